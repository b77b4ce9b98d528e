"""A debug setting: memory that nobody may read holds NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.step_inputs import StepInputs

_NAN_BYTE = 0xFF
"""Floats of such bytes are NaN, in bfloat16 and every wider dtype; so are int8 numbers with such a scale."""


class MemoryPoison:
    """Observes a context, and fills its free memory with NaN before every forward.

    Free are state slots that hold neither a committed state nor one that a request goes on from, and KV
    blocks that nobody holds and that store no prefix. A slot reserved for a state of the step is free: the
    forward writes it. Where decodes replay, all is free in the slots of inputs except the inputs since each
    request's last grid point, and its last raw inputs of convolutions.

    The fill is launched before the forward and outside of it, so it also precedes the replay of a CUDA graph.
    It costs a pass over the free memory a step, and on a GPU a synchronisation.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        """Fill what is free now, and observe `context` from now on."""
        self._context = context
        self.fill()
        context.observe(self)

    def step_begun(self, steps: Sequence[object], inputs: StepInputs) -> None:
        """Fill what is free once all that the step needs is reserved."""
        self.fill()

    def step_ended(self, steps: Sequence[object]) -> None:
        """Nothing is to be done."""

    def fill(self) -> None:
        """Fill all free memory with NaN; between steps, or after a step is begun and before its forward."""
        slots, blocks = free_memory(self._context)
        pool = self._context.memory.state_pool
        for states in pool.tensors:
            _fill(states, 1, slots)
        encoded = self._context.memory.durable_pool
        if encoded is not pool:
            unused = sorted(set(range(encoded.num_durable)) - set(self._context.prefix_cache.slots.map.slots))
            encoded.memory.index_fill_(
                0, torch.tensor(unused, dtype=torch.int64, device=encoded.memory.device), _NAN_BYTE
            )
        _fill(self._context.memory.kv_cache, 2, blocks)
        self._fill_inputs()

    def _fill_inputs(self) -> None:
        spec, pool = self._context.spec, self._context.memory.input_pool
        if not pool.slots:
            return
        chunk = spec.chunk_tokens(self._context.config.block_size_tokens)
        holdings = [request.holding for request in self._context.requests if request.holding is not None]
        for entry in (entry for tensor in spec.states for entry in tensor.inputs):
            inputs = pool[entry.name]
            axis = inputs.dim() - 1 if entry.layout == "by_head" else 2
            length = inputs.shape[axis]
            free = torch.ones(pool.slots, length, dtype=torch.bool, device="cpu")
            for holding in holdings:
                stop = holding.num_computed
                first = stop - entry.taps + 1 if entry.layout == "ring" else stop // chunk * chunk
                for position in range(max(0, first), stop) if holding.decoding else ():
                    free[holding.row, position % length] = False
            shape = [1] * inputs.dim()
            shape[1], shape[axis] = pool.slots, length
            inputs.masked_fill_(free.view(shape).to(inputs.device), float("nan"))

    def check(self, logits: Tensor) -> None:
        """Raise RuntimeError where logits [tokens, vocabulary] are NaN; synchronises."""
        lost = logits.isnan().any(dim=1)
        if lost.any():
            raise RuntimeError(
                f"the logits of {int(lost.sum())} of {len(lost)} tokens are NaN, and poison_free_memory is "
                "set: the model has read memory that the step does not name, or computes NaN by itself; "
                "mambaslots.testing.check_model(model) tells which"
            )


def free_memory(context: DynamicInferenceContext) -> tuple[Tensor, Tensor]:
    """The pool indices of free state slots and the ids of free KV blocks: two int64 tensors on the CPU.

    This function is the only one here that knows how a context keeps its books.
    """
    pool, blocks = context.memory.state_pool, context.prefix_cache.kv_blocks
    slots = context.prefix_cache.slots
    free = torch.zeros(pool.num_slots, dtype=torch.bool, device="cpu")
    if not pool.is_shared:
        free[: pool.num_live] = True
    if context.memory.durable_pool is pool:
        free[[pool.durable_index(slot) for slot in (*slots.free, *slots.reserved, *slots.live)]] = True
    else:
        free[pool.num_live :] = True  # staging slots belong to one step
    holdings = [request.holding for request in context.requests if request.holding is not None]
    free[[holding.state_index for holding in holdings if holding.state_index >= 0]] = False
    unused = (blocks.block_ref_counts == 0) & (blocks.block_hashes < 0)
    return free.nonzero().flatten(), unused.nonzero().flatten()


def _fill(memory: Tensor, axis: int, entries: Tensor) -> None:
    memory.index_fill_(axis, entries.to(memory.device), float("nan"))
