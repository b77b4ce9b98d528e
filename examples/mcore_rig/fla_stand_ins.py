"""In plain torch, token by token, what megatron-core's gated delta net takes from fla."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """Outputs `[1, tokens, value heads, value dim]`, and the states after each packed sequence.

    `initial_state`: `[sequences, value heads, key dim, value dim]`. `g` and `beta` come before their gates.
    Without `cu_seqlens` a row of the batch is a sequence. Outputs of no sequence are zero.
    """
    wanted = ("output_final_state", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    if not all(flags.pop(flag) for flag in wanted) or flags:
        raise NotImplementedError(f"this stand-in computes gates and final states, and nothing of {flags}")
    groups = v.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    if use_qk_l2norm_in_kernel:
        q, k = (F.normalize(each.to(wide), dim=-1).to(each.dtype) for each in (q, k))
    queries = q.to(wide).repeat_interleave(groups, 2) * q.shape[-1] ** -0.5
    keys, values = k.to(wide).repeat_interleave(groups, 2), v.to(wide)
    decay = (-A_log.to(wide).exp() * F.softplus(g.to(wide) + dt_bias.to(wide))).exp()
    strength = beta.to(wide).sigmoid()
    out, states = torch.zeros_like(values), []
    for i, state in enumerate(initial_state.to(wide)):
        row, start, stop = (i, 0, q.shape[1]) if cu_seqlens is None else (0, *cu_seqlens[i : i + 2].tolist())
        for t in range(start, stop):
            key = keys[row, t, :, :, None]
            state = state * decay[row, t, :, None, None]
            error = values[row, t] - (key * state).sum(1)
            state = state + key * (strength[row, t, :, None] * error)[:, None]
            out[row, t] = (queries[row, t, :, :, None] * state).sum(1)
        states.append(state)
    return out.to(q.dtype), torch.stack(states)


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """`x` `[1, tokens, channels]` convolved by sequence; last inputs `[sequences, channels, width]`."""
    width, starts = weight.shape[1], cu_seqlens.tolist()
    out, windows = torch.zeros_like(x), []
    for i, window in enumerate(initial_state):
        tokens = slice(starts[i], starts[i + 1])
        inputs = torch.cat([window, x[0, tokens].T], 1)
        if starts[i + 1] > starts[i]:  # else padding
            here = F.conv1d(inputs[None, :, 1:], weight[:, None], bias, groups=len(weight))
            out[0, tokens] = F.silu(here)[0].T
        windows.append(inputs[:, -width:])
    return out, torch.stack(windows)


def causal_conv1d_update(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """One token `[sequences, 1, channels]` each, and the windows `[sequences, channels, width]` after it."""
    cache = torch.cat([cache[:, :, 1:], x.transpose(1, 2)], 2)
    out = (cache * weight).sum(2) + (0 if bias is None else bias)
    return F.silu(out)[:, None], cache
