"""The messages of a replica about its resumable states."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from ...inference.contexts.cache.prefix_tree import PrefixTree
from ...validation import shown
from .state_events import StateEvents

_SMALLEST_DIRTY_SET = 64


class DirtyStates:
    """Dirty set: the hashes whose states were added or removed since the last `clear`.

    The tree notes a hash before it changes, so that an interrupted change is noted, too; a noted hash may be
    unchanged. A reader of a full set looks at all states.

    Attributes:
        keys: the noted hashes, in order.
        is_full: whether hashes were dropped.
        num_clears: how often the cache has forgotten all states at once.
    """

    def __init__(self, tree: PrefixTree, most_keys: int) -> None:
        """Watches the tree until `close`."""
        self._tree = tree
        self._limit = max(most_keys, _SMALLEST_DIRTY_SET)
        self.keys: dict[int, None] = {}
        self.is_full = False
        self.num_clears = 0
        tree.watchers.append(self._note)

    def close(self) -> None:
        """Stop watching."""
        self._tree.watchers.remove(self._note)

    def clear(self) -> None:
        """Forget what is noted."""
        self.keys.clear()
        self.is_full = False

    def is_resumable(self, key: int) -> bool:
        """Whether the cache, or its tier, has the state under this hash now."""
        return key in self._tree.hash_to_block_id or key in self._tree.copies

    def resumable(self) -> Iterator[int]:
        """The hashes of all states that the cache and its tier have now, each once; O(states)."""
        states = self._tree.hash_to_block_id
        yield from states
        yield from (key for key in self._tree.copies if key not in states)

    def _note(self, keys: Iterable[int] | None) -> None:
        if keys is None:
            self.num_clears += 1
            self.is_full = True
        elif not self.is_full:
            self.keys.update(dict.fromkeys(keys))
        if self.is_full or len(self.keys) > self._limit:
            self.is_full = True  # first: the next statement drops the hashes
            self.keys.clear()


class StatePublisher:
    """Makes the `StateEvents` of one replica.

    The cost of a step grows by the states that the step inserts and evicts; a cache without a publisher pays
    nothing. The thread that calls the engine makes the calls, between its calls. After an interrupted call
    the next `take` returns everything that is due, as a snapshot where needed.

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
        self._journal = DirtyStates(cache.tree, cache.slots.num_slots + num_copies)
        self._num_clears = -1  # of the last published epoch
        self._epoch = 0
        self._sequence = -1
        self._published: dict[int, None] = {}
        self._needs_snapshot = True

    def close(self) -> None:
        """Stop watching the cache; no call may follow."""
        self._journal.close()

    def take(self) -> StateEvents | None:
        """The changes since the last call; None without changes. The first call returns a snapshot."""
        journal = self._journal
        begins_anew = journal.num_clears != self._num_clears
        everything = begins_anew or journal.is_full or self._needs_snapshot
        if not everything and not journal.keys:
            return None
        self._needs_snapshot = True  # until this message is complete
        dirty = list(journal.keys)
        journal.clear()
        if begins_anew:
            # Also larger than the epochs of an earlier process with this replica's name.
            self._epoch, self._sequence = max(self._epoch + 1, time.time_ns()), -1
            self._num_clears = journal.num_clears
        inserted: tuple[int, ...]
        removed: tuple[int, ...] = ()
        if everything:
            self._published = dict.fromkeys(journal.resumable())
            inserted = tuple(self._published)
        else:
            is_resumable, published = journal.is_resumable, self._published
            inserted = tuple(key for key in dirty if key not in published and is_resumable(key))
            removed = tuple(key for key in dirty if key in published and not is_resumable(key))
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
        if self._needs_snapshot or self._journal.num_clears != self._num_clears or self._journal.is_full:
            events = self.take()
            assert events is not None
            return events
        return StateEvents(self.replica, self._epoch, self._sequence, tuple(self._published), (), True)
