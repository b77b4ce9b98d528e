"""The `KernelSet` in plain torch: what a CPU runs, and the oracle of the GPU's kernels.

Every function runs on any device and in any float dtype, and computes in `compute_dtype`, float32 or wider.
Pools are those of one layer, `[slots, ...]`. A kernel reads the state before its tokens at a *source* pool
index (-1: zeros) and writes the state after its tokens at a *destination* (-1: nowhere). A kernel reads every
source before it writes any destination, so that a row may be updated in place.

Inputs may be padded to larger shapes. Padding writes nothing:

    row             has no token, or in decode kernels one; source and destination are -1
    token           lies behind the real tokens; row is -1; its output is unspecified
    chunk           lies behind the chunks that `row_chunk_starts` counts; is empty
    checkpoint      row is -1, end is 0, destination is -1
    position of KV  is -1
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SEPARATE_STATES = True
"""See `KernelSet.SEPARATE_STATES`."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, decays, scores and states of a `dtype` model are computed."""
    return torch.promote_types(dtype, torch.float32)


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    conv_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    query_start_loc: Tensor,
    token_rows: Tensor,
    checkpoint_rows: Tensor,
    checkpoint_ends: Tensor,
    checkpoint_destinations: Tensor,
) -> Tensor:
    """Depthwise causal convolution, then SiLU, over packed sequences of any lengths, 0 and 1 included.

    Args:
        x: [tokens, conv_dim] raw inputs, row after row.
        weight, bias: [conv_dim, kernel], [conv_dim].
        conv_states: [slots, conv_dim, >= kernel - 1]. A slot's first kernel - 1 places hold the last raw
            inputs, oldest first. Written at `destinations` and `checkpoint_destinations`.
        sources, destinations: [rows] pool indices.
        query_start_loc: [rows + 1] where each row's tokens start in `x`.
        token_rows: [tokens] the row of each token.
        checkpoint_rows, checkpoint_ends, checkpoint_destinations: [n] a checkpoint stores the window before
            token `checkpoint_ends` of `x`, which is a token of that row or the row's end, at this pool index.

    Returns: [tokens, conv_dim] in the compute dtype.
    """
    tokens, conv_dim = x.shape
    width = weight.shape[1] - 1
    rows = torch.arange(sources.shape[0], device=x.device)
    taps = torch.arange(width, device=x.device)

    # Each row's carried window goes in front of the row's tokens, and one gather serves rows of any length.
    # Padding tokens belong to a row behind the last, whose window is zeros.
    packed = x.new_zeros(tokens + (rows.shape[0] + 1) * width, conv_dim)
    window_starts = query_start_loc[:-1] + rows * width
    carried = _read(conv_states[..., :width], sources)
    packed[window_starts[:, None] + taps] = carried.transpose(1, 2).to(x.dtype)
    windows_before = torch.where(token_rows < 0, rows.shape[0], token_rows)
    token_windows = torch.arange(tokens, device=x.device) + windows_before * width
    packed[token_windows + width] = x

    dtype = compute_dtype(x.dtype)
    out = bias.to(dtype).expand(tokens, conv_dim)
    for tap in range(width + 1):
        out = out + packed[token_windows + tap].to(dtype) * weight[:, tap].to(dtype)

    ends = torch.cat([query_start_loc[1:], checkpoint_ends])
    end_rows = torch.cat([rows, checkpoint_rows])
    windows = packed[(ends + end_rows * width)[:, None] + taps].transpose(1, 2)
    _write(conv_states[..., :width], torch.cat([destinations, checkpoint_destinations]), windows)
    return F.silu(out)


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor, conv_states: Tensor, sources: Tensor, destinations: Tensor
) -> Tensor:
    """`causal_conv1d_prefill` for rows of T tokens each, with the window stored after each token.

    Args:
        x: [rows, T, conv_dim]. weight, bias, conv_states: as for `causal_conv1d_prefill`.
        sources: [rows] pool indices. destinations: [rows, T] where the window after that token goes.

    Returns: [rows, T, conv_dim] in the compute dtype.
    """
    dtype = compute_dtype(x.dtype)
    tokens, width = x.shape[1], weight.shape[1] - 1
    carried = _read(conv_states[..., :width], sources).transpose(1, 2)
    packed = torch.cat([carried.to(x.dtype), x], dim=1)
    out = bias.to(dtype).expand(x.shape)
    for tap in range(width + 1):
        out = out + packed[:, tap : tap + tokens].to(dtype) * weight[:, tap].to(dtype)
    windows = packed.unfold(1, width, 1)[:, 1:]  # [rows, T, conv_dim, width]
    _write(conv_states[..., :width], destinations.flatten(), windows.flatten(0, 1))
    return F.silu(out)


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    cu_chunk_seqlens: Tensor,
    seq_idx: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
) -> Tensor:
    """The state space dual form of h[t] = exp(dt A) h[t-1] + dt B x, y = C h + D x, over packed sequences.

    Dao & Gu 2024 (arXiv 2405.21060), section 6: within a chunk a masked matrix product, between chunks the
    recurrence, in order within a sequence. Every chunk is padded to `chunk_size`, so that its products have
    the same shape whichever rows share the batch. The same inputs and cuts therefore give the same states,
    bit for bit, in one call or in several.

    Args:
        x: [tokens, H, P]. dt: [tokens, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [tokens, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations` and `chunk_destinations`.
        sources, destinations: [rows] pool indices. A row without tokens passes its state on unchanged.
        cu_chunk_seqlens, seq_idx, row_chunk_starts: [chunks + 1], [chunks], [rows + 1], as in
            `PrefillChunks`. A chunk has at most `chunk_size` tokens, and a row without tokens has no chunk.
        chunk_destinations: [chunks] pool indices for the state after each chunk.

    Returns: y, [tokens, H, P] in the compute dtype.
    """
    dtype = compute_dtype(x.dtype)
    tokens, heads = x.shape[:2]
    groups = B.shape[1]
    chunks = int(row_chunk_starts[-1])
    cuts = cu_chunk_seqlens[: chunks + 1].long()
    places = cuts[:-1, None] + torch.arange(chunk_size, device=x.device)
    inside = places < cuts[1:, None]
    places = torch.where(inside, places, tokens)

    def padded(packed: Tensor) -> Tensor:
        """[tokens, ...] -> [chunks, chunk_size, ...]; zeros, and so dt = 0, where a chunk is short."""
        return torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])]).to(dtype)[places]

    # From here [chunks, G, heads of a group, chunk_size (, chunk_size, P or N)].
    grouped = (groups, heads // groups)
    steps = padded(dt).movedim(1, 2)
    log_decay = torch.unflatten((steps * A.to(dtype)[:, None]).cumsum(-1), 1, grouped)
    scaled = torch.unflatten((padded(x) * steps.mT[..., None]).movedim(1, 2), 1, grouped)
    keys = padded(B).movedim(1, 2)
    queries = padded(C).movedim(1, 2)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    pairwise = log_decay[..., :, None] - log_decay[..., None, :]
    decay = pairwise.masked_fill(~causal, float("-inf")).exp()
    y = ((queries @ keys.mT)[:, :, None] * decay) @ scaled

    to_end = (log_decay[..., -1:] - log_decay).exp()
    updates = (scaled * to_end[..., None]).mT @ keys[:, :, None]
    entering, leaving, final = _pass_states(
        updates.flatten(1, 2),
        log_decay[..., -1].exp().flatten(1, 2),
        _read(ssm_states, sources).to(dtype),
        seq_idx[:chunks].long(),
        row_chunk_starts.long(),
    )
    carried = queries[:, :, None] @ torch.unflatten(entering, 1, grouped).mT
    y = y + carried * log_decay.exp()[..., None]

    _write(ssm_states, destinations, final)
    _write(ssm_states, chunk_destinations[:chunks], leaving)
    out = x.to(dtype) * D.to(dtype)[:, None]
    out[: int(cuts[-1])] += y.flatten(1, 2).movedim(1, 2)[inside]
    return out


def _pass_states(
    updates: Tensor, decays: Tensor, initial: Tensor, seq_idx: Tensor, row_chunk_starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence between chunks: leaving = decay * entering + update, in order within each row.

    Costs one step a chunk of the longest row. Rows are ranked by length, so that the k-th chunks of all rows
    that have one are neighbours, in the order of the ranked states.

    Args:
        updates: [chunks, H, P, N]. decays: [chunks, H]. initial: [rows, H, P, N].

    Returns: the states that enter and that leave each chunk, [chunks, H, P, N] both, and each row's last
        state, [rows, H, P, N].
    """
    rows = initial.shape[0]
    counts = row_chunk_starts.diff()
    ranked = counts.argsort(descending=True, stable=True)
    rank = ranked.argsort()
    ordinal = torch.arange(seq_idx.shape[0], device=seq_idx.device) - row_chunk_starts[seq_idx]
    order = (ordinal * rows + rank[seq_idx]).argsort()
    sizes = torch.bincount(ordinal).tolist()

    entering, leaving = [updates[:0]], [updates[:0]]
    state = initial[ranked]
    for update, decay in zip(
        torch.split(updates[order], sizes), torch.split(decays[order], sizes), strict=True
    ):
        state = state[: update.shape[0]]
        entering.append(state)
        state = decay[:, :, None, None] * state + update
        leaving.append(state)

    chunk_place = order.argsort()
    left = torch.cat(leaving)[chunk_place]
    own = torch.arange(rows, device=initial.device)
    last_or_initial = torch.where(counts > 0, rows + row_chunk_starts[1:] - 1, own)
    final = torch.cat([initial, left])[last_or_initial]
    return torch.cat(entering)[chunk_place], left, final


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
) -> Tensor:
    """`ssd_chunk_scan` for rows of T tokens each: the recurrence (Gu & Dao 2023, arXiv 2312.00752).

    Args:
        x: [rows, T, H, P]. dt: [rows, T, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [rows, T, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations`.
        sources: [rows] pool indices. destinations: [rows, T] where the state after that token goes.

    Returns: y, [rows, T, H, P] in the compute dtype.
    """
    dtype = compute_dtype(x.dtype)
    x, dt = x.to(dtype), dt.to(dtype)
    heads_a_group = x.shape[2] // B.shape[2]
    key = B.to(dtype).repeat_interleave(heads_a_group, dim=2)
    query = C.to(dtype).repeat_interleave(heads_a_group, dim=2)
    decay = (dt * A.to(dtype)).exp()[..., None, None]
    scaled = (dt[..., None] * x)[..., None]
    state = _read(ssm_states, sources).to(dtype)
    states = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + scaled[:, t] * key[:, t, :, None]
        states.append(state)
    after = torch.stack(states, dim=1)
    _write(ssm_states, destinations.flatten(), after.flatten(0, 1))
    return (after @ query[..., None])[..., 0] + x * D.to(dtype)[:, None]


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Store `keys[tokens[i]]` and `values[tokens[i]]` at `positions[i]` of the cache.

    Args:
        kv_cache: [2, blocks, block size, kv heads, head dim]. Written, in its own dtype.
        keys, values: [T, kv heads, head dim].
        tokens: [W] indices into `keys` and `values`.
        positions: [W] block * block size + offset; -1 writes nothing.
    """
    real = positions >= 0
    tokens, positions = tokens[real], positions[real]
    block_size = kv_cache.shape[2]
    blocks, offsets = positions // block_size, positions % block_size
    kv_cache[0, blocks, offsets] = keys[tokens].to(kv_cache.dtype)
    kv_cache[1, blocks, offsets] = values[tokens].to(kv_cache.dtype)


def paged_attention_decode(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, kv_lengths: Tensor
) -> Tensor:
    """Attention of one token a row to the row's whole sequence, the token itself included.

    Args:
        query: [rows, heads, head dim]; head h reads kv head h // (heads // kv heads).
        kv_cache: [2, blocks, block size, kv heads, head dim], keys and values of the token included.
        block_table: [rows, blocks of the longest row].
        kv_lengths: [rows] tokens of each sequence, 0 for padding rows.

    Returns: [rows, heads, head dim] in the compute dtype.
    """
    dtype = compute_dtype(query.dtype)
    kv_heads, head_dim = kv_cache.shape[3:]
    past = torch.arange(block_table.shape[1] * kv_cache.shape[2], device=query.device) < kv_lengths[:, None]
    grouped = torch.unflatten(query.to(dtype), 1, (kv_heads, -1)) * head_dim**-0.5
    # Memory beyond a row's length may hold NaN, and 0 * NaN is NaN.
    keys, values = (
        cache[block_table].flatten(1, 2).to(dtype).masked_fill(~past[:, :, None, None], 0.0).movedim(1, 2)
        for cache in kv_cache
    )
    scores = (grouped @ keys.mT).masked_fill(~past[:, None, None], float("-inf"))
    attended: Tensor = scores.softmax(-1) @ values
    return attended.flatten(1, 2)


def paged_attention_verify(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, kv_lengths: Tensor, positions: Tensor
) -> Tensor:
    """`paged_attention_decode` for rows of T tokens; a token sees the tokens up to its own position.

    Args:
        query: [rows, T, heads, head dim]. kv_cache, block_table: as for `paged_attention_decode`.
        kv_lengths: [rows] tokens of each sequence, the last real token of the row included.
        positions: [rows, T] positions in the sequence; 0 for padding tokens, behind the real tokens.

    Returns: the shape of `query`, in the compute dtype.
    """
    seen = torch.minimum(positions + 1, kv_lengths[:, None]).flatten()
    table = block_table.repeat_interleave(positions.shape[1], dim=0)
    attended = paged_attention_decode(query.flatten(0, 1), kv_cache, table, seen)
    return torch.unflatten(attended, 0, positions.shape)


def paged_attention_prefill(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lengths: Tensor,
    max_query_tokens: int,
) -> Tensor:
    """Causal attention of each row's tokens, which are the last tokens of the row's sequence.

    Args:
        query: [tokens, heads, head dim], row after row.
        kv_cache, block_table, kv_lengths: as for `paged_attention_decode`.
        query_start_loc: [rows + 1] where each row's tokens start in `query`.
        max_query_tokens: at least the tokens of the longest row.

    Returns: the shape of `query`, in the compute dtype.
    """
    dtype = compute_dtype(query.dtype)
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    scale = head_dim**-0.5
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    starts = query_start_loc.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        new = tokens.stop - tokens.start
        grouped = torch.unflatten(query[tokens].to(dtype), 1, (kv_heads, -1)) * scale
        blocks = block_table[row, : -(-length // block_size)]
        keys, values = (cache[blocks].flatten(0, 1)[:length].to(dtype).movedim(0, 1) for cache in kv_cache)
        future = torch.ones(new, length, dtype=torch.bool, device=query.device).triu(length - new + 1)
        scores = (grouped.permute(1, 2, 0, 3) @ keys[:, None].mT).masked_fill(future, float("-inf"))
        out[tokens] = (scores.softmax(-1) @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in the compute dtype (arXiv 1910.07467)."""
    dtype = compute_dtype(x.dtype)
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mamba-2's output norm: `rms_norm` of x * silu(gate), over each of `groups` parts of the channels."""
    dtype = compute_dtype(x.dtype)
    parts = torch.unflatten(x.to(dtype) * F.silu(gate.to(dtype)), -1, (groups, -1))
    return rms_norm(parts, torch.unflatten(weight, -1, (groups, -1)), eps).flatten(-2)


def apply_rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate x [T, heads, head dim] by `positions` [T], in the compute dtype (arXiv 2104.09864).

    Dimension i is paired with i + head dim / 2; the pair's angle is position * base ** (-2 i / head dim).
    """
    dtype = compute_dtype(x.dtype)
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.to(dtype)[:, None] * (base**-exponents).to(dtype)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _read(states: Tensor, sources: Tensor) -> Tensor:
    """A copy of the states at `sources`, [rows, ...]; zeros for -1."""
    named = (sources >= 0).view(-1, *[1] * (states.dim() - 1))
    return states[sources.clamp(min=0)].masked_fill(~named, 0)


def _write(states: Tensor, destinations: Tensor, values: Tensor) -> None:
    """Store `values` [rows, ...] at `destinations`; -1: nowhere."""
    named = destinations >= 0
    states[destinations[named]] = values[named].to(states.dtype)
