"""Engines whose free memory holds NaN, and which fail where logits are NaN or infinite."""

from collections.abc import Sequence
from typing import Any

import mambaslots as ms
import torch
from mambaslots.devices import tensor_on
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.dynamic_request import Allocation, ScheduledRequest
from mambaslots.inference.engines.step_runner import StepRunner
from torch import Tensor
from torch.nn import functional

_NAN_BYTE = 0xFF
"""Floats of such bytes are NaN, in bfloat16 and every wider dtype; so are int8 numbers with such a scale."""


INVALID = "are NaN or infinite, and free memory holds NaN"


def poison(engine: ms.DynamicInferenceEngine, *, checks: bool = True) -> ms.DynamicInferenceEngine:
    """The engine; free memory holds NaN before each forward. `checks`: invalid logits raise RuntimeError."""
    if not is_poisoned(engine):
        engine.context.observers.insert(0, MemoryPoison(engine.context))
        if checks:
            _refuse_invalid_logits(engine.core.step_runner)
    return engine


def is_poisoned(engine: ms.DynamicInferenceEngine) -> bool:
    return any(isinstance(observer, MemoryPoison) for observer in engine.context.observers)


def _refuse_invalid_logits(runner: StepRunner) -> None:
    make = runner.make_step

    def checked(*arguments: Any) -> Any:
        made = make(*arguments)
        if made[2]:
            raise RuntimeError(f"the logits of the requests {list(made[2])} {INVALID}")
        return made

    runner.make_step = checked  # type: ignore[method-assign]


class MemoryPoison:
    """Fills the free memory of a context with NaN at the beginning of each step, as an observer.

    Free are state slots without a committed or live state (slots reserved by the step, too, but none that a
    launched step has written and not committed yet), KV blocks without reference and hash, inputs before a
    request's last grid point where decodes replay, and rows of host memory without a copy. Unwritten rows of
    a request's KV blocks hold NaN, too, but the largest finite number where the block's first row is written:
    kernels may multiply such rows by 0.

    Fills are launched before the forward, outside of CUDA graphs, in stream order. They cost a pass over the
    free memory a step.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self.fill()

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: ms.StepInputs) -> None:
        self.fill()

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Nothing is to be done."""

    def fill(self) -> None:
        """Fill all free memory with NaN; between steps, or after a step is begun and before its forward."""
        memory, cache = self._context.memory, self._context.prefix_cache
        slots, blocks = free_memory(self._context)
        for states in memory.state_pool.tensors:
            _fill(states, 1, slots)
        encoded = memory.durable_pool
        if encoded is not memory.state_pool:
            written = {*cache.cached_states.slot_of_block.values(), *_uncommitted(self._context)}
            unused = set(range(encoded.num_durable)) - written
            encoded.memory.index_fill_(0, tensor_on(encoded.memory.device, sorted(unused)), _NAN_BYTE)
        self._fill_kv(blocks)
        self._fill_inputs()
        rows = getattr(cache.tiers.copies, "memory", None) if cache.tiers is not None else None
        if cache.tiers is not None and rows is not None:
            rows[sorted(cache.tiers.host.free_slots)] = _NAN_BYTE

    def _fill_kv(self, free: Tensor) -> None:
        """Also blocks of requests in which tokens are not stored yet, or no more, as rejected drafts."""
        kv_cache, size = self._context.memory.kv_cache, self._context.config.block_size_tokens
        unwritten: list[int] = []
        begun: list[tuple[int, int]] = []
        for allocation in (request.allocation for request in self._context.requests):
            if allocation is not None:
                path = allocation.path
                index, row = divmod(max(allocation.num_computed, path.num_registered * size), size)
                if row and index < len(path.blocks):
                    begun += [(path.blocks[index], later) for later in range(row, size)]
                unwritten += path.blocks[index + bool(row) :]
        _fill(kv_cache, 2, torch.cat([free, torch.tensor(unwritten, dtype=torch.int64, device="cpu")]))
        if begun and kv_cache.numel():
            blocks, rows = tensor_on(kv_cache.device, begun).T
            largest = torch.finfo(kv_cache.dtype).max
            kv_cache[:, :, blocks, rows] = kv_cache.new_full((), largest)

    def _fill_inputs(self) -> None:
        spec, memory = self._context.spec, self._context.memory
        pool = memory.input_pool
        chunk = spec.chunk_tokens(self._context.config.block_size_tokens)
        allocations = [
            request.allocation for request in self._context.requests if request.allocation is not None
        ]
        for entry in (entry for tensor in spec.states for entry in tensor.inputs if entry.name in pool):
            inputs = pool[entry.name]
            if entry.name not in memory.shapes_in_rows:
                _fill_input_blocks(inputs, allocations, chunk)
                continue
            axis = inputs.dim() - 1 if entry.layout == "by_head" else 2
            length = inputs.shape[axis] if entry.layout == "ring" else chunk
            free = torch.ones(inputs.shape[1], length, dtype=torch.bool, device="cpu")
            for allocation in allocations:
                stop = allocation.num_computed
                first = stop - entry.taps + 1 if entry.layout == "ring" else stop // chunk * chunk
                for position in range(max(0, first), stop) if allocation.decoding else ():
                    free[allocation.row, position % length] = False
            if entry.name == "delta_inverse":
                rows = free[:, _rows_of_inverse(chunk)].repeat(1, inputs.shape[2])  # kernels pack heads
                unused = inputs[0, 0].numel() - rows.shape[1]  # at the end, where the grid is coarser
                rows = functional.pad(rows, (0, unused), value=True).view(1, -1, *inputs.shape[2:])
                inputs.masked_fill_(_sent(rows, inputs.device), float("nan"))
                continue
            shape = [1] * inputs.dim()
            shape[1], shape[axis] = inputs.shape[1], length
            inputs.masked_fill_(_sent(free.view(shape), inputs.device), float("nan"))


def _rows_of_inverse(chunk: int) -> Tensor:
    """The row, a token, of each number of an inverse in blocks of 16 x 16 on and below the diagonal."""
    blocks = [block for block in range(chunk // 16) for _ in range(block + 1)]
    return torch.tensor([16 * block + row // 16 for block in blocks for row in range(256)], device="cpu")


def _fill_input_blocks(inputs: Tensor, allocations: Sequence[Allocation], chunk: int) -> None:
    """NaN in input blocks of requests, but for the tokens since the last grid point; free ones are KV."""
    size = inputs.shape[2]
    for allocation in allocations:
        kept = allocation.num_computed % chunk if allocation.decoding else 0
        for number, input_block in enumerate(allocation.input_blocks):
            inputs[:, input_block, min(size, max(0, kept - number * size)) :] = float("nan")


def free_memory(context: DynamicInferenceContext) -> tuple[Tensor, Tensor]:
    """The pool indices of free state slots and the ids of free KV blocks: two int64 tensors on the CPU."""
    pool, blocks = context.memory.state_pool, context.prefix_cache.kv_blocks
    slots = context.prefix_cache.slots
    free = torch.zeros(pool.num_slots, dtype=torch.bool, device="cpu")
    if not pool.is_shared:
        free[: pool.num_live] = True
    if context.memory.durable_pool is pool:
        reserved = slots.reserved.keys() - _uncommitted(context)
        free[[pool.durable_index(slot) for slot in (*slots.free_slots, *reserved, *slots.live_slots)]] = True
    else:
        free[pool.num_live :] = True  # staging slots belong to one step
    allocations = [request.allocation for request in context.requests if request.allocation is not None]
    free[[allocation.state_index for allocation in allocations if allocation.state_index >= 0]] = False
    refs, parents = blocks.tree.references, blocks.tree.parents
    unused = [block for block in range(blocks.total_count) if not refs[block] and parents[block] < 0]
    return free.nonzero().flatten(), torch.tensor(unused, dtype=torch.int64, device="cpu")


def _uncommitted(context: DynamicInferenceContext) -> set[int]:
    """Slots that launched steps have written, and that are committed once their tokens are read."""
    return {slot for step in context.uncommitted for slot in step.destinations.values()}


def _fill(memory: Tensor, axis: int, entries: Tensor) -> None:
    memory.index_fill_(axis, _sent(entries, memory.device), float("nan"))


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, by a copy that does not synchronise."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
