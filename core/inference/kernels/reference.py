"""The model's kernels in plain torch: the CPU path, and the oracle of the fused kernels.

Every function runs on any device and float dtype and computes in `compute_dtype`, float32 or wider. Pools are
those of one layer, `[slots, ...]`. A kernel reads the state before its tokens at a *source* pool index
(-1: zeros) and writes the state after them at a *destination* (-1: nowhere); it reads every source before
it writes any destination, so a row may be updated in place.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
        x: [tokens, conv_dim] raw inputs, rows one after another.
        weight, bias: [conv_dim, kernel], [conv_dim].
        conv_states: [slots, conv_dim, kernel - 1], the last raw inputs, oldest first. Written at
            `destinations` and `checkpoint_destinations`, bit for bit.
        sources, destinations: [rows] pool indices.
        query_start_loc: [rows + 1] where each row's tokens start in `x`.
        token_rows: [tokens] the row of each token.
        checkpoint_rows, checkpoint_ends, checkpoint_destinations: [n] also store the window after the tokens
            of `x` before `checkpoint_ends` (of that row) at this pool index.

    Returns: [tokens, conv_dim] in the compute dtype.
    """
    tokens, conv_dim = x.shape
    width = weight.shape[1] - 1
    rows = torch.arange(sources.shape[0], device=x.device)
    taps = torch.arange(width, device=x.device)

    # Each row's carried window goes in front of its tokens: all that follows is one gather for any length.
    packed = x.new_empty(tokens + rows.shape[0] * width, conv_dim)
    window_starts = query_start_loc[:-1] + rows * width
    packed[window_starts[:, None] + taps] = _read(conv_states, sources).transpose(1, 2).to(x.dtype)
    token_windows = torch.arange(tokens, device=x.device) + token_rows * width
    packed[token_windows + width] = x

    dtype = compute_dtype(x.dtype)
    out = bias.to(dtype).expand(tokens, conv_dim)
    for tap in range(width + 1):
        out = out + packed[token_windows + tap].to(dtype) * weight[:, tap].to(dtype)

    ends = torch.cat([query_start_loc[1:], checkpoint_ends])
    end_rows = torch.cat([rows, checkpoint_rows])
    windows = packed[(ends + end_rows * width)[:, None] + taps].transpose(1, 2)
    _write(conv_states, torch.cat([destinations, checkpoint_destinations]), windows)
    return F.silu(out)


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor, conv_states: Tensor, sources: Tensor, destinations: Tensor
) -> Tensor:
    """`causal_conv1d_prefill` for rows of one token: `x` [rows, conv_dim]. Writes `conv_states`."""
    dtype = compute_dtype(x.dtype)
    window = torch.cat([_read(conv_states, sources).to(x.dtype), x[:, :, None]], dim=2)
    out = bias.to(dtype).expand(x.shape)
    for tap in range(weight.shape[1]):
        out = out + window[:, :, tap].to(dtype) * weight[:, tap].to(dtype)
    _write(conv_states, destinations, window[:, :, 1:])
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
    last_chunk_indices: Tensor,
    checkpoint_chunks: Tensor,
    checkpoint_destinations: Tensor,
) -> Tensor:
    """The state space dual form of h[t] = exp(dt A) h[t-1] + dt B x, y = C h + D x, over packed sequences.

    Dao & Gu 2024 (arXiv 2405.21060), section 6: within a chunk a masked matrix product, between chunks the
    recurrence, in order within a sequence. Every chunk is padded to `chunk_size`, and so goes through
    products of the same shape in whatever company: the same inputs and cuts give the same states, bit for
    bit, also when the cuts fall into several calls.

    Args:
        x: [tokens, H, P]. dt: [tokens, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [tokens, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations` and `checkpoint_destinations`.
        sources, destinations: [rows] pool indices.
        cu_chunk_seqlens, seq_idx, last_chunk_indices: [chunks + 1], [chunks], [rows], as in `PrefillChunks`;
            at most `chunk_size` tokens a chunk, a row without tokens has no chunk and last -1.
        checkpoint_chunks, checkpoint_destinations: [n] also store the state after this chunk here.

    Returns: y, [tokens, H, P] in the compute dtype.
    """
    dtype = compute_dtype(x.dtype)
    tokens, heads = x.shape[:2]
    groups = B.shape[1]
    cuts = cu_chunk_seqlens.long()
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
        seq_idx.long(),
        last_chunk_indices.long(),
    )
    carried = queries[:, :, None] @ torch.unflatten(entering, 1, grouped).mT
    y = y + carried * log_decay.exp()[..., None]

    _write(ssm_states, destinations, final)
    _write(ssm_states, checkpoint_destinations, leaving[checkpoint_chunks])
    return y.flatten(1, 2).movedim(1, 2)[inside] + x.to(dtype) * D.to(dtype)[:, None]


def _pass_states(
    updates: Tensor, decays: Tensor, initial: Tensor, seq_idx: Tensor, last_chunks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence between chunks: leaving = decay * entering + update, in order within each row.

    updates: [chunks, H, P, N]; decays: [chunks, H]; initial: [rows, H, P, N].
    Returns the states entering and leaving each chunk [chunks, H, P, N], and each row's last [rows, H, P, N].
    Costs one step a chunk of the longest row: rows are ranked by length, so that the k-th chunks of all
    rows that have one are neighbours, and in the order of the ranked states.
    """
    rows = initial.shape[0]
    counts = torch.bincount(seq_idx, minlength=rows)
    ranked = counts.argsort(descending=True, stable=True)
    rank = ranked.argsort()
    ordinal = torch.arange(seq_idx.shape[0], device=seq_idx.device) - (counts.cumsum(0) - counts)[seq_idx]
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
    # A row without tokens has last chunk -1, which is no chunk of its own: its state stays what it was.
    own = torch.arange(rows, device=initial.device)
    last_or_initial = torch.where(last_chunks >= 0, rows + last_chunks, own)
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
    """`ssd_chunk_scan` for rows of one token (Gu & Dao 2023, arXiv 2312.00752): the recurrence itself.

    x: [rows, H, P]; dt: [rows, H]; B, C: [rows, G, N]; A, D: [H]; sources, destinations: [rows].
    Returns y, [rows, H, P], in the compute dtype. Writes `ssm_states`.
    """
    dtype = compute_dtype(x.dtype)
    x, dt = x.to(dtype), dt.to(dtype)
    heads_a_group = x.shape[1] // B.shape[1]
    key = B.to(dtype).repeat_interleave(heads_a_group, dim=1)
    query = C.to(dtype).repeat_interleave(heads_a_group, dim=1)
    decay = (dt * A.to(dtype)).exp()[..., None, None]
    state = decay * _read(ssm_states, sources).to(dtype) + (dt[..., None] * x)[..., None] * key[:, :, None]
    _write(ssm_states, destinations, state)
    return (state @ query[..., None])[..., 0] + x * D.to(dtype)[:, None]


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Store `keys` and `values` [T, kv heads, head dim] of `tokens` [W] at `positions` [W].

    Writes `kv_cache` [2, blocks, block size, kv heads, head dim]; a position is block * block size + offset.
    """
    block_size = kv_cache.shape[2]
    blocks, offsets = positions // block_size, positions % block_size
    kv_cache[0, blocks, offsets] = keys[tokens].to(kv_cache.dtype)
    kv_cache[1, blocks, offsets] = values[tokens].to(kv_cache.dtype)


def paged_attention_decode(query: Tensor, kv_cache: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one token a row to its whole sequence, itself included.

    query: [rows, heads, head dim]; kv_cache: [2, blocks, block size, kv heads, head dim], already written;
    block_table: [rows, most blocks]; lengths: [rows]. Head h reads kv head h // (heads // kv heads).
    Returns [rows, heads, head dim] in the compute dtype.
    """
    dtype = compute_dtype(query.dtype)
    kv_heads, head_dim = kv_cache.shape[3:]
    past = torch.arange(block_table.shape[1] * kv_cache.shape[2], device=query.device) < lengths[:, None]
    grouped = torch.unflatten(query.to(dtype), 1, (kv_heads, -1)) * head_dim**-0.5
    # Beyond a row's length lies whatever was in memory, which may be no number, and 0 * NaN is NaN.
    keys, values = (
        cache[block_table].flatten(1, 2).to(dtype).masked_fill(~past[:, :, None, None], 0.0).movedim(1, 2)
        for cache in kv_cache
    )
    scores = (grouped @ keys.mT).masked_fill(~past[:, None, None], float("-inf"))
    attended: Tensor = scores.softmax(-1) @ values
    return attended.flatten(1, 2)


def paged_attention_prefill(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_lengths: Sequence[int],
    sequence_lengths: Sequence[int],
) -> Tensor:
    """Causal attention of each row's last `query_lengths[row]` tokens to its first `sequence_lengths[row]`.

    As `paged_attention_decode`, with query: [tokens, heads, head dim], packed; one row after another.
    """
    dtype = compute_dtype(query.dtype)
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    scale = head_dim**-0.5
    outputs = [query[:0].to(dtype)]
    start = 0
    for row, (new, length) in enumerate(zip(query_lengths, sequence_lengths, strict=True)):
        grouped = torch.unflatten(query[start : start + new].to(dtype), 1, (kv_heads, -1)) * scale
        blocks = block_table[row, : -(-length // block_size)]
        keys, values = (cache[blocks].flatten(0, 1)[:length].to(dtype).movedim(0, 1) for cache in kv_cache)
        future = torch.ones(new, length, dtype=torch.bool, device=query.device).triu(length - new + 1)
        scores = (grouped.permute(1, 2, 0, 3) @ keys[:, None].mT).masked_fill(future, float("-inf"))
        outputs.append((scores.softmax(-1) @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2))
        start += new
    return torch.cat(outputs)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in the compute dtype (arXiv 1910.07467)."""
    dtype = compute_dtype(x.dtype)
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mamba-2's output norm: `rms_norm` of x * silu(gate), in `groups` equal parts of the last dimension."""
    dtype = compute_dtype(x.dtype)
    parts = torch.unflatten(x.to(dtype) * F.silu(gate.to(dtype)), -1, (groups, -1))
    return rms_norm(parts, torch.unflatten(weight, -1, (groups, -1)), eps).flatten(-2)


def apply_rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate [T, heads, head dim] by absolute position, in the compute dtype (arXiv 2104.09864).

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
    """[rows, ...] a copy of the states at `sources`, zeros for -1."""
    known = (sources >= 0).view(-1, *[1] * (states.dim() - 1))
    return states[sources.clamp(min=0)].masked_fill(~known, 0)


def _write(states: Tensor, destinations: Tensor, values: Tensor) -> None:
    """Store `values` [rows, ...] at `destinations`, except where that is -1."""
    wanted = destinations >= 0
    states[destinations[wanted]] = values[wanted].to(states.dtype)
