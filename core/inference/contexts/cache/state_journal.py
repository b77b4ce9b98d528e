"""Which states have come and left since somebody looked."""

from collections.abc import Iterable, Iterator

from .prefix_cache import PrefixCache

_SMALLEST_LIMIT = 64


class StateJournal:
    """The hashes whose states may have come or left, for a reader who compares them with the cache.

    The maps of the cache note a hash before they change, so that an interrupted change is noted, too. A hash
    that is noted may be as it was. The journal holds as many hashes as the cache can hold states, and no
    more: beyond that the reader is to look at all states.

    Attributes:
        keys: the noted hashes, in order.
        is_full: whether hashes were not noted any more.
        num_clears: how often the cache has forgotten all states at once.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Notes what happens to `cache` from now on, until `close`."""
        tier = cache.tier
        self._books = (cache.slots.map, *((tier.host, tier.files) if tier is not None else ()))
        num_tier = tier.host.num_slots + tier.files.num_slots if tier is not None else 0
        self._limit = max(cache.slots.num_slots + num_tier, _SMALLEST_LIMIT)
        self._states = cache.slots.map.hash_to_block_id
        self._tier = tier
        self.keys: dict[int, None] = {}
        self.is_full = False
        self.num_clears = 0
        for book in self._books:
            book.watchers = (*book.watchers, self._note)

    def close(self) -> None:
        """Note nothing any more."""
        for book in self._books:
            book.watchers = tuple(watcher for watcher in book.watchers if watcher != self._note)

    def clear(self) -> None:
        """Forget what is noted."""
        self.keys.clear()
        self.is_full = False

    def is_resumable(self, key: int) -> bool:
        """Whether the cache, or its tier, has the state under this hash now."""
        return key in self._states or (self._tier is not None and key in self._tier)

    def resumable(self) -> Iterator[int]:
        """The hashes of all states that the cache and its tier have now, each once; O(states)."""
        yield from self._states
        if self._tier is not None:
            copies = dict.fromkeys((*self._tier.host.keys(), *self._tier.files.keys()))
            yield from (key for key in copies if key not in self._states)

    def _note(self, keys: Iterable[int] | None) -> None:
        if keys is None:
            self.num_clears += 1
            self.is_full = True
        elif not self.is_full:
            self.keys.update(dict.fromkeys(keys))
        if self.is_full or len(self.keys) > self._limit:
            self.is_full = True  # first: the hashes are gone behind the next statement
            self.keys.clear()
