"""How much of the arithmetic of prefills a cache has saved."""

from collections.abc import Iterable

from .setting import ModelShape, ReplayResult
from .trace import Trace


def prefill_flops(shape: ModelShape, num_tokens: int) -> int:
    """Floating-point operations of a prefill of `num_tokens` tokens from the start.

    With T tokens, hidden size D and state size N: a recurrent layer takes 12 T D^2 + 16 T D N + 10 T D, an
    attention layer 8 T D^2 + 4 T^2 D, and an MLP layer 16 T D^2 (Marconi, arXiv 2411.19379).
    """
    tokens, hidden, state = num_tokens, shape.hidden_size, shape.state_size
    recurrent = 12 * tokens * hidden**2 + 16 * tokens * hidden * state + 10 * tokens * hidden
    attention = 8 * tokens * hidden**2 + 4 * tokens**2 * hidden
    return (
        shape.num_recurrent_layers * recurrent
        + shape.num_attention_layers * attention
        + shape.num_mlp_layers * 16 * tokens * hidden**2
    )


def saved_share(trace: Trace, result: ReplayResult, shape: ModelShape) -> float | None:
    """Of the operations of all prefills, those that were not made; None for rows that tell no lengths.

    A request that resumed several times counts as if it had resumed all its tokens at once.
    """
    if not result.resumed_lengths:
        return None
    all_prompts = _sum(shape, (len(request.prompt) for request in trace.requests))
    return _sum(shape, result.resumed_lengths) / all_prompts if all_prompts else 0.0


def _sum(shape: ModelShape, lengths: Iterable[int]) -> int:
    return sum(prefill_flops(shape, length) for length in lengths)
