"""The SSD stages in Triton (arXiv 2405.21060, section 6); `ssd.ssd_chunk_scan` runs them in this order.

    chunk_cumsum  sums of dt * A within each chunk, token after token
    ssd_states    updates of chunks and the recurrence over a row's chunks
    chunk_scores  C[m] B[k] of the tokens m and k of one chunk
    chunk_scan    a chunk's outputs, from its tokens and the state that enters it

m and k are tokens of one chunk, and l are its `log_decays`, sums of dt * A from the chunk's start, [H,
chunks, chunk size] float32, contiguous, as is `dt`. A ValueError is raised where a last stride is not 1.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import check_last_stride, check_slots
from .step_rows import ScanRows
from .tiles import load_tile

SUM_WARPS = 1
_MAX_HEADS = 32  # of a program, which is one warp


def chunk_cumsum(dt: Tensor, A: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """l[k] = fma(dt[k], A, l[k - 1]) from 0 on; returns the steps, 0 after a chunk's tokens, and l."""
    heads, chunks = dt.shape[1], cu_chunk_seqlens.shape[0] - 1
    chunk_dt, log_decays = torch.empty(2, heads, chunks, chunk_size, dtype=torch.float32, device=dt.device)
    block_h = heads_of_a_warp(heads)
    chunk_cumsum_kernel[(chunks, ceil_div(heads, block_h))](
        dt, A, cu_chunk_seqlens, chunk_dt, log_decays,
        *dt.stride(), A.stride(0), chunk_dt.stride(0),
        HEADS=heads, CHUNK_SIZE=chunk_size, BLOCK_H=block_h, num_warps=SUM_WARPS,
    )  # fmt: skip
    return chunk_dt, log_decays


def heads_of_a_warp(heads: int) -> int:
    """The heads whose sums one program adds up side by side."""
    covering: int = triton.next_power_of_2(heads)
    return min(_MAX_HEADS, covering)


@triton.jit
def side_by_side(v, first: tl.constexpr):
    """Eight vectors [n] of a tuple, from `first` on, as the columns of a tile [n, 8]."""
    even = tl.join(tl.join(v[first], v[first + 4]), tl.join(v[first + 2], v[first + 6]))
    odd = tl.join(tl.join(v[first + 1], v[first + 5]), tl.join(v[first + 3], v[first + 7]))
    return tl.reshape(tl.join(even, odd), (v[0].shape[0], 8))


@triton.jit
def sum_decays(dt, rate, steps_out, sums_out, token_stride, length, stored, is_head, BLOCK_H: tl.constexpr):
    """Store the steps and the sums of `stored` tokens, 0 from `length` on; 16 loads run at once."""
    place = tl.arange(0, 8)[None, :]
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(0, stored, 16):
        steps = ()
        for token in tl.static_range(16):
            step = tl.load(
                dt + (first + token) * token_stride, mask=is_head & (first + token < length), other=0.0
            )
            steps = steps + (step.to(tl.float32),)
        sums = ()
        for token in tl.static_range(16):
            total = tl.fma(steps[token], rate, total)
            sums = sums + (total,)
        for half in tl.static_range(0, 16, 8):
            to = first + place + half
            inside = is_head[:, None] & (to < stored)
            tl.store(steps_out[:, None] + to, side_by_side(steps, half), mask=inside)
            tl.store(sums_out[:, None] + to, side_by_side(sums, half), mask=inside)


@triton.jit
def chunk_cumsum_kernel(
    # Pointers
    dt, A, cu_chunk_seqlens, chunk_dt, log_decays,
    # Strides
    dt_token_stride: tl.int64, dt_head_stride: tl.int64, a_stride, out_head_stride: tl.int64,
    # Meta-parameters
    HEADS: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has a chunk and BLOCK_H heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
    rate = tl.load(A + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
    out = head * out_head_stride + chunk * CHUNK_SIZE
    sum_decays(
        dt + start * dt_token_stride + head * dt_head_stride, rate, chunk_dt + out, log_decays + out,
        dt_token_stride, length, CHUNK_SIZE, is_head, BLOCK_H,
    )  # fmt: skip


INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels of this process, on a CPU."""


def chunk_scan(
    x: Tensor, dt: Tensor, log_decays: Tensor, C: Tensor, CB: Tensor, D: Tensor,
    entering_states: Tensor, cu_chunk_seqlens: Tensor, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[m] = exp(l[m]) C[m] entering + sum over k <= m of CB[m, k] exp(l[m] - l[k]) dt[k] x[k] + D x[m].

    Both products multiply numbers of the dtype of `entering_states` [chunks, H, P, N], to which the masked
    scores are rounded. Values of CB above the diagonal and beyond a chunk's tokens have no effect; y is
    unspecified for tokens of no chunk.
    """
    check_last_stride(x=x, C=C)
    tokens, heads, head_dim = x.shape
    groups, state_dim = C.shape[1:]
    chunks, chunk_size = dt.shape[1:]
    operands = entering_states.dtype
    blocks, num_warps, num_stages = scan_blocks(chunk_size, head_dim, state_dim, operands)
    y = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device) if out is None else out
    tiles = ceil_div(chunk_size, blocks["BLOCK_M"]) * ceil_div(head_dim, blocks["BLOCK_P"])
    chunk_scan_kernel[(tiles, heads, chunks)](
        x, dt, log_decays, C, CB, D, entering_states, cu_chunk_seqlens, y,
        x.stride(0), x.stride(1), C.stride(0), C.stride(1), D.stride(0), dt.stride(0),
        heads, groups, head_dim, state_dim, chunk_size,
        **blocks, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def scan_blocks(
    chunk_size: int, head_dim: int, state_dim: int, operands: torch.dtype = torch.float32
) -> tuple[dict[str, int], int, int]:
    """Tile sizes, warps and pipeline stages. The number of tokens has no say: other rows change no bits."""
    block_p = min((64, 32), key=lambda block: ceil_div(head_dim, block) * block)
    narrow = operands.itemsize == 2
    blocks = {
        "BLOCK_M": min(64, padded_side(chunk_size)),
        "BLOCK_P": min(block_p, padded_side(head_dim)),
        "BLOCK_N": min(128 if narrow else 32, padded_side(state_dim)),
        "BLOCK_K": min(32, padded_side(chunk_size)),
    }
    return blocks, 4, 3 if narrow else 2


def padded_side(size: int) -> int:
    """`size` as a side of a Triton product: a power of two, 16 at least."""
    covering: int = triton.next_power_of_2(size)
    return max(16, covering)


@triton.jit
def multiply_add(a, b, acc):
    """acc + a b, in float32. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def masked_scores(scores, decay_m, decay_k, dt_k, m, k):
    """The factor of x[k] in y[m]: C[m] B[k] times the decay from k to m and the step of k; 0 for k > m."""
    # Above the diagonal the difference is positive, and its exponential could overflow.
    scores *= tl.exp(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * dt_k[None, :]
    return tl.where(m[:, None] >= k[None, :], scores, 0.0)


@triton.jit
def chunk_scan_kernel(
    # Pointers
    x, dt, log_decays, C, CB, D, entering_states, cu_chunk_seqlens, y,
    # Strides
    x_token_stride: tl.int64, x_head_stride: tl.int64, C_token_stride: tl.int64,
    C_group_stride: tl.int64, D_stride: tl.int64, decay_head_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr, groups: tl.constexpr, head_dim: tl.constexpr, state_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Blocks of one head run side by side and share the head's state in the L2 cache; those of one group, CB.
    p_blocks: tl.constexpr = tl.cdiv(head_dim, BLOCK_P)
    operand: tl.constexpr = entering_states.dtype.element_ty
    first_m = tl.program_id(0) // p_blocks * BLOCK_M
    head = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    group = head // (heads // groups)

    start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
    if first_m >= length:
        return

    m = first_m + tl.arange(0, BLOCK_M)
    p = tl.program_id(0) % p_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    is_token = m < length
    is_channel = p < head_dim
    # CB, dt and the decays hold `chunk_size` tokens of every chunk. A mask that does not depend on the
    # chunk's own length leaves the loads wide. No token's output depends on a value beyond the length.
    in_chunk = m < chunk_size

    x += start * x_token_stride + head * x_head_stride
    C += start * C_token_stride + group * C_group_stride
    dt += head * decay_head_stride + chunk * chunk_size
    log_decays += head * decay_head_stride + chunk * chunk_size
    CB += (chunk * groups + group) * (chunk_size * chunk_size)
    entering_states += (chunk * heads + head) * (head_dim * state_dim)
    y += start * (heads * head_dim) + head * head_dim

    decay_m = tl.load(log_decays + m, mask=in_chunk, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for first_n in range(0, state_dim, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        queries = load_tile(C + m[:, None] * C_token_stride + n[None, :], is_token, n < state_dim)
        states = load_tile(entering_states + p[:, None] * state_dim + n[None, :], is_channel, n < state_dim)
        acc = multiply_add(queries.to(operand), tl.trans(states), acc)
    acc *= tl.exp(decay_m)[:, None]

    for first_k in range(0, tl.minimum(first_m + BLOCK_M, length), BLOCK_K):
        k = first_k + tl.arange(0, BLOCK_K)
        decay_k = tl.load(log_decays + k, mask=k < chunk_size, other=0.0)
        dt_k = tl.load(dt + k, mask=k < chunk_size, other=0.0)
        scores = load_tile(CB + m[:, None] * chunk_size + k[None, :], in_chunk, k < chunk_size).to(tl.float32)
        scores = masked_scores(scores, decay_m, decay_k, dt_k, m, k)
        values = load_tile(x + k[:, None] * x_token_stride + p[None, :], k < length, is_channel)
        acc = multiply_add(scores.to(operand), values.to(operand), acc)

    inside = is_token[:, None] & is_channel[None, :]
    skipped = tl.load(x + m[:, None] * x_token_stride + p[None, :], mask=inside, other=0.0)
    acc = tl.fma(skipped.to(tl.float32), tl.load(D + head * D_stride).to(tl.float32), acc)
    tl.store(y + m[:, None] * (heads * head_dim) + p[None, :], acc.to(y.dtype.element_ty), mask=inside)


SCORE_WARPS = 4


def chunk_scores(
    C: Tensor, B: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor, operands: torch.dtype
) -> Tensor:
    """CB[m, k] = C[m] B[k] for k <= m, [chunks, G, chunk size, chunk size] float32, added over N in order."""
    check_last_stride(C=C, B=B)
    chunks, (groups, state_dim) = cu_chunk_seqlens.shape[0] - 1, C.shape[1:]
    CB = torch.empty(chunks, groups, chunk_size, chunk_size, dtype=torch.float32, device=C.device)
    blocks, num_stages = score_blocks(chunk_size, state_dim, operands)
    tiles = ceil_div(chunk_size, blocks["BLOCK_M"]) * ceil_div(chunk_size, blocks["BLOCK_K"])
    chunk_scores_kernel[(tiles, groups, chunks)](
        C, B, CB, cu_chunk_seqlens,
        C.stride(0), C.stride(1), B.stride(0), B.stride(1),
        groups, state_dim, chunk_size, operands == torch.float32,
        **blocks, num_warps=SCORE_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return CB


def score_blocks(chunk_size: int, state_dim: int, operands: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes in m, in k and in N, and pipeline stages; in Triton's interpreter those of `chunk_scan`."""
    scan, _, _ = scan_blocks(chunk_size, 1, state_dim, operands)
    blocks = {name: scan[name] for name in ("BLOCK_M", "BLOCK_K", "BLOCK_N")}
    if not INTERPRETED:
        blocks |= {"BLOCK_K": min(64, padded_side(chunk_size)), "BLOCK_N": min(64, padded_side(state_dim))}
        if operands == torch.float32:
            blocks["BLOCK_N"] = min(32, blocks["BLOCK_N"])
    return blocks, 2


@triton.jit
def chunk_scores_kernel(
    # Pointers
    C, B, CB, cu_chunk_seqlens,
    # Strides
    C_token_stride: tl.int64, C_group_stride: tl.int64,
    B_token_stride: tl.int64, B_group_stride: tl.int64,
    # Dimensions
    groups: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr,
    # Meta-parameters
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program has a chunk, a group and one tile."""
    k_blocks: tl.constexpr = (chunk_size + BLOCK_K - 1) // BLOCK_K
    operand: tl.constexpr = tl.float32 if WIDE else C.dtype.element_ty
    first_m = tl.program_id(0) // k_blocks * BLOCK_M
    first_k = tl.program_id(0) % k_blocks * BLOCK_K
    group = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
    if (first_m < length) & (first_k < tl.minimum(first_m + BLOCK_M, length)):
        m = first_m + tl.arange(0, BLOCK_M)
        k = first_k + tl.arange(0, BLOCK_K)
        C += start * C_token_stride + group * C_group_stride
        B += start * B_token_stride + group * B_group_stride
        scores = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        for first_n in range(0, state_dim, BLOCK_N):
            n = first_n + tl.arange(0, BLOCK_N)
            queries = load_tile(C + m[:, None] * C_token_stride + n[None, :], m < length, n < state_dim)
            keys = load_tile(B + k[:, None] * B_token_stride + n[None, :], k < length, n < state_dim)
            scores = multiply_add(queries.to(operand), tl.trans(keys.to(operand)), scores)
        CB += (chunk * groups + group) * (chunk_size * chunk_size)
        inside = (m < chunk_size)[:, None] & (k < chunk_size)[None, :]
        tl.store(CB + m[:, None] * chunk_size + k[None, :], scores, mask=inside)


STATE_WARPS = 4


def ssd_states(
    x: Tensor, B: Tensor, dt: Tensor, log_decays: Tensor, ssm_states: Tensor, rows: ScanRows,
    operands: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """leaving = exp(l[last]) entering + sum over k of exp(l[last] - l[k]) dt[k] x[k] B[k], chunk by chunk.

    Products multiply numbers of the dtype `operands`, to which x with its decay and time step is rounded. A
    row without chunks copies its source bit for bit. Returns the states that enter the chunks, [chunks, H, P,
    N].
    """
    check_slots(ssm_states=ssm_states)
    check_last_stride(x=x, B=B)
    heads, head_dim, state_dim = ssm_states.shape[1:]
    chunks, chunk_size = dt.shape[1:]
    operands = operands or x.dtype
    entering = torch.empty(chunks, heads, head_dim, state_dim, dtype=operands, device=x.device)
    blocks, num_stages = state_blocks(chunk_size, head_dim, state_dim, operands)
    tiles = ceil_div(head_dim, blocks["BLOCK_P"]) * ceil_div(state_dim, blocks["BLOCK_N"])
    ssd_states_kernel[(tiles * heads * rows.sources.shape[0],)](
        x, B, dt, log_decays, ssm_states, entering,
        rows.sources, rows.destinations, rows.cu_chunk_seqlens, rows.row_chunk_starts,
        rows.chunk_destinations,
        x.stride(0), x.stride(1), B.stride(0), B.stride(1), ssm_states.stride(0), dt.stride(0),
        heads, heads // B.shape[1], head_dim, state_dim, chunk_size,
        **blocks, num_warps=STATE_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return entering


def state_blocks(
    chunk_size: int, head_dim: int, state_dim: int, operands: torch.dtype = torch.bfloat16
) -> tuple[dict[str, int], int]:
    """Tile sizes and pipeline stages. The number of rows has no say, so that other rows change no bits."""
    wide = operands == torch.float32
    blocks = {
        "BLOCK_P": min(32, padded_side(head_dim)),
        "BLOCK_N": min(64 if wide else 128, padded_side(state_dim)),
        "BLOCK_K": min(16 if wide else 128, padded_side(chunk_size)),
    }
    return blocks, 1 if wide else 4 if chunk_size <= 128 else 2


@triton.jit
def add_update(update, values, keys, decay_of_chunk, decay, step, operand: tl.constexpr):
    """update + the sum over tokens k of exp(l[last] - l[k]) dt[k] x[k] B[k]; x and B are values and keys."""
    scale = tl.exp(tl.minimum(decay_of_chunk - decay, 0.0)) * step
    scaled = (values.to(tl.float32) * scale[:, None]).to(operand)
    return multiply_add(tl.trans(scaled), keys.to(operand), update)


@triton.jit
def ssd_states_kernel(
    # Pointers
    x, B, dt, log_decays, ssm_states, entering,
    sources, destinations, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
    # Strides
    x_token_stride: tl.int64, x_head_stride: tl.int64,
    B_token_stride: tl.int64, B_group_stride: tl.int64,
    slot_stride: tl.int64, decay_head_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr, heads_of_group: tl.constexpr,
    head_dim: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program has a row, a head, BLOCK_P of P and BLOCK_N of N. No other program touches this part."""
    operand: tl.constexpr = entering.dtype.element_ty
    n_blocks: tl.constexpr = (state_dim + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = (head_dim + BLOCK_P - 1) // BLOCK_P * n_blocks
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    row = tl.program_id(0) // (tiles * heads)
    p = tile // n_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]

    x += head * x_head_stride
    B += head // heads_of_group * B_group_stride
    dt += head * decay_head_stride
    log_decays += head * decay_head_stride

    first = tl.load(row_chunk_starts + row)
    end = tl.load(row_chunk_starts + row + 1)
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    moves = (destination >= 0) & (destination != source)

    within = head * (head_dim * state_dim) + p[:, None] * state_dim + n[None, :]
    slots = ssm_states + within
    has_initial = (source >= 0) & ((first < end) | moves)
    initial = tl.load(slots + source * slot_stride, mask=inside & has_initial, other=0.0)
    tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
    if first == end:
        if moves:
            tl.store(slots + destination * slot_stride, initial, mask=inside)
    else:
        state = initial.to(tl.float32)
        state_size: tl.constexpr = heads * head_dim * state_dim
        entry = entering + within + first.to(tl.int64) * state_size
        chunk_offset = first.to(tl.int64) * chunk_size
        checkpoint = tl.load(chunk_destinations + first)
        for chunk in range(first, end):
            # Triton loads ahead in a loop that carries no value of the chunk before the last: the bounds are
            # read anew.
            start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
            length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
            next_checkpoint = tl.load(chunk_destinations + chunk + 1, mask=chunk + 1 < end, other=-1)
            tl.store(entry, state.to(entering.dtype.element_ty), mask=inside)
            decay_of_chunk = tl.load(log_decays + chunk_offset + chunk_size - 1)
            update = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
            for first_k in tl.static_range(0, chunk_size, BLOCK_K):
                k = first_k + tl.arange(0, BLOCK_K)
                real = k < length
                decay = tl.load(log_decays + chunk_offset + k, mask=k < chunk_size, other=0.0)
                step = tl.load(dt + chunk_offset + k, mask=k < chunk_size, other=0.0)
                values = load_tile(x + (start + k)[:, None] * x_token_stride + p[None, :], real, p < head_dim)
                keys = load_tile(B + (start + k)[:, None] * B_token_stride + n[None, :], real, n < state_dim)
                update = add_update(update, values, keys, decay_of_chunk, decay, step, operand)
            # Written as a sum, Triton would add within the product, where tensor cores round otherwise.
            state = tl.fma(state, tl.exp(decay_of_chunk), update)
            if checkpoint >= 0:
                tl.store(slots + checkpoint * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
            checkpoint = next_checkpoint
            entry += state_size
            chunk_offset += chunk_size
        if destination >= 0:
            tl.store(slots + destination * slot_stride, state.to(slots.dtype.element_ty), mask=inside)
