"""KV blocks: reference counts, the free list, eviction."""

import logging
import time
from collections.abc import Callable, Sequence
from operator import countOf
from typing import Protocol

from ....errors import KVBlockCapacityError
from ....validation import INT32_MAX, boolean, checked_integers, integer, refused
from .block_tree import BlockTree, Parent
from .free_entries import BlocksByUnit, DirtyEntries
from .memory import MemoryUnits
from .pool_stats import Clock, KVRemovalCause
from .state_slots import StateSlots

logger = logging.getLogger(__name__)

DeregistrationObserver = Callable[[list[int], set[int]], None]
MAX_HASH = (1 << 63) - 1


class BlockBorrower(Protocol):
    """`UnitBorrower`, whose module imports this one: moves units of a shared memory from states to blocks."""

    def num_blocks_to_borrow(self, pinned: Sequence[int] | None = None) -> int: ...

    def borrow_blocks(self, num_blocks: int) -> None: ...


class BlockStack(list[int]):
    """A stack: the block freed last is allocated first."""

    def reset(self, free: list[int]) -> None:
        """These blocks are free now, and no others; the last one is allocated first."""
        self[:] = free

    def allocate(self, num_blocks: int) -> list[int]:
        cut = len(self) - num_blocks
        blocks = self[cut:][::-1]
        del self[cut:]
        return blocks


class KVBlockAllocator:
    """The bookkeeping of a pool of KV blocks; the tensors belong to the context.

    A block is *free*, *held* (reference count > 0) or *cached* (registered under its prefix hash, and not
    held). A registered block's parent is the registered block before it in the sequence. A path that holds a
    block also holds the block's parents. So cached blocks hang below held ones, and all of them can be
    evicted, leaf first. The cost of a call grows with the blocks that it names (times the logarithm of the
    number of cached blocks), not with the pool.

    Attributes:
        total_count: blocks of the pool.
        tree: the registered blocks, as `BlockTree` keeps them.
        free_blocks: the free list.
        num_cached: registered blocks that are not held.
    """

    def __init__(
        self, total_count: int, enable_prefix_caching: bool = True, *, slots: StateSlots | None = None,
        clock: Clock = time.monotonic_ns, dirty: DirtyEntries | None = None, units: MemoryUnits | None = None,
    ) -> None:  # fmt: skip
        """A pool of `total_count` blocks.

        Args:
            enable_prefix_caching: whether blocks may be registered.
            slots: of the states at the ends of blocks, which are removed before their blocks are
                deregistered; None for KV alone.
            clock: says when blocks are used.
            dirty: collects the blocks that become free.
            units: of a memory that blocks share with states, between which `unit_borrower` moves units.
        """
        self._slots = slots
        self._clock = clock
        self.total_count = integer("total_count", total_count, 1, INT32_MAX)
        self._registers = boolean("enable_prefix_caching", enable_prefix_caching)
        self._units = units
        self.unit_borrower: BlockBorrower | None = None  # `connect` sets it
        self.tree = BlockTree(self.total_count) if slots is None else slots.tree
        self._observers: list[DeregistrationObserver] = []
        self._dirty = dirty or DirtyEntries()
        self.free_blocks: BlockStack | BlocksByUnit = (
            BlocksByUnit(self.total_count, units.blocks_per_unit) if units else BlockStack()
        )
        self._clear_references()

    def connect(self, unit_borrower: BlockBorrower) -> None:
        """Move units of a shared memory by this borrower from now on."""
        self.unit_borrower = unit_borrower

    def _clear_references(self) -> None:
        self.tree.clear_references()
        self.tree.set_references(self._lent_blocks, 1)
        self._last_release_ns = 0
        self.num_cached = 0
        self._reset_free_list()

    def _reset_free_list(self) -> None:
        """Free every block that is neither held nor registered."""
        refs, parents = self.tree.references, self.tree.parents
        free = [b for b in range(self.total_count - 1, -1, -1) if not refs[b] and parents[b] < 0]
        self.free_blocks.reset(free)
        self._dirty.add(free)

    def _add_free(self, blocks: list[int]) -> None:
        if self._dirty.scrubs:
            self._dirty.add(blocks)
        self.free_blocks.extend(blocks)

    @property
    def _lent_blocks(self) -> Sequence[int]:
        """The blocks whose memory holds states. They have a reference, which does not count as held."""
        return self._units.lent_blocks if self._units else ()

    @property
    def references(self) -> dict[int, int]:
        """The reference counts of the held blocks."""
        refs = {block: count for block, count in enumerate(self.tree.references[: self.total_count]) if count}
        for block in self._lent_blocks:
            refs.pop(block, None)
        return refs

    # ---- how much there is

    @property
    def total_avail(self) -> int:
        """The number of free blocks; cached blocks do not count."""
        return len(self.free_blocks)

    @property
    def num_held(self) -> int:
        num_lent = self._units.num_lent_blocks if self._units else 0
        return self.total_count - self.total_avail - self.num_cached - num_lent

    def is_memory_available(
        self, num_blocks: int, potential_matched_count: int = 0, pinned_slots: Sequence[int] | None = None
    ) -> bool:
        """Whether `num_blocks` can be allocated once `potential_matched_count` cached blocks are held.

        `pinned_slots`: slots of states that a request has pinned before it allocates live slots.
        """
        num_needed = integer("num_blocks", num_blocks, 0)
        num_matched = integer("potential_matched_count", potential_matched_count, 0)
        num_missing = num_needed - (self.total_avail + self.num_cached - num_matched)
        if num_missing <= 0 or self.unit_borrower is None:
            return num_missing <= 0
        return num_missing <= self.unit_borrower.num_blocks_to_borrow(pinned_slots)

    # ---- allocation and references

    def allocate_memory_blocks(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` unregistered blocks, with one reference each; evicts cached blocks where needed.

        Raises:
            KVBlockCapacityError: too few blocks are free or cached; nothing is evicted.
        """
        num_blocks = integer("num_blocks", num_blocks, 0)
        if num_blocks > self.total_avail and self.unit_borrower is not None:
            self.unit_borrower.borrow_blocks(num_blocks)
        missing = num_blocks - self.total_avail
        if missing > self.num_cached:
            raise KVBlockCapacityError(num_blocks, self.total_avail + self.num_cached)
        if missing > 0:
            self.evict_lru_blocks(missing)
        blocks = self.free_blocks.allocate(num_blocks)
        if self._dirty.scrubs:
            self._dirty.scrub(blocks)
        self.tree.set_references(blocks, 1)
        return blocks

    def add_references(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these held or registered blocks; parents come before children."""
        self.num_cached -= self.tree.hold(self._checked(block_ids))

    def release_memory_blocks(self, block_ids: Sequence[int], discard: bool = False) -> None:
        """Remove one reference from each of these distinct blocks; those of a sequence come in order.

        Unregistered blocks without a reference become free; registered ones stay cached.

        `discard`: also deregister the blocks that are not held any more and no other sequence continues.
        """
        tree, now_ns = self.tree, max(self._last_release_ns + 1, self._clock())
        cached, freed = tree.release(self._checked(block_ids), now_ns)
        self._last_release_ns = now_ns
        self.num_cached += len(cached)
        if freed:
            self._add_free(freed)
        if discard:
            self._deregister([block for block in cached if tree.take_leaf(block)], "discarded")

    def register_chain(
        self, parent: Parent, block_ids: Sequence[int], hashes: Sequence[int], tokens: Sequence[bytes]
    ) -> list[int]:
        """Make consecutive, fully written blocks of one sequence findable; the first to register wins.

        `parent`: the registered block before the first of these blocks, or the root digest.

        Returns:
            For each block the registered block that stores its prefix: the block itself, or a duplicate that
                was registered earlier, which the caller should use instead. The list ends early where a hash
                collides with that of another prefix (probability 2**-63), because no later block could be
                found.
        """
        if not self._registers:
            raise refused("enable_prefix_caching", False, "no registration without prefix caching")
        blocks = self._checked(block_ids)
        hashes = checked_integers("hashes", hashes, 1, MAX_HASH)
        if not isinstance(tokens, Sequence) or countOf(map(type, tokens), bytes) < len(tokens):
            raise refused("tokens", tokens, "a list of bytes, the token ids of each block")
        if not len(blocks) == len(hashes) == len(tokens):
            raise ValueError(
                f"block_ids, hashes and tokens have {len(blocks)}, {len(hashes)} and {len(tokens)} entries; "
                "accepted: equally many"
            )
        if not isinstance(parent, bytes):
            parent = integer("parent", parent, 0, self.total_count - 1)
            if parent not in self.tree or not self.tree.references[parent]:
                raise ValueError(f"parent is {parent}; accepted: a held, registered block, or a root digest")
        refs, parents = self.tree.references, self.tree.parents
        registered = [parents[block] for block in blocks] != [-1] * len(blocks)
        if registered or len(set(blocks)) < len(blocks) or 0 in [refs[block] for block in blocks]:
            raise refused("block_ids", blocks, "distinct, held blocks that are not registered yet")
        return self.tree.register(parent, blocks, hashes, list(tokens))

    # ---- eviction

    def evict_lru_blocks(self, num_blocks: int) -> list[int]:
        """Deregister and free `num_blocks` cached blocks and return them (none for a number <= 0).

        Leaves without a state are evicted first, and of these, and of the others, the least recently used.
        The name is megatron-core's.

        Raises:
            KVBlockCapacityError: fewer blocks are cached; nothing is changed.
        """
        num_blocks = integer("num_blocks", num_blocks)
        if num_blocks > self.num_cached:
            raise KVBlockCapacityError(num_blocks, self.num_cached)
        victims = self.tree.take_leaves(num_blocks)
        self._deregister(victims, "new_block")
        return victims

    def observe_deregistration(self, observer: DeregistrationObserver) -> None:
        """Call `observer(block_ids, hashes)` after each deregistration, before the blocks are reused.

        Where an observer raises, the error is logged, the other observers are called and the blocks are
        freed.
        """
        if not callable(observer):
            raise refused("observer", observer, "a callable of blocks and hashes")
        self._observers.append(observer)

    def _deregister(self, blocks: list[int], cause: KVRemovalCause) -> None:
        """Deregister cached blocks that nothing continues, and free them: states first, observers last."""
        if not blocks:
            return
        try:
            if self._slots is not None:  # a state must not outlive its block
                state_cause = "kv_evicted" if cause == "new_block" else cause
                self._slots.remove(blocks, state_cause, with_blocks=True)
        except BaseException:
            self.tree.put_back(blocks)
            raise
        hashes = self.tree.deregister(blocks, cause)
        self.num_cached -= len(blocks)
        self._add_free(blocks[::-1])
        self._notify(blocks, hashes)

    def _notify(self, blocks: list[int], hashes: list[int]) -> None:
        for observer in self._observers:
            try:
                observer(list(blocks), set(hashes))
            except Exception:
                logger.exception("deregistration observer %r failed for blocks %s", observer, blocks)

    def deregister_all(self) -> None:
        """Remove every prefix and ghost. Cached blocks become free; held blocks stay held.

        Costs O(pool).
        """
        registered = self.tree.block_of_hash.copy() if self._observers else {}
        self.num_cached = 0
        self.tree.clear()
        self._reset_free_list()
        self._notify(list(registered.values()), list(registered))

    def reset(self, *, keep_counts: bool = False) -> None:
        """Remove every reference and prefix, without calling observers: the caller resets them, too.

        `keep_counts`: whether the counts of what entered and was removed stay.
        """
        self.tree.clear()
        if not keep_counts:
            self.tree.turnover.clear()
        self._clear_references()

    def evict_leaves(self, leaves: list[int]) -> None:
        """Evict these cached blocks, children first; no other blocks continue them."""
        for block in leaves:
            self.tree.take_leaf(block)
        self._deregister(leaves, "new_block")

    def _checked(self, block_ids: Sequence[int]) -> list[int]:
        return checked_integers("block_ids", block_ids, 0, self.total_count - 1)

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other; O(pool)."""
        refs = self.tree.references
        registered = set(self.tree.block_of_hash.values())
        if isinstance(self.free_blocks, BlocksByUnit):
            self.free_blocks.check_integrity()
        free_list = list(self.free_blocks)
        free = set(free_list)
        assert len(free_list) == len(free), "a block is free twice"
        assert len(free) == self.total_avail, "the count of free blocks is off"
        assert not free & registered, "a free block is registered"
        assert all(refs[block] == 0 for block in free), "a free block is held"
        held = {block for block in range(self.total_count) if refs[block] > 0}
        cached = registered - held
        assert min(refs) >= 0, "a reference count is negative"
        lent = self._lent_blocks
        assert registered.isdisjoint(lent), "a registered block's memory holds states"
        assert all(refs[block] == 1 for block in lent), "the memory of a block in use holds states"
        assert len(free) + len(held | registered) == self.total_count, "a block is nowhere"
        assert len(cached) == self.num_cached, "the count of cached blocks is off"
        assert refs[self.total_count] == 1, "the origin of all prefixes is not held"
        self.tree.check_integrity(held)
