"""Tokens drawn from rows of logits, many rows at once, in torch.

A token is drawn by inverse transform: it is the first token, in the order of ids, whose cumulative
probability exceeds the row's random number. Probabilities are rounded down to multiples of 2 ** -53 and
summed as integers. Such a sum does not depend on an order, so it may be taken in pieces.

`token_draws_gpu` draws the tokens of a GPU in three launches. The functions here are its reference. They read
intermediate results, which costs nothing on a CPU, and synchronises on a GPU.

Passes over rows are computed for a part of the rows at a time, so that intermediate tensors stay in the
caches of the CPU. Short operations are computed for a group of parts, because each has a fixed cost. There
are at most 64 parts of each kind of row, so the number of torch operations is bounded, whatever the number of
rows. A row's token does not depend on the other rows of its group.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 1 << 53
"""How many parts make up probability 1."""
_PART_ELEMENTS = 1 << 17  # of each thread
_PARTS_OF_GROUP = 16
_MAX_PARTS = 64
_PIECE = 512
_PIECE_BITS = 5
_CANDIDATE_PIECE = 1 << _PIECE_BITS
_WHOLE_SORT = 4096
_NUM_BISECTIONS = 10


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

    Rows that need only a temperature are not sorted. Of a row of more than 4096 tokens with `top_p`, only the
    tokens near the end of the head are sorted, or all that may be in it where they are few. It is sorted
    whole where rounded sums do not find the head, as in rows with a `top_p` near 1.

    Args:
        tokens: [rows] int64. Written at the draws' rows; a row without a finite largest logit gets any id.
        logits: [rows, vocabulary], floating point.
        largest: [rows] the largest logit of each row, in the dtype of `logits`.
        draws: the rows to draw, each at most once.
    """
    kinds: dict[tuple[bool, bool], list[TokenDraw]] = {}
    for draw in draws:
        kinds.setdefault((0 < draw.top_k < logits.shape[1], draw.top_p < 1), []).append(draw)
    logits = logits.detach()  # out= refuses tensors that require gradients
    for (cuts_k, cuts_p), alike in kinds.items():
        _draw_alike(tokens, logits, largest, alike, cuts_k, cuts_p)


def _draw_alike(
    tokens: Tensor, logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw], cuts_k: bool, cuts_p: bool
) -> None:
    """`draw_tokens` of rows that all have a top_k or all have none, and the same of top_p."""
    vocabulary, device = logits.shape[1], logits.device
    dtype = torch.promote_types(logits.dtype, torch.float32)
    limits = torch.finfo(dtype)  # temperatures that round to 0 or infinity would turn scores into NaN
    temperatures = _column([min(max(d.temperature, limits.tiny), limits.max) for d in draws], device, dtype)
    rows = _column([draw.row for draw in draws], device)[:, 0]
    maxima = largest.index_select(0, rows).to(dtype)[:, None]
    top_k = _column([draw.top_k for draw in draws], device) if cuts_k else rows
    needed = _column([draw.needed_parts for draw in draws], device) if cuts_p else rows
    uniforms = _column([draw.uniform for draw in draws], device, torch.float64)
    searches, pieces = cuts_p and vocabulary > _WHOLE_SORT, not cuts_p and vocabulary > _PIECE
    part = max(1, _PART_ELEMENTS * torch.get_num_threads() // vocabulary, math.ceil(len(draws) / _MAX_PARTS))
    size = part * _PARTS_OF_GROUP
    numbers = torch.empty(min(part, len(draws)), vocabulary, dtype=torch.float64, device=device)
    scores = numbers.view(-1).view(dtype)[: numbers.numel()].view_as(numbers)  # never needed together
    probabilities = torch.empty(min(size, len(draws)), vocabulary, dtype=dtype, device=device)
    zeros = probabilities.new_zeros(max(part, 2), vocabulary + 1) if searches else probabilities
    # The softmax subtracts the largest logit itself.
    scores_are_logits = logits.dtype == dtype and not cuts_k and all(draw.temperature == 1 for draw in draws)
    for first in range(0, len(draws), size):
        stop = min(first + size, len(draws))
        group, summaries = slice(first, stop), []
        columns = maxima[group], temperatures[group], top_k[group], probabilities[: stop - first]
        parts = zip(*(torch.split(column, part) for column in columns), strict=True)
        for begin, (own_maxima, own_temperatures, own_top_k, own) in zip(
            range(first, stop, part), parts, strict=True
        ):
            own_scores = _rows_of(logits, draws[begin : begin + len(own)])
            if not scores_are_logits:
                out = scores if len(own) == len(scores) else scores[: len(own)]
                own_scores = torch.sub(own_scores, own_maxima, out=out).div_(own_temperatures)
            if cuts_k:
                _cut_to_top_k(own_scores, own_top_k)
            torch.softmax(own_scores, dim=-1, out=own)
            if searches:
                summaries.append(_candidate_pieces(own).amax(dim=-1))
            elif pieces:
                summaries.append(_piece_sums(own, numbers))
        own = probabilities[: stop - first]
        if searches:
            peaks = torch.cat(summaries)
            drawn = _draw_of_top_p(own, peaks, needed[group], uniforms[group], zeros)
        elif cuts_p:
            drawn = _draw_of_sorted(own, needed[group], uniforms[group])
        elif pieces:
            drawn = _draw_of_parts(own, torch.cat(summaries), uniforms[group])
        else:
            drawn = _draw_of_head(own, uniforms[group])[:, 0]
        tokens.index_copy_(0, rows[group], drawn)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _rows_of(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """The rows of the draws: a view where they follow one another, else a copy."""
    rows = [draw.row for draw in draws]
    if len(rows) == 1 or rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


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

    Overwrites the probabilities.
    """
    numbers = torch.empty_like(probabilities, dtype=torch.float64)
    return _draw_of_parts(probabilities, _piece_sums(probabilities, numbers), uniforms)


def _piece_sums(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The sums of a row's pieces [rows, pieces], in parts. Overwrites the probabilities by their parts.

    The sums are float64. They are exact below 2 ** 53, so one of a row may be rounded; see `_exact_sums`.
    `numbers`: overwritten; float64, at least as large as the probabilities.
    """
    rows, vocabulary = probabilities.shape
    parts = numbers if rows == len(numbers) else numbers[:rows]
    parts.copy_(probabilities.mul_(WHOLE).trunc_())
    cut = vocabulary // _PIECE * _PIECE
    if cut == vocabulary:
        return parts.view(rows, -1, _PIECE).sum(dim=-1)
    sums = parts[:, :cut].view(rows, cut // _PIECE, _PIECE).sum(dim=-1)
    return torch.cat([sums, parts[:, cut:].sum(dim=-1, keepdim=True)], dim=1)


def _draw_of_parts(parts: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from parts [rows, vocabulary], whose pieces have `sums`.

    Only the piece that holds the token is summed token by token.
    """
    vocabulary = parts.shape[1]
    sums = _exact_sums(parts, sums)
    ends = sums.cumsum(dim=-1)
    target = _target(ends[:, -1:], uniforms)
    piece = _first_above(ends, target)
    before = ends.gather(1, piece) - sums.gather(1, piece)
    token = piece * _PIECE + _first_above(_parts_of_piece(parts, piece).cumsum(dim=-1), target - before)
    return token[:, 0].clamp_(0, vocabulary - 1)


def _exact_sums(parts: Tensor, sums: Tensor) -> Tensor:
    """`_piece_sums` as int64. The largest sum of a row is taken anew: only this one can pass 2 ** 53."""
    largest = sums.argmax(dim=-1, keepdim=True)
    return sums.long().scatter_(1, largest, _parts_of_piece(parts, largest).sum(dim=-1, keepdim=True))


def _parts_of_piece(parts: Tensor, piece: Tensor) -> Tensor:
    """[rows, length of a piece] int64: the parts of one piece [rows, 1] of each row; 0 behind the row."""
    ids = piece * _PIECE + torch.arange(_PIECE, device=parts.device)
    inside = parts.gather(1, ids.clamp(max=parts.shape[1] - 1)).long()
    return inside.masked_fill_(ids >= parts.shape[1], 0)


def _target(totals: Tensor, uniforms: Tensor) -> Tensor:
    """What a cumulative sum must exceed: less than the total, so the drawn token is a possible one."""
    return torch.minimum((totals * uniforms).long(), totals - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: the index of the first number above the row's target, at most the last index."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)


def _candidate_pieces(probabilities: Tensor) -> Tensor:
    """[rows, pieces, tokens of a piece]; zeros behind the vocabulary."""
    rows, vocabulary = probabilities.shape
    missing = -vocabulary % _CANDIDATE_PIECE
    padded = torch.nn.functional.pad(probabilities, (0, missing)) if missing else probabilities
    return padded.view(rows, -1, _CANDIDATE_PIECE)


def _draw_of_top_p(
    probabilities: Tensor, peaks: Tensor, needed: Tensor, uniforms: Tensor, zeros: Tensor
) -> Tensor:
    """Draw as `_draw` does, from the smallest head of each row that has `needed` [rows, 1] parts.

    Tokens below (1 - top_p) / vocabulary together have less than 1 - top_p, so the head has none of them. The
    others are searched where they are few. The head of other rows is narrowed down before it is searched.
    `peaks`: the largest probability of each piece of candidates. `zeros`: [any rows, vocabulary + 1]; zeros
    again afterwards.
    """
    vocabulary = probabilities.shape[1]
    bound = (WHOLE - needed).to(probabilities.dtype) / (2.0 * vocabulary * WHOLE)  # half: sums are rounded
    many = (peaks > bound).sum(dim=-1, keepdim=True) > peaks.shape[1] // 2
    few = _few_candidates(probabilities, peaks, bound.masked_fill(many, torch.inf))
    tokens, found = _draw_of_few(few, needed, uniforms, zeros)
    short = (~found).nonzero()[:, 0]
    if len(short):
        own = probabilities[short], bound[short], needed[short], uniforms[short]
        tokens[short], found = _draw_of_many(*own)
        short = short[~found]
    if len(short):
        tokens[short] = _draw_of_sorted(probabilities[short], needed[short], uniforms[short])
    return tokens


class _Candidates(NamedTuple):
    """Tokens that may be kept.

    Attributes:
        ids: [rows, most candidates of a row], ascending; the vocabulary's size where a row has fewer.
        probabilities: as `ids`; 0 where a row has fewer.
    """

    ids: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, places: Tensor, values: Tensor, rows: int, width: int, vocabulary: int) -> "_Candidates":
        """From the place of each candidate in [rows * width], ascending, and its probability."""
        counts = _counts(places, rows, width)
        column = torch.arange(max(1, int(counts.max())), device=places.device)
        missing = column >= counts
        index = (column + counts.cumsum(0) - counts).masked_fill_(missing, len(places)).view(-1)
        starts = torch.arange(0, rows * width, width, device=places.device)[:, None]
        ids = torch.cat([places, places.new_zeros(1)]).index_select(0, index).view(missing.shape) - starts
        chosen = torch.cat([values, values.new_zeros(1)]).index_select(0, index).view(missing.shape)
        return cls(ids.masked_fill_(missing, vocabulary), chosen)


def _counts(places: Tensor, rows: int, width: int) -> Tensor:
    """[rows, 1]: how many of the ascending `places` in [rows * width] are in each row."""
    ends = torch.arange(width, rows * width + 1, width, device=places.device)
    ends = torch.searchsorted(places, ends)
    return ends.diff(prepend=ends.new_zeros(1))[:, None]


def _few_candidates(probabilities: Tensor, peaks: Tensor, bound: Tensor) -> _Candidates:
    """The tokens above `bound` [rows, 1]. Only pieces whose peaks are above it are read.

    `nonzero` takes its time for each element, so it sees words of 8 bytes first.
    """
    rows, num_pieces = peaks.shape
    hits = (peaks > bound).view(-1).nonzero()[:, 0]
    searched = _candidate_pieces(probabilities).view(-1, _CANDIDATE_PIECE).index_select(0, hits)
    limits = bound[:, 0].repeat_interleave(_counts(hits, rows, num_pieces)[:, 0], output_size=len(hits))
    words = searched.sub(limits[:, None]).clamp_(min=0).view(torch.int64).view(-1)
    found = words.nonzero()[:, 0]
    halves = words.index_select(0, found).view(searched.dtype)
    shift = 8 // halves.itemsize - 1  # a word holds one or two probabilities
    half = halves.nonzero()[:, 0]
    index = (found.index_select(0, half >> shift) << shift) + (half & shift)
    places = hits.index_select(0, index >> _PIECE_BITS) * _CANDIDATE_PIECE + (index & (_CANDIDATE_PIECE - 1))
    values = searched.view(-1).index_select(0, index)
    return _Candidates.of(places, values, rows, num_pieces * _CANDIDATE_PIECE, probabilities.shape[1])


def _draw_of_few(
    candidates: _Candidates, needed: Tensor, uniforms: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor]:
    """The drawn tokens [rows], and whether the candidates hold the whole head [rows]."""
    head, suffices = _head(candidates.probabilities, needed)
    vocabulary = zeros.shape[1] - 1
    sums = []
    for ids, values in zip(
        torch.split(candidates.ids, len(zeros)), torch.split(head, len(zeros)), strict=True
    ):
        spread = zeros[: len(ids)].scatter_(1, ids, values)
        sums.append(_sum(spread[:, :vocabulary]))
        spread.scatter_(1, ids, 0)
    token = candidates.ids.gather(1, _draw_of_head(head.div_(torch.cat(sums)), uniforms))
    return token[:, 0].clamp_(max=vocabulary - 1), suffices


def _draw_of_many(
    probabilities: Tensor, bound: Tensor, needed: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """The drawn tokens [rows], and whether they are right [rows].

    The probability of the head's least likely token is bisected, above `bound`, with rounded sums. Tokens
    above the interval that is left belong to the head. Those in it are searched. Exact sums tell whether
    the rounded ones were misleading.
    """
    integers = torch.int64 if probabilities.dtype == torch.float64 else torch.int32
    low, high = bound.view(integers), probabilities.amax(dim=-1, keepdim=True).view(integers)
    share = needed.to(probabilities.dtype) / WHOLE
    mask = torch.empty_like(probabilities)
    for _ in range(_NUM_BISECTIONS):
        middle = low + (high - low) // 2
        mass = torch.gt(probabilities, middle.view(share.dtype), out=mask).mul_(probabilities).sum(-1, True)
        low, high = torch.where(mass < share, low, middle), torch.where(mass < share, middle, high)
    inside = torch.gt(probabilities, low.view(share.dtype), out=mask)
    sure = torch.gt(probabilities, high.view(share.dtype), out=torch.empty_like(mask))
    places = inside.sub_(sure).view(-1).nonzero()[:, 0]
    rows, vocabulary = probabilities.shape
    values = probabilities.view(-1).index_select(0, places)
    candidates = _Candidates.of(places, values, rows, vocabulary, vocabulary)
    spread = sure.mul_(probabilities)
    parts = mask.copy_(spread)
    sums = _piece_sums(parts, torch.empty_like(parts, dtype=torch.float64))
    above = _exact_sums(parts, sums).sum(dim=-1, keepdim=True)
    head, suffices = _head(candidates.probabilities, needed - above)
    spread.view(-1).index_copy_(0, places, head[candidates.ids < vocabulary])
    return _draw(spread.div_(_sum(spread)), uniforms), suffices & (above < needed)[:, 0]


def _draw_of_sorted(probabilities: Tensor, needed: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the head of each row, which is sorted whole: tokens [rows]."""
    head, _ = _head(probabilities, needed)
    return _draw_of_head(head.div_(_sum(head)), uniforms)[:, 0]


def _head(probabilities: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities, 0 for tokens outside the head, and whether they have `needed` parts [rows].

    A token stays if the tokens before it add up to less than `needed` [rows, 1]. So the first always stays.
    """
    descending, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    sums = _in_parts(descending).cumsum(dim=-1)
    descending[:, 1:].masked_fill_(sums[:, :-1] >= needed, 0)
    return torch.empty_like(descending).scatter_(1, order, descending), sums[:, -1] >= needed[:, 0]


def _sum(spread: Tensor) -> Tensor:
    """[rows, 1]: the sums that torch takes of single rows."""
    if len(spread) == 1:  # torch would split the sum of a single row between its threads, and round otherwise
        return spread.expand(2, -1).sum(dim=-1, keepdim=True)[:1]
    return spread.sum(dim=-1, keepdim=True)


def _draw_of_head(head: Tensor, uniforms: Tensor) -> Tensor:
    """[rows, 1]: drawn from probabilities that are few in a row."""
    cumulative = _in_parts(head).cumsum(dim=-1)
    return _first_above(cumulative, _target(cumulative[:, -1:], uniforms))


def _in_parts(probabilities: Tensor) -> Tensor:
    return (probabilities * WHOLE).long()
