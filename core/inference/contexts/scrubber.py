"""Zeroes what a tenant leaves."""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.state_tensors import device_indices
from .cache.left_entries import LeftEntries, MemoryCleaner
from .input_pool import InputPool
from .state_pool import StatePool


class Pools(Protocol):
    """The tensors of a context's pools."""

    kv_cache: Tensor
    state_pool: StatePool
    durable_pool: StatePool
    input_pool: InputPool
    allocated: bool

    def zero_unit(self, unit: int) -> None:
        """Fill a unit of a memory that states and KV share with zeros, in stream order."""


class Scrubber(MemoryCleaner):
    """Zeroes the entries of a context's pools that nobody owns, before anybody else can have them.

    The books note what they free, in one place each: `KVBlockAllocator` where blocks enter its free ones,
    `DurableSlots` and `MambaMetadata` likewise, `RequestRows` for the inputs of a row, `TierSlots` for rows
    of host memory, `EncodedStates` for staged states. Where an entry is taken, or changes its owner, it is
    zeroed at once. What is left at the end of an engine's call, or when a step begins, is zeroed then, in one
    launch for each pool.

    All is launched on the current stream. So what was launched before reads, and writes, what it shall.

    Attributes:
        blocks, slots, live, inputs, scratch, host_rows: what is left of KV blocks, of durable slots, of live
            slots where they are no durable ones, of the inputs of rows, of the slots of the pool of live
            states that staged a state in a step, and of rows of host memory.
    """

    def __init__(self, pools: Pools | None) -> None:
        """`pools`: what is zeroed, while it is there; None for nothing."""
        self.host_rows = LeftEntries()
        if pools is None:
            self.blocks = self.slots = self.live = self.inputs = self.scratch = LeftEntries()
            self._pools: Callable[[], Pools | None] = lambda: None
            return
        self._pools = there = weakref.ref(pools)  # pools own this object, and go with their last owner

        def fill(zero: Callable[[Pools, Sequence[int]], None]) -> LeftEntries:
            def zero_if_there(entries: Sequence[int]) -> None:
                pools = there()
                if pools is not None:
                    zero(pools, entries)

            return LeftEntries(zero_if_there)

        self.blocks = fill(lambda pools, blocks: _zero(pools.kv_cache, 2, blocks))
        self.slots = fill(_zero_slots)
        self.live = fill(lambda pools, slots: _zero(pools.state_pool.memory, 0, slots))
        self.inputs = fill(_zero_inputs)
        self.scratch = fill(lambda pools, slots: _zero(pools.state_pool.memory, 0, slots))

    def scrub(self) -> None:
        """Zero all that is left; does nothing where nothing is."""
        pools = self._pools()
        if pools is not None:
            for left in (self.blocks, self.slots, self.live, self.inputs, self.scratch):
                if pools.allocated:
                    left.scrub()
                else:
                    left.clear()
            self.host_rows.scrub()

    def move_unit(self, unit: int, entries: Sequence[int], left: LeftEntries) -> None:
        """Zero a unit of a memory that states and KV share before it changes sides, also between entries.

        `entries`, `left`: of the side that gives it.
        """
        pools = self._pools()
        if pools is not None and left.has_any(entries):
            pools.zero_unit(unit)


def _zero_slots(pools: Pools, slots: Sequence[int]) -> None:
    pool = pools.durable_pool
    _zero(pool.memory, 0, [pool.durable_index(slot) for slot in slots])


def _zero_inputs(pools: Pools, rows: Sequence[int]) -> None:
    for tensor in pools.input_pool.tensors:
        _zero(tensor, 1, rows)


def _zero(memory: Tensor, axis: int, entries: Sequence[int]) -> None:
    """Fill entries with zeros, in one launch, without synchronising; entries are in order."""
    if not memory.numel():
        return
    numbers = memory.view(torch.uint8)
    first, count = entries[0], len(entries)
    if entries[-1] - first == count - 1:
        numbers.narrow(axis, first, count).zero_()
    else:
        (indices,) = device_indices(memory.device, entries)
        numbers.index_fill_(axis, indices, 0)
