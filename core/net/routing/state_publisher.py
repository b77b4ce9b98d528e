"""The messages of a replica about its resumable states."""

import time
from typing import Any

from ...validation import refused
from .state_events import StateEvents


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
        states, copies, version = index.block_of_hash, index.offloaded_hashes, index.version
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
