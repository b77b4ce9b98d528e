"""Tokens drawn from rows of logits: two or three Triton launches and a softmax, without synchronising.

No row is sorted. `_head` finds the least likely token that top_k or top_p keeps: it bisects the 31 bits of
that token's number, and each step of the bisection is a pass over the row. Weights are summed as integers,
so no result depends on the order in which threads add, or on other rows.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...devices import tensor_on
from ...validation import ceil_div
from .dtypes_and_strides import dense
from .step_rows import TokenDraw

BLOCK = 4096
NUM_WARPS = 16
_ROW_ALIGNMENT = 8  # elements; torch's softmax adds in another order in rows that are not aligned
ROW, INVERSE_TEMPERATURE, TOP_K, NEEDED_PARTS, UNIFORM, LEAST_SCORE = map(tl.constexpr, range(6))


def draw_tokens(tokens: Tensor, logits: Tensor, largest: Tensor, draws: Sequence[TokenDraw]) -> None:
    """`torch_token_draws.draw_tokens` of at most 32 bits; scores times 1 / temperature, sums exact."""
    vocabulary, dtype = logits.shape[1], torch.float32
    limits = torch.finfo(dtype)
    temperatures = [min(max(draw.temperature, limits.tiny), limits.max) for draw in draws]
    top_k = [draw.top_k if draw.top_k < vocabulary else 0 for draw in draws]
    listed = [  # a list for each of ROW to LEAST_SCORE, in their order
        [draw.row for draw in draws],
        torch.tensor(temperatures, dtype=dtype, device="cpu").reciprocal().tolist(),
        top_k,
        [draw.needed_parts if draw.top_p < 1 else 0 for draw in draws],
        [draw.uniform for draw in draws],
        [draw.least_score for draw in draws],
    ]
    settings = tensor_on(logits.device, listed, torch.float64)
    width = ceil_div(vocabulary, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    scores = torch.empty(len(draws), width, dtype=dtype, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    logits = dense(logits)
    sizes = len(draws), vocabulary, width
    score_kernel[(len(draws), ceil_div(width, block))](
        scores, logits, largest, settings, *sizes, logits.stride(0), BLOCK=block, num_warps=NUM_WARPS
    )
    if any(top_k):
        top_k_kernel[(len(draws),)](scores, settings, *sizes, BLOCK=block, num_warps=NUM_WARPS)
    draw_kernel[(len(draws),)](
        tokens, torch.softmax(scores, dim=-1), settings, *sizes, BLOCK=block, num_warps=NUM_WARPS
    )


@triton.jit
def score_kernel(
    # Pointers
    scores, logits, largest, settings,
    # Dimensions
    num_draws, vocabulary, width,
    # Strides
    logits_row_stride,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(logits - largest) / temperature of a block of a draw's row; -inf where min_p cuts, or nothing is."""
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(settings + ROW * num_draws + draw).to(tl.int64)
    inverse = tl.load(settings + INVERSE_TEMPERATURE * num_draws + draw).to(scores.dtype.element_ty)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * logits_row_stride + token, mask=token < vocabulary, other=0)
    peak = tl.load(largest + row).to(scores.dtype.element_ty)
    score = (logit.to(scores.dtype.element_ty) - peak) * inverse
    least = tl.load(settings + LEAST_SCORE * num_draws + draw).to(scores.dtype.element_ty)
    score = tl.where((token < vocabulary) & ~(score < least), score, -float("inf"))
    tl.store(scores + draw * width + token, score, mask=token < width)


@triton.jit
def top_k_kernel(
    # Pointers
    scores, settings,
    # Dimensions
    num_draws, vocabulary, width,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set all but a draw's top_k highest scores to -inf; nothing is read or written where top_k is 0."""
    draw = tl.program_id(0).to(tl.int64)
    top_k = tl.load(settings + TOP_K * num_draws + draw).to(tl.int64)
    if top_k > 0:
        scores += draw * width
        cut, last = _head(scores, top_k, vocabulary, True, BLOCK)
        for first in range(0, vocabulary, BLOCK):
            token = first + tl.arange(0, BLOCK)
            score = tl.load(scores + token, mask=token < vocabulary, other=-float("inf"))
            key = _keys(score, True)
            removed = (key < cut) | ((key == cut) & (token > last))
            tl.store(scores + token, -float("inf"), mask=removed & (token < vocabulary))


@triton.jit
def draw_kernel(
    # Pointers
    tokens, probabilities, settings,
    # Dimensions
    num_draws, vocabulary, width,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut a draw's probabilities to the head that has the needed parts, if any are, and draw a token."""
    draw = tl.program_id(0).to(tl.int64)
    probabilities += draw * width
    row = tl.load(settings + ROW * num_draws + draw).to(tl.int64)
    needed = tl.load(settings + NEEDED_PARTS * num_draws + draw).to(tl.int64)
    uniform = tl.load(settings + UNIFORM * num_draws + draw)
    cut = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64) + vocabulary
    mass = tl.zeros([], tl.float64) + 1
    if needed > 0:
        cut, last = _head(probabilities, needed, vocabulary, False, BLOCK)
        one = tl.zeros([], tl.float64) + 1
        mass = _sum_of_head(probabilities, cut, last, one, vocabulary, BLOCK) * (one / 9007199254740992)
    total = _sum_of_head(probabilities, cut, last, mass, vocabulary, BLOCK)
    target = tl.minimum((total.to(tl.float64) * uniform).to(tl.int64), total - 1)
    before = tl.zeros([], tl.int64)
    drawn = tl.zeros([], tl.int64)
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        parts = _parts_of_head(probabilities, token, cut, last, mass, vocabulary)
        passed = (before + tl.cumsum(parts, 0) <= target) & (token < vocabulary)
        drawn += tl.sum(passed.to(tl.int64), 0)
        before += tl.sum(parts, 0)
    tl.store(tokens + row, tl.minimum(drawn, vocabulary - 1))


@triton.jit
def _keys(values, SCORES: tl.constexpr):
    """Integers >= 0 in the order of the values: of scores <= 0, or of probabilities."""
    if SCORES:
        values = 0.0 - values  # of 0 and -0 the same
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    if SCORES:
        bits = 0x7F800000 - bits
    return bits


@triton.jit
def _parts(probabilities):
    return (probabilities * 9007199254740992.0).to(tl.int64)


@triton.jit
def _weight_above(values, key, vocabulary, SCORES: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens with a higher key weigh: 1 each for scores, their parts for probabilities."""
    weight = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        outside = -float("inf") if SCORES else 0.0
        value = tl.load(values + token, mask=token < vocabulary, other=outside)
        above = _keys(value, SCORES) > key
        if SCORES:
            weight += above.to(tl.int64)
        else:
            weight += tl.where(above, _parts(value), 0)
    return tl.sum(weight, 0)


@triton.jit
def _head(values, needed, vocabulary, SCORES: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the least likely kept token, and the highest id of the kept tokens with this key.

    A token is kept if the tokens before it, by key and then by id, weigh less than `needed`.
    """
    low = tl.zeros([], tl.int64)
    high = low + 0x7F800000
    while low < high:
        middle = low + (high - low) // 2
        if _weight_above(values, middle, vocabulary, SCORES, BLOCK) < needed:
            high = middle
        else:
            low = middle + 1
    missing = needed - _weight_above(values, low, vocabulary, SCORES, BLOCK)
    if not SCORES:
        weight = _parts(low.to(tl.int32).to(tl.float32, bitcast=True))
        missing = (missing + weight - 1) // tl.maximum(weight, 1)
    seen = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64)
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        value = tl.load(values + token, mask=token < vocabulary, other=0.0)
        ties = ((_keys(value, SCORES) == low) & (token < vocabulary)).to(tl.int64)
        earlier = (seen + tl.cumsum(ties, 0) < missing) & (token < vocabulary)
        last += tl.sum(earlier.to(tl.int64), 0)
        seen += tl.sum(ties, 0)
    return low, last


@triton.jit
def _parts_of_head(probabilities, token, cut, last, mass, vocabulary):
    """The parts of tokens, divided by `mass`; 0 for those that are not kept."""
    value = tl.load(probabilities + token, mask=token < vocabulary, other=0.0)
    key = _keys(value, False)
    kept = ((key > cut) | ((key == cut) & (token <= last))) & (value > 0)  # to divide zeros is slow
    value = tl.div_rn(tl.where(kept, value, 1.0), tl.zeros_like(value) + mass.to(tl.float32))
    return tl.where(kept, _parts(value), 0)


@triton.jit
def _sum_of_head(probabilities, cut, last, mass, vocabulary, BLOCK: tl.constexpr):
    parts = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        parts += _parts_of_head(probabilities, token, cut, last, mass, vocabulary)
    return tl.sum(parts, 0)
