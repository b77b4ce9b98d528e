"""The tiers, host memory and files: which states have a copy where, and when they are copied."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from .free_entries import DirtyEntries
from .pool_stats import TierStats

logger = logging.getLogger(__name__)

HOST_BYTES_PER_TOKEN, FILE_BYTES_PER_TOKEN = 1 << 20, 1 << 16
"""A state is fetched if it has at most so many bytes for each token that it saves: about what a bus, and a
disk, move in the time in which a GPU prefills a token of an 8B model."""


class Tier:
    """The index of host memory, or of files: a slot for each copy, and one pinned copy."""

    def __init__(self, num_slots: int, dirty: DirtyEntries | None = None) -> None:
        self.num_slots = num_slots
        self.dirty = dirty or DirtyEntries()
        self.entries: OrderedDict[int, tuple[int, int]] = OrderedDict()  # hash -> slot, serial; oldest first
        self.free_slots = list(range(num_slots))
        self._pinned: int | None = None

    def __contains__(self, prefix_hash: object) -> bool:
        return prefix_hash in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def use(self, prefix_hash: int) -> None:
        self.entries.move_to_end(prefix_hash)

    def pin(self, prefix_hash: int | None) -> None:
        """Protect this copy, and no other, from eviction; None for none."""
        self._pinned = prefix_hash

    def allocate(self) -> tuple[int, int]:
        """A slot to write, and the hash whose copy is evicted for it, or 0; (-1, 0) where there is none."""
        if self.free_slots:
            slot = self.free_slots.pop()
            self.dirty.scrub([slot])
            return slot, 0
        victim = next((prefix_hash for prefix_hash in self.entries if prefix_hash != self._pinned), 0)
        if not victim:
            return -1, 0
        slot, _ = self.entries.pop(victim)
        self.dirty.scrub([slot])  # a copy that failed may be in it
        return slot, victim

    def insert(self, prefix_hash: int, slot: int, serial: int) -> None:
        """Index the state in a slot from `allocate` under its hash; no other state ever had this `serial`."""
        self.entries[prefix_hash] = slot, serial

    def remove(self, hashes: Iterable[int]) -> list[int]:
        """Remove the copies under these hashes, and return their slots, which are free."""
        hashes = [prefix_hash for prefix_hash in hashes if prefix_hash in self.entries]
        slots = [self.entries.pop(prefix_hash)[0] for prefix_hash in hashes]
        self.dirty.add(slots)
        self.free_slots += slots
        return slots

    def clear(self) -> None:
        """Remove every copy."""
        self.entries.clear()
        self.repair()

    def repair(self) -> None:
        """After an interrupted change: free what is not indexed; O(slots)."""
        used = {slot for slot, _ in self.entries.values()}
        self.dirty.add(set(range(self.num_slots)).difference(used, self.free_slots))
        self.free_slots = [slot for slot in range(self.num_slots) if slot not in used]
        self._pinned = None

    def check_integrity(self) -> None:
        """Raise AssertionError where the index contradicts itself; O(slots)."""
        slots = [*(slot for slot, _ in self.entries.values()), *self.free_slots]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of a tier is nowhere, or twice"
        assert self._pinned is None, "a copy of a tier is pinned"


class StateCopies:
    """Copies states between durable slots, host memory and files; this one copies nothing.

    Only `fetch` and `load` wait. They return True only for the bytes that were stored under the same serial
    number, and no two states are stored under one.
    """

    def store(self, slot: int, host_slot: int, serial: int) -> None:
        """Copy a durable slot to host memory. The slot may be written afterwards, in stream order."""

    def fetch(self, host_slot: int, slot: int, serial: int) -> bool:
        """Copy back; whether the durable slot now holds the bytes that were stored under `serial`."""
        return True

    def save(self, host_slot: int, file: int, serial: int) -> None:
        """Write a slot of host memory to a file, later."""

    def load(self, file: int, host_slot: int, serial: int) -> bool:
        """Read a file; False where none was written under `serial`. ValueError for a damaged one."""
        return True

    def delete(self, files: Sequence[int] | None) -> None:
        """Remove these files, or all."""

    def zero(self, host_slots: Sequence[int]) -> None:
        """Zero slots in host memory, after the copies under way; does not wait."""

    def deallocate_staging(self) -> None:
        """Free device memory that the next `store` can allocate again."""


class StateTiers:
    """Both tiers of evicted states, and the copies that follow their indexes; a copy that is fetched stays.

    Decisions depend on the indexes alone, not on when a copy is done: all ranks of a model decide alike.
    Whether a copy is good is found out when it is fetched, and the ranks agree on it.
    """

    def __init__(
        self, num_slots: int, copies: StateCopies | None = None, *, num_files: int = 0,
        agree: Callable[[bool], bool] = bool, scrubs: bool = False, state_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`agree`: whether a copy, good or not on this rank, is good on all; `state_bytes`: the largest."""
        self.files = Tier(num_files)
        self.copies = copies or StateCopies()
        self.host = Tier(num_slots, DirtyEntries(self.copies.zero if scrubs else None))
        self.min_tokens = max(1, state_bytes // HOST_BYTES_PER_TOKEN)  # that a fetch must save
        self.min_tokens_from_file = max(1, state_bytes // FILE_BYTES_PER_TOKEN)
        self._counts: Counter[str] = Counter()  # by the name that `TierStats` has for them
        self._has_failed = False
        self._lost: list[int] = []  # hashes whose last copy is gone since `take_lost`
        self._agree = agree
        self._serial = 0

    def __contains__(self, prefix_hash: object) -> bool:
        """Whether there is a copy under this hash."""
        return prefix_hash in self.host or prefix_hash in self.files

    def __iter__(self) -> Iterator[int]:
        """The hashes with a copy, each once."""
        return iter(dict.fromkeys((*self.host.entries, *self.files.entries)))

    def stats(self) -> TierStats:
        return TierStats(len(self.host), len(self.files), **self._counts)

    # ---- out

    def spill(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        """Copy evicted states; does not wait. A copy that failed stays indexed, as on other ranks."""
        for slot, prefix_hash in zip(slots, hashes, strict=True):
            if not prefix_hash:
                continue
            if prefix_hash in self.host:
                self.host.use(prefix_hash)
                continue
            host_slot = self._allocate(self.host)
            if host_slot < 0:
                continue
            self._serial = serial = self._serial + 1
            try:
                self.copies.store(slot, host_slot, serial)
            except Exception:
                self._log_failure()
                self.host.dirty.add([host_slot])
            self.host.insert(prefix_hash, host_slot, serial)
            self._save(host_slot, prefix_hash, serial)

    def take_lost(self) -> list[int]:
        """The hashes that have no copy any more, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _save(self, host_slot: int, prefix_hash: int, serial: int) -> None:
        if prefix_hash in self.files:
            self.files.use(prefix_hash)
            return
        file = self._allocate(self.files)
        if file < 0:
            return
        try:
            self.copies.save(host_slot, file, serial)
        except Exception:
            self._log_failure()
        self.files.insert(prefix_hash, file, serial)

    def _allocate(self, tier: Tier) -> int:
        slot, evicted = tier.allocate()
        if evicted and evicted not in self:
            self._lost.append(evicted)
        return slot

    def _log_failure(self) -> None:
        if not self._has_failed:
            logger.warning("a state could not be copied from the device; the state is lost", exc_info=True)
        self._has_failed = True

    # ---- back

    def is_worth_fetching(self, prefix_hash: int, num_tokens: int) -> bool:
        """Whether there is a copy under this hash, to fetch rather than to compute so many tokens."""
        if prefix_hash in self.host:
            return num_tokens >= self.min_tokens
        return prefix_hash in self.files and num_tokens >= self.min_tokens_from_file

    def pin(self, prefix_hash: int | None) -> None:
        """Protect the copies under a hash, which are used now, and no others, from eviction; None: none."""
        for tier in (self.host, self.files):
            if prefix_hash is None or prefix_hash in tier:
                tier.pin(prefix_hash)
            if prefix_hash is not None and prefix_hash in tier:
                tier.use(prefix_hash)

    def fetch(self, prefix_hash: int, slot: int) -> bool:
        """Copy a pinned state to a reserved slot; False, and removed on all ranks, if it is bad on one."""
        from_file = prefix_hash not in self.host
        good, exists = False, True
        try:
            exists = not from_file or self._load(prefix_hash)
            if exists:
                host_slot, serial = self.host.entries[prefix_hash]
                good = self.copies.fetch(host_slot, slot, serial)
        except Exception:
            logger.warning("a state could not be copied back; its tokens are computed", exc_info=True)
        self.pin(None)
        if not self._agree(good):
            self.remove([prefix_hash])
            self._counts["num_copies_damaged" if exists else "num_copies_not_written"] += 1
            self._lost.append(prefix_hash)
            return False
        self._counts["num_states_fetched"] += 1
        self._counts["num_states_fetched_from_disk"] += from_file
        return True

    def _load(self, prefix_hash: int) -> bool:
        """Read a file into host memory; the indexes change alike on all ranks, whatever is read."""
        host_slot = self._allocate(self.host)
        if host_slot < 0:
            return False
        file, serial = self.files.entries[prefix_hash]
        self.host.insert(prefix_hash, host_slot, serial)
        self.host.pin(prefix_hash)
        return self.copies.load(file, host_slot, serial)

    # ---- the whole

    def remove(self, hashes: Iterable[int]) -> None:
        """Remove the copies under these hashes."""
        hashes = list(hashes)
        self.host.remove(hashes)
        if files := self.files.remove(hashes):
            self.copies.delete(files)

    def clear(self, *, keep_counts: bool = True) -> None:
        """Remove every copy."""
        had_files = len(self.files) > 0
        self.host.clear()
        self.files.clear()
        if not keep_counts:
            self._counts.clear()
        if had_files:
            self.copies.delete(None)

    def repair(self) -> None:
        """After an interrupted change: free what is not indexed; O(slots)."""
        self.host.repair()
        self.files.repair()

    def check_integrity(self, is_known: Callable[[int], bool]) -> None:
        """Raise AssertionError where the indexes contradict themselves, or a hash has no registered block."""
        for tier in (self.host, self.files):
            tier.check_integrity()
            assert all(map(is_known, tier.entries)), "a tier keeps a state whose KV is gone"
