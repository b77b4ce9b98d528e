"""The prefix cache: KV blocks, durable states, and the one index over both."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from ....validation import INT32_MAX, boolean, integer, one_of
from .borrowing import Borrowing
from .checkpoint_plan import StatePlan
from .checkpoints import PathStep, StepCheckpoints
from .hashing import PrefixHashChain
from .kv_block_allocator import KVBlockAllocator
from .left_entries import MemoryCleaner
from .memory_division import MemoryDivision
from .memory_units import MemoryUnits
from .pinned_prefixes import PinnedPrefix, PinnedPrefixes
from .pool_stats import Clock, KVRemovalCause, PoolStats, StateRemovalCause, TierStats
from .prefix_match import CachedPath, PrefixMatch, PrefixMatcher, TableRow
from .reasons import Span
from .shared_kv_blocks import SharedKVBlocks
from .shared_slots import SharedSlots
from .slot_eviction import EVICTION_POLICIES
from .tier import HostTier
from .unit_slots import UnitSlots

_CAUSE_OF_STATE: dict[KVRemovalCause, StateRemovalCause] = {
    "new_block": "kv_evicted",
    "discarded": "discarded",
    "reset": "reset",
}
"""Why a state leaves with its KV block."""


class PrefixCache:
    """Which prefixes are cached, in which KV blocks and durable slots, and who holds them.

    The cache keeps books only: it reads, writes and awaits no tensor. A sequence passes these calls:

        match     what is cached of the sequence
        open      a path, which holds what the sequence uses
        hold      the shared blocks; hold_state the slot that the sequence starts from; grow blocks of its own
        reserve   durable slots for the states that a step takes        (before the forward)
        register  the blocks that the step completed                    (after the forward was launched)
        commit    the states that the step took
        release   all that the path holds; what was registered and committed stays cached
        discard   the same, but forget the path's blocks and states

    A KV block that leaves takes its state along: `kv_blocks` calls `slots` before every deregistration. A
    state that comes or leaves changes the eviction order of its block, and what matches: `slots` calls
    `kv_blocks.leaves` and `kv_blocks.tree`.

    Attributes:
        kv_blocks: who holds which KV block.
        slots: the book of state slots; has no slots where the cache is off.
        pins: the pinned prefixes, and how many blocks they hold.
        tier: states that left their slots for others, in host memory and on the disk; None for no tier.
    """

    def __init__(
        self,
        num_kv_blocks: int,
        num_slots: int,
        block_size_tokens: int,
        eviction_policy: str = "value",
        enabled: bool = True,
        clock: Clock = time.monotonic_ns,
        num_live_slots: int = 0,
        tier: HostTier | None = None,
        division: MemoryDivision | None = None,
        scrubber: MemoryCleaner | None = None,
    ) -> None:
        """
        Args:
            num_kv_blocks: blocks of the KV pool.
            num_slots: slots that cached states have for certain, and that pins may keep.
            block_size_tokens: tokens of a block.
            eviction_policy: one of `EVICTION_POLICIES`.
            enabled: where False, nothing is matched or registered, and sequences only hold blocks.
            clock: tells the ages of what is evicted.
            num_live_slots: slots more, which running requests may take. What they leave idle holds cached
                states.
            tier: keeps the states that are evicted for others; None for none. `HostTier(num_slots)` has books
                alone, for a cache without tensors.
            division: of the memory that KV and states share; None where each has its own.
            scrubber: is told of what becomes free; None for nobody.
        """
        scrubber = scrubber or MemoryCleaner()
        self._block_size = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        self._enabled = boolean("enabled", enabled)
        num_kv_blocks = integer("num_kv_blocks", num_kv_blocks, 1, INT32_MAX)
        num_slots = integer("num_slots", num_slots, 0, INT32_MAX)
        policy = one_of("eviction_policy", eviction_policy, EVICTION_POLICIES)
        forget = self._forget_states
        units = MemoryUnits(division) if division is not None else None
        self.kv_blocks = (
            SharedKVBlocks(units, forget, clock, scrubber.blocks)
            if units
            else KVBlockAllocator(num_kv_blocks, enabled, forget, clock, scrubber.blocks)
        )
        tree, leaves = self.kv_blocks.tree, self.kv_blocks.leaves
        book = tree.hash_of, self._note_states_changed, self._note_ghosts_changed, clock
        rest = num_kv_blocks, tree.keys_to, self._spill, scrubber.slots
        num_all = num_slots + num_live_slots if enabled else 0
        self.slots = (
            UnitSlots(units, num_all, policy, *book, *rest)
            if units
            else SharedSlots(num_all, policy, *book, *rest)
        )
        self._borrowing = (
            Borrowing(units, self.kv_blocks, self.slots, scrubber)
            if units and isinstance(self.kv_blocks, SharedKVBlocks) and isinstance(self.slots, UnitSlots)
            else None
        )
        self.tier = tier
        leaves.holds_state = self.slots.map.__contains__ if tier is None else self._can_be_resumed
        if tier is not None:
            tier.on_left = self._note_copies_left
        self._checkpoints = StepCheckpoints(self.slots)
        self.pins = PinnedPrefixes(self.slots, self.kv_blocks, num_slots, units)
        self._matcher = PrefixMatcher(tree, self.slots, self._block_size)

    def _spill(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        if self.tier is not None:
            self.tier.spill(slots, keys)

    def _can_be_resumed(self, block: int) -> bool:
        """Whether the block's state is in a durable slot, or in the tier."""
        return block in self.slots.map or self.kv_blocks.tree.hash_of(block) in self.tier  # type: ignore[operator]

    def _note_copies_left(self, keys: Iterable[int]) -> None:
        self.kv_blocks.leaves.note_states_changed(self._blocks_of(keys))

    def _note_ghosts_changed(self, keys: Iterable[int]) -> None:
        self.kv_blocks.tree.note_states_changed(self._blocks_of(keys))

    def _blocks_of(self, keys: Iterable[int]) -> list[int]:
        """The registered ones of the blocks with these hashes."""
        block_of_hash = self.kv_blocks.tree.block_of_hash
        return [block_of_hash[key] for key in keys if key in block_of_hash]

    def _forget_states(self, blocks: Sequence[int] | None, cause: KVRemovalCause) -> None:
        if self.tier is not None:
            if blocks is None:
                self.tier.clear()
            else:
                self.tier.forget(map(self.kv_blocks.tree.hash_of, blocks))
        self.slots.forget(blocks, blocks_leave=True, cause=_CAUSE_OF_STATE[cause])

    def _note_states_changed(self, blocks: Iterable[int]) -> None:
        self.kv_blocks.tree.note_states_changed(blocks)
        self.kv_blocks.leaves.note_states_changed(blocks)

    # ---- what is cached

    def match(
        self,
        chain: PrefixHashChain,
        num_tokens: int,
        path: CachedPath | None = None,
        max_resume_tokens: int | None = None,
        known: PrefixMatch | None = None,
    ) -> PrefixMatch:
        """What is cached of the first `num_tokens` tokens of a sequence. Changes nothing.

        Args:
            chain: the hashes of at least the whole blocks of these tokens.
            num_tokens: tokens of the sequence. Only states that leave at least one token to compute count.
            path: what the sequence holds already. States within the path's registered blocks do not count.
            max_resume_tokens: deeper states do not count, because the tokens behind are to be computed: the
                sequence shares their KV only. None for no limit.
            known: an earlier result for the same sequence, or for its beginning. The call returns what it
                would return without `known`, at the cost of what has changed: O(1) where nothing has that
                concerns the sequence. Where the result is the same, the call returns `known` itself. A
                result of another sequence, path or limit is ignored.
        """
        if not self._enabled or (path is not None and not path.shares):
            nothing = PrefixMatch((), 0, -1, 0, (Span(0, num_tokens, "disabled"),))
            return known if known == nothing else nothing
        if path is None:
            return self._matcher.match(chain, num_tokens, (), 0, max_resume_tokens, known)
        blocks, num_held = path.blocks, path.num_registered
        return self._matcher.match(chain, num_tokens, blocks, num_held, max_resume_tokens, known)

    def resumable_tokens(self, chain: PrefixHashChain) -> int:
        """How many of a prefix's tokens a longer prompt could resume now."""
        return len(self._resumable_blocks(chain)) * self._block_size

    def _resumable_blocks(self, chain: PrefixHashChain) -> list[int]:
        """The KV blocks up to the deepest cached state of the sequence with hashes `chain`."""
        blocks = self.kv_blocks.tree.match(chain.root, chain.keys, chain.tokens) if self._enabled else []
        while blocks and blocks[-1] not in self.slots.map:
            blocks.pop()
        return blocks

    # ---- what a sequence holds

    def open(
        self,
        chain: PrefixHashChain,
        plan: StatePlan,
        table_row: TableRow,
        *,
        max_resume_tokens: int | None = None,
        again: bool = False,
    ) -> CachedPath:
        """A path that holds nothing yet.

        Args:
            chain: the hashes of the sequence's whole blocks.
            plan: which states of the sequence are taken.
            table_row: will show the path's blocks.
            max_resume_tokens: the sequence is that of a request that comes, which could resume behind so many
                tokens at most. None for a sequence that is no request.
            again: whether the request came before, and was preempted.
        """
        path = CachedPath(chain, plan, table_row, self._enabled)
        if path.shares and max_resume_tokens is not None:
            num_reachable = min(max_resume_tokens // self._block_size, len(chain.keys))
            path.visit = self.slots.order.arrive(chain.keys, num_reachable, again)
        return path

    def affords(self, num_blocks: int, match: PrefixMatch, path: CachedPath | None) -> bool:
        """Whether a path (None: a new one) could hold a match's blocks, and grow to `num_blocks` blocks."""
        num_held, num_registered = (len(path.blocks), path.num_registered) if path is not None else (0, 0)
        shared = match.blocks[num_registered:]
        num_missing = max(0, num_blocks - (len(match.blocks) if shared else num_held))
        keep = (match.resume_slot,) if match.resume_slot >= 0 else ()
        return self.kv_blocks.is_memory_available(num_missing, self._count_cached(shared), keep)

    def _count_cached(self, blocks: Sequence[int]) -> int:
        """How many of a prefix's consecutive blocks nobody holds; O(log blocks).

        Whoever holds a block holds the blocks before it. So the held ones come first, and all but the last of
        these have a held child.
        """
        num_held_children = self.kv_blocks.tree.num_held_children
        num_held = bisect_left(blocks, True, key=lambda block: not num_held_children[block])
        if num_held < len(blocks):
            num_held += not self.kv_blocks.count_cached([blocks[num_held]])
        return len(blocks) - num_held

    def hold(self, path: CachedPath, match: PrefixMatch) -> None:
        """Put a match's registered blocks in the place of the path's unregistered ones."""
        shared = list(match.blocks[path.num_registered :])
        if shared:
            own = path.blocks[path.num_registered :]
            self.kv_blocks.add_references(shared)
            self.kv_blocks.release_memory_blocks(own)
            path.replace(path.num_registered, shared)
            path.num_registered = len(path.blocks)

    def grow(self, path: CachedPath, num_blocks: int) -> None:
        """Allocate blocks until the path has `num_blocks` blocks.

        Raises:
            KVBlockCapacityError: too few blocks are free or can be evicted; nothing is changed.
        """
        num_missing = num_blocks - len(path.blocks)
        if num_missing > 0:
            path.append(self.kv_blocks.allocate_memory_blocks(num_missing))

    def trim(self, path: CachedPath, num_blocks: int) -> None:
        """Release all but the path's first `num_blocks` blocks; the released ones must not be registered."""
        surplus = path.blocks[num_blocks:]
        if surplus:
            path.replace(num_blocks, [])
            self.kv_blocks.release_memory_blocks(surplus)

    def hold_state(self, path: CachedPath, slot: int, *, resumes: bool) -> None:
        """Pin the durable slot that the sequence continues from, in place of an earlier one.

        `resumes`: whether the sequence starts from another sequence's state, which counts as a use of the
        state.
        """
        self.release_state(path)
        self.slots.pin(slot)
        path.state_slot = slot
        if resumes:
            self.slots.note_use(slot)

    def release_state(self, path: CachedPath) -> None:
        """Unpin the slot that the sequence continued from, if there is one."""
        slot, path.state_slot = path.state_slot, -1
        if slot >= 0:
            self.slots.unpin(slot)

    def release(self, path: CachedPath) -> None:
        """Release all that the path holds; do not use the path afterwards.

        Observers of deregistered blocks are called last, when the books are in order.
        """
        self.release_state(path)
        self.slots.order.depart(path.visit)
        blocks = list(path.blocks)
        path.replace(0, [])
        self.kv_blocks.release_memory_blocks(blocks)

    def discard(self, path: CachedPath) -> None:
        """Release a path whose content cannot be trusted; do not use the path afterwards.

        What the path registered and what it resumed from is not found any more, as far as nobody else holds
        it. States along the path go unless they are pinned. Its blocks go from the deep end up, until one
        that is held or that another sequence continues.
        """
        self.release_state(path)
        self.slots.order.depart(path.visit)
        registered = path.blocks[: path.num_registered] if path.shares else []
        if self.tier is not None:
            self.tier.forget(map(self.kv_blocks.tree.hash_of, registered))
        for block in registered:
            self.slots.drop(block, "discarded")
        blocks = list(path.blocks)
        path.replace(0, [])
        self.kv_blocks.release_memory_blocks(blocks, forget=True)

    # ---- what a step leaves

    def register(self, path: CachedPath, tokens: Sequence[int], num_computed: int) -> None:
        """Make the blocks findable that the sequence's first `num_computed` tokens complete.

        Where another block is registered for the same prefix, the path continues with that block and releases
        its own. Registers nothing for a path that does not share.
        """
        first, stop = path.num_registered, num_computed // self._block_size
        if stop <= first or not path.shares:
            return
        chain, kv = path.chain, self.kv_blocks
        chain.extend_to(tokens, num_computed)
        parent = path.blocks[first - 1] if first else chain.root
        own, rest = path.blocks[first:stop], path.blocks[stop:]
        canonical = kv.register_chain(parent, own, chain.keys[first:stop], chain.tokens[first:stop])
        replaced = [mine for mine, theirs in zip(own, canonical, strict=False) if mine != theirs]
        if replaced:
            duplicates = [theirs for mine, theirs in zip(own, canonical, strict=False) if mine != theirs]
            kv.add_references(duplicates)
            kv.release_memory_blocks(replaced)
            path.replace(first, canonical + own[len(canonical) :] + rest)
        path.num_registered = first + len(canonical)

    def reserve[S: PathStep](self, steps: Sequence[S], max_inner_states: int | None = None) -> list[S]:
        """Reserve a slot for each planned state that is not cached yet.

        May evict unpinned states. A boundary for which no slot is left gets none, without error.

        Args:
            max_inner_states: how many states inside prefills the steps can take; None: any number.

        Returns:
            The steps with their `destinations`.
        """
        if self._borrowing:
            states = self.slots.map.hash_to_block_id
            wanted = {step.key_at(boundary.position) for step in steps for boundary in step.boundaries}
            self._borrowing.lend_slots(sum(key not in states for key in wanted))
        return self._checkpoints.reserve(steps, max_inner_states)

    def after_verification[S: PathStep](self, planned: Sequence[S], accepted: Sequence[S]) -> list[S]:
        """Adapt the reservations once drafts are verified; see `StepCheckpoints.after_verification`."""
        return self._checkpoints.after_verification(planned, accepted)

    def commit(self, step: PathStep) -> dict[int, int]:
        """Make the states of a launched step findable; the step's blocks must be registered already.

        Returns:
            boundary -> the committed slot that holds its state, or -1; see `StepCheckpoints.commit`.
        """
        return self._checkpoints.commit(step)

    def abort(self) -> None:
        """Free all slots that were reserved for a step that failed."""
        if self.tier is not None:
            self.tier.mend()
        self.slots.release()

    # ---- pins, eviction, reset

    def pin(self, chain: PrefixHashChain) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and the KV up to it, until `pins.unpin` or a reset.

        Raises:
            ValueError: no boundary of the prefix has a state.
            MambaSlotCapacityError: pins have all slots that they may have; nothing is changed.
        """
        blocks = self._resumable_blocks(chain)
        if not blocks:
            raise ValueError(
                f"tokens is a prefix of {len(chain.keys)} whole blocks; accepted: one with a cached state"
            )
        return self.pins.pin(blocks, len(blocks) * self._block_size)

    def forget(self, paths: Iterable[CachedPath]) -> None:
        """Forget every prefix, state, pin and ghost; sequences keep the blocks that they hold.

        What the sequences compute afterwards is registered and committed nowhere.

        `paths`: all open paths; none of them may hold a state.
        """
        for path in paths:
            path.shares = False
            path.rolling_block = -1
        self.pins.unpin_all()
        if self.tier is not None:
            self.tier.clear()
        self.slots.clear()  # first: no state may be findable once its block is free
        self.kv_blocks.deregister_all()

    def reset(self, *, keep_totals: bool = False) -> None:
        """Forget everything, also holders. Works on inconsistent books, too.

        `keep_totals`: whether the counts of what entered and left stay; what leaves counts as "reset".
        """
        self.pins.clear()
        if self.tier is not None:
            self.tier.clear(totals=not keep_totals)
        self.slots.clear(totals=not keep_totals, live=True)
        try:
            self.kv_blocks.deregister_all()  # calls observers
        finally:
            self.kv_blocks.reset(keep_totals=keep_totals)
        self.slots.map.mend_counts()
        self.kv_blocks.tree.mend_counts()

    # ---- the whole

    def stats(self) -> PoolStats:
        """How full both pools are."""
        slots, kv, pins = self.slots.counts, self.kv_blocks, list(self.slots.pins)
        states, blocks = self.slots.map.turnover, kv.tree.turnover
        return PoolStats(
            num_free_slots=slots.free,
            num_reserved_slots=slots.reserved,
            num_committed_slots=slots.committed,
            num_live_slots=slots.live,
            num_states_committed=slots.committed_total,
            num_pinned_slots=len(pins),
            num_states_evicted=slots.evicted_total,
            num_states_refused=states.num_refused,
            num_states_evicted_unused=states.num_unused,
            states_left_by_cause=states.by_cause.copy(),
            state_ages=states.ages,
            num_free_kv_blocks=kv.total_avail,
            num_cached_kv_blocks=kv.cached_count,
            num_held_kv_blocks=kv.held_count,
            num_kv_blocks_registered=blocks.num_entered,
            kv_blocks_left_by_cause=blocks.by_cause.copy(),
            kv_block_ages=blocks.ages,
            tiers=TierStats() if self.tier is None else self.tier.stats(),
        )

    def check_integrity(self, paths: Iterable[CachedPath], during_step: bool = False) -> None:
        """Raise AssertionError where the books contradict each other or the paths; O(pools).

        Args:
            paths: all open paths.
            during_step: whether slots may be reserved now.
        """
        references, pins = self.pins.block_references, self.pins.slot_pins
        for path in paths:
            path.check_integrity()
            references.update(path.blocks)
            pins.update([path.state_slot] if path.state_slot >= 0 else [])
        self.kv_blocks.check_integrity()
        self.slots.check_integrity()
        if self._borrowing:
            self._borrowing.check_integrity()
        self.pins.check_integrity()
        assert references == Counter(self.kv_blocks.references), "a KV reference leaked"
        assert pins == Counter(self.slots.pins), "a pin leaked"
        num_findable = len(self.slots.map.hash_to_block_id)
        assert num_findable == len(self.slots.map), "a state that nobody can find"
        assert during_step or not self.slots.reserved, "a reservation leaked"
        if self.tier is not None:
            self.tier.check_integrity(self.kv_blocks.tree.block_of_hash.__contains__)
