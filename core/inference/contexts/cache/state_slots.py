"""The pool of state slots: which are free, who may write one, which state is evicted next."""

import time
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from operator import neg
from typing import Protocol

from ....errors import MambaSlotCapacityError
from .block_tree import BlockTree
from .cached_states import CachedStates
from .eviction import LRUEviction, PolicyChoice
from .free_entries import DirtyEntries
from .memory import MemoryUnits
from .pool_stats import STATE_EVICTIONS, Clock, SlotCounts, StateRemovalCause
from .state_tiers import StateTiers
from .value_eviction import ValueEviction


class RollingOwner(Protocol):
    """A sequence that decodes; `rolling_block` ends at its newest decode state that rolls, or is -1."""

    rolling_block: int


class StateSlots:
    """The slots of one pool, as integers: no tensor is made or copied. Callers check arguments.

        FREE -- reserve --> RESERVED -- commit --> COMMITTED        FREE, COMMITTED -- allocate_live --> LIVE
          ^ <--- release ------+                       |                                                   |
          +-------------------------- evict, remove ---+ <------------------------------------ free_live --+

    A reserved slot is written by one step and read by no request. A committed slot is immutable and findable.
    A pinned slot is not evicted; where its block is evicted, the slot becomes RESERVED for no block until its
    last unpin. With `units`, a slot whose memory holds KV is in none of these states.
    """

    def __init__(
        self, num_slots: int, policy: PolicyChoice, tree: BlockTree, num_kv_blocks: int = 0, *,
        clock: Clock = time.monotonic_ns, dirty: DirtyEntries | None = None,
        units: MemoryUnits | None = None, tiers: StateTiers | None = None,
    ) -> None:  # fmt: skip
        """Ghosts of `num_kv_blocks` states are remembered, or of 8 a slot if more."""
        self.num_slots = num_slots
        self.tree = tree
        self._tiers = tiers
        self._units = units
        self.live_slots: set[int] = set()  # empty where live states have a pool of their own
        self.free_slots = self._unused_slots()
        self.reserved: dict[int, int] = {}  # slot -> its block, or -1 once that is evicted
        self.pins: dict[int, int] = {}  # slot -> how often it is pinned
        num_ghosts = max(8 * num_slots, num_kv_blocks) if num_slots else 0
        tree.ghosts.grow(num_ghosts)
        if isinstance(policy, str):
            policy = ValueEviction(num_ghosts) if policy == "value" else LRUEviction()
        self.policy = policy() if isinstance(policy, type) else policy
        self.cached_states = CachedStates(num_slots, tree, self.policy, clock, tiers)
        self._dirty = dirty or DirtyEntries()

    # ---- lookup

    def _unused_slots(self) -> list[int]:
        """All slots but live ones and those whose memory holds KV, in the order of the free list."""
        used_slots = self.live_slots.union(self._units.lent_slots if self._units else ())
        free = [slot for slot in range(self.num_slots) if slot not in used_slots]
        return free[::-1] if self._units else free

    @property
    def counts(self) -> SlotCounts:
        turnover = self.cached_states.turnover
        return SlotCounts(
            free=len(self.free_slots),
            reserved=len(self.reserved),
            committed=len(self.cached_states.slot_of_block),
            committed_total=turnover.num_entered,
            evicted_total=sum(turnover.by_cause[cause] for cause in STATE_EVICTIONS),
            live=len(self.live_slots),
        )

    @property
    def num_available(self) -> int:
        """Slots that `reserve` could allocate: free ones and unpinned committed ones."""
        num_pinned = sum(1 for slot in self.pins if slot not in self.reserved)
        return len(self.free_slots) + len(self.cached_states.slot_of_block) - num_pinned

    def next_victims(self, count: int, protected: Collection[int] | None = None) -> list[int]:
        """Up to `count` slots that would be evicted next, but `protected` (pinned) ones; changes nothing."""
        protected = self.pins if protected is None else protected
        victims = list(self.policy.victims(count, lambda slot: slot not in protected))
        return self.checked_victims(victims, count, protected)

    def checked_victims(self, victims: list[int], count: int, protected: Collection[int]) -> list[int]:
        """`victims`, a choice of the policy; ValueError unless these are slots that it may evict."""
        existing, block_of = range(self.num_slots), self.cached_states.block_of
        right = (slot in existing and block_of(slot) >= 0 and slot not in protected for slot in victims)
        if not all(right) or len(victims) > count or len(set(victims)) < len(victims):
            raise ValueError(
                f"victims of {type(self.policy).__name__} returned {victims}; accepted: up to {count} of the "
                "slots for which evictable(slot) is true, each once"
            )
        return victims

    # ---- reservations

    def reserve_slots(self, block_ids: Sequence[int]) -> list[int]:
        """Allocate one slot for each block's state; may evict."""
        slots = self._allocate(len(block_ids))
        self.reserved.update(zip(slots, block_ids, strict=True))
        return slots

    def commit_slots(self, slots: Sequence[int], blocks: Sequence[int] | None = None) -> list[int]:
        """Make written slots findable as states of `blocks`; returns the slot with each state now, or -1."""
        blocks = [self.reserved[slot] for slot in slots] if blocks is None else blocks
        results = []
        for slot, block in zip(slots, blocks, strict=True):
            # The block may be deregistered since; its id may then stand for another prefix.
            is_deregistered = self.reserved.pop(slot) < 0
            prefix_hash = self.tree.hash_of(block) if block >= 0 else 0
            if prefix_hash and not is_deregistered and block not in self.cached_states.slot_of_block:
                self.cached_states.insert([block], [slot])
                self.cached_states.set_hashes([block], [slot], [prefix_hash])
            else:
                self._add_free([slot])
            results.append(-1 if is_deregistered else self.cached_states.slot_of(block))
        return results

    def release(self, slots: Sequence[int]) -> None:
        """Free reserved slots without committing them."""
        for slot in slots:
            del self.reserved[slot]
        self._add_free(slots)

    def release_all(self) -> None:
        """Free all reserved slots that are not pinned."""
        self.release([slot for slot in self.reserved if slot not in self.pins])

    def fetch_state(
        self, blocks: Sequence[int], hashes: Sequence[int], start: int, block_size_tokens: int
    ) -> bool:
        """Copy back the deepest good state after token `start` from the tiers, if that beats computing.

        Waits for the copy, may evict states, and is a collective where the model is split. `blocks` and
        `hashes`: of a prefix that a match found, first block first; deeper states are not fetched. Returns
        whether states changed, so that earlier matches may be wrong.
        """
        tiers, changed = self._tiers, False
        if tiers is None or not (tiers.host or tiers.files):
            return False
        for depth in range(len(blocks), start // block_size_tokens, -1):
            prefix_hash, block = hashes[depth - 1], blocks[depth - 1]
            worth = tiers.is_worth_fetching(prefix_hash, depth * block_size_tokens - start)
            if not worth or block in self.cached_states.slot_of_block:
                continue
            tiers.pin(prefix_hash)
            try:
                (slot,) = self.reserve_slots([block])
            except MambaSlotCapacityError:
                tiers.pin(None)
                return changed
            changed = True
            good = tiers.fetch(prefix_hash, slot)
            self.cached_states.mark_copies_lost(tiers.take_lost())
            if good:
                self.commit_slots([slot])
                return True
            self.release([slot])
        return changed

    def pin(self, slot: int) -> None:
        """Keep a committed slot from eviction until `unpin`. A slot may be pinned several times."""
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot in self.reserved:  # the slot's block was evicted while the slot was pinned
                del self.reserved[slot]
                self._add_free([slot])

    # ---- live slots

    def allocate_live(
        self, num_slots: int, resume_slot: int = -1, evict_last: Iterable[int] = ()
    ) -> list[int]:
        """Allocate slots for a running request; evicts unpinned states, those in the slots `evict_last` last.

        Of these, the last ones go first. Where only the state in `resume_slot` could be evicted for the last
        slot, the request takes the slot.
        """
        room, pins = self.num_available - num_slots, self.pins
        block_of = self.cached_states.block_of
        unpinned = (slot for slot in evict_last if slot >= 0 and slot not in pins and block_of(slot) >= 0)
        protected = list(dict.fromkeys(unpinned))[: max(0, room)]
        is_evictable = resume_slot >= 0 and resume_slot not in pins and resume_slot not in protected
        takes_over = is_evictable and len(protected) == room
        num_allocated = num_slots - 1 if takes_over else num_slots
        slots = self._allocate(num_allocated, (resume_slot, *protected), "live_state")
        if takes_over:
            self.cached_states.record_use(resume_slot)
            self._spill([resume_slot], "live_state")
            slots = [resume_slot, *slots]
        self.live_slots.update(slots)
        return slots

    def free_live(self, slots: Sequence[int]) -> None:
        """Free live slots."""
        self.live_slots.difference_update(slots)
        self._add_free(slots)

    # ---- slots that enter the maps at once, for hosts that fill them afterwards

    def allocate_committed(self, blocks: Sequence[int]) -> list[int]:
        """Allocate and commit a slot, without a hash, for each block; a block has one slot at most."""
        slot_of_block = self.cached_states.slot_of_block
        new, protected = blocks, []
        if len(set(blocks)) < len(blocks) or not slot_of_block.keys().isdisjoint(blocks):
            new = [block for block in dict.fromkeys(blocks) if block not in slot_of_block]
            protected = [slot_of_block[block] for block in blocks if block in slot_of_block]
        slots = self._allocate(len(new), protected)
        self.cached_states.insert(new, slots)
        return [slot_of_block[block] for block in blocks] if len(new) < len(blocks) else slots

    # ---- eviction and what ends with a block

    def evict(
        self, num_slots: int, protected: Collection[int] = (), cause: StateRemovalCause = "new_state"
    ) -> None:
        """Evict so many unpinned states not in `protected`; an error, if there are fewer, changes nothing."""
        protected = self.pins.keys() | protected
        slot_of_block = self.cached_states.slot_of_block
        # Judged without the policy, which a choice may reorder.
        if len(slot_of_block) < num_slots + len(protected):
            num_evictable = sum(slot not in protected for slot in slot_of_block.values())
            if num_evictable < num_slots:
                raise MambaSlotCapacityError(num_slots, num_evictable)
        victims = self.next_victims(num_slots, protected)
        if len(victims) < num_slots:
            raise ValueError(
                f"victims of {type(self.policy).__name__} returned {len(victims)} slots; accepted: "
                f"{num_slots}, as so many are evictable"
            )
        self.evict_slots(victims, cause)

    def evict_slots(self, slots: Sequence[int], cause: StateRemovalCause = "new_state") -> None:
        """Evict the states in these slots, which are not pinned."""
        self._spill(slots, cause)
        self._add_free(slots)

    def remove_unpinned(self, block: int, cause: StateRemovalCause = "by_host") -> bool:
        """Remove the block's state, which its owner no longer needs; False, with nothing done, if pinned."""
        if self.cached_states.slot_of(block) in self.pins:
            return False
        self.remove([block], cause)
        return True

    def remove_rolling(self, owner: RollingOwner) -> None:
        """Remove the owner's newest decode state that rolls; one that a request has resumed from stays."""
        block = owner.rolling_block
        slot = self.cached_states.slot_of(block)
        if slot < 0 or slot in self.cached_states.used_slots or self.remove_unpinned(block, "rolled"):
            owner.rolling_block = -1

    def remove_rolling_states(self, owners: Iterable[RollingOwner], num_slots: int) -> None:
        """Remove decode states of `owners`, which store newer ones now, until `num_slots` slots are free."""
        for owner in owners:
            if len(self.free_slots) >= num_slots:
                return
            self.remove_rolling(owner)

    def remove(
        self, blocks: Sequence[int], cause: StateRemovalCause = "by_host", *, with_blocks: bool = False
    ) -> None:
        """Remove the states of blocks, and free their slots; `with_blocks`: these are evicted, too."""
        if with_blocks:
            self.remove_copies(blocks)
        if slots := self.cached_states.remove(blocks, cause):
            if self.pins and not self.pins.keys().isdisjoint(slots):
                pinned = [slot for slot in slots if slot in self.pins]
                self.reserved.update(dict.fromkeys(pinned, -1))  # still read: the last unpin frees the slot
                slots = [slot for slot in slots if slot not in self.pins]
            self._add_free(slots)
        if with_blocks and self.reserved:
            removed = set(blocks)
            self.reserved = {slot: -1 if block in removed else block for slot, block in self.reserved.items()}

    def remove_copies(self, blocks: Sequence[int]) -> None:
        """Remove the copies of these blocks' states in the tiers."""
        if self._tiers is not None:
            hashes = [self.tree.hash_of(block) for block in blocks]
            self.cached_states.mark_changed(hashes)
            self._tiers.remove(hashes)

    def clear(self, *, keep_counts: bool = True, live: bool = False) -> None:
        """Remove every state, reservation, pin and ghost; with `live`, live slots become free, too."""
        if live:
            self.live_slots.clear()
        # No state may be findable once its slot is free: the index goes first, the free list comes last.
        self.cached_states.clear()
        self.reserved.clear()
        self.pins.clear()
        self.free_slots = self._unused_slots()
        self._dirty.add(self.free_slots)
        if not keep_counts:
            self.cached_states.turnover.clear()

    # ---- memory that slots share with KV blocks

    def lend(self, slots: range) -> None:
        """Take these free slots from the free list: their memory will hold KV."""
        self._dirty.remove(slots)
        self.free_slots = [slot for slot in self.free_slots if slot not in slots]

    def take_back(self, slots: Sequence[int]) -> None:
        """Free lent slots, whose memory held KV and is zero where that is asked for."""
        self._add_free(slots)
        self._dirty.remove(slots)

    # ---- inside

    def _allocate(
        self, num_slots: int, protected: Collection[int] = (), cause: StateRemovalCause = "new_state"
    ) -> list[int]:
        """Allocate slots: free ones, the last ones first, then those of states that are evicted."""
        num_free = len(self.free_slots)
        if num_slots > num_free:
            try:
                self.evict(num_slots - num_free, protected, cause)
            except MambaSlotCapacityError as error:
                raise MambaSlotCapacityError(num_slots, error.available + num_free) from None
        cut = len(self.free_slots) - num_slots
        slots = self.free_slots[cut:]
        if self._dirty.scrubs:
            self._dirty.scrub(slots)
        del self.free_slots[cut:]
        return slots

    def _spill(self, slots: Sequence[int], cause: StateRemovalCause) -> None:
        """Copy states that are evicted to the tiers, and remove them."""
        cached_states = self.cached_states
        if self._tiers is not None:
            self._tiers.spill(slots, [cached_states.hash_of(slot) for slot in slots])
            cached_states.mark_copies_lost(self._tiers.take_lost())
        cached_states.remove([cached_states.block_of(slot) for slot in slots], cause)

    def _add_free(self, slots: Sequence[int]) -> None:
        if self._dirty.scrubs:
            self._dirty.add(slots)
        if self._units is None:
            self.free_slots.extend(slots)
        else:  # the lowest slot is allocated first: slots before the units are used, and units become free
            for slot in slots:
                insort(self.free_slots, slot, key=neg)

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other or the KV hashes; O(slots)."""
        self.cached_states.check_integrity()
        free, reserved = set(self.free_slots), set(self.reserved)
        committed = set(self.cached_states.slot_of_block.values())
        lent = set(self._units.lent_slots) if self._units else set[int]()
        assert len(free) == len(self.free_slots), "a slot is free twice"
        assert free.isdisjoint(committed | reserved), "a slot is free and in use"
        assert committed.isdisjoint(reserved), "a slot is committed and reserved"
        assert self.live_slots.isdisjoint(free | reserved | committed), "a live slot is in another state"
        assert lent.isdisjoint(free | reserved | committed), "a slot is in use whose memory holds KV"
        num_owned = len(free) + len(reserved) + len(committed) + len(self.live_slots) + len(lent)
        assert num_owned == self.num_slots, "a slot is nowhere"
        targets = [block for block in self.reserved.values() if block >= 0]
        assert len(targets) == len(set(targets)), "two slots are reserved for one block"
        assert self.pins.keys() <= committed | reserved, "a free slot is pinned"
