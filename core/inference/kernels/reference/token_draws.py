"""Tokens drawn from rows of logits, many rows at once, in torch.

A token is drawn by inverse transform: it is the first token, in the order of ids, whose cumulative
probability exceeds the row's random number. Probabilities are rounded down to multiples of 2 ** -53 and
summed as integers, so that a row's token depends neither on an order of addition nor on other rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 1 << 53
"""How many parts make up probability 1."""
_PART_ELEMENTS = 1 << 18  # numbers of the rows that are computed at a time, so that a cache holds them
_MAX_PARTS = 64  # of each kind of row, so that the number of torch operations is bounded


class TokenDraw(NamedTuple):
    """How the token of one row of logits is drawn.

    Attributes:
        row: the row of logits.
        temperature: divides the logits, > 0; clamped to the normal numbers of the scores' dtype.
        top_k: keep the k most likely tokens; of equally likely ones those with the lowest ids. 0 keeps all.
        top_p: keep the smallest set of most likely tokens that reaches this probability, in (0, 1]; of
            equally likely ones those with the lowest ids. 1 keeps all.
        uniform: a random number in [0, 1).
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    uniform: float

    @property
    def needed_parts(self) -> int:
        """`top_p` in parts."""
        return math.ceil(self.top_p * WHOLE)


def draw_tokens(tokens: Tensor, logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw]) -> None:
    """Draw a token for each of `draws`. Rows with `top_p` are sorted as far as needed.

    Args:
        tokens: [rows] int64. Written at the draws' rows; a row without a finite largest logit gets any id.
        logits: [rows, vocabulary], floating point.
        largest: [rows] the largest logit of each row, in the dtype of `logits`.
        draws: the rows to draw, each at most once.
    """
    kinds: dict[tuple[bool, bool], list[TokenDraw]] = {}
    for draw in draws:
        kinds.setdefault((0 < draw.top_k < logits.shape[1], draw.top_p < 1), []).append(draw)
    logits = logits.detach()
    for (cuts_k, cuts_p), alike in kinds.items():
        part = max(1, _PART_ELEMENTS // logits.shape[1], math.ceil(len(alike) / _MAX_PARTS))
        for first in range(0, len(alike), part):
            _draw_part(tokens, logits, largest, alike[first : first + part], cuts_k, cuts_p)


def _draw_part(
    tokens: Tensor, logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw], cuts_k: bool, cuts_p: bool
) -> None:
    """`draw_tokens` of rows that all have a top_k or all have none, and the same of top_p."""
    device, dtype = logits.device, torch.promote_types(logits.dtype, torch.float32)
    limits = torch.finfo(dtype)  # temperatures that round to 0 or infinity would turn scores into NaN
    temperatures = _column([min(max(d.temperature, limits.tiny), limits.max) for d in draws], device, dtype)
    rows = _column([draw.row for draw in draws], device)[:, 0]
    maxima = largest.index_select(0, rows).to(dtype)[:, None]
    scores = logits.index_select(0, rows).to(dtype).sub_(maxima).div_(temperatures)
    if cuts_k:
        _cut_to_top_k(scores, _column([draw.top_k for draw in draws], device))
    probabilities = torch.softmax(scores, dim=-1, out=scores)
    uniforms = _column([draw.uniform for draw in draws], device, torch.float64)
    if cuts_p:
        ids, head = _head(probabilities, _column([draw.needed_parts for draw in draws], device))
        drawn = ids.gather(1, _draw(head, uniforms)[:, None])[:, 0]
    else:
        drawn = _draw(probabilities, uniforms)
    tokens.index_copy_(0, rows, drawn)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _cut_to_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Set all but the `top_k` [rows, 1] highest scores of each row to -inf, in place."""
    highest = torch.topk(scores, int(top_k.max()) + 1).values
    last, next_lower = highest.gather(1, top_k - 1), highest.gather(1, top_k)
    scores.masked_fill_(scores < last, -torch.inf)
    tied = ((last == next_lower) & (last > -torch.inf))[:, 0].nonzero()[:, 0]
    if len(tied):
        last = last[tied]
        num_tied = top_k[tied] - (highest[tied] > last).sum(dim=-1, keepdim=True)
        own = scores[tied]
        ties = own == last
        scores[tied] = own.masked_fill_(ties & (ties.cumsum(dim=-1) > num_tied), -torch.inf)


def _head(probabilities: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [rows, n] in the order of ids, and their probabilities: 0 for each token before which others add
    up to `needed` [rows, 1] parts, and 1 in all.
    """
    tokens, likely = _likelier(probabilities, (1 - needed / WHOLE) / (2 * probabilities.shape[1]))
    descending, order, sums = _sorted(likely)
    if not (sums[:, -1:] >= needed).all():  # probabilities are rounded: they may add up to less than 1
        tokens, likely = _likelier(probabilities, torch.full_like(needed, -1))
        descending, order, sums = _sorted(likely)
    surplus = sums[:, :-1] >= needed
    descending[:, 1:].masked_fill_(surplus, 0)
    total = sums.gather(1, (~surplus).sum(dim=-1, keepdim=True))
    return tokens, torch.zeros_like(likely).scatter_(
        1, order, descending.div_(total.to(likely.dtype) / WHOLE)
    )


def _likelier(probabilities: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens above `least` [rows, 1], ascending, and their probabilities, then 0; all tokens if many are."""
    above = probabilities > least
    counts = above.sum(dim=-1)
    num_rows, vocabulary = probabilities.shape
    width = max(1, int(counts.max()))
    if width > vocabulary // 8:
        return torch.arange(vocabulary, device=above.device).expand_as(probabilities), probabilities
    rows, columns = above.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=above.device) - (counts.cumsum(0) - counts)[rows]
    tokens = rows.new_zeros(num_rows, width)
    tokens[rows, places] = columns
    likely = probabilities.new_zeros(num_rows, width)
    likely[rows, places] = probabilities[rows, columns]
    return tokens, likely


def _sorted(likely: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`likely` in descending order, of equal ones the first first; where each was; sums of their parts."""
    descending, order = likely.sort(dim=-1, descending=True, stable=True)
    return descending, order, (descending * WHOLE).long().cumsum_(dim=-1)


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from probabilities [rows, vocabulary] by uniforms [rows, 1]: tokens [rows]."""
    cumulative = (probabilities * WHOLE).long().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum((total * uniforms).long(), total - 1)
    index = torch.searchsorted(cumulative, target, right=True)
    return index[:, 0].clamp_(0, probabilities.shape[1] - 1)
