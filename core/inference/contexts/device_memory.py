"""The tensors of a context's pools, and the zeroing of what is freed."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...state_spec import HybridStateSpec
from ...state_tensor import TensorEncoding
from ...validation import addressable
from ..kernels.state_tensors import device_indices
from .cache.left_entries import LeftEntries, MemoryCleaner
from .cache.memory_units import MemoryDivision, UnitSizes
from .pools import InputPool, StatePool


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
    `StateSlots` and `MambaMetadata` likewise, `RequestRows` for the inputs of a row, `TierSlots` for rows
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


MEBIBYTE = 1 << 20


class DeviceMemory:
    """KV of all blocks, and live and durable states, on the model's device.

    Attributes:
        kv_cache: [attention layers, 2 (K, V), blocks, block_size_tokens, KV heads, head dim]. A layer's part
            of a block is contiguous. With a division, all layers of a block stand together, and blocks have
            gaps between them.
        state_pool: live states, then durable states; with encodings live states, then staging slots.
        durable_pool: what holds the durable states: `state_pool`, or with encodings a pool of their own.
            Durable slot s is row `durable_pool.durable_index(s)` of `durable_pool.memory`.
        input_pool: the inputs of running requests since their last grid points.
        allocated: whether all these tensors are there.
        scrubber: zeroes what is left of the pools.
    """

    def __init__(
        self,
        spec: HybridStateSpec,
        num_kv_blocks: int,
        block_size_tokens: int,
        num_live_slots: int,
        num_durable_slots: int,
        input_pool: InputPool | None = None,
        is_shared: bool = False,
        division: MemoryDivision | None = None,
        encodings: Sequence[TensorEncoding] = (),
        num_staging_slots: int = 0,
        scrubs: bool = False,
    ) -> None:
        """
        Args:
            spec, num_kv_blocks, block_size_tokens, num_live_slots, num_durable_slots: sizes.
            input_pool: for decodes by replay; None for others.
            is_shared: whether live and durable states share their slots; not with encodings.
            division: of one memory that states and KV share; None where each has its own, as with encodings.
            encodings: how durable slots store states; empty: as live slots do.
            num_staging_slots: with encodings, slots of `state_pool` beside the live ones.
            scrubs: whether what is left is zeroed.
        """
        self._spec = spec
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size_tokens
        self._division = division
        num_others = num_staging_slots if encodings else num_durable_slots
        self._num_slots = num_live_slots + num_others
        self._sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(block_size_tokens))
        self._units: torch.Tensor | None = None  # [units, bytes of one] of a shared memory
        self.kv_cache, states = self._new_memory()
        self.state_pool = StatePool(spec.states, num_live_slots, num_others, spec.device, is_shared, states)
        self.durable_pool = self.state_pool
        if encodings:
            tensors = [tensor for encoding in encodings for tensor in encoding.tensors]
            self.durable_pool = StatePool(tensors, 0, num_durable_slots, spec.device)
        self.input_pool = input_pool or InputPool((), 0, 1, 0, spec.device)
        self.allocated = True
        self._scrubs = scrubs
        self.scrubber = Scrubber(self if scrubs else None)

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def _new_memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """KV, and the slots of states where they share KV's memory."""
        spec, num_blocks = self._spec, self._num_kv_blocks
        shape = (
            spec.num_attention_layers, 2, num_blocks, self._block_size, spec.num_kv_heads, spec.head_dim,
        )  # fmt: skip
        addressable("num_kv_blocks", num_blocks, shape, spec.kv_dtype)
        if self._division is None:
            return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device), None
        return self._views(self._division, shape)

    def _views(
        self, division: MemoryDivision, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """KV of this shape and slots in one memory, as the division says. Both name all of its units."""
        sizes, dtype = self._sizes, self._spec.kv_dtype
        num_bytes = division.total_bytes(sizes)
        addressable("total_gb", num_bytes, (num_bytes,), torch.uint8)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._spec.device)
        stride = division.shape.slot_stride(sizes)
        slots = memory.view(self._num_slots, stride)[:, : sizes.slot]
        shared = memory[division.num_fixed_slots * stride :]
        self._units = shared.view(division.num_units, -1)
        units = shared.view(dtype)
        part = math.prod(shape[3:])
        block = division.shape.block_stride(sizes) // dtype.itemsize
        strides = 2 * part, part, block, math.prod(shape[4:]), shape[5], 1
        return units.as_strided(shape, strides), slots

    def allocate(self) -> None:
        """Make the tensors again, as zeros, after `free`; their addresses are new.

        A call that raises, because memory is short, leaves no tensor; it can be repeated.
        """
        if not self.allocated:
            self.free()  # what an interrupted call has left
            # In one expression: no name in this frame, which a traceback keeps, holds a part of the memory.
            (kv_cache, shared), states, durable, inputs = (
                self._new_memory(),
                self.state_pool.new_memory() if self._division is None else None,
                self.durable_pool.new_memory() if self._has_encoded_states else None,
                self.input_pool.new_tensors(),
            )  # fmt: skip
            for pool, memory in (
                (self.state_pool, shared), (self.state_pool, states), (self.durable_pool, durable),
            ):  # fmt: skip
                if memory is not None:
                    pool.put(memory)
            self.kv_cache = kv_cache
            self.input_pool.put(inputs)
            self.allocated = True

    def free(self) -> None:
        """Free the tensors' memory, which is zeroed before where that is asked for."""
        if self._scrubs:
            self._zero()
        self.allocated = False
        self.state_pool.free()
        self.durable_pool.free()
        self.input_pool.free()
        self.kv_cache = self.kv_cache.new_empty(0)
        self._units = None

    def zero_unit(self, unit: int) -> None:
        """Fill a unit of a memory that states and KV share with zeros, in stream order."""
        if self._units is not None:
            self._units[unit].zero_()

    def _zero(self) -> None:
        for unit in range(0 if self._units is None else len(self._units)):
            self.zero_unit(unit)
        pools = self.state_pool.memory, self.durable_pool.memory, self.kv_cache
        for memory in (*pools, *self.input_pool.tensors):
            memory.zero_()

    @property
    def _has_encoded_states(self) -> bool:
        return self.durable_pool is not self.state_pool

    def summary(self) -> str:
        """One line that says how many bytes each pool takes, or would take if it were allocated."""
        pool, num_blocks, division = self.state_pool, self._num_kv_blocks, self._division
        state = self._sizes.slot / MEBIBYTE
        kv = num_blocks * self._sizes.block / MEBIBYTE
        inputs = self.input_pool
        total, staging = inputs.num_bytes / MEBIBYTE, ""
        if division is None:
            total += pool.num_slots * state + kv
            durable = self.durable_pool.slot_bytes / MEBIBYTE
            if self._has_encoded_states:
                total += self.durable_pool.num_durable * durable
                staging = f"staged states {pool.num_durable} x {state:.3g} MiB; "
            shared = ", and the live ones of idle rows" if pool.is_shared else ""
            cached = (
                f"durable states {self.durable_pool.num_durable} x {durable:.3g} MiB{shared}; "
                f"KV {num_blocks} blocks of {self._block_size} tokens, {kv:.3g} MiB"
            )
        else:
            total += division.total_bytes(self._sizes) / MEBIBYTE
            slots, blocks = division.shape
            cached = (
                f"durable states and KV share {division.num_units} units of "
                f"{division.shape.unit_bytes(self._sizes) / MEBIBYTE:.3g} MiB, each for {slots} x "
                f"{state:.3g} MiB or {blocks} blocks of {self._block_size} tokens"
            )
        replayed = ""
        if inputs.slots:
            each = inputs.num_bytes / inputs.slots / MEBIBYTE
            replayed = f"inputs of running requests {inputs.slots} x {each:.3g} MiB; "
        return (
            f"mambaslots: live states {pool.num_live} x {state:.3g} MiB; {staging}{replayed}"
            f"{cached}; "
            f"total {total:.4g} MiB on {self._spec.device}"
            f"{'' if self.allocated else ', freed now'}"
        )
