"""The messages of a replica about its resumable states."""

import time
from collections.abc import Iterable
from typing import Any

from ...validation import shown
from .state_events import StateEvents

_SMALLEST_LIMIT = 64


class StatePublisher:
    """Makes the `StateEvents` of one replica.

    The cost of a step grows by the states that the step inserts and evicts; a cache without a publisher pays
    nothing. The thread that calls the engine makes the calls, between its calls. After an interrupted call
    the next `take` returns everything that is due, as a snapshot where needed. The tree notes a hash before
    it changes, so that an interrupted change is noted, too; a noted hash may be unchanged.

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
            raise ValueError(f"source is {shown(source)}; accepted: an engine or a context")
        rank = context.spec.groups.rank if hasattr(context, "spec") else 0
        if rank:
            raise ValueError(f"source is of rank {rank}; accepted: rank 0, which speaks for the others")
        self.replica = StateEvents(replica, 0, 0).replica if isinstance(replica, str) else ""
        if not self.replica:
            raise ValueError(f"replica is {shown(replica)}; accepted: a str that is not empty")
        num_copies = cache.tier.host.num_slots + cache.tier.files.num_slots if cache.tier is not None else 0
        self._tree = cache.tree
        self._limit = max(cache.slots.num_slots + num_copies, _SMALLEST_LIMIT)
        self._dirty: dict[int, None] = {}  # hashes whose states were added or removed since the last message
        self._begins_anew = True  # the cache has forgotten all states at once
        self._needs_snapshot = True  # changes were dropped, or a message was not completed
        self._epoch = 0
        self._sequence = -1
        self._published: dict[int, None] = {}
        self._tree.watchers.append(self._note)

    def close(self) -> None:
        """Stop watching the cache; no call may follow."""
        self._tree.watchers.remove(self._note)

    def _note(self, keys: Iterable[int] | None) -> None:
        if keys is None:
            self._begins_anew = True
        elif not (self._begins_anew or self._needs_snapshot):
            self._dirty.update(dict.fromkeys(keys))
        if self._begins_anew or len(self._dirty) > self._limit:
            self._needs_snapshot = True  # first: the next statement drops the hashes
            self._dirty.clear()

    def _is_resumable(self, key: int) -> bool:
        """Whether the cache, or its tier, has the state under this hash now."""
        return key in self._tree.hash_to_block_id or key in self._tree.copies

    def take(self) -> StateEvents | None:
        """The changes since the last call; None without changes. The first call returns a snapshot."""
        everything = self._begins_anew or self._needs_snapshot
        if not everything and not self._dirty:
            return None
        self._needs_snapshot = True  # until this message is complete
        dirty = list(self._dirty)
        self._dirty.clear()
        if self._begins_anew:
            # Also larger than the epochs of an earlier process with this replica's name.
            self._epoch, self._sequence = max(self._epoch + 1, time.time_ns()), -1
            self._begins_anew = False
        inserted: tuple[int, ...]
        removed: tuple[int, ...] = ()
        if everything:
            self._published = dict.fromkeys((*self._tree.hash_to_block_id, *self._tree.copies))
            inserted = tuple(self._published)
        else:
            published = self._published
            inserted = tuple(key for key in dirty if key not in published and self._is_resumable(key))
            removed = tuple(key for key in dirty if key in published and not self._is_resumable(key))
            for key in removed:
                del published[key]
            published.update(dict.fromkeys(inserted))
        events = None
        if everything or inserted or removed:
            self._sequence += 1
            events = StateEvents(self.replica, self._epoch, self._sequence, inserted, removed, everything)
        self._needs_snapshot = False
        return events

    def snapshot(self) -> StateEvents:
        """Everything published so far, for a router that missed messages.

        Where the next message would be a snapshot, this is that message, and uses its number.
        """
        if self._needs_snapshot or self._begins_anew:
            events = self.take()
            assert events is not None
            return events
        return StateEvents(self.replica, self._epoch, self._sequence, tuple(self._published), (), True)
