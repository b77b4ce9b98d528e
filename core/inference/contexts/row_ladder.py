"""The numbers of rows that steps are padded to where bits must not depend on the number of rows."""

from .step_inputs import StepShape

FEWEST_ROWS = 32
"""With fewer rows cuBLAS pads by itself, or picks kernels that are up to eight times as slow."""
_BLOCK = 256  # rungs above it are its multiples
MOST_PADDING = _BLOCK - 1
"""No number of rows is further from its rung."""
FEW_ROWS = 64
"""For so many rows at most `kernels.sequential_product` has tiles of their own."""


def rung(rows: int) -> int:
    """The smallest rung that is at least `rows`: 32, 64, 128, 256, then multiples of 256. 0 stays 0."""
    if rows > _BLOCK:
        return -(-rows // _BLOCK) * _BLOCK
    return max(FEWEST_ROWS, power_of_two(rows)) if rows else 0


def rungs(rows: int) -> list[int]:
    """All rungs up to `rung(rows)`, in order; none for 0."""
    last = rung(rows)
    halves = [size for size in (32, 64, 128) if size < min(last, _BLOCK)]
    return [*halves, *range(_BLOCK, last, _BLOCK), last] if last else []


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()


def padded_to_ladder(shape: StepShape) -> StepShape:
    """The shape to pad a step to: its tokens and its logits are rungs.

    A step without prefills gets more decode rows, whose tokens are a power of two. A step with prefills gets
    more prefill tokens. A shape that is padded already stays the same.
    """
    if shape.prefills:
        tokens = rung(shape.tokens) - shape.decodes * shape.decode_tokens
        return shape._replace(prefill_tokens=tokens, logits=rung(shape.logits))
    width = power_of_two(shape.decode_tokens)
    decodes = rung(shape.decodes * width) // width  # a rung of at least `width` is a multiple of it
    return shape._replace(decodes=decodes, decode_tokens=width, logits=rung(shape.logits))


def largest_on_ladder(largest: StepShape) -> StepShape:
    """Upper bounds of the sizes of padded steps; `largest`: `StepShape.largest`, those without padding."""
    width, decodes = power_of_two(largest.decode_tokens), rung(largest.decodes)
    tokens = largest.prefill_tokens + MOST_PADDING
    return largest._replace(
        decodes=decodes,
        decode_tokens=width,
        prefill_tokens=tokens,
        max_query_tokens=tokens,
        kv_writes=decodes * width + tokens,
        chunks=largest.chunks + MOST_PADDING,
        checkpoints=largest.checkpoints + MOST_PADDING,
        logits=rung(decodes * width + largest.logits),
    )
