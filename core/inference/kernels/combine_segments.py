"""The result of attention from the results of segments, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers of a program: 16 bytes of bfloat16 a thread."""
NUM_WARPS = 4


def combine_segments(
    earlier: Tensor,
    earlier_log_sums: Tensor,
    own: Tensor,
    own_log_sums: Tensor,
    positions: Tensor,
    segment_tokens: int,
    out: Tensor,
) -> Tensor:
    """Weigh the results of each query's segments by their sums of exp(score), in float32.

    With the query at position p, its segments are 0 to k = p // segment_tokens. The result is
    sum_s exp(l_s - m) * o_s / sum_s exp(l_s - m), where l_s are the log-sums and m is the largest. Products
    are added in the order of s, each by a fused multiply-add. Where k is 0, the result has the bits of `own`.
    What lies at other segments is not read. Does not synchronise.

    Args:
        earlier: [segments, T, heads, head dim]: what queries find in segments before their own.
        own: [k, T, heads, head dim], with any strides: what queries find in their own segment k.
        earlier_log_sums, own_log_sums: [segments, heads, T] float32: logarithms of the sums of exp(score).
        positions: [T] int64. segment_tokens: of a segment.
        out: [T, heads, head dim]. Written, in its own dtype. The last stride of it, `earlier` and `own` is 1.
    """
    tokens, heads, head_dim = out.shape
    if not tokens:
        return out
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(max(1, BLOCK // block_dim), triton.next_power_of_2(heads))
    combine_segments_kernel[(tokens, triton.cdiv(heads, block_heads))](
        earlier, earlier_log_sums, own, own_log_sums, positions, out,
        *earlier.stride()[:3], *own.stride()[:3], *earlier_log_sums.stride(), *own_log_sums.stride(),
        *out.stride()[:2], heads, earlier.shape[0],
        SEGMENT=segment_tokens, DIM=head_dim, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def combine_segments_kernel(
    # Pointers
    earlier,
    earlier_log_sums,
    own,
    own_log_sums,
    positions,
    out,
    # Strides
    earlier_segment_stride,
    earlier_token_stride,
    earlier_head_stride,
    own_segment_stride,
    own_token_stride,
    own_head_stride,
    earlier_sums_segment_stride,
    earlier_sums_head_stride,
    earlier_sums_token_stride,
    own_sums_segment_stride,
    own_sums_head_stride,
    own_sums_token_stride,
    out_token_stride,
    out_head_stride,
    # Dimensions
    heads,
    num_earlier,
    # Meta-parameters
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    real = head < heads
    inside = real[:, None] & (dim < DIM)[None, :]
    count = tl.minimum((tl.load(positions + token) // SEGMENT).to(tl.int32), num_earlier)

    own += count.to(tl.int64) * own_segment_stride + token * own_token_stride
    own_log_sums += count.to(tl.int64) * own_sums_segment_stride + token * own_sums_token_stride
    last = tl.load(own + head[:, None] * own_head_stride + dim[None, :], mask=inside, other=0.0)
    last_sum = tl.load(own_log_sums + head * own_sums_head_stride, mask=real, other=0.0)

    sums = earlier_log_sums + token * earlier_sums_token_stride + head * earlier_sums_head_stride
    largest = last_sum
    for segment in range(count):
        offset = tl.cast(segment, tl.int64) * earlier_sums_segment_stride
        largest = tl.maximum(largest, tl.load(sums + offset, mask=real, other=0.0))

    parts = earlier + token * earlier_token_stride + head[:, None] * earlier_head_stride + dim[None, :]
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    result = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for segment in range(count):
        at = tl.cast(segment, tl.int64)
        log_sum = tl.load(sums + at * earlier_sums_segment_stride, mask=real, other=0.0)
        part = tl.load(parts + at * earlier_segment_stride, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(log_sum - largest)
        total += weight
        result = tl.fma(tl.broadcast_to(weight[:, None], result.shape), part, result)
    weight = tl.exp(last_sum - largest)
    total += weight
    exact = last.to(tl.float32)
    result = tl.fma(tl.broadcast_to(weight[:, None], result.shape), exact, result) / total[:, None]
    result = tl.where(count == 0, exact, result)

    target = out + token * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
