"""The book of durable slots: whose state a slot holds, who may write it, which slot is evicted next."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ....errors import MambaSlotCapacityError
from .eviction_order import EvictionOrder, PlannedState
from .left_entries import LeftEntries
from .pool_stats import EVICTIONS, Clock, StateRemovalCause
from .reasons import GhostList
from .slot_choice import SlotChoice, choose_for_slots
from .slot_map import SlotMap

_REMEMBERED = EVICTIONS | {"path_limit"}
"""The causes of leaving after which requests for the state are still to be expected."""


class SlotCounts(NamedTuple):
    """Numbers of slots now, and of states that were ever committed, or evicted for another state."""

    free: int
    reserved: int
    committed: int
    committed_total: int
    evicted_total: int
    live: int = 0


class DurableSlots:
    """The state of each durable slot, as integers: no tensor is made or copied. Arguments are trusted.

    A slot is FREE, RESERVED or COMMITTED:

        FREE -- reserve --> RESERVED -- commit --> COMMITTED (its block is in the maps)
          ^                    |                       |
          +----- release ------+--- evict, drop, forget+

    A reserved slot is written by one step and read by nobody. A committed slot is immutable. A pinned slot is
    not evicted. Where the block of a pinned slot leaves, the slot becomes RESERVED for no block until its
    last unpin.

    Attributes:
        num_slots: slots of the pool.
        map: the committed slots.
        free: the free slots; the last one is taken next.
        reserved: slot -> the block that the slot is reserved for, or -1 once the block has left.
        pins: pinned slot -> how often it is pinned.
        ghosts: hashes whose state was evicted, or was not taken for want of a slot.
        order: which state is evicted next, and which was used last.
        version: grows with every change of `free` or `map`.
    """

    def __init__(
        self,
        num_slots: int,
        eviction_policy: str,
        kv_hash: Callable[[int], int],
        on_states_changed: Callable[[Iterable[int]], None],
        on_ghosts_changed: Callable[[Iterable[int]], None] = lambda keys: None,
        clock: Clock = time.monotonic_ns,
        num_kv_blocks: int = 0,
        keys_to: Callable[[int], Sequence[int]] | None = None,
        on_evict: Callable[[Sequence[int], Sequence[int]], None] = lambda slots, keys: None,
        left: LeftEntries | None = None,
    ) -> None:
        """
        Args:
            num_slots: slots of the pool, >= 0.
            eviction_policy: one of `EVICTION_POLICIES`.
            kv_hash: block -> its prefix hash in the KV index, or -1 for an unregistered block.
            on_states_changed: called with blocks that gained or lost a state.
            on_ghosts_changed: called with hashes of `ghosts` where no state changed with them.
            clock: tells the ages of states.
            num_kv_blocks: blocks of the KV index. So many states are remembered that are gone.
            keys_to: block -> the prefix hashes of the registered blocks up to it. None for a host that does
                not tell; each of its states then counts as one that saves one block.
            on_evict: called with slots whose states leave for others, and the states' hashes (< 1 for a state
                without a hash), before anything is changed or written.
            left: notes the slots that become free; None for nothing.
        """
        self._on_evict = on_evict
        self._left = left or LeftEntries()
        self.num_slots = num_slots
        self.map = SlotMap(num_slots)
        self.free = self._all_free()
        self.reserved: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        num_ghosts = max(8 * num_slots, num_kv_blocks) if num_slots else 0
        self.ghosts = GhostList(num_ghosts)
        self.version = 0
        self._kv_hash = kv_hash
        self._tell_states_changed = on_states_changed
        self._tell_ghosts_changed = on_ghosts_changed
        self._clock = clock
        keys_to = keys_to or (lambda block: [kv_hash(block)])
        self.order = EvictionOrder(eviction_policy, num_ghosts, keys_to, clock)

    # ---- a memory that slots share with KV blocks: `UnitSlots` has it

    def _lent_slots(self) -> Sequence[int]:
        """The slots whose memory holds KV."""
        return ()

    def _all_free(self) -> list[int]:
        """All slots but those whose memory holds KV."""
        lent = set(self._lent_slots())
        return [slot for slot in range(self.num_slots) if slot not in lent]

    # ---- lookup

    @property
    def counts(self) -> SlotCounts:
        left = self.map.turnover
        return SlotCounts(
            free=len(self.free),
            reserved=len(self.reserved),
            committed=len(self.map),
            committed_total=left.num_entered,
            evicted_total=left.by_cause["new_state"] + left.by_cause["live_state"],
        )

    @property
    def num_available(self) -> int:
        """Slots that `reserve` could hand out: free ones and unpinned committed ones."""
        num_pinned = sum(1 for slot in self.pins if slot not in self.reserved)
        return len(self.free) + len(self.map) - num_pinned

    # ---- reservations

    def choose(self, planned: Sequence[PlannedState], guessed: Sequence[int] = ()) -> SlotChoice[int]:
        """Which of these states get a slot; states that are worth less than they leave.

        Args:
            planned: states that the step takes, the worthiest kinds first.
            guessed: the hashes of states that the step takes only if drafts turn out right.

        Returns:
            The hashes of the chosen states, which `reserve` has slots for, and of the refused ones.
        """
        policy, keys = self.order.policy, [state.key for state in planned]
        for state in planned:
            self.order.plan(state)
        if policy.refuses:
            wanted = dict.fromkeys(keys)
            while len(wanted) > len(self.free):
                slot, key = policy.least(lambda slot: slot not in self.pins, wanted)
                if slot < 0:
                    key = key if key in wanted else next(reversed(wanted))
                    policy.unplan(key)
                    del wanted[key]
                else:
                    self._evict_slots([slot])
                    self._free_slots([slot])
            refused = [key for key in keys if key not in wanted]
            num_left = len(self.free) - len(wanted)
            return SlotChoice([*wanted, *guessed[:num_left]], refused)
        return choose_for_slots(keys, guessed, num_available=self.num_available, num_free=len(self.free))

    def reserve(self, blocks: Sequence[int], keys: Sequence[int] = ()) -> list[int]:
        """Take one slot for the state of each block; evicts unpinned states where too few slots are free.

        The slots enter no map yet. `keys`: the hashes of the states, where `choose` chose them.

        Raises:
            ValueError: a block is named twice, or has a state or a reservation; nothing is changed.
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        taken = set(self.reserved.values())
        for i, block in enumerate(blocks):
            if block in self.map or block in taken:
                raise ValueError(
                    f"block_ids[{i}] is {block}; accepted: distinct blocks without state or reservation"
                )
            taken.add(block)
        slots = self._take(len(blocks))
        self.reserved.update(zip(slots, blocks, strict=True))
        self.order.planned.update(zip(slots, keys, strict=False))
        return slots

    def commit(self, slots: Sequence[int], blocks: Sequence[int] | None = None) -> list[int]:
        """Make reserved, written slots findable as the states of `blocks`.

        Args:
            slots: reserved slots.
            blocks: a block for each slot; None for the blocks that the slots are reserved for.

        Returns:
            For each slot the committed slot that now holds the block's state: the slot itself, or an earlier
                one, which holds the state after the same tokens. -1 where the block is not registered in the
                KV index, so that nobody could find the state. A slot that is not the result is freed.

        Raises:
            ValueError: a slot is not reserved, or is reserved for the state of another prefix than its block
                is registered for: one of other tokens, or of another number of tokens. Nothing is changed.
        """
        self._require_reserved(slots)
        blocks = [self.reserved[slot] for slot in slots] if blocks is None else blocks
        self._require_planned(slots, blocks)
        results = []
        for slot, block in zip(slots, blocks, strict=True):
            # The block may be deregistered since; its number may then stand for another prefix.
            gone = self.reserved.pop(slot) < 0
            planned = self.order.planned.pop(slot, -1)
            key = -1 if gone or block < 0 else self._kv_hash(block)
            if key > 0 and block not in self.map:
                self._enter([block], [slot])
                self.name([block], [slot], [key])
            else:
                self._free_slots([slot])
            if planned >= 0:  # does nothing where the state is there now
                self.order.policy.unplan(planned)
            results.append(-1 if gone else self.map.slot_of(block))
        return results

    def release(self, slots: Sequence[int] | None = None) -> None:
        """Free reserved slots without committing them; None frees all reserved slots that are not pinned."""
        if slots is None:
            self.order.planned.clear()
            self.order.policy.unplan_all()  # also what an interrupted `choose` has left
            slots = [slot for slot in self.reserved if slot not in self.pins]
        self._require_reserved(slots)
        for slot in slots:
            del self.reserved[slot]
            if slot in self.order.planned:
                self.order.policy.unplan(self.order.planned.pop(slot))
        self._free_slots(slots)

    # ---- use

    def pin(self, slot: int) -> None:
        """Keep a committed slot from eviction until `unpin`. A slot may be pinned several times."""
        self._require_committed(slot)
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        if slot not in self.pins:
            raise ValueError(f"slot is {slot}; accepted: a pinned slot")
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot in self.reserved:  # the slot's block left while the slot was pinned
                del self.reserved[slot]
                self._free_slots([slot])

    def note_use(self, slot: int) -> None:
        """Note that a request resumes from this committed slot, or that an import brought its state again.

        Nothing else refreshes the recency of a state.
        """
        self._require_committed(slot)
        self.order.use(slot)

    # ---- slots that enter the maps at once, for hosts that fill them afterwards

    def allocate(self, blocks: Sequence[int]) -> list[int]:
        """Commit a slot, without a hash, for each block; a block with a slot, or named twice, keeps one slot.

        Raises:
            ValueError: a block has a reservation; nothing is changed.
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        if self.reserved:
            reserved = set(self.reserved.values()).intersection(blocks)
            if reserved:
                raise ValueError(
                    f"block_ids names {min(reserved)}; accepted: blocks that no reservation will commit"
                )
        slot_by_block = self.map.slot_by_block
        if slot_by_block.keys().isdisjoint(blocks) and len(set(blocks)) == len(blocks):
            slots = self._take(len(blocks))
            self._enter(blocks, slots)
            return slots
        new = [block for block in dict.fromkeys(blocks) if block not in slot_by_block]
        keep = [slot_by_block[block] for block in blocks if block in slot_by_block]
        self._enter(new, self._take(len(new), keep))
        return [slot_by_block[block] for block in blocks]

    def name(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the states in these slots, of these blocks, findable by prefix hash."""
        self.map.name(blocks, slots, keys)
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            self.order.name(slot, key, block)
        if self.ghosts.discard_all(keys):
            self._tell_ghosts_changed(keys)

    def refuse(self, keys: Sequence[int]) -> None:
        """Note that no slot was left for the states under these prefix hashes."""
        if keys:
            self.map.turnover.num_refused += len(keys)
            self.ghosts.add_all(keys, "capacity")
            self._tell_ghosts_changed(keys)

    # ---- leaving

    def evict(self, num_slots: int, keep: Iterable[int] = ()) -> list[int]:
        """Evict the states of `num_slots` unpinned slots that are not in `keep`.

        The returned slots are reserved for the caller until `release`.

        Raises:
            MambaSlotCapacityError: fewer can be evicted; nothing is changed.
        """
        slots = self._evict(num_slots, keep, num_free=0)
        self.reserved.update(dict.fromkeys(slots, -1))
        return slots

    def drop(self, block: int, cause: StateRemovalCause = "by_host") -> bool:
        """Free the slot of a state that its owner no longer needs.

        The drop does not count as an eviction. `cause`: what it counts as.

        Returns:
            Whether the state is dropped; False, with nothing done, for a pinned one.
        """
        if self.map.slot_of(block) in self.pins:
            return False
        key = self.map.key_of(block)
        if cause in _REMEMBERED and key > 0:
            self.ghosts.add(key, "evicted")
        self.forget([block], cause=cause)
        return True

    def forget(
        self,
        blocks: Sequence[int] | None,
        *,
        blocks_leave: bool = False,
        cause: StateRemovalCause | None = None,
    ) -> None:
        """Free the slots of those blocks that have a slot, and drop the slots' hashes.

        Args:
            blocks: None for all blocks that the KV index knows.
            blocks_leave: the KV index forgets the blocks, too. Then nothing is committed for them any more.
            cause: why the states leave; None: "kv_evicted" where the blocks leave, else "by_host".
        """
        if blocks is None:
            known = (*self.map.slot_by_block, *self.reserved.values())
            blocks = [block for block in known if block >= 0 and self._kv_hash(block) > 0]
        slots = self._leave(blocks, cause or ("kv_evicted" if blocks_leave else "by_host"))
        if slots:
            left = self.map.blocks_of(slots)
            if self.pins and not self.pins.keys().isdisjoint(slots):
                pinned = [slot for slot in slots if slot in self.pins]
                self.reserved.update(dict.fromkeys(pinned, -1))  # still read: the last unpin frees the slot
                slots = [slot for slot in slots if slot not in self.pins]
            self._free_slots(slots)
            self._tell_states_changed(left)
        if blocks_leave and self.reserved:
            gone = set(blocks)
            self.reserved = {slot: -1 if block in gone else block for slot, block in self.reserved.items()}

    def clear(self, totals: bool = False) -> None:
        """Forget every state, reservation, pin and ghost; with `totals` also the totals of `counts`."""
        num_left = len(self.map)
        # No state may be findable once its slot is free: the map goes first, the free list comes last.
        for part in (self.map, self.ghosts, self.reserved, self.pins, self.order):
            part.clear()
        self.free = self._all_free()
        self._left.note(self.free)
        self.version += 1
        self.map.turnover.by_cause["reset"] += num_left
        if totals:
            self.map.turnover.clear()

    # ---- inside

    def _take(
        self, num_slots: int, keep: Iterable[int] = (), cause: StateRemovalCause = "new_state"
    ) -> list[int]:
        num_free = min(num_slots, len(self.free))
        evicted = self._evict(num_slots - num_free, keep, num_free, cause) if num_free < num_slots else []
        if not num_free:
            return evicted
        cut = len(self.free) - num_free
        taken = self.free[cut:]
        self._left.give(taken)
        del self.free[cut:]
        self.version += 1
        return taken + evicted if evicted else taken

    def _evict(
        self, num_slots: int, keep: Iterable[int], num_free: int, cause: StateRemovalCause = "new_state"
    ) -> list[int]:
        if not num_slots:
            return []
        kept = self.pins.keys() | keep
        if len(self.map) < num_slots + len(kept):  # judged without the policy, which a choice may reorder
            num_evictable = sum(slot not in kept for slot in self.map.slots)
            if num_evictable < num_slots:
                raise MambaSlotCapacityError(num_slots + num_free, num_evictable + num_free)
        victims = self.order.victims(num_slots, lambda slot: slot not in kept)
        self._evict_slots(victims, cause)
        self._left.pass_on(victims)
        return victims

    def _evict_slots(self, slots: Sequence[int], cause: StateRemovalCause = "new_state") -> None:
        blocks = self.map.blocks_of(slots)
        self._on_evict(slots, [self.map.key_of(block) for block in blocks])
        self.ghosts.add_all(self.map.keys_of(slots), "evicted")
        self._leave(blocks, cause)
        self._tell_states_changed(blocks)

    def _enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.map.enter(blocks, slots)
        self.version += 1
        self.order.insert(slots)
        self.map.turnover.num_entered += len(blocks)
        self._tell_states_changed(blocks)

    def _leave(self, blocks: Sequence[int], cause: StateRemovalCause) -> list[int]:
        slots = self.map.leave(blocks)
        self.version += 1
        departures = self.map.turnover
        departures.by_cause[cause] += len(slots)
        num_used = len(self.order.used.intersection(slots)) if self.order.used else 0
        last_used_ns = self.order.remove(slots, remember=cause in _REMEMBERED)
        if slots and cause in EVICTIONS:
            departures.note_ages(self._clock(), last_used_ns)
            departures.num_unused += len(slots) - num_used
        return slots

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._left.note(slots)
        self.free.extend(slots)
        self.version += 1

    def _require_reserved(self, slots: Sequence[int]) -> None:
        reserved = all(slot in self.reserved and slot not in self.pins for slot in slots)
        if len(set(slots)) < len(slots) or not reserved:
            raise ValueError(f"slots is {list(slots)}; accepted: distinct reserved slots")

    def _require_planned(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            planned = self.order.planned.get(slot, -1)
            key = -1 if planned < 0 or block < 0 else self._kv_hash(block)
            if key > 0 and key != planned:
                raise ValueError(
                    f"blocks has {block}, registered under hash {key}, for slot {slot}; accepted: the block "
                    f"of hash {planned}, whose state the slot is reserved for"
                )

    def _require_committed(self, slot: int) -> None:
        if self.map.block_of(slot) < 0:
            raise ValueError(f"slot is {slot}; accepted: a committed slot")

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other or the KV hashes; O(slots)."""
        self.map.check_integrity(self._kv_hash)
        free, committed, reserved = set(self.free), set(self.map.slots), set(self.reserved)
        assert len(free) == len(self.free), "a slot is free twice"
        assert free.isdisjoint(committed | reserved), "a slot is free and in use"
        assert committed.isdisjoint(reserved), "a slot is committed and reserved"
        lent = set(self._lent_slots())
        assert lent.isdisjoint(free | reserved | committed), "a slot is in use whose memory holds KV"
        num_owned = len(free) + len(reserved) + len(committed) + self.counts.live + len(lent)
        assert num_owned == self.num_slots, "a slot is nowhere"
        self.map.turnover.check_integrity(len(committed), "states")
        targets = [block for block in self.reserved.values() if block >= 0]
        assert len(targets) == len(set(targets)), "two slots are reserved for one block"
        for slot, block in self.reserved.items():
            key = self._kv_hash(block) if block >= 0 and slot in self.order.planned else -1
            assert key < 0 or key == self.order.planned[slot], "a slot is reserved for another prefix's block"
        self.order.check_integrity(committed)
        assert self.order.planned.keys() <= reserved, "a state is planned for a slot that is not reserved"
        assert self.pins.keys() <= committed | reserved, "a free slot is pinned"
