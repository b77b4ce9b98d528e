"""The gated delta rule in plain torch: prefill in chunks, decode token by token, and decode by replay.

A state S [Dk, Dv] of one value head maps keys to values. A token decays S by exp(g), replaces the value that
S holds for the token's key by the token's own value, as far as beta says, and reads S at the token's query:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q

Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464). For decode by replay, a request keeps its state
at the last grid point, and the inputs of the tokens since, position p of its sequence at p % chunk_size. The
recurrence goes from that state over these inputs, token by token.
"""

import torch
from torch import Tensor

from ..dtypes_and_strides import compute_dtype
from ..mixer_inputs import DeltaInputs, RawTokens
from ..step_rows import ReplayRows, ScanRows, TailRows, input_table
from .torch_chunks import PaddedChunks, pass_states, places, read_states, write_states
from .torch_conv import causal_conv1d_replay
from .torch_pointwise import delta_gates

_NORM_EPSILON = 1e-6


def gated_delta_rule_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: ScanRows,
    new_v: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The rule over packed sequences, in chunks of the WY form (arXiv 2412.06464, section 3.3)."""
    dtype = compute_dtype(v.dtype)
    key_heads, value_heads = k.shape[1], v.shape[1]
    chunks, chunk_size = PaddedChunks(v.shape[0], rows), rows.chunk_size
    heads_of_key = value_heads // key_heads

    # From here [chunks, Hv, chunk_size (, chunk_size, Dk or Dv)]. Padding has q = k = v = g = beta = 0: it
    # changes no state and no output of a token.
    queries, keys = (
        normalised(chunks.padded(x, dtype).movedim(1, 2)).repeat_interleave(heads_of_key, dim=1)
        for x in (q, k)
    )
    queries = queries * q.shape[-1] ** -0.5
    values, strength = (chunks.padded(x, dtype).movedim(1, 2) for x in (v, beta))

    # One strong decay would leave a float32 sum few bits for the differences of the tokens after it.
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
        read_states(states, rows.sources).to(dtype),
        rows.seq_idx[: chunks.num_chunks],
    )
    new_values = written - read_keys @ entering
    carried = (queries * from_start[..., None]) @ entering
    o = carried + ((queries @ keys.mT) * decay) @ new_values

    write_states(states, rows.chunk_destinations[: chunks.num_chunks], leaving)
    write_states(states, rows.destinations, final)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    packed = chunks.packed(o.movedim(1, 2))
    out[: packed.shape[0]] = packed
    return out.to(v.dtype)


def gated_delta_rule_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, sources: Tensor,
    destinations: Tensor,
) -> Tensor:  # fmt: skip
    """`gated_delta_rule_scan` for rows of T tokens each: the recurrence."""
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
    """The states [rows, Hv, Dk, Dv] after one token of each row; `decay` is exp(g), [rows, Hv, 1, 1]."""
    state = decay * state
    read_value = (state * key[..., None]).sum(-2)
    new_value = beta[..., None] * (value - read_value)
    return state + key[..., None] * new_value[..., None, :]


def _next_states(state: Tensor, decay: Tensor, read_keys: Tensor, written: Tensor, keys: Tensor) -> Tensor:
    """The states after one chunk each; `keys` [n, Hv, Dk, chunk_size] are decayed to the end of the chunk."""
    return decay[..., None, None] * state + keys @ (written - read_keys @ state)


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def gated_delta_rule_replay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, inputs: DeltaInputs,
    rows: ReplayRows, raw: RawTokens | None = None,
) -> Tensor:  # fmt: skip
    """`gated_delta_rule_scan` of the tokens since each row's last grid point; the outputs of the new ones."""
    num_rows, tokens = v.shape[:2]
    if raw is not None:
        net, windows, rings, slots = raw
        conv = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2), net.weight, net.bias, windows, rings
        x = causal_conv1d_replay(*conv, rows._replace(destinations=slots))
        q, k, v = net.heads(x)
        a, b = g.flatten(0, 1), beta.flatten(0, 1)
        made = delta_gates(a, b, net.A_log, net.dt_bias, doubled=net.doubled)
        g, beta = (torch.unflatten(x, 0, (num_rows, tokens)) for x in made)
    dtype, device = compute_dtype(v.dtype), v.device
    token, input_rows, input_blocks = torch.arange(tokens, device=device), rows.input_rows, input_table(rows)
    firsts = rows.starts.long() % rows.chunk_size
    lengths = rows.lengths.long().masked_fill(input_rows < 0, 0)
    row, new = (token < lengths[:, None]).nonzero(as_tuple=True)
    kept_keys = normalised(k.to(dtype))
    for pool, step in zip(inputs, (kept_keys, v, g, beta), strict=False):
        assert pool is not None
        new_offsets, size = firsts[row] + new, pool.shape[1]
        input_block = input_blocks[row, new_offsets // size] if pool.dim() == 4 else input_rows[row]
        pool[input_block, new_offsets % size] = step[row, new].to(pool.dtype)

    # A chunk's tokens after the new ones are zeros, which change no state and no output.
    ends = (firsts + lengths).masked_fill(input_rows < 0, 0)
    chunk = torch.arange(int(ends.max()) if num_rows else 0, device=device)
    real = (chunk < ends[:, None])[..., None]
    pool_rows = input_rows.clamp(min=0)
    keys, values = (
        pool[input_blocks.clamp(min=0)].flatten(1, 2)[:, : chunk.shape[0]].to(dtype)
        .masked_fill(~real[..., None], 0)
        for pool in (inputs.k, inputs.v)
    )  # fmt: skip
    gates, strengths = (
        pool[pool_rows, : chunk.shape[0]].to(dtype).masked_fill(~real, 0) for pool in (inputs.g, inputs.beta)
    )
    heads_of_key = v.shape[2] // k.shape[2]
    keys = keys.repeat_interleave(heads_of_key, dim=2)
    queries = normalised(q.to(dtype)).repeat_interleave(heads_of_key, dim=2) * q.shape[-1] ** -0.5
    decays = gates.exp()[..., None, None]

    state = read_states(states, rows.sources).to(dtype)
    o = torch.zeros(v.shape, dtype=dtype, device=device)
    for t in range(chunk.shape[0]):
        state = state_after(state, keys[:, t], values[:, t], decays[:, t], strengths[:, t])
        row, new = ((firsts[:, None] + token == t) & (token < lengths[:, None])).nonzero(as_tuple=True)
        o[row, new] = (state[row] * queries[row, new][..., None]).sum(-2)
    if rows.destinations is not None:
        write_states(states, rows.destinations, state)
    return o.to(v.dtype)


def complete_delta_chunks(states: Tensor, inputs: DeltaInputs, rows: ReplayRows) -> None:
    """Write the states of all layers that `gated_delta_rule_replay` did not, for want of destinations."""
    assert rows.destinations is not None
    input_rows = rows.input_rows.masked_fill(rows.destinations < 0, -1)
    starts, lengths = torch.zeros_like(input_rows), torch.full_like(input_rows, rows.chunk_size)
    rows = rows._replace(input_rows=input_rows, starts=starts, lengths=lengths)
    for pool, *layer_inputs in zip(states, inputs.k, inputs.v, inputs.g, inputs.beta, strict=True):
        k, v, g, beta = (x.new_empty(len(input_rows), 0, *x.shape[2:]) for x in layer_inputs)
        gated_delta_rule_replay(k, k, v, g, beta, pool, DeltaInputs(*layer_inputs), rows)


def keep_delta_inputs(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, new_v: Tensor | None, inputs: DeltaInputs, rows: TailRows
) -> None:
    """Store the inputs of each prefill row's tail, the tokens after its last grid point."""
    keys = normalised(k.to(compute_dtype(v.dtype)))
    indices = (index.tolist() for index in (rows.input_rows, rows.starts, rows.query_start_loc[1:]))
    for row, input_row, first, end in zip(input_table(rows), *indices, strict=True):
        if input_row >= 0 and end > first:
            tail_places = places(inputs.k, row, 0, end - first)
            for pool, packed in ((inputs.k, keys), (inputs.v, v)):
                pool[tail_places] = packed[first:end].to(pool.dtype)
            for pool, packed in ((inputs.g, g), (inputs.beta, beta)):
                pool[input_row, : end - first] = packed[first:end].to(pool.dtype)
