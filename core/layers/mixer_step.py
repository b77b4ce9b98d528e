"""A mixer's step in one call: decode rows by one kernel, prefill rows by another.

`T` counts all tokens of the step, decode rows first. `layer` counts the layers with the same state. Every
function writes the states or the KV of the step; decodes by replay also the requests' inputs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import Replay, StepInputs
from ..inference.kernels.kernel_set import KernelSet
from ..inference.kernels.mixer_inputs import DeltaInputs, DeltaNet, RawTokens, SsdInputs, split_heads


def convolve(
    raw: Tensor, weight: Tensor, bias: Tensor | None, name: str, layer: int, inputs: StepInputs,
    kernels: KernelSet, activation: bool = True, decodes_too: bool = True,
) -> Tensor:  # fmt: skip
    """A causal depthwise convolution of raw [T, channels], then SiLU if `activation`; writes its windows."""
    conv_states, replay = inputs.state_pool[name][layer], inputs.replay
    conv_inputs = None if replay is None else replay.pool[f"{name}_in"][layer]
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    if inputs.num_decodes and decodes_too:
        tokens, of_tokens = _decodes(inputs, raw, out)
        if conv_inputs is None:
            kernels.causal_conv1d_update(
                tokens, weight, bias, conv_states, *_slots(inputs), activation=activation, out=of_tokens
            )
        else:
            rows = inputs.replay_rows
            kernels.causal_conv1d_replay(
                tokens, weight, bias, conv_states, conv_inputs, rows, activation=activation, out=of_tokens
            )
    if inputs.num_prefills:
        tokens, of_tokens = _prefills(inputs, raw, out)
        if replay is not None and conv_inputs is not None:  # before the prefill, which may overwrite windows
            tails, starts = inputs.tail_rows, replay.starts[inputs.num_decodes :]
            kernels.keep_conv_inputs(
                tokens, conv_states, conv_inputs, tails.input_rows, starts, inputs.conv_rows.sources,
                tails.query_start_loc,
            )  # fmt: skip
        kernels.causal_conv1d_prefill(
            tokens, weight, bias, conv_states, inputs.conv_rows, activation=activation, out=of_tokens
        )
    return out


class Mamba2(NamedTuple):
    """What makes x, B and C of what a Mamba-2 mixer convolves, and its time steps.

    Arguments of `causal_conv1d_update`, with SiLU, and of `time_steps`; `heads`: H and P, `groups`: G and N.
    """

    weight: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    heads: tuple[int, int]
    groups: tuple[int, int]
    shortest: float = 0.0
    longest: float = float("inf")


def run_mamba2(
    raw: Tensor, dt: Tensor, net: Mamba2, layer: int, inputs: StepInputs, kernels: KernelSet
) -> Tensor:
    """Mamba-2's recurrence of raw [T, channels] before the convolution and raw dt [T, H]: [T, H x P]."""
    states, replay = inputs.state_pool["ssm"][layer], inputs.replay
    kept = None if replay is None else SsdInputs(*_kept(replay, layer, "ssm_x", "ssm_B", "ssm_dt"))
    dt, A = kernels.time_steps(dt, net.dt_bias, net.A_log, net.shortest, net.longest)
    convolved = convolve(raw, net.weight, net.bias, "conv", layer, inputs, kernels)
    x, B, C = split_heads(convolved, (net.heads, net.groups, net.groups))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if inputs.num_decodes:
        x_rows, dt_rows, B_rows, C_rows, out_rows = _decodes(inputs, x, dt, B, C, out)
        if kept is None:
            kernels.selective_state_update(
                x_rows, dt_rows, A, B_rows, C_rows, net.D, states, *_slots(inputs), out=out_rows
            )
        else:
            kernels.ssd_replay(
                x_rows, dt_rows, A, B_rows, C_rows, net.D, states, kept, inputs.replay_rows, out=out_rows
            )
    if inputs.num_prefills:
        x, dt, B, C, out_rows = _prefills(inputs, x, dt, B, C, out)
        kernels.ssd_chunk_scan(x, dt, A, B, C, net.D, states, inputs.scan_rows, out=out_rows)
        if kept is not None:
            kernels.keep_ssd_inputs(x, dt, A, B, kept, inputs.tail_rows, inputs.chunks.chunk_size)
    return out.flatten(1)


_DELTA_INPUTS = "delta_k", "delta_v", "delta_g", "delta_beta", "delta_new_v", "delta_inverse"


def run_delta_net(
    raw: Tensor, a: Tensor, b: Tensor, net: DeltaNet, layer: int, inputs: StepInputs, kernels: KernelSet
) -> Tensor:
    """The gated delta rule of raw [T, channels] before the convolution, a and b; writes the states."""
    pool, replay = inputs.state_pool["delta"], inputs.replay
    kept = None if replay is None else DeltaInputs(*_kept(replay, layer, *_DELTA_INPUTS))
    outputs = []
    if replay is not None and kept is not None and inputs.num_decodes:
        rows, later = inputs.replay_rows, kept.inverses is not None
        windows, rings = inputs.state_pool["gdn_conv"][layer], replay.pool["gdn_conv_in"][layer]
        raw_tokens = RawTokens(net, windows, rings, replay.destinations[: inputs.num_decodes])
        q, k, v, a_rows, b_rows = _decodes(inputs, *net.heads(raw), a, b)
        new = rows._replace(destinations=None) if later else rows
        o = kernels.gated_delta_rule_replay(q, k, v, a_rows, b_rows, pool[layer], kept, new, raw_tokens)
        outputs.append(o.flatten(0, 1))
        if later and layer == len(pool) - 1:  # of all layers by one launch: a model runs each, in order
            of_layers = DeltaInputs(*_kept(replay, slice(None), *_DELTA_INPUTS))
            kernels.complete_delta_chunks(pool, of_layers, rows)
        if not inputs.num_prefills:
            return outputs[0]
    g, beta = kernels.delta_gates(a, b, net.A_log, net.dt_bias, doubled=net.doubled)
    convolved = convolve(
        raw, net.weight, net.bias, "gdn_conv", layer, inputs, kernels, decodes_too=replay is None
    )
    q, k, v = net.heads(convolved)
    if inputs.num_decodes and replay is None:
        q_rows, k_rows, v_rows, g_rows, beta_rows = _decodes(inputs, q, k, v, g, beta)
        o = kernels.gated_delta_rule_update(
            q_rows, k_rows, v_rows, g_rows, beta_rows, pool[layer], *_slots(inputs)
        )
        outputs.append(o.flatten(0, 1))
    if inputs.num_prefills:
        q, k, v, g, beta = _prefills(inputs, q, k, v, g, beta)
        keeps_new_v = kept is not None and kept.new_v is not None
        new_v = torch.empty(v.shape, dtype=v.dtype, device=v.device) if keeps_new_v else None
        outputs.append(kernels.gated_delta_rule_scan(q, k, v, g, beta, pool[layer], inputs.scan_rows, new_v))
        if kept is not None:
            kernels.keep_delta_inputs(k, v, g, beta, new_v, kept, inputs.tail_rows)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, inputs: StepInputs, kernels: KernelSet,
    *, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Store keys and values [T, heads, head dim] of the step, and attend to each token's sequence."""
    kernels.write_kv(kv_cache, key, value, inputs.kv_write_tokens, inputs.kv_write_positions)
    return kernels.paged_attention(query, kv_cache, inputs.attention_rows, scale=scale)


def _kept(replay: Replay, layer: int | slice, *names: str) -> list[Any]:
    """The layer's pools of inputs with these names; None for what requests do not keep."""
    return [replay.pool[name][layer] if name in replay.pool else None for name in names]


def _decodes(inputs: StepInputs, *packed: Tensor) -> Any:
    """The tokens of the decode rows, [rows, tokens, ...] each."""
    shape = inputs.num_decodes, inputs.shape.decode_tokens
    return [torch.unflatten(tensor[: inputs.num_decode_tokens], 0, shape) for tensor in packed]


def _prefills(inputs: StepInputs, *packed: Tensor) -> Any:
    """The tokens after the decode rows; the tensors themselves where there are none before."""
    decoded = inputs.num_decode_tokens
    return [tensor[decoded:] for tensor in packed] if decoded else packed


def _slots(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Sources and destinations of the decode rows, a state for each token."""
    return inputs.state_sources[: inputs.num_decodes], inputs.decode_destinations
