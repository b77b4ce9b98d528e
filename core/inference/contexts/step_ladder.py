"""Steps padded so that each product of a model has as many rows as a rung of the ladder."""

from .row_ladder import MOST_PADDING, power_of_two, rung
from .step_inputs import StepShape


def padded_to_ladder(shape: StepShape) -> StepShape:
    """The shape to pad a step to: its tokens and its logits are rungs of `policies.row_ladder`.

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
    """Upper bounds of the sizes of padded steps, captured ones included.

    Args:
        largest: `StepShape.largest`, upper bounds of the sizes without padding.
    """
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
