"""A channel between a replica and a router that loses, repeats and reorders messages; what is to arrive."""

from random import Random

import msgspec
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from mambaslots.net import StatePublisher
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_index import StateIndex

encode_events = msgspec.msgpack.encode
decode_events = msgspec.msgpack.Decoder(StateEvents).decode


def keys_of(index: StateIndex, replica: str) -> set[int]:
    """The hashes that a replica holds; none for an unknown one."""
    keys = {key for key, holders in index._holders.items() if replica in holders}
    assert keys == (index._replicas[replica].hashes if replica in index._replicas else set())
    return keys


def resumable_keys(cache: PrefixCache) -> set[int]:
    """The hashes of all registered blocks whose state is in a slot or in a tier, by a look at each block."""
    tree, tier = cache.kv_blocks.tree, cache.tiers
    return {
        key
        for key, block in tree.block_of_hash.items()
        if block in cache.slots.cached_states.slot_of_block or (tier is not None and key in tier)
    }


class LossyChannel:
    """Brings one publisher's messages to an index, as bytes. Nothing is lost where `faults` is 0."""

    def __init__(self, publisher: StatePublisher, seed: int, faults: float = 0.3) -> None:
        self.publisher = publisher
        self.index = StateIndex()
        self._random = Random(seed)
        self._faults = faults
        self._late: list[bytes] = []
        self._is_telling = False  # True behind an interrupt

    def publish(self) -> None:
        """Take what has changed, and bring it or not. The router may ask for a snapshot, or not do so yet."""
        self._is_telling = True
        events = self.publisher.take()
        if events is not None:
            self._copy_back(encode_events(events))
        while self._late and self._random.random() < 0.5:
            self._arrive(self._late.pop(self._random.randrange(len(self._late))))
        self._is_telling = False

    def settle(self) -> None:
        """Bring all that is on its way, in any order, and then a snapshot where messages are missing."""
        self._random.shuffle(self._late)
        for data in self._late:
            self.index.apply(decode_events(data))
        self._late.clear()
        events = self.publisher.take()
        is_incomplete = events is not None and not self.index.apply(events)
        if self._faults or self._is_telling or is_incomplete:
            self._is_telling = False
            assert self.index.apply(self.publisher.snapshot())

    def _copy_back(self, data: bytes) -> None:
        chance = self._random.random() / self._faults if self._faults else 4.0
        if chance < 1:
            return
        if chance < 2:
            self._late.append(data)
            return
        if chance < 3:
            self._late.append(data)
        self._arrive(data)

    def _arrive(self, data: bytes) -> None:
        if not self.index.apply(decode_events(data)) and self._random.random() < 0.5:
            self._copy_back(encode_events(self.publisher.snapshot()))
