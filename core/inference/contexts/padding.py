"""The sizes that steps are padded to, and the upper bounds of all sizes.

An *invariant bucket* is a number of rows: in all of them, a product gives a row the same bits. A *graph
bucket* is a shape that a graph is captured for (`GraphBuckets`).
"""

from collections.abc import Callable

from ...validation import ceil_div
from .step_inputs import StepShape

Padding = Callable[[StepShape], StepShape]
"""Maps a step's shape to the shape to pad to, which is at least as large in every size."""
MIN_CUBLAS_ROWS = 32
"""With fewer rows cuBLAS pads by itself, or picks kernels that are up to eight times as slow."""
_BLOCK = 256  # invariant buckets above it are its multiples
MAX_PADDING = _BLOCK - 1  # no number of rows is further from its invariant bucket


def invariant_bucket(rows: int, smallest: int = MIN_CUBLAS_ROWS) -> int:
    """The first of `smallest`, 32, 64, 128, 256 and multiples of 256 that is at least `rows`. 0 stays 0.

    `smallest` is 8 where products of few rows keep bits. Then 5, 9 and 300 rows have 8, 32 and 512.
    """
    if rows > _BLOCK:
        return ceil_div(rows, _BLOCK) * _BLOCK
    if rows > smallest:
        return max(MIN_CUBLAS_ROWS, power_of_two(rows))
    return smallest if rows else 0


def invariant_buckets(rows: int) -> list[int]:
    """All invariant buckets from 32 up to that of `rows`, in order; none for 0."""
    sizes = range(MIN_CUBLAS_ROWS, invariant_bucket(rows) + 1, MIN_CUBLAS_ROWS)
    return sorted(set(map(invariant_bucket, sizes)))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()


def invariant_padding(shape: StepShape, min_decode_tokens: int = MIN_CUBLAS_ROWS) -> StepShape:
    """The shape to pad a step to: more prefill tokens, else more decodes; tokens and logits are buckets.

    Decodes without prefills have at least `min_decode_tokens`: 8 where products of few rows keep bits.
    """
    logits = invariant_bucket(shape.logits)
    if shape.prefills:
        tokens = invariant_bucket(shape.tokens) - shape.decodes * shape.decode_tokens
        return shape._replace(prefill_tokens=tokens, logits=logits)
    width = power_of_two(shape.decode_tokens)
    tokens = invariant_bucket(shape.decodes * width, min_decode_tokens)  # a multiple of `width`
    return shape._replace(decodes=tokens // width, decode_tokens=width, logits=min(logits, tokens))


def largest_shape(
    max_requests: int, max_tokens_per_step: int, decode_tokens: int, block_columns: int, chunk_size: int,
    batch_invariant: bool = False, input_block_columns: int = 0,
) -> StepShape:  # fmt: skip
    """Upper bounds of all sizes of a context's steps; `batch_invariant`: of padded steps, too."""
    if batch_invariant:
        max_requests, max_tokens_per_step = invariant_bucket(max_requests), max_tokens_per_step + MAX_PADDING
        decode_tokens = power_of_two(decode_tokens)
    num_decode_tokens = max_requests * decode_tokens
    num_chunks = ceil_div(max_tokens_per_step, chunk_size)
    return StepShape(
        decodes=max_requests, prefills=max_requests, prefill_tokens=max_tokens_per_step,
        max_query_tokens=max_tokens_per_step, block_columns=block_columns,
        kv_writes=num_decode_tokens + max_tokens_per_step, chunks=num_chunks + 2 * max_requests,
        checkpoints=num_chunks + max_requests, logits=num_decode_tokens + max_tokens_per_step,
        decode_tokens=decode_tokens, input_block_columns=input_block_columns,
    )  # fmt: skip
