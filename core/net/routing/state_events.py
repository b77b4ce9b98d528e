"""A replica's messages about its resumable states; docs/fleet.md describes their bytes."""

import time
from typing import Any

from msgspec import Struct

from ...validation import INT64_MAX, refused


class StateEvents(Struct, frozen=True, array_like=True, tag="state-events-2", forbid_unknown_fields=True):
    """The changes of a replica's resumable states since its previous message.

    Example: StateEvents("r0", epoch=7, sequence=3, inserted=(5, 9), removed=(4,)): r0 can now resume after
    the blocks with hashes 5 and 9, and no longer after 4.

    Attributes:
        replica: its name.
        epoch: grows with each start of the replica; messages of smaller epochs are obsolete.
        sequence: 0, 1, 2, ... within an epoch. A reader that misses a number asks for a snapshot.
        inserted: hashes of blocks after which a state can be resumed now.
        removed: hashes of blocks after which none can be resumed any more.
        is_snapshot: whether `inserted` is all that the replica holds.

    Raises:
        ValueError: a field is out of its range, or the fields contradict each other.
    """

    replica: str
    epoch: int
    sequence: int
    inserted: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_snapshot: bool = False

    def __post_init__(self) -> None:
        if not self.replica or not self.replica.isprintable():
            raise refused("replica", self.replica, "a printable name")
        for name in ("epoch", "sequence"):
            if not 0 <= getattr(self, name) < 1 << 64:
                raise refused(name, getattr(self, name), "from 0 to 2**64 - 1")
        if self.is_snapshot and self.removed:
            raise ValueError(f"removed has {len(self.removed)} hashes; accepted: none in a snapshot")
        hashes = self.inserted + self.removed
        for prefix_hash in (min(hashes), max(hashes)) if hashes else ():
            if not 0 < prefix_hash <= INT64_MAX:
                raise refused("a hash", prefix_hash, "from 1 to 2**63 - 1")
        if len(set(hashes)) < len(hashes):
            raise ValueError("a hash is named twice; accepted: distinct hashes")


class StatePublisher:
    """Makes the `StateEvents` of one replica.

    A step costs nothing more; a call costs O(changes since the last one), or O(states) where those are more
    than the index lists. The thread that calls the engine makes the calls.

    Attributes:
        replica: the replica's name.
    """

    def __init__(self, source: Any, replica: str) -> None:
        """
        Args:
            source: a `DynamicInferenceEngine`, or a context. Where the model is split, that of rank 0: all
                ranks hold the same states.
            replica: the name of the replica.

        Raises:
            ValueError: `source` has no prefix cache, or is not of rank 0; `replica` is no name.
        """
        context = getattr(source, "context", source)
        cache = getattr(context, "prefix_cache", None)
        if cache is None:
            raise refused("source", source, "an engine or a context")
        rank = context.spec.groups.rank if hasattr(context, "spec") else 0
        if rank:
            raise ValueError(f"source is of rank {rank}; accepted: rank 0, which speaks for the others")
        self.replica = StateEvents(replica, 0, 0).replica if isinstance(replica, str) else ""
        if not self.replica:
            raise refused("replica", replica, "a str that is not empty")
        self._cached_states = cache.cached_states
        self._epoch = time.time_ns()  # larger than that of an earlier process with this replica's name
        self._sequence = -1
        self._published: set[int] = set()
        self._version = -1  # of the states, when they were read last

    def take(self) -> StateEvents | None:
        """The changes since the last call; None without changes. The first call returns a snapshot."""
        index, published, is_first = self._cached_states, self._published, self._sequence < 0
        states, copies, version = index.state_block_of_hash, index.offloaded_hashes, index.version
        changed = None if is_first else index.changed_since(self._version)
        if changed is None:
            changed = {*states, *copies} ^ published
        changed = {each for each in changed if (each in states or each in copies) != (each in published)}
        if not (changed or is_first):
            self._version = version
            return None
        removed = tuple(changed & published)
        inserted = tuple(changed.difference(removed))
        self._sequence += 1  # first: after an interrupt a reader misses this number, and asks for a snapshot
        self._published ^= changed
        self._version = version
        return StateEvents(self.replica, self._epoch, self._sequence, inserted, removed, is_first)

    def snapshot(self) -> StateEvents:
        """Everything published so far, for a router that missed messages."""
        return (self.take() if self._sequence < 0 else None) or StateEvents(
            self.replica, self._epoch, self._sequence, tuple(self._published), (), True
        )
