"""What a replica tells routers of its states."""

import time
from typing import Any

from ...inference.contexts.cache.state_journal import StateJournal
from ...validation import shown
from .state_events import StateEvents

TAKES_BETWEEN_RESYNCS = 4096
"""Nothing is known to need it. At a take every 30 ms it is one comparison in two minutes."""


class StatePublisher:
    """Tells which resumable states a replica's cache has gained and lost.

    A step pays for the states that come and leave in it, and a cache without a publisher pays nothing. The
    calls are made by the thread that calls the engine, between its calls. Whatever interrupts a call, the
    next `take` tells all that is to be told: with a snapshot, where it has to.

    Attributes:
        replica: the replica's name.
    """

    def __init__(self, source: Any, replica: str) -> None:
        """
        Args:
            source: a `DynamicInferenceEngine`, or a context. Where the model is split, that of rank 0: all
                ranks hold the same states.
            replica: names the replica to routers.

        Raises:
            ValueError: `source` has no prefix cache, or is not of rank 0; `replica` is no name.
        """
        context = getattr(source, "context", source)
        cache = getattr(context, "prefix_cache", None)
        if cache is None:
            raise ValueError(f"source is {shown(source)}; accepted: an engine or a context")
        rank = context.spec.groups.rank if hasattr(context, "spec") else 0
        if rank:
            raise ValueError(f"source is of rank {rank}; accepted: rank 0, which speaks for the others")
        if not isinstance(replica, str) or not replica:
            raise ValueError(f"replica is {shown(replica)}; accepted: a str that is not empty")
        self.replica = replica
        self._journal = StateJournal(cache)
        self._num_clears = -1  # of the epoch that was told last
        self._epoch = 0
        self._sequence = -1
        self._told: dict[int, None] = {}
        self._needs_snapshot = True
        self._num_takes = 0

    def close(self) -> None:
        """Stop watching the cache; nothing may be taken afterwards."""
        self._journal.close()

    def take(self) -> StateEvents | None:
        """What has changed since the last call; None where nothing has. The first call gives a snapshot."""
        self._num_takes += 1
        if not self._num_takes % TAKES_BETWEEN_RESYNCS:
            self.resync()
        journal = self._journal
        begins_anew = journal.num_clears != self._num_clears
        everything = begins_anew or journal.is_full or self._needs_snapshot
        if not everything and not journal.keys:
            return None
        self._needs_snapshot = True  # until this message is complete
        noted = list(journal.keys)
        journal.clear()
        if begins_anew:
            # Also larger than those of a process before this one that had the replica's name.
            self._epoch, self._sequence = max(self._epoch + 1, time.time_ns()), -1
            self._num_clears = journal.num_clears
        inserted: tuple[int, ...]
        removed: tuple[int, ...] = ()
        if everything:
            self._told = dict.fromkeys(journal.resumable())
            inserted = tuple(self._told)
        else:
            inserted, removed = self._changes(noted)
            for key in removed:
                del self._told[key]
            self._told.update(dict.fromkeys(inserted))
        if everything or inserted or removed:
            self._sequence += 1
            events = StateEvents(self.replica, self._epoch, self._sequence, inserted, removed, everything)
        else:
            events = None
        self._needs_snapshot = False
        return events

    def snapshot(self) -> StateEvents:
        """All that has been told, for a router that missed messages. What comes next has the next number.

        Where the next message is to be a snapshot in any case, this is the one, and routers that do not get
        it miss a number.
        """
        if self._needs_snapshot or self._journal.num_clears != self._num_clears or self._journal.is_full:
            events = self.take()
            assert events is not None
            return events
        return StateEvents(self.replica, self._epoch, self._sequence, tuple(self._told), (), True)

    def resync(self) -> None:
        """Compare what was told with all states of the cache; the next message tells what differs; O(states).

        `take` does so from time to time.
        """
        noted, journal = dict.fromkeys(self._journal.keys), self._journal
        known = journal.resumable()
        if any(key not in self._told and key not in noted for key in known) or any(
            key not in noted and not journal.is_resumable(key) for key in self._told
        ):
            self._needs_snapshot = True

    def _changes(self, noted: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of these hashes have a state that was not told, and which had one that is gone."""
        is_resumable, told = self._journal.is_resumable, self._told
        inserted = tuple(key for key in noted if key not in told and is_resumable(key))
        removed = tuple(key for key in noted if key in told and not is_resumable(key))
        return inserted, removed
