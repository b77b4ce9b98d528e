"""Which cached state is in which slot of a tier behind the device: host memory, or files."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .left_entries import LeftEntries
from .pool_stats import TIER_REMOVAL_CAUSES, TierRemovalCause
from .slot_map import Watcher


class TierSlots:
    """The book of a tier: prefix hash -> slot. Handles integers only, and trusts its arguments.

    A slot is free, being written (it is neither free nor in the map), or holds the state of one hash. The
    copy that was used longest ago goes first. A pinned copy does not go for a new state.

    Attributes:
        num_slots: slots of the tier.
        num_entered: how many copies were ever published.
        left_by_cause: cause -> how many copies left.
        watchers: called with hashes before their copies come or leave; None for all hashes.
        left: notes the slots that become free. A slot that is taken for another copy is written whole.
    """

    def __init__(self, num_slots: int, left: LeftEntries | None = None) -> None:
        self.num_slots = num_slots
        self.num_entered = 0
        self.left_by_cause: dict[TierRemovalCause, int] = dict.fromkeys(TIER_REMOVAL_CAUSES, 0)
        self.watchers: tuple[Watcher, ...] = ()
        self.left = left or LeftEntries()
        self._slots: OrderedDict[int, int] = OrderedDict()  # hash -> slot, used longest ago first
        self._free = list(range(num_slots))
        self._serials = [0] * num_slots
        self._pinned: int | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> Sequence[int]:
        """The slots that hold nothing, in no order."""
        return self._free

    def slot_of(self, key: int) -> int:
        """The slot that holds the state of this hash, or -1."""
        return self._slots.get(key, -1)

    def serial_of(self, key: int) -> int:
        """The number of the copy under this hash, which has one."""
        return self._serials[self._slots[key]]

    def keys(self) -> list[int]:
        """The hashes, the one used longest ago first."""
        return list(self._slots)

    def use(self, key: int) -> None:
        """Note that a copy is used now."""
        self._slots.move_to_end(key)

    def pin(self, key: int | None) -> None:
        """Keep this copy, and no other, from leaving for a new state; None for none."""
        self._pinned = key

    def take(self) -> tuple[int, int]:
        """Take a slot to write to, until `publish` or `give_back`.

        Returns:
            The slot, and the hash whose copy left for it or 0. (-1, 0) where no slot can be had.
        """
        if self._free:
            slot = self._free.pop()
            self.left.give([slot])
            return slot, 0
        victim = next((key for key in self._slots if key != self._pinned), 0)
        if not victim:
            return -1, 0
        for watcher in self.watchers:
            watcher([victim])
        slot = self._slots.pop(victim)
        self.left_by_cause["new_state"] += 1
        self.left.give([slot])  # a copy that failed may be in it
        return slot, victim

    def publish(self, key: int, slot: int, serial: int) -> None:
        """Note that a taken slot holds the state of a hash, which has no slot yet.

        `serial`: a number that no copy of another state has, also not one that was there before.
        """
        for watcher in self.watchers:
            watcher([key])
        self._serials[slot] = serial
        self._slots[key] = slot
        self.num_entered += 1

    def forget(self, keys: Iterable[int], cause: TierRemovalCause) -> list[int]:
        """Free the slots of those hashes that have one; returns these slots."""
        if self.watchers:
            keys = [key for key in keys if key in self._slots]
            for watcher in self.watchers:
                watcher(keys)
        slots = []
        for key in keys:
            slot = self._slots.pop(key, -1)
            if slot >= 0:
                self.left_by_cause[cause] += 1
                self.left.note([slot])
                self._free.append(slot)
                slots.append(slot)
        return slots

    def clear(self, totals: bool = False) -> None:
        """Forget every copy; with `totals` also the counts."""
        for watcher in self.watchers:
            watcher(None)
        self.left_by_cause["reset"] += len(self._slots)
        self._slots.clear()
        self._pinned = None
        self.mend()
        if totals:
            self.num_entered = 0
            self.left_by_cause = dict.fromkeys(TIER_REMOVAL_CAUSES, 0)

    def mend(self) -> None:
        """Put the book in order behind an interrupted change: free what is in no map; O(slots)."""
        used = set(self._slots.values())
        if self.left.is_active:
            self.left.note(set(range(self.num_slots)).difference(used, self._free))
        self._free = [slot for slot in range(self.num_slots) if slot not in used]
        self._pinned = None
        self.num_entered = len(self._slots) + sum(self.left_by_cause.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where the book contradicts itself; O(slots)."""
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of a tier is nowhere, or twice"
        assert self._pinned is None, "a copy of a tier is pinned"
        left = sum(self.left_by_cause.values())
        assert self.num_entered == len(self._slots) + left, "the count of copies that left a tier is off"
