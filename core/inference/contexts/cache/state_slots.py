"""The pool of state slots: whose state a slot holds, who may write it, which state is evicted next."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, ValuesView
from functools import partial
from typing import NamedTuple, Protocol

from ....errors import MambaSlotCapacityError
from .eviction import LRUEviction, PolicyChoice
from .memory import DirtyEntries, MemoryUnits
from .pool_stats import EVICTIONS, STATE_REMOVAL_CAUSES, Clock, StateRemovalCause, Turnover
from .reasons import GhostList
from .value_eviction import ValueEviction

Watcher = Callable[[Iterable[int] | None], None]


class SlotMap:
    """Which block's state is in which committed slot, and under which hash; arguments are trusted.

    `watchers` are called with hashes before these begin or cease to find a state; None for all hashes.
    """

    def __init__(self, num_slots: int) -> None:
        self.hash_to_block_id: dict[int, int] = {}
        self.slot_by_block: dict[int, int] = {}
        self.turnover = Turnover[StateRemovalCause](STATE_REMOVAL_CAUSES, remembers=True)
        self.watchers: tuple[Watcher, ...] = ()
        # For each slot its last block, and the hash that finds the state, or 0. Stale without a state.
        self._last_block = [-1] * num_slots
        self._last_key = [0] * num_slots

    def __contains__(self, block: int) -> bool:
        return block in self.slot_by_block

    def __len__(self) -> int:
        return len(self.slot_by_block)

    @property
    def slots(self) -> ValuesView[int]:
        """The committed slots in the order of their commits, as a live view."""
        return self.slot_by_block.values()

    def slot_of(self, block: int) -> int:
        return self.slot_by_block.get(block, -1)

    def slots_of(self, blocks: Iterable[int]) -> list[int]:
        return [self.slot_by_block[block] for block in blocks]

    def block_of(self, slot: int) -> int:
        """The block whose state the slot holds, or -1."""
        block = self._last_block[slot]
        return block if self.slot_by_block.get(block) == slot else -1

    def blocks_of(self, slots: Iterable[int]) -> list[int]:
        """The blocks of slots that hold states."""
        return [self._last_block[slot] for slot in slots]

    def key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        slot = self.slot_by_block.get(block, -1)
        return self._last_key[slot] or -1 if slot >= 0 else -1

    def keys_of(self, slots: Iterable[int]) -> list[int]:
        """The hashes that find the states in these slots; slots without a hash are skipped."""
        return [key for slot in slots if (key := self._last_key[slot])]

    def enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The slots hold the blocks' states; no hash finds these states yet."""
        slot_by_block, last_block, last_key = self.slot_by_block, self._last_block, self._last_key
        for block, slot in zip(blocks, slots, strict=True):
            slot_by_block[block] = slot
            last_block[slot] = block
            last_key[slot] = 0

    def name(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash in use keeps finding its older state."""
        block_named, last_key = self.hash_to_block_id, self._last_key
        for watcher in self.watchers:
            watcher((*keys, *self.keys_of(slots)))
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            if block_named.setdefault(key, block) == block:
                former = last_key[slot]
                if former and former != key:
                    del block_named[former]
                last_key[slot] = key

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Forget the states of these blocks, as far as they have one; returns the slots of these states."""
        slot_by_block, block_named, last_key = self.slot_by_block, self.hash_to_block_id, self._last_key
        removed = [block for block in blocks if block in slot_by_block]
        for watcher in self.watchers:
            watcher(self.keys_of(map(slot_by_block.__getitem__, removed)))
        for block in removed:  # the hash goes first, because it is what makes a state findable
            if key := last_key[slot_by_block[block]]:
                block_named.pop(key, None)
        return [slot for block in removed if (slot := slot_by_block.pop(block, -1)) >= 0]

    def clear(self) -> None:
        for watcher in self.watchers:
            watcher(None)
        self.hash_to_block_id.clear()
        self.slot_by_block.clear()

    def check_integrity(self, hash_of: Callable[[int], int]) -> None:
        """Raise AssertionError where the maps, or the KV hashes of blocks, contradict each other."""
        slots = list(self.slot_by_block.values())
        assert len(set(slots)) == len(slots), "two blocks share a slot"
        assert self.blocks_of(slots) == list(self.slot_by_block), "a slot's block is another"
        keys = {self._last_key[slot]: block for block, slot in self.slot_by_block.items()}
        assert {key: keys[key] for key in keys if key} == self.hash_to_block_id, "a state's hash is another"
        for key, block in self.hash_to_block_id.items():
            assert block in self.slot_by_block, f"hash {key} names block {block}, which has no state"
            assert hash_of(block) == key, f"block {block} is indexed under a hash that is not its own"


class KVIndex(Protocol):
    """What the slots read of the index of KV blocks, and report to it; `PrefixTree` is one."""

    def hash_of(self, block: int) -> int: ...

    def keys_to(self, block: int) -> Sequence[int]: ...

    def note_states_changed(self, blocks: Iterable[int]) -> None: ...

    def note_ghosts_changed(self, keys: Iterable[int]) -> None: ...


class SlotCounts(NamedTuple):
    """Numbers of slots now, and of states that were ever committed, or evicted for another state."""

    free: int
    reserved: int
    committed: int
    committed_total: int
    evicted_total: int
    live: int = 0


class SlotChoice[T](NamedTuple):
    """`chosen` candidates get a slot; `refused` ones are certain candidates that get none."""

    chosen: list[T]
    refused: list[T]


def choose_for_slots[T](
    certain: Sequence[T], guessed: Sequence[T] = (), *, num_available: int, num_free: int = 0
) -> SlotChoice[T]:
    """Give slots to the worthiest candidates; a guessed one evicts nothing, as its draft may be wrong."""
    chosen, refused = list(certain[:num_available]), list(certain[num_available:])
    return SlotChoice(chosen + list(guessed[: max(0, num_free - len(chosen))]), refused)


class PlannedState(NamedTuple):
    """A state that a step will store: `keys[:depth]` hashes its prefix, `request` is the policy's number."""

    key: int
    keys: Sequence[int]
    depth: int
    taken_as: str
    request: int


class StateSlots:
    """The slots of one pool, as integers: no tensor is made or copied. Arguments are trusted.

        FREE -- reserve --> RESERVED -- commit --> COMMITTED -- take_over --> LIVE
          ^ <--- release ------+                       |                        |
          +---------------------------- evict, drop, forget+ <----- free_live --+ (FREE -- take_live --> LIVE)

    A reserved slot is written by one step and read by no request. A committed slot is immutable and findable.
    A live slot belongs to one running request, which alone reads and writes it. A pinned slot is not evicted;
    where its block is evicted, the slot becomes RESERVED for no block until its last unpin. With `units`, a
    slot whose memory holds KV is in none of these states.

    Attributes:
        num_slots: slots of the pool.
        map: the committed slots.
        free: the free slots; the last one is allocated next.
        reserved: slot -> the block that the slot is reserved for, or -1 once that block is evicted.
        pins: pinned slot -> how often it is pinned.
        live: the live slots; empty where live states have a pool of their own.
        ghosts: hashes whose state was evicted, or was not stored for want of a slot.
        policy: names victims.
        used: slots from which a request resumed since they were committed.
        planned: reserved slot -> the hash that the policy expects there.
        version: grows with every change of `free` or `map`.
        units: which units of a shared memory hold states; None for a memory of the slots' own.
        spill: called with slots whose states are evicted for others, and the states' hashes (< 1 for a state
            without a hash), before anything is changed or written.
    """

    def __init__(
        self,
        num_slots: int,
        policy: PolicyChoice,
        index: KVIndex,
        num_kv_blocks: int = 0,
        *,
        clock: Clock = time.monotonic_ns,
        dirty: DirtyEntries | None = None,
        units: MemoryUnits | None = None,
    ) -> None:
        """`num_kv_blocks`: so many ghosts are remembered, or 8 a slot if more."""
        self.num_slots = num_slots
        self.units = units
        self.map = SlotMap(num_slots)
        self.live: set[int] = set()
        self.free = self._all_free()
        self.reserved: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        num_ghosts = max(8 * num_slots, num_kv_blocks) if num_slots else 0
        self.ghosts = GhostList(num_ghosts)
        if isinstance(policy, str):
            policy = ValueEviction(num_ghosts) if policy == "value" else LRUEviction()
        self.policy = policy() if isinstance(policy, type) else policy
        self.used: set[int] = set()
        self.planned: dict[int, int] = {}
        self.version = 0
        self.spill: Callable[[Sequence[int], Sequence[int]], None] = lambda slots, keys: None
        self._last_used_ns: OrderedDict[int, int] = OrderedDict()  # committed slots, LRU first
        self._index = index
        self._clock = clock
        self._dirty = dirty or DirtyEntries()

    # ---- lookup

    def _all_free(self) -> list[int]:
        """All slots but live ones and those whose memory holds KV."""
        taken = self.live.union(self.units.lent_slots if self.units else ())
        return [slot for slot in range(self.num_slots) if slot not in taken]

    @property
    def counts(self) -> SlotCounts:
        turnover = self.map.turnover
        return SlotCounts(
            free=len(self.free),
            reserved=len(self.reserved),
            committed=len(self.map),
            committed_total=turnover.num_entered,
            evicted_total=turnover.by_cause["new_state"] + turnover.by_cause["live_state"],
            live=len(self.live),
        )

    @property
    def num_available(self) -> int:
        """Slots that `reserve` could allocate: free ones and unpinned committed ones."""
        num_pinned = sum(1 for slot in self.pins if slot not in self.reserved)
        return len(self.free) + len(self.map) - num_pinned

    def by_eviction(self) -> list[int]:
        """All committed slots in the order of eviction."""
        return self.policy.victims(len(self._last_used_ns), lambda slot: True)

    def by_recency(self) -> list[int]:
        """The committed slots, least recently used first: the same on all ranks and under all policies."""
        return list(self._last_used_ns)

    def next_victims(self, count: int) -> list[int]:
        """Up to `count` unpinned slots whose states would be evicted next. Changes nothing."""
        return self.policy.victims(count, lambda slot: slot not in self.pins)

    # ---- reservations

    def plan(self, state: PlannedState) -> None:
        """A step will store this state; `choose` calls this for all states but those of drafts."""
        self.policy.plan(state.keys, state.depth, state.taken_as, state.request)

    def choose(self, planned: Sequence[PlannedState], guessed: Sequence[int] = ()) -> SlotChoice[int]:
        """Which hashes get a slot; evicts states worth less. `guessed`: hashes of drafts' states."""
        policy, keys = self.policy, [state.key for state in planned]
        for state in planned:
            self.plan(state)
        if not policy.refuses:
            return choose_for_slots(keys, guessed, num_available=self.num_available, num_free=len(self.free))
        wanted = dict.fromkeys(keys)
        while len(wanted) > len(self.free):
            slot, key = policy.least(lambda slot: slot not in self.pins, wanted)
            if slot >= 0:
                self.evict_slots([slot])
            else:
                key = key if key in wanted else next(reversed(wanted))
                policy.unplan(key)
                del wanted[key]
        num_free = len(self.free) - len(wanted)
        return SlotChoice([*wanted, *guessed[:num_free]], [key for key in keys if key not in wanted])

    def reserve(self, blocks: Sequence[int], keys: Sequence[int] = ()) -> list[int]:
        """Allocate one slot for each block's state; may evict. `keys`: the hashes that `choose` chose."""
        taken = set(self.reserved.values())
        for i, block in enumerate(blocks):
            if block in self.map or block in taken:
                raise ValueError(
                    f"block_ids[{i}] is {block}; accepted: distinct blocks without state or reservation"
                )
            taken.add(block)
        slots = self._take(len(blocks))
        self.reserved.update(zip(slots, blocks, strict=True))
        self.planned.update(zip(slots, keys, strict=False))
        return slots

    def commit(self, slots: Sequence[int], blocks: Sequence[int] | None = None) -> list[int]:
        """Make reserved, written slots findable as states of `blocks`; None for those they are reserved for.

        Returns for each slot the one that holds the block's state now: itself, or an earlier one; -1 where
        the block is not registered. Other slots are freed. A block of another prefix is a ValueError.
        """
        self._require_reserved(slots)
        blocks = [self.reserved[slot] for slot in slots] if blocks is None else blocks
        self._require_planned(slots, blocks)
        results = []
        for slot, block in zip(slots, blocks, strict=True):
            # The block may be deregistered since; its number may then stand for another prefix.
            gone = self.reserved.pop(slot) < 0
            planned = self.planned.pop(slot, -1)
            key = -1 if gone or block < 0 else self._index.hash_of(block)
            if key > 0 and block not in self.map:
                self._enter([block], [slot])
                self.name([block], [slot], [key])
            else:
                self._free_slots([slot])
            if planned >= 0:  # does nothing where the state is there now
                self.policy.unplan(planned)
            results.append(-1 if gone else self.map.slot_of(block))
        return results

    def release(self, slots: Sequence[int] | None = None) -> None:
        """Free reserved slots without committing them; None frees all reserved slots that are not pinned."""
        if slots is None:
            self.planned.clear()
            self.policy.unplan(None)  # also what an interrupted `choose` planned
            slots = [slot for slot in self.reserved if slot not in self.pins]
        self._require_reserved(slots)
        for slot in slots:
            del self.reserved[slot]
            if slot in self.planned:
                self.policy.unplan(self.planned.pop(slot))
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
            if slot in self.reserved:  # the slot's block was evicted while the slot was pinned
                del self.reserved[slot]
                self._free_slots([slot])

    def note_use(self, slot: int) -> None:
        """A request resumes from this committed slot, or an import brought its state again."""
        self._require_committed(slot)
        self.policy.use(slot)
        self._last_used_ns[slot] = self._clock()
        self._last_used_ns.move_to_end(slot)
        self.used.add(slot)

    # ---- live slots

    def take_live(self, num_slots: int, keep: Iterable[int] = ()) -> list[int]:
        """Allocate slots for a running request; evicts unpinned states, but those of `keep`, where needed."""
        slots = self._take(num_slots, keep, "live_state")
        self.live.update(slots)
        return slots

    def take_over(self, slot: int) -> None:
        """Make an unpinned committed slot live: a running request updates its state, which is evicted."""
        self.note_use(slot)
        self._evict_slots([slot], "live_state")
        self.live.add(slot)

    def free_live(self, slots: Sequence[int]) -> None:
        """Free live slots; ValueError, with nothing changed, where a slot is not live, or named twice."""
        if len(set(slots)) < len(slots) or not self.live.issuperset(slots):
            raise ValueError(f"slots is {list(slots)}; accepted: distinct live slots")
        self.live.difference_update(slots)
        self._free_slots(slots)

    # ---- slots that enter the maps at once, for hosts that fill them afterwards

    def allocate(self, blocks: Sequence[int]) -> list[int]:
        """Commit a slot, without a hash, for each block; a block has one slot at most."""
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
            self.policy.name(slot, key, partial(self._index.keys_to, block))
        if self.ghosts.discard_all(keys):
            self._index.note_ghosts_changed(keys)

    def refuse(self, keys: Sequence[int]) -> None:
        """No slot was available for the states under these prefix hashes."""
        if keys:
            self.map.turnover.num_refused += len(keys)
            self.ghosts.add_all(keys, "capacity")
            self._index.note_ghosts_changed(keys)

    # ---- removal

    def evict(self, num_slots: int, keep: Iterable[int] = ()) -> list[int]:
        """Evict the states of unpinned slots not in `keep`; the slots are reserved for the caller."""
        slots = self._evict(num_slots, keep, num_free=0)
        self.reserved.update(dict.fromkeys(slots, -1))
        return slots

    def evict_slots(self, slots: Sequence[int]) -> None:
        """Evict the states in these unpinned slots, and free the slots."""
        if slots:
            self._evict_slots(slots)
            self._free_slots(slots)

    def drop(self, block: int, cause: StateRemovalCause = "by_host") -> bool:
        """Free the slot of a state that its owner no longer needs; False, with nothing done, if pinned."""
        if self.map.slot_of(block) in self.pins:
            return False
        self.forget([block], cause=cause)
        return True

    def forget(
        self,
        blocks: Sequence[int] | None,
        *,
        with_blocks: bool = False,
        cause: StateRemovalCause | None = None,
    ) -> None:
        """Free the slots of blocks (None: all registered ones); `with_blocks`: these are evicted, too."""
        if blocks is None:
            known = (*self.map.slot_by_block, *self.reserved.values())
            blocks = [block for block in known if block >= 0 and self._index.hash_of(block) > 0]
        slots = self._remove(blocks, cause or ("kv_evicted" if with_blocks else "by_host"))
        if slots:
            removed = self.map.blocks_of(slots)
            if self.pins and not self.pins.keys().isdisjoint(slots):
                pinned = [slot for slot in slots if slot in self.pins]
                self.reserved.update(dict.fromkeys(pinned, -1))  # still read: the last unpin frees the slot
                slots = [slot for slot in slots if slot not in self.pins]
            self._free_slots(slots)
            self._index.note_states_changed(removed)
        if with_blocks and self.reserved:
            gone = set(blocks)
            self.reserved = {slot: -1 if block in gone else block for slot, block in self.reserved.items()}

    def clear(self, totals: bool = False, live: bool = False) -> None:
        """Forget every state, reservation, pin and ghost; also `totals`, and `live` slots become free."""
        if live:
            self.live.clear()
        num_removed = len(self.map)
        # No state may be findable once its slot is free: the map goes first, the free list comes last.
        self.map.clear()
        self.ghosts.clear()
        self.reserved.clear()
        self.pins.clear()
        self.policy.clear()
        self._last_used_ns.clear()
        self.used.clear()
        self.planned.clear()
        self.free = self._all_free()
        self._dirty.note(self.free)
        self.version += 1
        self.map.turnover.by_cause["reset"] += num_removed
        if totals:
            self.map.turnover.clear()

    # ---- memory that slots share with KV blocks

    def withdraw(self, slots: Sequence[int]) -> None:
        """Remove these free slots from the free list: their memory will hold KV."""
        gone = set(slots)
        self._dirty.withdraw(gone)
        self.free = [slot for slot in self.free if slot not in gone]
        self.version += 1

    def enter(self, slots: Sequence[int]) -> None:
        """Add these slots to the free list, whose memory held KV and is zero where that is asked for."""
        self._free_slots(slots)
        self._dirty.withdraw(slots)

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
        self._dirty.give(taken)
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
        victims = self.policy.victims(num_slots, lambda slot: slot not in kept)
        self._evict_slots(victims, cause)
        self._dirty.pass_on(victims)
        return victims

    def _evict_slots(self, slots: Sequence[int], cause: StateRemovalCause = "new_state") -> None:
        blocks = self.map.blocks_of(slots)
        self.spill(slots, [self.map.key_of(block) for block in blocks])
        self.ghosts.add_all(self.map.keys_of(slots), "evicted")
        self._remove(blocks, cause)
        self._index.note_states_changed(blocks)

    def _enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.map.enter(blocks, slots)
        self.version += 1
        self.policy.insert(slots)
        self._last_used_ns.update(dict.fromkeys(slots, self._clock()))
        self.map.turnover.num_entered += len(blocks)
        self._index.note_states_changed(blocks)

    def _remove(self, blocks: Sequence[int], cause: StateRemovalCause) -> list[int]:
        slots = self.map.remove(blocks)
        self.version += 1
        turnover = self.map.turnover
        turnover.by_cause[cause] += len(slots)
        num_used = len(self.used.intersection(slots)) if self.used else 0
        self.policy.remove(slots, cause in EVICTIONS)
        last_used_ns = [self._last_used_ns.pop(slot) for slot in slots]
        if self.used:
            self.used.difference_update(slots)
        if slots and cause in EVICTIONS:
            turnover.note_ages(self._clock(), last_used_ns)
            turnover.num_unused += len(slots) - num_used
        return slots

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._dirty.note(slots)
        self.free.extend(slots)
        self.version += 1

    def _require_reserved(self, slots: Sequence[int]) -> None:
        reserved = all(slot in self.reserved and slot not in self.pins for slot in slots)
        if len(set(slots)) < len(slots) or not reserved:
            raise ValueError(f"slots is {list(slots)}; accepted: distinct reserved slots")

    def _require_planned(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            planned = self.planned.get(slot, -1)
            key = -1 if planned < 0 or block < 0 else self._index.hash_of(block)
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
        self.map.check_integrity(self._index.hash_of)
        free, committed, reserved = set(self.free), set(self.map.slots), set(self.reserved)
        lent = set(self.units.lent_slots) if self.units else set[int]()
        assert len(free) == len(self.free), "a slot is free twice"
        assert free.isdisjoint(committed | reserved), "a slot is free and in use"
        assert committed.isdisjoint(reserved), "a slot is committed and reserved"
        assert self.live.isdisjoint(free | reserved | committed), "a live slot is free, reserved or committed"
        assert lent.isdisjoint(free | reserved | committed), "a slot is in use whose memory holds KV"
        num_owned = len(free) + len(reserved) + len(committed) + len(self.live) + len(lent)
        assert num_owned == self.num_slots, "a slot is nowhere"
        self.map.turnover.check_integrity(len(committed), "states")
        targets = [block for block in self.reserved.values() if block >= 0]
        assert len(targets) == len(set(targets)), "two slots are reserved for one block"
        for slot, block in self.reserved.items():
            key = self._index.hash_of(block) if block >= 0 and slot in self.planned else -1
            assert key < 0 or key == self.planned[slot], "a slot is reserved for another prefix's block"
        self.policy.check_integrity(committed)
        assert self._last_used_ns.keys() == committed, "the recency of other states than the committed"
        assert self.used <= committed, "a slot without a state counts as used"
        assert self.planned.keys() <= reserved, "a state is planned for a slot that is not reserved"
        assert self.pins.keys() <= committed | reserved, "a free slot is pinned"
