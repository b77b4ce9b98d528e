"""The gated delta rule in plain torch: packed prefill in chunks, and decode token by token.

A state S [Dk, Dv] of one value head maps keys to values. A token decays S by exp(g), replaces the value that
S holds for the token's key by the token's own value, as far as beta says, and reads S at the token's query:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464). `reference` re-exports both functions.
"""

import torch
from torch import Tensor

from .reference_chunks import PaddedChunks, compute_dtype, pass_states, read_states, write_states

_NORM_EPSILON = 1e-6


def gated_delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    cu_chunk_seqlens: Tensor,
    seq_idx: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
) -> Tensor:
    """The gated delta rule over packed sequences, in chunks.

    Yang et al. 2024 (arXiv 2412.06464), section 3.3: within a chunk the WY form, whose triangular system is
    solved exactly; between chunks the recurrence, in order within a sequence. Every chunk is padded to
    `chunk_size`, so that its products have the same shape whichever rows share the batch. The same inputs and
    cuts therefore give the same states, bit for bit, in one call or in several.

    Args:
        q, k: [tokens, Hk, Dk] raw. Both are normalised here, x * rsqrt(sum x^2 + 1e-6), and q is scaled by
            Dk ** -0.5. Value head h reads key head h // (Hv // Hk).
        v: [tokens, Hv, Dv].
        g: [tokens, Hv] log decays, 0 or less, finite.
        beta: [tokens, Hv] as it is used: after the sigmoid, and doubled where the model says so.
        states: [slots, Hv, Dk, Dv]. Written at `destinations` and `chunk_destinations`.
        sources, destinations: [rows] pool indices. A row without tokens passes its state on unchanged.
        chunk_size: 1 or more.
        cu_chunk_seqlens, seq_idx, row_chunk_starts: [chunks + 1], [chunks], [rows + 1], as in
            `PrefillChunks`. A chunk has at most `chunk_size` tokens, and a row without tokens has no chunk.
        chunk_destinations: [chunks] pool indices for the state after each chunk.

    Returns: o, [tokens, Hv, Dv] in the dtype of v.
    """
    dtype = compute_dtype(v.dtype)
    key_heads, value_heads = k.shape[1], v.shape[1]
    chunks = PaddedChunks(v.shape[0], chunk_size, cu_chunk_seqlens, row_chunk_starts)
    heads_of_key = value_heads // key_heads

    # From here [chunks, Hv, chunk_size (, chunk_size, Dk or Dv)]. Padding has q = k = v = g = beta = 0: it
    # changes no state and no output of a token.
    queries, keys = (
        normalised(chunks.padded(x, dtype).movedim(1, 2)).repeat_interleave(heads_of_key, dim=1)
        for x in (q, k)
    )
    queries = queries * q.shape[-1] ** -0.5
    values, strength = (chunks.padded(x, dtype).movedim(1, 2) for x in (v, beta))

    # One strong decay would leave a float32 sum few bits for the differences of the tokens behind it.
    log_decay = chunks.padded(g, torch.float64).movedim(1, 2).cumsum(-1)
    from_start, to_end = log_decay.to(dtype).exp(), (log_decay[..., -1:] - log_decay).to(dtype).exp()
    # Above the diagonal the difference is positive, and its exponential could overflow.
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).triu(1)
    pairwise = (log_decay[..., :, None] - log_decay[..., None, :]).to(dtype)
    decay = pairwise.masked_fill_(later, float("-inf")).exp_()

    # Row i of the chunk's new values is beta[i] (v[i] - what the state holds for k[i] at that moment), which
    # contains the new values of all rows before i: a unit triangular system.
    scaled_keys = keys * strength[..., None]
    coupling = ((scaled_keys @ keys.mT) * decay).tril(-1)
    right_sides = torch.cat([scaled_keys * from_start[..., None], values * strength[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(coupling, right_sides, upper=False, unitriangular=True)
    read_keys, written = solved.split([q.shape[-1], v.shape[-1]], dim=-1)

    entering, leaving, final = pass_states(
        _next_states,
        (from_start[..., -1], read_keys, written, (keys * to_end[..., None]).mT),
        read_states(states, sources).to(dtype),
        seq_idx[: chunks.num_chunks].long(),
        row_chunk_starts.long(),
    )
    new_values = written - read_keys @ entering
    carried = (queries * from_start[..., None]) @ entering
    o = carried + ((queries @ keys.mT) * decay) @ new_values

    write_states(states, chunk_destinations[: chunks.num_chunks], leaving)
    write_states(states, destinations, final)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    packed = chunks.packed(o.movedim(1, 2))
    out[: packed.shape[0]] = packed
    return out.to(v.dtype)


def gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
) -> Tensor:
    """`gated_delta_rule_scan` for rows of T tokens each: the recurrence.

    Args:
        q, k: [rows, T, Hk, Dk] raw. v: [rows, T, Hv, Dv]. g, beta: [rows, T, Hv]. All as for
            `gated_delta_rule_scan`.
        states: [slots, Hv, Dk, Dv]. Written at `destinations`.
        sources: [rows] pool indices. destinations: [rows, T] where the state after that token goes.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v.
    """
    narrow, dtype = v.dtype, compute_dtype(v.dtype)
    heads_of_key = v.shape[2] // k.shape[2]
    query, key = (normalised(x.to(dtype)).repeat_interleave(heads_of_key, dim=2) for x in (q, k))
    query = query * q.shape[-1] ** -0.5
    v, beta = v.to(dtype), beta.to(dtype)
    decay = g.to(dtype).exp()[..., None, None]
    state = read_states(states, sources).to(dtype)
    after = []
    for t in range(v.shape[1]):
        state = state_after(state, key[:, t], v[:, t], decay[:, t], beta[:, t])
        after.append(state)
    states_after = torch.stack(after, dim=1)
    write_states(states, destinations.flatten(), states_after.flatten(0, 1))
    o: Tensor = (states_after * query[..., None]).sum(-2)
    return o.to(narrow)


def state_after(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The states [rows, Hv, Dk, Dv] after one token of each row.

    Args:
        key: [rows, Hv, Dk] normalised. value: [rows, Hv, Dv]. decay: [rows, Hv, 1, 1], exp(g).
            beta: [rows, Hv].
    """
    state = decay * state
    held = (state * key[..., None]).sum(-2)
    new_value = beta[..., None] * (value - held)
    return state + key[..., None] * new_value[..., None, :]


def _next_states(state: Tensor, decay: Tensor, read_keys: Tensor, written: Tensor, keys: Tensor) -> Tensor:
    """The states after one chunk each.

    Args:
        state: [n, Hv, Dk, Dv] the states before it. decay: [n, Hv] of the whole chunk.
        read_keys, written: [n, Hv, chunk_size, Dk] and [n, Hv, chunk_size, Dv], the two parts of the WY form.
        keys: [n, Hv, Dk, chunk_size], each key decayed from its token to the end of the chunk.
    """
    return decay[..., None, None] * state + keys @ (written - read_keys @ state)


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)
