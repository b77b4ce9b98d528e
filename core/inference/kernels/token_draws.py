"""Tokens drawn from rows of logits, many rows at once, in torch; the reference of `token_draws_gpu`.

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
_PART_ELEMENTS = 1 << 20  # numbers of the rows that are computed at a time
_NUM_CANDIDATES = 1024  # tokens of a row with top_p that are sorted; all are where these do not suffice
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
    scores = (logits.index_select(0, rows).to(dtype) - maxima).div_(temperatures)
    if cuts_k:
        _cut_to_top_k(scores, _column([draw.top_k for draw in draws], device))
    probabilities = torch.softmax(scores, dim=-1)
    if cuts_p:
        head = _head(probabilities, _column([draw.needed_parts for draw in draws], device))
        probabilities = head.div_(_sum(head))
    uniforms = _column([draw.uniform for draw in draws], device, torch.float64)
    tokens.index_copy_(0, rows, _draw(probabilities, uniforms))


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


def _head(probabilities: Tensor, needed: Tensor) -> Tensor:
    """The probabilities, 0 for each token before which others add up to `needed` [rows, 1] parts."""
    descending, order = _most_likely(probabilities)
    sums = (descending * WHOLE).long().cumsum(dim=-1)
    # Do those reach `needed` that are likelier than the last candidate, which may have equals outside?
    likelier = (descending > descending[:, -1:]).sum(dim=-1, keepdim=True)
    if not (sums.gather(1, (likelier - 1).clamp_(min=0)).masked_fill_(likelier == 0, 0) >= needed).all():
        descending, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        sums = (descending * WHOLE).long().cumsum(dim=-1)
    descending[:, 1:].masked_fill_(sums[:, :-1] >= needed, 0)
    return torch.zeros_like(probabilities).scatter_(1, order, descending)


def _most_likely(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probabilities of each row and their tokens, of equal ones the lowest token first."""
    tokens = probabilities.topk(min(_NUM_CANDIDATES, probabilities.shape[1]), sorted=False).indices
    tokens = tokens.sort(dim=-1).values
    descending, order = probabilities.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return descending, tokens.gather(1, order)


def _sum(head: Tensor) -> Tensor:
    """[rows, 1]: the sums of rows, with the same bits for one row and for several."""
    if len(head) == 1:  # torch would split the sum of a single row between its threads, and round otherwise
        return head.expand(2, -1).sum(dim=-1, keepdim=True)[:1]
    return head.sum(dim=-1, keepdim=True)


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from probabilities [rows, vocabulary] by uniforms [rows, 1]: tokens [rows]."""
    cumulative = (probabilities * WHOLE).long().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum((total * uniforms).long(), total - 1)
    index = torch.searchsorted(cumulative, target, right=True)
    return index[:, 0].clamp_(0, probabilities.shape[1] - 1)
