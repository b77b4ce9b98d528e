"""What the products of the gated delta rule multiply: normalised keys and queries, and values, packed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T, NUM_WARPS = 32, 4


def delta_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k by x * rsqrt(sum x^2 + 1e-6), computed in float32, and v; all contiguous, in the dtype of v.

    One launch, whose grid depends on shapes alone. Does not synchronise.

    Args:
        q, k: [tokens, Hk, Dk]. v: [tokens, Hv, Dv]. Views with any strides.
    """
    tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    queries, keys = (torch.empty(k.shape, dtype=v.dtype, device=v.device) for _ in range(2))
    values = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads = 2 * key_heads + value_heads
    delta_operands_kernel[(triton.cdiv(tokens, BLOCK_T) * heads,)](
        q, k, v, queries, keys, values, tokens, *q.stride(), *k.stride(), *v.stride(),
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=triton.next_power_of_2(value_dim), BLOCK_T=BLOCK_T,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return queries, keys, values


@triton.jit(do_not_specialize=["tokens"])
def delta_operands_kernel(
    # Pointers
    q, k, v, queries, keys, values,
    # Dimensions
    tokens,
    # Strides
    q_token_stride, q_head_stride, q_dim_stride,
    k_token_stride, k_head_stride, k_dim_stride,
    v_token_stride, v_head_stride, v_dim_stride,
    # Meta-parameters
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_T tokens of one head of q, of k or of v."""
    HEADS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if head < KEY_HEADS:
        _normalise(
            q + head * q_head_stride, queries + head * KEY_DIM, token, tokens,
            q_token_stride, q_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K,
        )  # fmt: skip
    elif head < 2 * KEY_HEADS:
        head -= KEY_HEADS
        _normalise(
            k + head * k_head_stride, keys + head * KEY_DIM, token, tokens,
            k_token_stride, k_dim_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K,
        )  # fmt: skip
    else:
        head -= 2 * KEY_HEADS
        p = tl.arange(0, BLOCK_V)
        inside = (token < tokens)[:, None] & (p < VALUE_DIM)[None, :]
        raw = v + head * v_head_stride + token[:, None] * v_token_stride + p[None, :] * v_dim_stride
        packed = values + head * VALUE_DIM + token[:, None] * (VALUE_HEADS * VALUE_DIM) + p[None, :]
        tl.store(packed, tl.load(raw, mask=inside, other=0.0), mask=inside)


@triton.jit
def _normalise(
    raw, packed, token, tokens, token_stride, dim_stride,
    packed_token_stride: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (n < DIM)[None, :]
    x = tl.load(raw + token[:, None] * token_stride + n[None, :] * dim_stride, mask=inside, other=0.0)
    place = packed + token[:, None] * packed_token_stride + n[None, :]
    tl.store(place, normalised(x).to(packed.dtype.element_ty), mask=inside)


@triton.jit
def normalised(x):
    """Each row of a tile, in float32. A row's bits depend on the tile's shape and on the number of warps."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
