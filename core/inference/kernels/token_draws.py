"""Tokens drawn from rows of logits, many rows at once, in torch.

A token is drawn by inverse transform: it is the first token, in the order of ids, whose cumulative
probability exceeds the row's random number. Probabilities are rounded down to multiples of 2 ** -53 and
summed as integers. Such a sum does not depend on an order, so it may be taken in pieces.

`token_draws_gpu` draws the tokens of a GPU in three launches. The functions here are its reference. They read
intermediate results, which costs nothing on a CPU, and synchronises on a GPU.

Rows are computed in groups. A group's intermediate tensors stay in the caches of the CPU, and the allocator
uses their memory again. There are at most 64 groups of each kind of row, so the number of torch operations is
bounded, whatever the number of rows. A row's token does not depend on the other rows of its group.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 1 << 53
"""How many parts make up probability 1."""
_GROUP_ELEMENTS = 1 << 17  # of each thread
_MAX_GROUPS = 64
_PIECE = 512
_NUM_CANDIDATES = 1024
_CANDIDATE_PIECE = 32


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
    """Draw a token for each of `draws`.

    Rows that need only a temperature are not sorted. A row with `top_p` is sorted whole only where about a
    thousand of its most likely tokens do not reach `top_p`.

    Args:
        tokens: [rows] int64. Written at the draws' rows; a row without a finite largest logit gets any id.
        logits: [rows, vocabulary], floating point.
        largest: [rows] the largest logit of each row, in the dtype of `logits`.
        draws: the rows to draw, each at most once.
    """
    kinds: dict[tuple[bool, bool], list[TokenDraw]] = {}
    for draw in draws:
        kinds.setdefault((0 < draw.top_k < logits.shape[1], draw.top_p < 1), []).append(draw)
    for (cuts_k, cuts_p), alike in kinds.items():
        for group in _groups(alike, logits.shape[1]):
            rows = _column([draw.row for draw in group], logits.device)[:, 0]
            scores = _scores(_rows_of(logits, group, rows), largest.index_select(0, rows), group)
            if cuts_k:
                _cut_to_top_k(scores, _column([draw.top_k for draw in group], logits.device))
            probabilities = torch.softmax(scores, dim=-1)
            uniforms = _column([draw.uniform for draw in group], logits.device, torch.float64)
            if cuts_p:
                needed = _column([draw.needed_parts for draw in group], logits.device)
                drawn = _draw_of_top_p(probabilities, needed, uniforms)
            else:
                drawn = _draw(probabilities, uniforms)
            tokens.index_copy_(0, rows, drawn)


def _groups(draws: Sequence[TokenDraw], vocabulary: int) -> Iterator[Sequence[TokenDraw]]:
    fitting = _GROUP_ELEMENTS * torch.get_num_threads() // vocabulary
    size = max(1, fitting, math.ceil(len(draws) / _MAX_GROUPS))
    return (draws[first : first + size] for first in range(0, len(draws), size))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _rows_of(logits: Tensor, group: Sequence[TokenDraw], rows: Tensor) -> Tensor:
    """The group's rows: a view where they follow one another, else a copy."""
    first, last = group[0].row, group[-1].row
    follow = [draw.row for draw in group] == list(range(first, last + 1))
    return logits[first : last + 1] if follow else logits.index_select(0, rows)


def _scores(logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """(logits - largest) / temperature in max(float32, the logits' dtype), a new tensor."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    limits = torch.finfo(dtype)  # temperatures that round to 0 or infinity would turn scores into NaN
    temperatures = [min(max(draw.temperature, limits.tiny), limits.max) for draw in draws]
    scores = logits - largest.to(dtype)[:, None]
    return scores.div_(_column(temperatures, logits.device, dtype))


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


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from probabilities [rows, vocabulary] by uniforms [rows, 1]: tokens [rows].

    Overwrites the probabilities. The piece of the row that holds the token is found by the sums of all
    pieces. Only that piece is summed token by token.
    """
    rows, vocabulary = probabilities.shape
    num_pieces = -(-vocabulary // _PIECE)
    parts = torch.empty(rows, num_pieces * _PIECE, dtype=torch.int64, device=probabilities.device)
    parts[:, vocabulary:] = 0
    parts[:, :vocabulary] = probabilities.mul_(WHOLE)
    pieces = parts.view(rows, num_pieces, _PIECE)
    sums = pieces.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    target = _target(ends[:, -1:], uniforms)
    piece = _first_above(ends, target)
    before = ends.gather(1, piece) - sums.gather(1, piece)
    inside = pieces.gather(1, piece[:, :, None].expand(-1, -1, _PIECE))[:, 0]
    token = piece * _PIECE + _first_above(inside.cumsum(dim=-1), target - before)
    return token[:, 0].clamp_(0, vocabulary - 1)


def _target(totals: Tensor, uniforms: Tensor) -> Tensor:
    """What a cumulative sum must exceed: less than the total, so the drawn token is a possible one."""
    return torch.minimum((totals * uniforms).long(), totals - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: the index of the first number above the row's target, at most the last index."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)


def _draw_of_top_p(probabilities: Tensor, needed: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `_draw` does, from the smallest head of each row that has `needed` [rows, 1] parts."""
    if probabilities.shape[1] <= _NUM_CANDIDATES * 4:
        return _draw_of_head(probabilities, needed, uniforms)[0]
    tokens, suffices = _draw_of_head(probabilities, needed, uniforms, _candidates(probabilities))
    short = (~suffices).nonzero()[:, 0]
    if len(short):
        tokens[short] = _draw_of_head(probabilities[short], needed[short], uniforms[short])[0]
    return tokens


class _Candidates(NamedTuple):
    """Tokens that may be kept: ids [rows, number] in ascending order, and their probabilities.

    Where a row has fewer candidates than another, its last ids are the vocabulary's size, and their
    probabilities 0.
    """

    ids: Tensor
    probabilities: Tensor


def _candidates(probabilities: Tensor) -> _Candidates:
    """The tokens above a bound: about a thousand, if a row's likely tokens are not neighbours.

    The row is cut into pieces. The bound is the 1025th highest of the pieces' largest probabilities, so only
    the 1024 pieces before it are searched.
    """
    rows, vocabulary = probabilities.shape
    missing, device = -vocabulary % _CANDIDATE_PIECE, probabilities.device
    padded = torch.nn.functional.pad(probabilities, (0, missing)) if missing else probabilities
    pieces = padded.view(rows, -1, _CANDIDATE_PIECE)
    highest = pieces.amax(dim=-1)
    rank = min(_NUM_CANDIDATES + 1, highest.shape[1] // 4)
    bound = torch.topk(highest, rank, sorted=False).values.amin(dim=-1, keepdim=True)
    row, piece = (highest > bound).nonzero(as_tuple=True)
    searched = pieces[row, piece]
    found, place = (searched > bound[row]).nonzero(as_tuple=True)
    row, token = row[found], piece[found] * _CANDIDATE_PIECE + place
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    ids = torch.full((rows, max(1, int(counts.max()))), vocabulary, device=device)
    ids[row, column] = token
    chosen = probabilities.new_zeros(ids.shape)
    chosen[row, column] = searched[found, place]
    return _Candidates(ids, chosen)


def _draw_of_head(
    probabilities: Tensor, needed: Tensor, uniforms: Tensor, candidates: _Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """The drawn tokens [rows], and whether the candidates hold the whole head [rows].

    The head is renormalised by the sum that torch takes of the row with zeros for the other tokens.
    `candidates`: None for all tokens.
    """
    rows, vocabulary = probabilities.shape
    likely = probabilities if candidates is None else candidates.probabilities
    descending, order = torch.sort(likely, dim=-1, descending=True, stable=True)
    sums = _in_parts(descending).cumsum(dim=-1)
    # A token stays if the tokens before it add up to less than needed. So the first token always stays.
    descending[:, 1:].masked_fill_(sums[:, :-1] >= needed, 0)
    head = torch.zeros_like(likely).scatter_(1, order, descending)
    spread = head
    if candidates is not None:
        spread = head.new_zeros(rows, vocabulary + 1).scatter_(1, candidates.ids, head)[:, :vocabulary]
    if rows == 1:  # torch would split the sum of a single row between its threads, and so round otherwise
        spread = spread.expand(2, -1)
    cumulative = _in_parts(head.div_(spread.sum(dim=-1)[:rows, None])).cumsum(dim=-1)
    token = _first_above(cumulative, _target(cumulative[:, -1:], uniforms))
    if candidates is not None:
        token = candidates.ids.gather(1, token).clamp_(max=vocabulary - 1)
    return token[:, 0], sums[:, -1] >= needed[:, 0]


def _in_parts(probabilities: Tensor) -> Tensor:
    return (probabilities * WHOLE).long()
