"""The prefix cache: KV blocks, states, and the calls of a sequence."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from ....validation import INT32_MAX, boolean, integer
from .block_tree import BlockTree
from .cached_states import PrefixMatch, Span, match_prefix
from .checkpoint_plan import CheckpointPlan
from .eviction import PolicyChoice, checked_policy
from .free_entries import MemoryScrubber
from .hashing import PrefixHashChain
from .kv_block_allocator import KVBlockAllocator
from .memory import MemoryDivision, MemoryUnits
from .paths import CachedPath, PathStep, PlannedState, Reservations, TableRow
from .pins import PinnedPrefix, PinnedPrefixes
from .pool_stats import Clock, PoolStats, TierStats
from .state_slots import StateSlots
from .state_tiers import StateTiers
from .unit_borrower import UnitBorrower


class PrefixCache:
    """Which prefixes are cached, in which KV blocks and state slots, and which paths hold them.

    The cache handles integers only: it reads, writes and awaits no tensor. It works alone, for an engine of
    one's own: `PrefixCache(num_kv_blocks=1000, num_slots=64, block_size_tokens=256)`. A sequence passes these
    calls:

        match     what is cached of the sequence
        open      a path, which holds what the sequence uses
        hold      the shared blocks; pin_state the slot that the sequence starts from; grow blocks of its own
        reserve   slots for the states that a step stores               (before the forward)
        register  the blocks that the step completed                    (after the forward was launched)
        commit    the states that the step stored
        release   all that the path holds; what was registered and committed stays cached
        discard   the same, and what it registered and committed is removed

    A KV block that is evicted takes its state along.

    Attributes:
        tree: the index of KV blocks.
        cached_states: the index of states.
        kv_blocks: reference counts of KV blocks, and which are free.
        slots: the state slots; none where the cache is off.
        reservations: the slots that steps will write.
        pins: the pinned prefixes, and how many blocks they hold.
        tiers: copies of evicted states, in host memory and on the disk; None for no tier.
    """

    def __init__(
        self, num_kv_blocks: int, num_slots: int, block_size_tokens: int,
        eviction_policy: PolicyChoice = "value", *, enabled: bool = True, clock: Clock = time.monotonic_ns,
        num_live_slots: int = 0, tiers: StateTiers | None = None, division: MemoryDivision | None = None,
        scrubber: MemoryScrubber | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            num_kv_blocks: blocks of the KV pool.
            num_slots: slots reserved for cached states; pins may keep so many.
            block_size_tokens: tokens of a block.
            eviction_policy: "value", "lru", or an `EvictionPolicy` of one's own.
            enabled: where False, nothing is matched or registered, and sequences only hold blocks.
            clock: measures the ages of what is evicted, for statistics.
            num_live_slots: additional slots that running requests may use; idle ones hold cached states. With
                num_slots=10 and num_live_slots=4, up to 14 states are cached while no request runs.
            tiers: keep evicted states; `StateTiers(num_slots)` copies nothing, for a cache without tensors.
            division: of the memory that KV and states share; None where each has its own.
            scrubber: zeroes what becomes free; None for nothing.
        """
        self._block_size = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        self._enabled = boolean("enabled", enabled)
        num_kv_blocks = integer("num_kv_blocks", num_kv_blocks, 1, INT32_MAX)
        num_slots = integer("num_slots", num_slots, 0, INT32_MAX)
        policy = checked_policy("eviction_policy", eviction_policy)
        scrubber = scrubber or MemoryScrubber()
        units = MemoryUnits(division) if division is not None else None
        num_blocks = units.num_units * units.blocks_per_unit if units else num_kv_blocks
        self.tree = BlockTree(num_blocks)
        self.tiers = tiers
        self.slots = StateSlots(
            num_slots + num_live_slots if enabled else 0, policy, self.tree, num_kv_blocks, clock=clock,
            dirty=scrubber.slots, units=units, tiers=tiers,
        )  # fmt: skip
        self.cached_states = self.slots.cached_states
        self.reservations = Reservations(self.slots)
        self.kv_blocks = KVBlockAllocator(
            num_blocks, self._enabled, slots=self.slots, clock=clock, dirty=scrubber.blocks, units=units
        )
        self._unit_borrower = UnitBorrower(units, self.kv_blocks, self.slots, scrubber) if units else None
        self.pins = PinnedPrefixes(self.slots, self.kv_blocks, num_slots, units)

    # ---- what is cached

    def match(
        self, chain: PrefixHashChain, num_tokens: int, path: CachedPath | None = None,
        max_resume_tokens: int | None = None, known: PrefixMatch | None = None,
    ) -> PrefixMatch:  # fmt: skip
        """What is cached of the first `num_tokens` tokens of a sequence. Changes nothing.

        Args:
            chain: the hashes of at least the whole blocks of these tokens.
            num_tokens: tokens of the sequence. Only states before the last token count: it is computed.
            path: what the sequence holds already. States within the path's registered blocks do not count.
            max_resume_tokens: deeper states do not count, because the tokens after are to be computed: the
                sequence shares their KV only. None for no limit.
            known: an earlier result, of which the call uses what still holds: O(1) where nothing has changed
                that concerns the sequence. Where the result is the same, the call returns `known` itself. A
                result of another sequence, path or limit is ignored.
        """
        if not self._enabled or (path is not None and not path.caches):
            nothing = PrefixMatch((), 0, -1, 0, (Span(0, num_tokens, "disabled"),))
            return known if known == nothing else nothing
        registered = path.blocks[: path.num_registered] if path is not None else ()
        return match_prefix(self.cached_states, chain, num_tokens, registered, max_resume_tokens, known)

    def resumable_tokens(self, chain: PrefixHashChain) -> int:
        """How many of a prefix's tokens a longer prompt could resume now."""
        return len(self._resumable_blocks(chain)) * self._block_size

    def _resumable_blocks(self, chain: PrefixHashChain) -> list[int]:
        """The KV blocks up to the deepest cached state of the sequence with hashes `chain`."""
        blocks = self.tree.match(chain.root, chain.hashes, chain.tokens) if self._enabled else []
        while blocks and blocks[-1] not in self.cached_states.slot_of_block:
            blocks.pop()
        return blocks

    # ---- what a sequence holds

    def open(
        self, chain: PrefixHashChain, plan: CheckpointPlan, table_row: TableRow, *,
        max_resume_tokens: int | None = None, was_preempted: bool = False,
    ) -> CachedPath:  # fmt: skip
        """A path that holds nothing yet.

        Args:
            chain: the hashes of the sequence's whole blocks.
            plan: which states of the sequence are taken.
            table_row: will show the path's blocks: an integer array, all -1, with as many entries as the
                sequence may have blocks. 20 tokens in blocks of 8 need 3.
            max_resume_tokens: the sequence could resume after at most so many tokens, of which the eviction
                policy learns. None for no limit but the chain's whole blocks.
            was_preempted: whether the request came before, and was preempted.
        """
        path = CachedPath(chain, plan, table_row, self._enabled)
        if path.caches:
            num_reachable = len(chain.hashes)
            if max_resume_tokens is not None:
                num_reachable = min(num_reachable, max_resume_tokens // self._block_size)
            path.policy_ticket = self.slots.policy.add_request(chain.hashes, num_reachable, was_preempted)
        return path

    def can_hold(
        self, num_blocks: int, match: PrefixMatch, path: CachedPath | None, num_other: int = 0
    ) -> bool:
        """Whether a path (None: a new one) could hold a match's blocks, and grow to `num_blocks` blocks.

        `num_other`: blocks that the sequence needs besides.
        """
        num_own, num_registered = (len(path.blocks), path.num_registered) if path is not None else (0, 0)
        shared = match.blocks[num_registered:]
        num_missing = max(0, num_blocks - (len(match.blocks) if shared else num_own))
        pinned = (match.resume_slot,) if match.resume_slot >= 0 else ()
        references = self.tree.references
        num_held = bisect_left(shared, True, key=lambda block: not references[block])  # held ones come first
        return self.kv_blocks.is_memory_available(num_missing + num_other, len(shared) - num_held, pinned)

    def hold(self, path: CachedPath, match: PrefixMatch) -> None:
        """Put a match's registered blocks in the place of the path's unregistered ones.

        Raises:
            ValueError: `table_row` has fewer entries than the match has blocks; nothing is changed.
        """
        if shared := list(match.blocks[path.num_registered :]):
            path.check_fits(len(match.blocks))
            self.kv_blocks.add_references(shared)
            self.kv_blocks.release_memory_blocks(path.blocks[path.num_registered :])
            path.replace(path.num_registered, shared)
            path.num_registered = len(path.blocks)

    def grow(self, path: CachedPath, num_blocks: int) -> None:
        """Allocate blocks until the path has `num_blocks` blocks.

        Raises:
            KVBlockCapacityError: too few blocks are free or can be evicted; nothing is changed.
            ValueError: `table_row` has fewer entries; nothing is changed.
        """
        num_missing = num_blocks - len(path.blocks)
        if num_missing > 0:
            path.check_fits(num_blocks)
            path.append(self.kv_blocks.allocate_memory_blocks(num_missing))

    def trim(self, path: CachedPath, num_blocks: int) -> None:
        """Release all but the path's first `num_blocks` blocks; the released ones must not be registered."""
        if surplus := path.blocks[num_blocks:]:
            path.replace(num_blocks, [])
            self.kv_blocks.release_memory_blocks(surplus)

    def pin_state(self, path: CachedPath, slot: int, *, resumes: bool) -> None:
        """Pin the durable slot that the sequence continues from, in place of an earlier one.

        `resumes`: whether the sequence starts from another sequence's state, which counts as a use of the
        state.
        """
        self.slots.pin(slot)  # first: where the new pin is refused, the earlier one stays
        former, path.state_slot = path.state_slot, slot
        if former >= 0:
            self.slots.unpin(former)
        if resumes:
            self.cached_states.record_use(slot)

    def unpin_state(self, path: CachedPath) -> None:
        """Unpin the slot that the sequence continued from, if there is one."""
        slot, path.state_slot = path.state_slot, -1
        if slot >= 0:
            self.slots.unpin(slot)

    def release(self, path: CachedPath) -> None:
        """Release all that the path holds; do not use the path afterwards.

        Observers of deregistered blocks are called last, when all counts are right.
        """
        self.unpin_state(path)
        self.slots.policy.end_request(path.policy_ticket)
        blocks = list(path.blocks)
        path.replace(0, [])
        self.kv_blocks.release_memory_blocks(blocks)

    def discard(self, path: CachedPath) -> None:
        """Release a path whose content cannot be trusted; do not use the path afterwards.

        What the path registered and what it resumed from is not found any more, as far as no other path holds
        it. States along the path go unless they are pinned. Its blocks go from the deep end up, until one
        that is held or that another sequence continues.
        """
        self.unpin_state(path)
        self.slots.policy.end_request(path.policy_ticket)
        registered = path.blocks[: path.num_registered] if path.caches else []
        self.slots.remove_copies(registered)
        for block in registered:
            self.slots.remove_unpinned(block, "discarded")
        blocks = list(path.blocks)
        path.replace(0, [])
        self.kv_blocks.release_memory_blocks(blocks, discard=True)

    # ---- one step

    def register(self, path: CachedPath, tokens: Sequence[int], num_computed: int) -> None:
        """Make the blocks findable that the sequence's first `num_computed` tokens complete.

        Where another block is registered for the same prefix, the path continues with that block and releases
        its own. Registers nothing for a path that does not cache.
        """
        first, stop = path.num_registered, num_computed // self._block_size
        if stop <= first or not path.caches:
            return
        chain, kv = path.chain, self.kv_blocks
        chain.extend_to(tokens, num_computed)
        parent = path.blocks[first - 1] if first else chain.root
        blocks, later_blocks = path.blocks[first:stop], path.blocks[stop:]
        canonical = self.tree.register(parent, blocks, chain.hashes[first:stop], chain.tokens[first:stop])
        pairs = [(old, new) for old, new in zip(blocks, canonical, strict=False) if old != new]
        if pairs:
            duplicates, replacements = zip(*pairs, strict=True)
            kv.add_references(replacements)
            kv.release_memory_blocks(duplicates)
            path.replace(first, canonical + blocks[len(canonical) :] + later_blocks)
        path.num_registered = first + len(canonical)

    def reserve[S: PathStep](self, steps: Sequence[S], max_inner_states: int | None = None) -> list[S]:
        """Reserve a slot for each planned state that is not cached yet.

        May evict unpinned states. A boundary for which no slot is left gets none, without error.

        Args:
            max_inner_states: how many states inside prefills the steps can take; None: any number.

        Returns:
            The steps with their `destinations`.
        """
        make_room = self._unit_borrower.borrow_slots if self._unit_borrower else None
        return self.reservations.reserve(steps, max_inner_states, make_room)

    def commit(self, step: PathStep) -> dict[int, int]:
        """Make a launched step's states findable, after its blocks; returns boundary -> slot, or -1."""
        path, reservations = step.path, self.reservations
        committed: dict[int, int] = {}
        for position, slot in sorted(step.destinations.items()):
            depth = position // self._block_size
            if depth > path.num_registered:
                reservations.release([slot])
                committed[position] = -1
                continue
            block = path.blocks[depth - 1]
            if step.decoding:  # planned only now that the tokens are known, and drafts right
                state = PlannedState(path.chain.hashes, depth, "decode", path.policy_ticket)
                reservations.expect(slot, state)
            committed[position] = reservations.commit(slot, block)
            if step.decoding:
                is_kept = any(b.position == position and b.is_kept for b in step.boundaries)
                self.slots.remove_rolling(path)
                if committed[position] == slot and not is_kept:
                    path.rolling_block = block
        return committed

    def abort(self) -> None:
        """Free all slots that were reserved for a step that failed."""
        if self.tiers is not None:
            self.tiers.repair()
        self.reservations.abort()

    # ---- pins, eviction, reset

    def pin(self, chain: PrefixHashChain) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and the KV up to it, until `pins.unpin` or a reset.

        Raises:
            ValueError: no boundary of the prefix has a state.
            MambaSlotCapacityError: pins have all slots that they may have; nothing is changed.
        """
        if not (blocks := self._resumable_blocks(chain)):
            raise ValueError(
                f"chain has {len(chain.hashes)} whole blocks; accepted: one of a prefix with a cached state"
            )
        return self.pins.pin(blocks, len(blocks) * self._block_size)

    def clear(self, paths: Iterable[CachedPath]) -> None:
        """Remove every prefix, state, pin and ghost; sequences keep the blocks that they hold.

        What the sequences compute afterwards is registered and committed nowhere.

        `paths`: all open paths; none of them may hold a state.
        """
        for path in paths:
            path.caches = False
            path.rolling_block = -1
        for prefix in list(self.pins.prefixes):
            self.pins.unpin(prefix)
        if self.tiers is not None:
            self.tiers.clear()
        self.slots.clear()  # first: no state may be findable once its block is free
        self.reservations.clear()
        self.kv_blocks.deregister_all()

    def reset(self, *, keep_counts: bool = False) -> None:
        """Empty the cache, references and live slots included; also where the cache is inconsistent.

        `keep_counts`: whether the counts of what entered and was removed stay; the rest counts as "reset".
        """
        self.pins.clear()
        if self.tiers is not None:
            self.tiers.clear(keep_counts=keep_counts)
        self.slots.clear(keep_counts=keep_counts, live=True)
        self.reservations.clear()
        try:
            self.kv_blocks.deregister_all()  # calls observers
        finally:
            self.kv_blocks.reset(keep_counts=keep_counts)
        self.cached_states.turnover.repair(len(self.cached_states.slot_of_block))
        self.tree.turnover.repair(len(self.tree.block_of_hash))

    # ---- the whole

    @property
    def num_states(self) -> int:
        """Prefixes from which a request can resume."""
        return len(self.cached_states.state_block_of_hash)

    def stats(self) -> PoolStats:
        """How full both pools are."""
        slots, kv, pins = self.slots.counts, self.kv_blocks, list(self.slots.pins)
        state_turnover, kv_turnover = self.cached_states.turnover, self.tree.turnover
        return PoolStats(
            num_free_slots=slots.free,
            num_reserved_slots=slots.reserved,
            num_committed_slots=slots.committed,
            num_live_slots=slots.live,
            num_states_committed=slots.committed_total,
            num_pinned_slots=len(pins),
            num_states_evicted=slots.evicted_total,
            num_states_refused=state_turnover.num_refused,
            num_states_evicted_unused=state_turnover.num_unused,
            states_removed_by_cause=state_turnover.by_cause.copy(),
            state_ages=state_turnover.ages,
            num_free_kv_blocks=kv.total_avail,
            num_cached_kv_blocks=kv.num_cached,
            num_held_kv_blocks=kv.num_held,
            num_kv_blocks_registered=kv_turnover.num_entered,
            kv_blocks_removed_by_cause=kv_turnover.by_cause.copy(),
            tiers=TierStats() if self.tiers is None else self.tiers.stats(),
        )

    def check_integrity(
        self, paths: Iterable[CachedPath], during_step: bool = False, other_blocks: Iterable[int] = ()
    ) -> None:
        """Raise AssertionError where the parts contradict each other or the paths; O(pools).

        Args:
            paths: all open paths.
            during_step: whether slots may be reserved now.
            other_blocks: blocks that sequences hold besides their paths, in `kv_blocks`.
        """
        references, pins = self.pins.block_references.copy(), self.pins.slot_pins
        for path in paths:
            path.check_integrity()
            references.update(path.blocks)
            pins.update([path.state_slot] if path.state_slot >= 0 else [])
        references.update(other_blocks)
        self.kv_blocks.check_integrity()
        self.slots.check_integrity()
        self.reservations.check_integrity()
        if self._unit_borrower:
            self._unit_borrower.check_integrity()
        assert references == Counter(self.kv_blocks.references), "a KV reference leaked"
        assert pins == Counter(self.slots.pins), "a pin leaked"
        num_findable = len(self.cached_states.state_block_of_hash)
        assert num_findable == len(self.cached_states.slot_of_block), "a state without a hash"
        assert during_step or not self.slots.reserved, "a reservation leaked"
        if self.tiers is not None:
            self.tiers.check_integrity(self.tree.block_of_hash.__contains__)
