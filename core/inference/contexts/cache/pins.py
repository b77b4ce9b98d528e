"""Prefixes that stay cached until they are unpinned: their references to KV blocks, and pins on states."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ....errors import MambaSlotCapacityError
from ....validation import refused
from .kv_block_allocator import KVBlockAllocator
from .memory import MemoryUnits
from .state_slots import StateSlots


@dataclass(frozen=True, eq=False)
class PinnedPrefix:
    """A prefix whose state and KV stay until the prefix is unpinned, or the cache is reset.

    A `PinnedPrefix` equals only itself. One that is made by hand, or by another cache, unpins nothing.

    Attributes:
        pin_id: counts the pins of this cache, from 0.
        num_tokens: length of the prefix: its deepest boundary with a state at the time of the pin.
        prefix_hash: the hash of the prefix, as `PrefixHashChain.hashes` has it.
    """

    pin_id: int
    num_tokens: int
    prefix_hash: int = 0


class PinnedPrefixes:
    """Holds a reference to the KV blocks, and a pin on the state, of each pinned prefix."""

    def __init__(
        self, slots: StateSlots, kv_blocks: KVBlockAllocator, max_slots: int, units: MemoryUnits | None
    ) -> None:
        self._max_slots = max_slots
        self._slots = slots
        self._kv_blocks = kv_blocks
        self._units = units
        self.prefixes: dict[PinnedPrefix, tuple[list[int], int]] = {}  # KV blocks and slot, in order of pins
        self.block_references: Counter[int] = Counter()  # of the pinned blocks
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        """Distinct KV blocks that pinned prefixes hold."""
        return len(self.block_references)

    @property
    def max_slots(self) -> int:
        """How many slots pins may keep now, so that running requests can have the others."""
        return self._max_slots - (self._units.num_lent_slots if self._units else 0)

    def max_sequence_blocks(self, shared: Iterable[int] = ()) -> int:
        """How many KV blocks one sequence can hold while the pins stay, with pinned ones that it shares."""
        num_blocks = self._kv_blocks.total_count
        if self._units is not None:
            num_units = self._units.num_units_for_pins([slot for _, slot in self.prefixes.values()])
            num_for_kv = self._units.num_units - num_units - self._units.num_spare_units
            num_blocks = max(self._units.num_kv_units, num_for_kv) * self._units.blocks_per_unit
        return max(0, num_blocks - self.num_blocks) + sum(map(self.block_references.__contains__, shared))

    def pin(self, blocks: list[int], num_tokens: int) -> PinnedPrefix:
        """Pin the prefix that the registered `blocks` store; the last block must have a state."""
        slot, slots = self._slots.cached_states.slot_of(blocks[-1]), self.slot_pins
        if slot not in slots and len(slots) >= self.max_slots:
            raise MambaSlotCapacityError(len(slots) + 1, self.max_slots)
        self._slots.pin(slot)
        self._kv_blocks.add_references(blocks)
        prefix = PinnedPrefix(self._next_id, num_tokens, self._slots.tree.hash_of(blocks[-1]))
        self.prefixes[prefix] = (blocks, slot)
        self.block_references.update(blocks)
        self._next_id += 1
        return prefix

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Release a pinned prefix; ValueError for a prefix that is not pinned here."""
        if not isinstance(prefix, PinnedPrefix) or prefix not in self.prefixes:
            raise refused("prefix", prefix, "a prefix that is pinned here (a reset unpins all)")
        blocks, slot = self.prefixes.pop(prefix)
        self.block_references -= Counter(blocks)
        self._slots.unpin(slot)
        self._kv_blocks.release_memory_blocks(blocks)

    def clear(self) -> None:
        """Remove all pins; the caller resets the allocators."""
        self.prefixes.clear()
        self.block_references.clear()

    @property
    def slot_pins(self) -> Counter[int]:
        return Counter(slot for _, slot in self.prefixes.values())
