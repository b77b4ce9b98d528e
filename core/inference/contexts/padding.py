"""The sizes that steps are padded to, and the upper bounds of all sizes."""

from ...validation import ceil_div
from ..kernels.operands import FEW_ROWS
from .step_inputs import StepShape

SMALLEST_RUNG = 32
"""With fewer rows cuBLAS pads by itself, or picks kernels that are up to eight times as slow."""
_BLOCK = 256  # rungs above it are its multiples
MAX_PADDING = _BLOCK - 1
"""No number of rows is further from its rung."""


def rung(rows: int) -> int:
    """The smallest rung that is at least `rows`: 32, 64, 128, 256, then multiples of 256. 0 stays 0."""
    if rows > _BLOCK:
        return ceil_div(rows, _BLOCK) * _BLOCK
    return max(SMALLEST_RUNG, power_of_two(rows)) if rows else 0


def rungs(rows: int) -> list[int]:
    """All rungs up to `rung(rows)`, in order; none for 0."""
    last = rung(rows)
    halves = [size for size in (32, 64, 128) if size < min(last, _BLOCK)]
    return [*halves, *range(_BLOCK, last, _BLOCK), last] if last else []


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()


def padded_to_ladder(shape: StepShape) -> StepShape:
    """The shape to pad a step to: more prefill tokens, else more decodes; tokens and logits are rungs."""
    if shape.prefills:
        tokens = rung(shape.tokens) - shape.decodes * shape.decode_tokens
        return shape._replace(prefill_tokens=tokens, logits=rung(shape.logits))
    width = power_of_two(shape.decode_tokens)
    decodes = rung(shape.decodes * width) // width  # a rung of at least `width` is a multiple of it
    return shape._replace(decodes=decodes, decode_tokens=width, logits=rung(shape.logits))


def padded_to_few(shape: StepShape) -> StepShape:
    """As `padded_to_ladder`, but up to 8 decode tokens to 8."""
    width = power_of_two(shape.decode_tokens)
    if shape.prefills or shape.decodes * width > FEW_ROWS:
        return padded_to_ladder(shape)
    return shape._replace(decodes=FEW_ROWS // width, decode_tokens=width, logits=FEW_ROWS)


def largest_shape(
    max_requests: int, max_tokens_per_step: int, decode_tokens: int, block_columns: int, chunk_size: int,
    on_ladder: bool = False, input_block_columns: int = 0,
) -> StepShape:  # fmt: skip
    """Upper bounds of all sizes of a context's steps; `on_ladder`: of those of `padded_to_ladder`."""
    if on_ladder:
        max_requests, max_tokens_per_step = rung(max_requests), max_tokens_per_step + MAX_PADDING
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
