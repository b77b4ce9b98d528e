"""Tokens drawn from rows of logits, row by row, in torch.

A token is drawn by inverse transform: it is the first token, in the order of ids, whose cumulative
probability exceeds the row's random number. Probabilities are rounded down to multiples of 2 ** -53 and
summed as integers, so that a row's token depends neither on an order of addition nor on other rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dtypes_and_strides import compute_dtype
from ..step_rows import WHOLE, TokenDraw


def draw_tokens(tokens: Tensor, logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw]) -> None:
    """Write a token at the row of each draw; any id where the row's largest logit is not finite."""
    dtype = compute_dtype(logits.dtype)
    limits = torch.finfo(dtype)  # temperatures that round to 0 or infinity would turn scores into NaN
    finite = largest.isfinite().tolist()
    for draw in draws:
        if not finite[draw.row]:
            tokens[draw.row] = 0
            continue
        scores = logits[draw.row].detach().to(dtype).sub(largest[draw.row])
        scores /= min(max(draw.temperature, limits.tiny), limits.max)
        if draw.min_p:
            scores.masked_fill_(scores < draw.least_score, -torch.inf)
        if 0 < draw.top_k < len(scores):
            _cut_to_top_k(scores, draw.top_k)
        probabilities = torch.softmax(scores, dim=-1)
        if draw.top_p < 1:
            probabilities = _cut_to_top_p(probabilities, draw.needed_parts)
        tokens[draw.row] = drawn_token(probabilities, draw.uniform)


def _cut_to_top_k(scores: Tensor, top_k: int) -> None:
    """Set all but the `top_k` highest scores [vocabulary] to -inf, in place."""
    last = torch.topk(scores, top_k).values[-1]
    above, ties = scores > last, scores == last
    scores.masked_fill_(~(above | (ties & (ties.cumsum(0) <= top_k - above.sum()))), -torch.inf)


def _cut_to_top_p(probabilities: Tensor, needed: int) -> Tensor:
    """The probabilities, 0 for each token before which others add up to `needed` parts, and 1 in all."""
    # Tokens up to `least` add up to half of what may be cut. Few others are left to sort, and suffice unless
    # rounded probabilities add up to less than 1.
    for least in ((1 - needed / WHOLE) / (2 * len(probabilities)), -1.0):
        likely = (~(probabilities <= least)).nonzero()[:, 0]
        descending, order = probabilities[likely].sort(descending=True, stable=True)
        sums = (descending * WHOLE).long().cumsum_(0)
        if sums[-1] >= needed:
            break
    num_kept = 1 + int((sums[:-1] < needed).sum())
    kept, total = likely[order[:num_kept]], sums[num_kept - 1].to(probabilities.dtype) / WHOLE
    return torch.zeros_like(probabilities).index_copy_(0, kept, descending[:num_kept] / total)


def drawn_token(probabilities: Tensor, uniform: float) -> int:
    """The token that a random number draws from probabilities [vocabulary]."""
    sums = (probabilities * WHOLE).long().cumsum_(0)
    total = int(sums[-1])
    token = torch.searchsorted(sums, min(int(total * uniform), total - 1), right=True)
    return min(int(token), len(sums) - 1)
