"""The SSD stage that multiplies a chunk's queries and keys: C[m] B[k] of tokens m and k of one chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ssd_output import INTERPRETED, block_sizes, multiply_add, padded_side

NUM_WARPS = 4


def chunk_scores(
    C: Tensor, B: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor, operands: torch.dtype
) -> Tensor:
    """CB[m, k] = C[m] B[k], for the tokens of each chunk and for k <= m.

    Products multiply numbers of `operands`, and add in float32 over N in order. Tiles above the diagonal and
    behind a chunk's tokens are not written, for `chunk_scan` uses nothing from there. One launch, whose grid
    and addresses depend on shapes alone: a CUDA graph can capture it. Does not synchronise.

    Args:
        C, B: [tokens, G, N]; the last stride is 1.
        chunk_size: the most tokens of a chunk.
        cu_chunk_seqlens: [chunks + 1] int32, where each chunk starts, and the trailing total.
        operands: the dtype of C and B, or float32.

    Returns: CB, [chunks, G, chunk size, chunk size] float32; unspecified where k > m, and behind the tokens.

    Raises:
        ValueError: a tensor has another last stride.
    """
    for name, tokens_first in (("C", C), ("B", B)):
        if tokens_first.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tokens_first.stride()}; accepted: a last stride of 1")
    chunks, (groups, state_dim) = cu_chunk_seqlens.shape[0] - 1, C.shape[1:]
    CB = torch.empty(chunks, groups, chunk_size, chunk_size, dtype=torch.float32, device=C.device)
    blocks, num_stages = score_blocks(chunk_size, state_dim, operands)
    tiles = triton.cdiv(chunk_size, blocks["BLOCK_M"]) * triton.cdiv(chunk_size, blocks["BLOCK_K"])
    chunk_scores_kernel[(tiles, groups, chunks)](
        C, B, CB, cu_chunk_seqlens,
        C.stride(0), C.stride(1), B.stride(0), B.stride(1),
        groups, state_dim, chunk_size, operands == torch.float32,
        **blocks, num_warps=NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return CB


def score_blocks(chunk_size: int, state_dim: int, operands: torch.dtype) -> tuple[dict[str, int], int]:
    """Tile sizes in m, in k and in N, and pipeline stages.

    numpy, which multiplies in Triton's interpreter, may add in an order that depends on the sizes. There the
    tiles are those of `chunk_scan`, which a replay has, too.
    """
    scan, _, _ = block_sizes(chunk_size, 1, state_dim, operands)
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
            queries = tl.load(
                C + m[:, None] * C_token_stride + n[None, :],
                mask=(m < length)[:, None] & (n < state_dim)[None, :],
                other=0.0,
            )
            keys = tl.load(
                B + k[:, None] * B_token_stride + n[None, :],
                mask=(k < length)[:, None] & (n < state_dim)[None, :],
                other=0.0,
            )
            scores = multiply_add(queries.to(operand), tl.trans(keys.to(operand)), scores, "ieee")
        CB += (chunk * groups + group) * (chunk_size * chunk_size)
        tl.store(
            CB + m[:, None] * chunk_size + k[None, :],
            scores,
            mask=(m < chunk_size)[:, None] & (k < chunk_size)[None, :],
        )
