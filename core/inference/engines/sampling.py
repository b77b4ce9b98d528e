"""The next token of each request, from its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...config import SamplingParams


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of the model's own distribution, in max(float32, the logits' dtype)."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary].

    `positions[i]` is how many tokens row i's request has generated so far: a request's random number for its
    n-th token depends on its seed and n alone. Synchronises once for all greedy rows, once for each other.
    """
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(
            f"logits has {logits.shape[0]} rows, params {len(params)} entries and positions "
            f"{len(positions)}; accepted: equally many"
        )
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if not param.greedy:
            tokens[row] = _draw(token_distribution(logits[row], param), param.seed, position)
    return tokens


def token_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocabulary] after temperature, then top-k, then top-p."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores / (1.0 if params.temperature is None else params.temperature)
    if params.top_k and params.top_k < scores.numel():
        kept = torch.topk(scores, params.top_k).indices
        scores = torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept])
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p is not None and params.top_p < 1.0:
        descending, order = torch.sort(probabilities, descending=True, stable=True)
        # A token stays if those before it have not reached top_p yet, so at least one stays.
        kept = order[descending.cumsum(0) - descending < params.top_p]
        probabilities = torch.zeros_like(probabilities).index_copy(0, kept, probabilities[kept])
        probabilities = probabilities / probabilities.sum()
    return probabilities


def _draw(probabilities: Tensor, seed: int, position: int) -> int:
    """Inverse transform sampling: the first token at which the cumulative probability passes a uniform."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position) % (1 << 63))
    uniform = torch.rand((), generator=generator, dtype=torch.float64)
    cumulative = probabilities.to("cpu", torch.float64).cumsum(0)
    token = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return min(token, int(probabilities.nonzero()[-1]))
