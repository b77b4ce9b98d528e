"""What replicas publish of their states, to a router: bytes of any kind, in any order.

What an index holds is compared with a plain model: sets of keys by replica.
"""

import struct
from dataclasses import dataclass, field
from random import Random

from fuzzing.target import ACCEPTED, REFUSED, damaged_bytes
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_index import StateIndex
from oracle.state_channel import decode_events, encode_events, keys_of

_NAMES = ("a", "b", "replica 2", "é")
_NUMBERS = (0, 1, 2, 3, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
MAX_KEYS = 40


@dataclass(frozen=True)
class Published:
    """Messages in order, each with the name under which it is published."""

    messages: tuple[tuple[str, bytes], ...]


def draw_messages(random: Random) -> Published:
    """Messages of a few replicas, which repeat, reorder, lose and damage some of them, and lie."""
    epochs = {name: random.choice((0, 1, 5, 2**64 - 2)) for name in _NAMES}
    sequences = dict.fromkeys(_NAMES, 0)
    messages: list[tuple[str, bytes]] = []
    for _ in range(random.choice((1, 3, 8, 20))):
        name = random.choice(_NAMES)
        if random.random() < 0.15:
            epochs[name] = min(2**64 - 1, epochs[name] + random.choice((1, 1, 2**40)))
            sequences[name] = 0
        keys = random.sample(range(1, 60), random.choice((0, 1, 5, 30)))
        cut = random.randrange(len(keys) + 1)
        is_snapshot = random.random() < 0.2
        sequence = sequences[name]
        if random.random() < 0.1:
            sequence = random.choice(_NUMBERS)
        else:
            sequences[name] += 1
        removed = () if is_snapshot else tuple(keys[cut:])
        events = StateEvents(name, epochs[name], sequence, tuple(keys[:cut]), removed, is_snapshot)
        data = encode_events(events)
        if random.random() < 0.15:
            data = _damaged(random, data)
        said = name if random.random() < 0.9 else random.choice((*_NAMES, "", "stranger"))
        messages.append((said, data))
    if random.random() < 0.3:
        random.shuffle(messages)
    if random.random() < 0.3:
        messages += random.sample(messages, random.randrange(len(messages) + 1))
    return Published(tuple(messages))


def _damaged(random: Random, data: bytes) -> bytes:
    way = random.randrange(5)
    if way == 0:
        return damaged_bytes(random, data)
    if way == 1:  # counts of keys and letters
        at = random.choice((24, 28, 32))
        return data[:at] + struct.pack("<I", random.choice((0, 1, 2**31, 2**32 - 1))) + data[at + 4 :]
    if way == 2:  # version and flags
        at = random.choice((4, 6))
        return data[:at] + struct.pack("<H", random.choice((0, 1, 2, 3, 2**15, 2**16 - 1))) + data[at + 2 :]
    if way == 3 and len(data) >= 52:  # a key
        at = len(data) - 8 * random.randrange(1, (len(data) - 36) // 8)
        return data[:at] + struct.pack("<Q", random.choice(_NUMBERS)) + data[at + 8 :]
    at = random.choice((8, 16))
    return data[:at] + struct.pack("<Q", random.choice(_NUMBERS)) + data[at + 8 :]


def size_of(drawn: object) -> int:
    assert isinstance(drawn, Published)
    return sum(len(name) + len(data) for name, data in drawn.messages)


@dataclass
class _Model:
    """What an index without a limit of keys holds, by the rules of docs/fleet.md."""

    held: dict[str, tuple[int, int, set[int]]] = field(default_factory=dict)

    def apply(self, events: StateEvents) -> bool:
        epoch, sequence, keys = self.held.get(events.replica, (-1, -1, set()))
        if events.epoch < epoch:
            return True
        if events.is_snapshot:
            if events.epoch == epoch and events.sequence < sequence:
                return True
            keys = set(events.inserted)
        elif events.epoch == epoch:
            if events.sequence <= sequence:
                return True
            if events.sequence != sequence + 1:
                return False
            keys = (keys - set(events.removed)) | set(events.inserted)
        elif events.sequence:
            return False
        else:
            keys = set(events.inserted)
        self.held[events.replica] = events.epoch, events.sequence, keys
        return True


class Events:
    """Messages for a `StateIndex`."""

    name = "events of replicas"
    documented: tuple[type[BaseException], ...] = (ValueError,)
    draw = staticmethod(draw_messages)
    size_of = staticmethod(size_of)

    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Published)
        index, small, model = StateIndex(), StateIndex(max_hashes=MAX_KEYS), _Model()
        refused = 0
        for _, data in drawn.messages:
            try:
                events = decode_events(data)
            except ValueError:
                refused += 1
                continue
            assert encode_events(events) == data
            expected = model.apply(events)
            assert index.apply(events) == expected
            small.apply(events)
        _check(index)
        _check(small)
        assert len(small) <= MAX_KEYS
        for name, (_, _, keys) in model.held.items():
            assert keys_of(index, name) == keys, f"of {name}"
            assert keys_of(small, name) <= keys
        return REFUSED if refused else ACCEPTED


def _check(index: StateIndex) -> None:
    """AssertionError where keys and holders contradict each other."""
    by_key: dict[int, set[str]] = {}
    for name in index.replicas:
        for key in keys_of(index, name):
            by_key.setdefault(key, set()).add(name)
    assert len(index) == len(by_key)
    for key, names in by_key.items():
        assert set(index.deepest([key])) == names
