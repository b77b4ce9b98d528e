"""The gated delta rule of decode by replay in plain torch; `reference` re-exports both functions.

A request keeps its state at the last grid point, and the inputs of the tokens since, position p of its
sequence at p % chunk_size. The recurrence goes from that state over these inputs, token by token.
"""

import torch
from torch import Tensor

from .reference_chunks import compute_dtype, read_states, write_states
from .reference_delta import normalised, state_after


def gated_delta_rule_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    k_inputs: Tensor,
    v_inputs: Tensor,
    g_inputs: Tensor,
    beta_inputs: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
) -> Tensor:
    """`gated_delta_rule_scan` of the tokens since each row's last grid point; the outputs of the new ones.

    Args:
        q, k: [rows, T, Hk, Dk] raw. v: [rows, T, Hv, Dv]. g, beta: [rows, T, Hv]. All as for the scan. Tokens
            of a row behind its length are padding.
        states: [slots, Hv, Dk, Dv]. Written at `destinations`.
        k_inputs, v_inputs: [slots, chunk_size, Hk, Dk] and [slots, chunk_size, Hv, Dv]. Written at the
            positions of the rows' tokens. Read from the grid point to `starts`.
        g_inputs, beta_inputs: [slots, chunk_size, Hv] likewise.
        slots: [rows] where each row's inputs are, -1: padding, which writes nothing.
        starts, lengths: [rows] the position of each row's first token, and its number of tokens, which all
            lie in one chunk.
        sources: [rows] the index in `states` of the state at the grid point, -1: zeros.
        destinations: [rows] the index for the state behind the chunk, -1: nowhere. It is named only where the
            row's tokens complete the chunk.
        chunk_size: 1 or more.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v; unspecified for padding.
    """
    rows, tokens = v.shape[:2]
    dtype, device = compute_dtype(v.dtype), v.device
    token = torch.arange(tokens, device=device)
    firsts, lengths = starts.long() % chunk_size, lengths.long().masked_fill(slots < 0, 0)
    row, new = (token < lengths[:, None]).nonzero(as_tuple=True)
    for inputs, step in ((k_inputs, k), (v_inputs, v), (g_inputs, g), (beta_inputs, beta)):
        inputs[slots[row], firsts[row] + new] = step[row, new].to(inputs.dtype)

    # A chunk's tokens behind the new ones are zeros, which change no state and no output.
    ends = (firsts + lengths).masked_fill(slots < 0, 0)
    chunk = torch.arange(int(ends.max()) if rows else 0, device=device)
    real = (chunk < ends[:, None])[..., None]
    own = slots.clamp(min=0)
    keys, values, gates, strengths = (
        inputs[own, : chunk.shape[0]]
        .to(dtype)
        .masked_fill(~(real if inputs.dim() == 3 else real[..., None]), 0)
        for inputs in (k_inputs, v_inputs, g_inputs, beta_inputs)
    )
    heads_of_key = v.shape[2] // k.shape[2]
    keys = normalised(keys).repeat_interleave(heads_of_key, dim=2)
    queries = normalised(q.to(dtype)).repeat_interleave(heads_of_key, dim=2) * q.shape[-1] ** -0.5
    decays = gates.exp()[..., None, None]

    state = read_states(states, sources).to(dtype)
    o = torch.zeros(v.shape, dtype=dtype, device=device)
    for t in range(chunk.shape[0]):
        state = state_after(state, keys[:, t], values[:, t], decays[:, t], strengths[:, t])
        row, new = ((firsts[:, None] + token == t) & (token < lengths[:, None])).nonzero(as_tuple=True)
        o[row, new] = (state[row] * queries[row, new][..., None]).sum(-2)
    write_states(states, destinations, state)
    return o.to(v.dtype)


def keep_delta_inputs(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    k_inputs: Tensor,
    v_inputs: Tensor,
    g_inputs: Tensor,
    beta_inputs: Tensor,
    slots: Tensor,
    tail_starts: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Store the inputs of each prefill row's tail, the tokens behind its last grid point.

    Args:
        k: [tokens, Hk, Dk]. v: [tokens, Hv, Dv]. g, beta: [tokens, Hv]. Packed rows.
        k_inputs, v_inputs, g_inputs, beta_inputs: as for `gated_delta_rule_replay`. Written.
        slots: [rows] where each row's inputs go, -1: nowhere.
        tail_starts: [rows] the packed token that begins the row's last, incomplete chunk. A row whose tail
            begins at the row's end stores nothing.
        query_start_loc: [rows + 1] where each row's tokens start.
    """
    for slot, first, end in zip(
        slots.tolist(), tail_starts.tolist(), query_start_loc[1:].tolist(), strict=True
    ):
        if slot >= 0:
            for inputs, packed in ((k_inputs, k), (v_inputs, v), (g_inputs, g), (beta_inputs, beta)):
                inputs[slot, : max(0, end - first)] = packed[first:end].to(inputs.dtype)
