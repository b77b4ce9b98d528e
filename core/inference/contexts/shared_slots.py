"""Durable slots in a memory that they share with KV blocks."""

import time
from collections.abc import Callable, Iterable, Sequence

from ..policies.departures import Clock
from .durable_slots import DurableSlots
from .memory_units import MemoryUnits


class SharedSlots(DurableSlots):
    """`DurableSlots` that use those of their slots whose units hold states.

    Attributes:
        units: which units hold states.
        lend: called with how many free slots are wanted, where fewer are free. Adds free slots, as long as
            that costs less than to evict states. Its owner sets it.
    """

    lend: Callable[[int], None]

    def __init__(
        self,
        units: MemoryUnits,
        num_slots: int,
        eviction_policy: str,
        kv_hash: Callable[[int], int],
        on_states_changed: Callable[[Iterable[int]], None],
        on_ghosts_changed: Callable[[Iterable[int]], None] = lambda keys: None,
        clock: Clock = time.monotonic_ns,
        num_kv_blocks: int = 0,
        keys_to: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            units: of the memory.
            num_slots: slots before the units, and of all units.
            eviction_policy, kv_hash, on_states_changed, on_ghosts_changed, clock, num_kv_blocks, keys_to: as
                for `DurableSlots`.
        """
        self.units = units
        super().__init__(
            num_slots, eviction_policy, kv_hash, on_states_changed, on_ghosts_changed, clock,
            num_kv_blocks, keys_to,
        )  # fmt: skip

    def _lent_slots(self) -> Sequence[int]:
        return self.units.lent_slots

    def _make_room(self, num_slots: int) -> None:
        self.make_room(num_slots)

    def make_room(self, num_slots: int) -> None:
        """Let `lend` add free slots where fewer than so many are free."""
        if len(self.free) < num_slots:
            self.lend(num_slots)

    def next_victims(self, count: int) -> list[int]:
        """Up to `count` unpinned slots whose states would be evicted next. Changes nothing."""
        pins = self.pins
        return self._eviction.victims(count, lambda slot: slot not in pins)

    def evict_slots(self, slots: Sequence[int]) -> None:
        """Evict the states in these unpinned slots, and free the slots."""
        if slots:
            self._evict_slots(list(slots))
            self._free_slots(slots)

    def withdraw(self, slots: Sequence[int]) -> None:
        """Give up these free slots: their memory shall hold KV."""
        gone = set(slots)
        self.free = [slot for slot in self.free if slot not in gone]
        self.version += 1

    def enter(self, slots: Sequence[int]) -> None:
        """Take these slots into use, whose memory held KV."""
        self._free_slots(slots)
