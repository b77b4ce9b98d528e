"""The last SSD stage: a chunk's outputs, from the chunk's tokens and from the state that enters the chunk.

The function has the name that mamba_ssm and megatron-core give to this stage, `chunk_scan`.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contexts.row_ladder import power_of_two

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels of this process, on a CPU."""

InputPrecision = Literal["ieee", "tf32x3", "tf32"]
"""How float32 operands are multiplied. "ieee": in float32, without tensor cores. "tf32x3": in three tensor
core products of the operands' 11-bit halves, with errors near float32's. "tf32": in one tensor core product
of operands that are cut to 11 bits."""


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    log_decays: Tensor,
    C: Tensor,
    CB: Tensor,
    D: Tensor,
    entering_states: Tensor,
    cu_chunk_seqlens: Tensor,
    input_precision: InputPrecision = "ieee",
    out: Tensor | None = None,
) -> Tensor:
    """y[m] = exp(l[m]) C[m] entering + sum over k <= m of CB[m, k] exp(l[m] - l[k]) dt[k] x[k] + D x[m].

    m and k are tokens of one chunk, l is the chunk's `log_decays` (Dao & Gu 2024, arXiv 2405.21060, section
    6). Both products multiply numbers of the dtype of `entering_states`, to which the masked scores are
    rounded, and add in float32. An empty chunk costs empty programs. One launch, whose grid and addresses
    depend on shapes alone: a CUDA graph can capture it. Does not synchronise.

    Args:
        x: [tokens, H, P]. C: [tokens, G, N]. Float32 or narrower; the last stride is 1.
        dt, log_decays: [H, chunks, chunk size] float32, contiguous. log_decays are sums of dt * A from the
            start of each chunk.
        CB: [chunks, G, chunk size, chunk size] float32 or narrower, contiguous: C[m] B[k]. Values above the
            diagonal and beyond a chunk's tokens have no effect.
        D: [H].
        entering_states: [chunks, H, P, N] float32, or the 16-bit dtype of x and C, contiguous.
        cu_chunk_seqlens: [chunks + 1] int32, where each chunk starts, and the trailing total.
        input_precision: how float32 operands are multiplied.
        out: where y goes, contiguous, of the dtype of x; None allocates it.

    Returns: y, [tokens, H, P] in the dtype of x; unspecified for tokens of no chunk.

    Raises:
        ValueError: a tensor has other strides.
    """
    for name, dense in (
        ("dt", dt),
        ("log_decays", log_decays),
        ("CB", CB),
        ("entering_states", entering_states),
    ):
        if not dense.is_contiguous():
            raise ValueError(f"{name} has strides {dense.stride()}; accepted: a contiguous tensor")
    for name, tokens_first in (("x", x), ("C", C)):
        if tokens_first.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tokens_first.stride()}; accepted: a last stride of 1")
    tokens, heads, head_dim = x.shape
    groups, state_dim = C.shape[1:]
    chunks, chunk_size = dt.shape[1:]
    operands = entering_states.dtype
    blocks, num_warps, num_stages = block_sizes(chunk_size, head_dim, state_dim, operands, input_precision)
    y = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device) if out is None else out
    grid = (
        triton.cdiv(chunk_size, blocks["BLOCK_M"]) * triton.cdiv(head_dim, blocks["BLOCK_P"]),
        heads,
        chunks,
    )
    chunk_scan_kernel[grid](
        x, dt, log_decays, C, CB, D, entering_states, cu_chunk_seqlens, y,
        x.stride(0), x.stride(1), C.stride(0), C.stride(1), D.stride(0), dt.stride(0),
        heads, groups, head_dim, state_dim, chunk_size, input_precision,
        **blocks, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def block_sizes(
    chunk_size: int,
    head_dim: int,
    state_dim: int,
    operands: torch.dtype = torch.float32,
    input_precision: InputPrecision = "ieee",
) -> tuple[dict[str, int], int, int]:
    """Tile sizes, warps and pipeline stages. The number of tokens has no say: other rows change no bits.

    Tensor cores need three stages to be fed. A third stage would cost the "ieee" product of float32 42
    registers a thread, and with them one of four programs on a multiprocessor. Those of 16 bits were the
    fastest of twelve on an H100.
    """
    block_p = min((64, 32), key=lambda block: triton.cdiv(head_dim, block) * block)
    narrow = operands.itemsize == 2
    blocks = {
        "BLOCK_M": min(64, padded_side(chunk_size)),
        "BLOCK_P": min(block_p, padded_side(head_dim)),
        "BLOCK_N": min(128 if narrow else 32, padded_side(state_dim)),
        "BLOCK_K": min(32, padded_side(chunk_size)),
    }
    return blocks, 4, 2 if input_precision == "ieee" and not narrow else 3


def padded_side(size: int) -> int:
    """`size` as a side of a Triton product: a power of two, 16 at least."""
    return max(16, power_of_two(size))


@triton.jit
def multiply_add(a, b, acc, INPUT_PRECISION: tl.constexpr):
    """acc + a b, in float32. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)


@triton.jit
def masked_scores(scores, decay_m, decay_k, dt_k, m, k):
    """The factor of x[k] in y[m]: C[m] B[k] times the decay from k to m and the step of k; 0 for k > m."""
    # Above the diagonal the difference is positive, and its exponential could overflow.
    scores *= tl.exp(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * dt_k[None, :]
    return tl.where(m[:, None] >= k[None, :], scores, 0.0)


@triton.jit
def chunk_scan_kernel(
    # Pointers
    x,
    dt,
    log_decays,
    C,
    CB,
    D,
    entering_states,
    cu_chunk_seqlens,
    y,
    # Strides
    x_token_stride: tl.int64,
    x_head_stride: tl.int64,
    C_token_stride: tl.int64,
    C_group_stride: tl.int64,
    D_stride: tl.int64,
    decay_head_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr,
    groups: tl.constexpr,
    head_dim: tl.constexpr,
    state_dim: tl.constexpr,
    chunk_size: tl.constexpr,
    # Meta-parameters
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
        queries = tl.load(
            C + m[:, None] * C_token_stride + n[None, :],
            mask=is_token[:, None] & (n < state_dim)[None, :],
            other=0.0,
        )
        states = tl.load(
            entering_states + p[:, None] * state_dim + n[None, :],
            mask=is_channel[:, None] & (n < state_dim)[None, :],
            other=0.0,
        )
        acc = multiply_add(queries.to(operand), tl.trans(states), acc, INPUT_PRECISION)
    acc *= tl.exp(decay_m)[:, None]

    for first_k in range(0, tl.minimum(first_m + BLOCK_M, length), BLOCK_K):
        k = first_k + tl.arange(0, BLOCK_K)
        decay_k = tl.load(log_decays + k, mask=k < chunk_size, other=0.0)
        dt_k = tl.load(dt + k, mask=k < chunk_size, other=0.0)
        scores = tl.load(
            CB + m[:, None] * chunk_size + k[None, :],
            mask=in_chunk[:, None] & (k < chunk_size)[None, :],
            other=0.0,
        ).to(tl.float32)
        scores = masked_scores(scores, decay_m, decay_k, dt_k, m, k)
        values = tl.load(
            x + k[:, None] * x_token_stride + p[None, :],
            mask=(k < length)[:, None] & is_channel[None, :],
            other=0.0,
        )
        acc = multiply_add(scores.to(operand), values.to(operand), acc, INPUT_PRECISION)

    inside = is_token[:, None] & is_channel[None, :]
    skipped = tl.load(x + m[:, None] * x_token_stride + p[None, :], mask=inside, other=0.0)
    acc = tl.fma(skipped.to(tl.float32), tl.load(D + head * D_stride).to(tl.float32), acc)
    tl.store(y + m[:, None] * (heads * head_dim) + p[None, :], acc.to(y.dtype.element_ty), mask=inside)
