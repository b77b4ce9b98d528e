"""Prefix caching of megatron-core's gated delta nets, which the host asserts off."""

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..devices import tensor_on
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .host_record import HostCallError
from .overrides import override
from .versions import GATED_DELTA_NET


@override(GATED_DELTA_NET, "forward", series=("0.20",))
def forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    inference_context: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Serve a context that caches states. The stock method asserts that it caches nothing."""
    arguments = (self, hidden_states, attention_mask, inference_context, *args)
    if not isinstance(getattr(inference_context, "mamba_slot_allocator", None), MambaSlotAllocator):
        return original(*arguments, **kwargs)
    with mock.patch.object(inference_context, "enable_prefix_caching", False):  # nothing else reads it here
        return original(*arguments, **kwargs)


@override(GATED_DELTA_NET, "ssm_prefill", series=("0.20",))
def ssm_prefill(
    original: Callable[..., Tensor],
    self: Any,
    projected: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    context: Any,
) -> Tensor:
    """Write the states at the step's checkpoints, which end pieces of sequences, to the scratch."""
    slots = context.mamba_slot_allocator
    if not isinstance(slots, MambaSlotAllocator):
        return original(self, projected, conv_state, ssm_state, context)
    if projected.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # of fixed pieces
        raise HostCallError(
            "use_cuda_graphs_for_non_decode_steps is True; accepted with a gated delta net and a prefix "
            "cache: False"
        )
    positions = context.mamba_metadata._mambaslots_positions
    if not positions:
        return original(self, projected, conv_state, ssm_state, context)
    layer = context.layer_map[self.layer_number - self.pp_layer_offset - 1]
    windows = slots.intermediate_conv_out[layer]
    states = slots.intermediate_ssm_out[layer]
    starts = context.mamba_metadata._mambaslots_starts
    module = importlib.import_module(GATED_DELTA_NET.partition(":")[0])
    convolve = module.causal_conv1d
    rule = module.chunk_gated_delta_rule

    def causal_conv1d(x: Tensor, **options: Any) -> Any:
        for row, position in enumerate(positions):
            windows[row].copy_(x[0, position - windows.shape[-1] : position].T)
        return convolve(x=x, **options)

    def chunk_gated_delta_rule(**inputs: Any) -> tuple[Tensor, Tensor]:
        output, final_states, state_at = run_in_pieces(rule, inputs, starts, positions)
        for row, position in enumerate(positions):
            states[row].copy_(state_at[position])
        return output, final_states

    with mock.patch.multiple(
        module, causal_conv1d=causal_conv1d, chunk_gated_delta_rule=chunk_gated_delta_rule
    ):
        return original(self, projected, conv_state, ssm_state, context)


def run_in_pieces(
    rule: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Any],
    starts: list[int],
    positions: list[int],
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Outputs and final states of fla's `rule`, and the state after each of `positions`.

    `inputs`: as for one call. Sequence i has the packed tokens from `starts[i]` to `starts[i + 1]`. The first
    pieces of all sequences are one call, then the second pieces of those that have one, and so on.
    """
    packed = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    initial = inputs.pop("initial_state")
    del inputs["cu_seqlens"]
    bounds = [
        [start, *(position for position in positions if start < position < stop), stop]
        for start, stop in pairwise(starts)
    ]
    final_states = initial.to(torch.promote_types(initial.dtype, torch.float32), copy=True)
    state_at: dict[int, Tensor] = {}
    output = torch.zeros_like(packed["v"])
    for piece in range(max(map(len, bounds)) - 1):
        rows = [row for row, bound in enumerate(bounds) if piece + 1 < len(bound)]
        spans = [bounds[row][piece : piece + 2] for row in rows]
        lengths = [0, *(stop - start for start, stop in spans)]
        tokens = torch.cat([torch.arange(start, stop, device=output.device) for start, stop in spans])
        indices = tensor_on(output.device, rows, torch.int64)
        output[:, tokens], states = rule(
            **{name: tensor[:, tokens] for name, tensor in packed.items()},
            **inputs,
            initial_state=final_states[indices],
            cu_seqlens=tensor_on(output.device, lengths, torch.int64).cumsum(0),
        )
        final_states[indices] = states
        state_at |= {stop: state for (_, stop), state in zip(spans, states, strict=True)}
    return output, final_states, state_at
