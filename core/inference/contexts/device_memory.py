"""The memory of states, KV and inputs of a context, and the zeroing of what is freed."""

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...config import InferenceConfig
from ...devices import tensor_on
from ...state_spec import HybridStateSpec, durable_tensors
from ...validation import addressable, ceil_div
from .cache.free_entries import DirtyEntries, MemoryScrubber
from .cache.memory import UNIT_ALIGNMENT, UnitSizes
from .input_blocks import input_block_offsets, input_bytes, input_shapes
from .pool_sizes import NUM_STAGING_SLOTS, PoolSizes, num_live_slots
from .request_states import StatePool, zeroed

MEBIBYTE = 1 << 20


class DeviceScrubber(MemoryScrubber):
    """Zeroes freed entries of a context's pools before another owner can have them.

    An entry that is allocated again is zeroed at once; `scrub_all` zeroes the rest, in stream order, when a
    step begins and at the end of an engine's call.
    """

    def __init__(self, memory: "DeviceMemory", scrubs: bool) -> None:
        """`memory`: what is zeroed, as long as it lives; with `scrubs` False, nothing."""
        # A weak reference: the memory owns this object, and is freed with its own last owner.
        self._memory = owner = weakref.ref(memory)

        def entries(zero: "Callable[[DeviceMemory, Sequence[int]], None]") -> DirtyEntries:
            def zero_in_owner(indices: Sequence[int]) -> None:
                if (living := owner()) is not None:
                    zero(living, indices)

            return DirtyEntries(zero_in_owner if scrubs else None)

        self.host_slots = DirtyEntries()  # of a tier of host memory, if the context has one
        self.blocks = entries(lambda pools, blocks: _zero(pools.kv_cache, 2, blocks))
        self.slots = entries(_zero_slots)
        self.live = entries(lambda pools, slots: _zero(pools.state_pool.memory, 0, slots))
        self.inputs = entries(_zero_inputs)
        self.scratch = entries(lambda pools, slots: _zero(pools.state_pool.memory, 0, slots))

    def scrub_all(self) -> None:
        """Zero all dirty entries; does nothing where there are none."""
        memory = self._memory()
        for dirty in (self.blocks, self.slots, self.live, self.inputs, self.scratch):
            if memory is None or memory.is_allocated:
                dirty.scrub_all()
            else:
                dirty.clear()
        self.host_slots.scrub_all()

    def move_unit(self, unit: int, entries: Sequence[int], dirty: DirtyEntries) -> None:
        memory = self._memory()
        if memory is not None and dirty.has_any(entries):
            memory.zero_unit(unit)


def _zero_slots(memory: "DeviceMemory", slots: Sequence[int]) -> None:
    pool = memory.durable_pool
    _zero(pool.memory, 0, [pool.durable_index(slot) for slot in slots])


def _zero_inputs(memory: "DeviceMemory", rows: Sequence[int]) -> None:
    for name in memory.shapes_in_rows:
        _zero(memory.input_pool[name], 1, rows)


def _zero(memory: Tensor, axis: int, entries: Sequence[int]) -> None:
    """Fill entries with zeros, in one launch, without synchronising; entries are in order."""
    if not memory.numel():
        return
    raw = memory.view(torch.uint8)
    first, count = entries[0], len(entries)
    if entries[-1] - first == count - 1:
        raw.narrow(axis, first, count).zero_()
    else:
        raw.index_fill_(axis, tensor_on(memory.device, entries), 0)


class DeviceMemory:
    """KV of all blocks, and live and durable states, on the model's device."""

    def __init__(self, spec: HybridStateSpec, config: InferenceConfig, sizes: PoolSizes) -> None:
        """`sizes`: of both pools, which stay `sizes`; `sizes.division`: of one memory for states and KV."""
        caching, num_live = config.enable_prefix_caching, num_live_slots(config)
        durable = durable_tensors(spec.states, config.durable_state_dtype if caching else None)
        encodes = durable != spec.states
        self.sizes = sizes
        self._spec = spec
        self._block_size = config.block_size_tokens
        num_durable = NUM_STAGING_SLOTS if encodes else sizes.num_mamba_slots
        self._num_slots = num_live + num_durable
        self._unit_sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(config.block_size_tokens))
        self._units: Tensor | None = None  # [units, bytes of one] of a shared memory
        self._blocks: Tensor | None = None  # [KV blocks, bytes of one], where some are input blocks
        self.kv_cache, slots = self._new_memory()
        is_shared = caching and not encodes
        self.state_pool = StatePool(spec.states, num_live, num_durable, spec.device, is_shared, slots)
        self.durable_pool = self.state_pool  # or a pool of their own, for encoded states
        if encodes:
            self.durable_pool = StatePool(durable, 0, sizes.num_mamba_slots, spec.device)
        self.shapes_in_rows = input_shapes(config, spec, sizes.input_blocks.tokens > 0)  # in no input blocks
        for name, (input_shape, dtype) in self.shapes_in_rows.items():
            addressable(name, input_shape[1], input_shape, dtype)
        self.input_pool = self._new_inputs()
        self.is_allocated = True
        self._scrubs = config.free_memory == "zero"
        self.scrubber = DeviceScrubber(self, self._scrubs)

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def _new_memory(self) -> tuple[Tensor, Tensor | None]:
        """KV, and the slots of states where they share KV's memory; both then name all of its units."""
        spec, sizes, division = self._spec, self._unit_sizes, self.sizes.division
        num_blocks = self.sizes.num_kv_blocks
        shape = (
            spec.num_attention_layers, 2, num_blocks, self._block_size, spec.num_kv_heads, spec.head_dim,
        )  # fmt: skip
        addressable("num_kv_blocks", num_blocks, shape, spec.kv_dtype)
        if division is None and not self.sizes.input_blocks.tokens:
            return zeroed(shape, spec.kv_dtype, spec.device), None
        stride = ceil_div(sizes.block, UNIT_ALIGNMENT) * UNIT_ALIGNMENT
        slots = None
        if division is None:
            shared = zeroed((num_blocks * stride,), torch.uint8, spec.device)
        else:
            num_bytes = division.total_bytes(sizes)
            addressable("total_gb", num_bytes, (num_bytes,), torch.uint8)
            memory = zeroed((num_bytes,), torch.uint8, spec.device)
            slot_stride, stride = division.shape.slot_stride(sizes), division.shape.block_stride(sizes)
            slots = memory.view(self._num_slots, slot_stride)[:, : sizes.slot]
            shared = memory[division.num_fixed_slots * slot_stride :]
            self._units = shared.view(division.num_units, -1)
        self._blocks = shared.view(num_blocks, stride)
        part = math.prod(shape[3:])
        strides = 2 * part, part, stride // spec.kv_dtype.itemsize, math.prod(shape[4:]), shape[5], 1
        return shared.view(spec.kv_dtype).as_strided(shape, strides), slots

    @torch.inference_mode(False)
    def _new_inputs(self) -> dict[str, Tensor]:
        """Inputs of rows, views [layers, KV blocks, tokens of a block, *shape] of those in blocks."""
        spec, tokens, blocks = self._spec, self.sizes.input_blocks.tokens, self._blocks
        inputs = {
            name: torch.zeros(shape, dtype=dtype, device=spec.device)
            for name, (shape, dtype) in self.shapes_in_rows.items()
        }
        if not tokens or blocks is None:
            return inputs
        offsets, _ = input_block_offsets(spec, tokens)
        for tensor in spec.states:
            for entry in (entry for entry in tensor.inputs if entry.name in offsets):
                shape = tensor.num_layers, tokens, *entry.shape
                start = offsets[entry.name]
                part = blocks[:, start : start + math.prod(shape) * entry.dtype.itemsize]
                view = part.view(entry.dtype).view(len(blocks), *shape)
                inputs[entry.name] = view.movedim(0, 1)
        return inputs

    def allocate(self) -> None:
        """Make the tensors again, as zeros, after `deallocate`. Where it raises there are none."""
        if self.is_allocated:
            return
        self.deallocate()  # after an interrupted call
        try:
            self.kv_cache, slots = self._new_memory()
            self.state_pool.allocate(slots)
            slots = None  # a traceback keeps this frame, and would keep the memory
            if self.durable_pool is not self.state_pool:
                self.durable_pool.allocate()
            self.input_pool = self._new_inputs()
        except BaseException:
            self.deallocate()
            raise
        self.is_allocated = True

    def deallocate(self) -> None:
        """Free the tensors' memory, which is zeroed before where that is asked for."""
        if self._scrubs and self.is_allocated:
            for unit in range(0 if self._units is None else len(self._units)):
                self.zero_unit(unit)
            pools = self.state_pool.memory, self.durable_pool.memory, self.kv_cache
            for memory in (*pools, *self.input_pool.values()):
                memory.zero_()
        self.is_allocated = False
        self.state_pool.deallocate()
        self.durable_pool.deallocate()
        self.input_pool = {name: tensor.new_empty(0) for name, tensor in self.input_pool.items()}
        self.kv_cache = self.kv_cache.new_empty(0)
        self._units = None
        self._blocks = None

    def zero_unit(self, unit: int) -> None:
        """Fill a unit of a memory that states and KV share with zeros, in stream order."""
        if self._units is not None:
            self._units[unit].zero_()

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools, allocated or not."""
        pool, durable, sizes = self.state_pool, self.durable_pool, self._unit_sizes
        total = input_bytes(self.shapes_in_rows)
        if durable is not pool:
            total += durable.num_durable * durable.slot_bytes
        if self.sizes.division is not None:
            return total + self.sizes.division.total_bytes(sizes)
        return total + pool.num_slots * sizes.slot + self.sizes.num_kv_blocks * sizes.block

    def summary(self) -> str:
        """One line that says the bytes of each pool, allocated or not."""
        pool, durable, division = self.state_pool, self.durable_pool, self.sizes.division
        num_kv_blocks, sizes = self.sizes.num_kv_blocks, self._unit_sizes
        state, kv = sizes.slot / MEBIBYTE, num_kv_blocks * sizes.block / MEBIBYTE
        blocks = f"blocks of {self._block_size} tokens"
        parts = [f"live states {pool.num_live} x {state:.3g} MiB"]
        if durable is not pool:
            parts.append(f"staged states {pool.num_durable} x {state:.3g} MiB")
        if self.shapes_in_rows:
            inputs = input_bytes(self.shapes_in_rows) / MEBIBYTE
            num_rows = next(iter(self.shapes_in_rows.values()))[0][1]
            parts.append(f"inputs of running requests {num_rows} x {inputs / num_rows:.3g} MiB")
            if tokens := self.sizes.input_blocks.tokens:
                parts[-1] += f", and a KV block for each {tokens} tokens of a chunk"
        if division is None:
            idle = ", and the live ones of idle rows" if pool.is_shared else ""
            size = f"{durable.slot_bytes / MEBIBYTE:.3g} MiB"
            parts.append(f"cached states {durable.num_durable} x {size}{idle}")
            parts.append(f"KV {num_kv_blocks} {blocks}, {kv:.3g} MiB")
        else:
            unit = division.shape.unit_bytes(sizes) / MEBIBYTE
            parts.append(
                f"cached states and KV share {division.num_units:,} units of {unit:.3g} MiB, each of "
                f"{division.shape.slots} x {state:.3g} MiB or {division.shape.blocks} {blocks}"
            )
        on = f"on {self._spec.device}{'' if self.is_allocated else ', freed now'}"
        parts.append(f"total {self.total_bytes / MEBIBYTE:,.1f} MiB {on}")
        return f"mambaslots: {'; '.join(parts)}"
