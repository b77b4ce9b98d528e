"""A mixer's step in one call: decode rows by one kernel, prefill rows by another.

`T` counts all tokens of the step, decode rows first. `layer` counts the layers with the same state. Every
function writes the states or the KV of the step; decodes by replay also the requests' inputs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import Replay, StepInputs
from ..inference.kernels.kernel_set import KernelSet
from ..inference.kernels.operands import DeltaNet, split_heads


def convolve(
    raw: Tensor, weight: Tensor, bias: Tensor | None, name: str, layer: int, inputs: StepInputs,
    kernels: KernelSet, activation: bool = True, decodes_too: bool = True,
) -> Tensor:  # fmt: skip
    """A causal depthwise convolution of raw [T, channels], then SiLU if `activation`; writes its windows."""
    conv_states, replay = inputs.state_pool[name][layer], inputs.replay
    kept = _kept(replay, layer, conv_inputs=f"{name}_in")
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    decodes, sources = inputs.num_decodes, inputs.state_sources[inputs.num_decodes :]
    if decodes and decodes_too:
        rows, out_rows = _decodes(inputs, raw, out)
        step = rows, weight, bias, conv_states
        if replay is None:
            kernels.causal_conv1d_update(*step, **_updated(inputs), activation=activation, out=out_rows)
        else:
            new = _replayed(inputs, replay)
            kernels.causal_conv1d_replay(*step, **(kept | new), activation=activation, out=out_rows)
    if inputs.num_prefills:
        chunks, checkpoints = inputs.chunks, inputs.checkpoints
        rows, out_rows = _prefills(inputs, raw, out)
        if replay is not None:  # first, because a prefill may overwrite the windows that it begins with
            kernels.keep_conv_inputs(
                rows, conv_states, **kept, input_rows=replay.input_rows[decodes:],
                starts=replay.starts[decodes:], sources=sources, query_start_loc=chunks.query_start_loc,
            )  # fmt: skip
        kernels.causal_conv1d_prefill(
            rows, weight, bias, conv_states, sources=sources, destinations=inputs.prefill_destinations,
            query_start_loc=chunks.query_start_loc, token_rows=chunks.token_rows,
            checkpoint_rows=checkpoints.rows, checkpoint_ends=checkpoints.token_ends,
            checkpoint_destinations=checkpoints.destinations, activation=activation, out=out_rows,
        )  # fmt: skip
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
    kept = _kept(replay, layer, x_inputs="ssm_x", B_inputs="ssm_B", dt_inputs="ssm_dt")
    dt, A = kernels.time_steps(dt, net.dt_bias, net.A_log, net.shortest, net.longest)
    convolved = convolve(raw, net.weight, net.bias, "conv", layer, inputs, kernels)
    x, B, C = split_heads(convolved, (net.heads, net.groups, net.groups))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if inputs.num_decodes:
        x_rows, dt_rows, B_rows, C_rows, out_rows = _decodes(inputs, x, dt, B, C, out)
        step = x_rows, dt_rows, A, B_rows, C_rows, net.D, states
        if replay is None:
            kernels.selective_state_update(*step, **_updated(inputs), out=out_rows)
        else:
            kernels.ssd_replay(*step, **(kept | _replayed_chunk(inputs, replay)), out=out_rows)
    if inputs.num_prefills:
        x, dt, B, C, out_rows = _prefills(inputs, x, dt, B, C, out)
        kernels.ssd_chunk_scan(x, dt, A, B, C, net.D, states, **_scanned(inputs), out=out_rows)
        if replay is not None:
            tails, chunk_size = _tails(inputs, replay), inputs.chunks.chunk_size
            kernels.keep_ssd_inputs(x, dt, A, B, **kept, **tails, chunk_size=chunk_size)
    return out.flatten(1)


_READ_BACK = {
    "k_inputs": "delta_k", "v_inputs": "delta_v", "g_inputs": "delta_g", "beta_inputs": "delta_beta",
    "inverses": "delta_inverse",
}  # fmt: skip
"""Argument -> inputs of which the state after a chunk is computed."""


def run_delta_net(
    raw: Tensor, a: Tensor, b: Tensor, net: DeltaNet, layer: int, inputs: StepInputs, kernels: KernelSet
) -> Tensor:
    """The gated delta rule of raw [T, channels] before the convolution, a and b; writes the states."""
    pool, replay = inputs.state_pool["delta"], inputs.replay
    kept = _kept(replay, layer, new_v_inputs="delta_new_v", **_READ_BACK)
    outputs = []
    if replay is not None and inputs.num_decodes:
        q, k, v, of_g, of_beta = _decodes(inputs, *net.heads(raw), a, b)
        step = q, k, v, of_g, of_beta, pool[layer]
        new, later = _replayed_chunk(inputs, replay), kept["inverses"] is not None
        windows, rings = inputs.state_pool["gdn_conv"][layer], replay.pool["gdn_conv_in"][layer]
        named = kept | new | {"raw": (net, windows, rings, new["destinations"])}
        named |= {"destinations": None} if later else {}
        outputs.append(kernels.gated_delta_rule_replay(*step, **named).flatten(0, 1))
        if later and layer == len(pool) - 1:  # of all layers by one launch: a model runs each, in order
            del new["starts"], new["lengths"]
            kernels.complete_delta_chunks(pool, **_kept(replay, slice(None), **_READ_BACK), **new)
        if not inputs.num_prefills:
            return outputs[0]
    g, beta = kernels.delta_gates(a, b, net.A_log, net.dt_bias, doubled=net.doubled)
    convolution = raw, net.weight, net.bias, "gdn_conv", layer, inputs, kernels
    q, k, v = net.heads(convolve(*convolution, decodes_too=replay is None))
    if inputs.num_decodes and replay is None:
        step = *_decodes(inputs, q, k, v, g, beta), pool[layer]
        outputs.append(kernels.gated_delta_rule_update(*step, **_updated(inputs)).flatten(0, 1))
    if inputs.num_prefills:
        q, k, v, g, beta = _prefills(inputs, q, k, v, g, beta)
        keeps_new_v = kept["inverses"] is not None
        new_v = torch.empty(v.shape, dtype=v.dtype, device=v.device) if keeps_new_v else None
        step = q, k, v, g, beta, pool[layer]
        outputs.append(kernels.gated_delta_rule_scan(*step, **_scanned(inputs), new_v=new_v))
        if replay is not None:
            kernels.keep_delta_inputs(k, v, g, beta, new_v, **kept, **_tails(inputs, replay))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, inputs: StepInputs, kernels: KernelSet,
    *, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Store keys and values [T, heads, head dim] of the step, and attend to each token's sequence."""
    kernels.write_kv(kv_cache, key, value, inputs.kv_write_tokens, inputs.kv_write_positions)
    return kernels.paged_attention(query, kv_cache, inputs.attention_rows, scale=scale)


def _kept(replay: Replay | None, layer: int | slice, **names: str) -> dict[str, Any]:
    """Argument -> the layer's inputs of this name; None for what requests do not keep."""
    pool = {} if replay is None else replay.pool
    return {argument: pool[name][layer] if name in pool else None for argument, name in names.items()}


def _decodes(inputs: StepInputs, *packed: Tensor) -> Any:
    """The tokens of the decode rows, [rows, tokens, ...] each."""
    shape = inputs.num_decodes, inputs.shape.decode_tokens
    return [torch.unflatten(tensor[: inputs.num_decode_tokens], 0, shape) for tensor in packed]


def _prefills(inputs: StepInputs, *packed: Tensor) -> Any:
    """The tokens after the decode rows; the tensors themselves where there are none before."""
    decoded = inputs.num_decode_tokens
    return [tensor[decoded:] for tensor in packed] if decoded else packed


def _updated(inputs: StepInputs) -> dict[str, Any]:
    """Sources and destinations of the decode rows, a state for each token."""
    return {"sources": inputs.state_sources[: inputs.num_decodes], "destinations": inputs.decode_destinations}


def _replayed(inputs: StepInputs, replay: Replay) -> dict[str, Any]:
    """What is new of the decode rows, and where a state that it completes goes."""
    decodes = slice(inputs.num_decodes)
    return {
        "input_rows": replay.input_rows[decodes],
        "starts": replay.starts[decodes],
        "lengths": inputs.query_lengths[decodes],
        "destinations": replay.destinations[decodes],
    }


def _replayed_chunk(inputs: StepInputs, replay: Replay) -> dict[str, Any]:
    """`_replayed`, and the chunk that it continues: its state and its pages."""
    decodes = slice(inputs.num_decodes)
    return _replayed(inputs, replay) | {
        "sources": inputs.state_sources[decodes],
        "chunk_size": inputs.chunks.chunk_size,
        "pages": replay.pages[decodes],
    }


def _scanned(inputs: StepInputs) -> dict[str, Any]:
    """Sources and destinations of the prefill rows, and their chunks."""
    chunks = inputs.chunks
    return {
        "sources": inputs.state_sources[inputs.num_decodes :],
        "destinations": inputs.prefill_destinations,
        "chunk_size": chunks.chunk_size,
        "cu_chunk_seqlens": chunks.cu_chunk_seqlens,
        "seq_idx": chunks.seq_idx,
        "row_chunk_starts": chunks.row_chunk_starts,
        "chunk_destinations": chunks.destinations,
    }


def _tails(inputs: StepInputs, replay: Replay) -> dict[str, Any]:
    """Input rows and pages of the prefill rows, their tails' first tokens, and where their tokens start."""
    return {
        "input_rows": replay.input_rows[inputs.num_decodes :],
        "pages": replay.pages[inputs.num_decodes :],
        "tail_starts": replay.tail_starts,
        "query_start_loc": inputs.chunks.query_start_loc,
    }
