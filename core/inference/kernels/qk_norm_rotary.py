"""The norms and the rotation of queries and keys in one Triton launch.

The reference is `reference_pointwise.qk_norm_rotary`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of a program."""
NUM_WARPS = 4


def qk_norm_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `reference_pointwise.qk_norm_rotary`. Does not synchronise.

    Queries and keys may be slices of wider projections, whose last dimension is dense. A head is normalised
    within one program, whose tile follows from the model's shape alone.
    """
    tokens, query_heads, dim = query.shape
    key_heads, rotary = key.shape[1], cos.shape[-1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if not tokens:
        return query_out, key_out
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    block_dim = triton.next_power_of_2(dim)
    block_heads = min(max(1, BLOCK // block_dim), triton.next_power_of_2(query_heads))
    query_blocks = triton.cdiv(query_heads, block_heads)
    qk_norm_rotary_kernel[(tokens, query_blocks + triton.cdiv(key_heads, block_heads))](
        query_out, key_out, query, key, cos, sin, query_weight, key_weight,
        eps, offset,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0), sin.stride(0),
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, DIM=dim, ROTARY=rotary,
        NORM=query_weight is not None, QUERY_BLOCKS=query_blocks,
        BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, num_warps=NUM_WARPS,
    )  # fmt: skip
    return query_out, key_out


@triton.jit
def qk_norm_rotary_kernel(
    # Pointers
    query_out, key_out, query, key, cos, sin, query_weight, key_weight,
    # Scalars
    eps, offset,
    # Strides
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    cos_token_stride, sin_token_stride,
    # Meta-parameters
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, QUERY_BLOCKS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A program has a token and a block of its query heads, or of its key heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos += token * cos_token_stride
    sin += token * sin_token_stride
    if block < QUERY_BLOCKS:
        _norm_rotary(
            query_out + token * QUERY_HEADS * DIM, query + token * query_token_stride, query_head_stride,
            block, query_weight, eps, offset, cos, sin,
            QUERY_HEADS, DIM, ROTARY, NORM, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip
    else:
        _norm_rotary(
            key_out + token * KEY_HEADS * DIM, key + token * key_token_stride, key_head_stride,
            block - QUERY_BLOCKS, key_weight, eps, offset, cos, sin,
            KEY_HEADS, DIM, ROTARY, NORM, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip


@triton.jit
def _norm_rotary(
    out, x, head_stride, block, weight, eps, offset, cos, sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A block of one token's heads. Each channel is read a second time as its partner's partner."""
    HALF: tl.constexpr = ROTARY // 2
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK_DIM)[None, :]
    partner = tl.where(channel < HALF, channel + HALF, tl.where(channel < ROTARY, channel - HALF, channel))
    inside = (head < HEADS) & (channel < DIM)
    values = tl.load(x + head * head_stride + channel, mask=inside, other=0.0).to(tl.float32)
    partners = tl.load(x + head * head_stride + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None]
        weights = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        partner_weights = tl.load(weight + partner, mask=channel < DIM, other=0.0).to(tl.float32)
        values = values * scale * (weights + offset)
        partners = partners * scale * (partner_weights + offset)
    cosines = tl.load(cos + channel, mask=channel < ROTARY, other=0.0).to(tl.float32)
    sines = tl.load(sin + channel, mask=channel < ROTARY, other=0.0).to(tl.float32)
    turned = values * cosines + tl.where(channel < HALF, -partners, partners) * sines
    turned = tl.where(channel < ROTARY, turned, values)
    tl.store(out + head * DIM + channel, turned.to(out.dtype.element_ty), mask=inside)
