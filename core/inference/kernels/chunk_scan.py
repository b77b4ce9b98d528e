"""The last SSD stage: each chunk's outputs, from its own tokens and from the state that enters it."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .specialisation import Specialisation

InputPrecision = Literal["ieee", "tf32x3", "tf32"]
"""How float32 operands are multiplied: as they are, without tensor cores; in three tensor core products of
their 11-bit halves, which loses next to nothing; in one such product of operands cut to 11 bits."""

_NUM_WARPS = 4


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
) -> Tensor:
    """y[m] = exp(l[m]) C[m] entering + sum over k <= m of CB[m, k] exp(l[m] - l[k]) dt[k] x[k] + D x[m].

    m and k are tokens of one chunk, l is its `log_decays` (Dao & Gu 2024, arXiv 2405.21060, section 6).
    Narrower inputs are widened to float32, which nothing is narrowed from again, except as
    `input_precision` says. An empty chunk costs empty programs. Launches one kernel, whose grid and
    addresses depend on shapes alone: it can be captured in a CUDA graph, and synchronises nothing.

    Args:
        x: [tokens, H, P]. C: [tokens, G, N]. Both of any strides but the last, which is 1.
        dt, log_decays: [H, chunks, chunk size] float32, contiguous; log_decays are sums of dt * A from the
            start of each chunk.
        CB: [chunks, G, chunk size, chunk size] float32, contiguous: C[m] B[k]; what is above the diagonal,
            or beyond a chunk's tokens, does not matter.
        D: [H].
        entering_states: [chunks, H, P, N] float32, contiguous.
        cu_chunk_seqlens: [chunks + 1] int32, where each chunk starts, and the trailing total.

    Returns: y, [tokens, H, P] float32; unspecified for tokens of no chunk.

    Raises:
        ValueError: a tensor is not as contiguous as it must be.
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
    blocks, num_stages = _blocks(chunk_size, head_dim, state_dim, input_precision)
    y = torch.empty(tokens, heads, head_dim, dtype=torch.float32, device=x.device)
    grid = (
        triton.cdiv(chunk_size, blocks["BLOCK_M"]) * triton.cdiv(head_dim, blocks["BLOCK_P"]),
        heads,
        chunks,
    )
    _chunk_scan_kernel[grid](
        x, dt, log_decays, C, CB, D, entering_states, cu_chunk_seqlens, y,
        x.stride(0), x.stride(1), C.stride(0), C.stride(1), D.stride(0), dt.stride(0),
        heads, groups, head_dim, state_dim, chunk_size, input_precision,
        **blocks, num_warps=_NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return y


def _blocks(
    chunk_size: int, head_dim: int, state_dim: int, input_precision: InputPrecision
) -> tuple[dict[str, int], int]:
    """Tile sizes and pipeline depth, by shape alone: the same inputs give the same bits in any company.

    A third stage would cost the plain float32 product 42 registers of a thread, and with them one program in
    four; tensor cores need it to be fed.
    """
    block_p = min((64, 32), key=lambda block: triton.cdiv(head_dim, block) * block)
    blocks = {
        "BLOCK_M": min(64, _padded(chunk_size)),
        "BLOCK_P": min(block_p, _padded(head_dim)),
        "BLOCK_N": min(32, _padded(state_dim)),
        "BLOCK_K": min(32, _padded(chunk_size)),
    }
    return blocks, 2 if input_precision == "ieee" else 3


def _padded(size: int) -> int:
    """The sides of a product are powers of two, and 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def _chunk_scan_kernel(
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
    # The blocks of one head run side by side and share its state in the L2 cache, those of one group its CB.
    p_blocks: tl.constexpr = tl.cdiv(head_dim, BLOCK_P)
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
    # CB, dt and the decays have `chunk_size` tokens of every chunk. Masks that do not depend on the chunk's
    # own length leave the loads wide, and beyond it all is finite and multiplied by no token's x.
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
        acc = tl.dot(queries.to(tl.float32), tl.trans(states), acc, input_precision=INPUT_PRECISION)
    acc *= tl.exp(decay_m)[:, None]

    for first_k in range(0, tl.minimum(first_m + BLOCK_M, length), BLOCK_K):
        k = first_k + tl.arange(0, BLOCK_K)
        decay_k = tl.load(log_decays + k, mask=k < chunk_size, other=0.0)
        dt_k = tl.load(dt + k, mask=k < chunk_size, other=0.0)
        scores = tl.load(
            CB + m[:, None] * chunk_size + k[None, :],
            mask=in_chunk[:, None] & (k < chunk_size)[None, :],
            other=0.0,
        )
        # Above the diagonal, where nothing is wanted, the difference is positive, and could overflow.
        scores *= tl.exp(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * dt_k[None, :]
        scores = tl.where(m[:, None] >= k[None, :], scores, 0.0)
        values = tl.load(
            x + k[:, None] * x_token_stride + p[None, :],
            mask=(k < length)[:, None] & is_channel[None, :],
            other=0.0,
        )
        acc = tl.dot(scores, values.to(tl.float32), acc, input_precision=INPUT_PRECISION)

    inside = is_token[:, None] & is_channel[None, :]
    skipped = tl.load(x + m[:, None] * x_token_stride + p[None, :], mask=inside, other=0.0)
    acc += tl.load(D + head * D_stride).to(tl.float32) * skipped.to(tl.float32)
    tl.store(y + m[:, None] * (heads * head_dim) + p[None, :], acc, mask=inside)


def hopper_specialisations() -> list[Specialisation]:
    """What `chunk_scan` launches at the shapes of Nemotron-H-8B; x and C are parts of one tensor there."""
    shapes: list[tuple[InputPrecision, str, int]] = [
        ("ieee", "fp32", 128),
        ("ieee", "fp32", 256),
        ("ieee", "bf16", 128),
        ("tf32x3", "fp32", 128),
        ("tf32x3", "fp32", 256),
        ("tf32", "fp32", 128),
    ]
    return [_specialisation(*shape) for shape in shapes]


def _specialisation(input_precision: InputPrecision, inputs: str, chunk_size: int) -> Specialisation:
    dimensions = {"head_dim": 64, "state_dim": 128, "chunk_size": chunk_size}
    blocks, num_stages = _blocks(**dimensions, input_precision=input_precision)
    pointers = {"x": inputs, "C": inputs} | dict.fromkeys(
        ("dt", "log_decays", "CB", "D", "entering_states", "y"), "fp32"
    )
    strides = ("x_token_stride", "x_head_stride", "C_token_stride", "C_group_stride", "decay_head_stride")
    constexprs: dict[str, Any] = dimensions | blocks
    return Specialisation(
        name=f"chunk_scan {input_precision} {inputs} chunk {chunk_size}",
        kernel=_chunk_scan_kernel,
        signature={name: f"*{dtype}" for name, dtype in pointers.items()}
        | {"cu_chunk_seqlens": "*i32"}
        | dict.fromkeys(strides, "i64"),
        constexprs=constexprs
        | {"heads": 128, "groups": 8, "D_stride": 1, "INPUT_PRECISION": input_precision},
        divisible_by_16=(*pointers, *strides),
        num_warps=_NUM_WARPS,
        num_stages=num_stages,
    )
