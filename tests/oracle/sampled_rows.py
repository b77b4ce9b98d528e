"""The tokens of rows of logits one row at a time, in plain torch: the oracle of `sampling.sample`."""

import hashlib
import math
from collections.abc import Sequence

import torch
from mambaslots import SamplingParams
from mambaslots.inference.engines.step_runner import draws_of
from mambaslots.inference.kernels.sampling import sample
from torch import Tensor

_WHOLE = 1 << 53


def sample_rows(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token for each row of logits [rows, vocabulary], each row by itself."""
    return [
        int(
            row.argmax()
            if param.greedy
            else draw(token_distribution(row, param), uniform(param.seed or 0, position, row.device))
        )
        for row, param, position in zip(logits, params, positions, strict=True)
    ]


def token_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocabulary] after temperature, then min_p, then top-k, then top-p."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    smallest = torch.finfo(scores.dtype).tiny  # a temperature that rounds to 0 would turn ties into NaN
    temperature = 1.0 if params.temperature is None else max(params.temperature, smallest)
    scores = (scores - scores.max()) / temperature
    if params.min_p:
        scores = scores.where(scores.exp() >= params.min_p, float("-inf"))
    if params.top_k and params.top_k < scores.numel():
        highest, order = torch.topk(scores, params.top_k + 1)
        top = order[:-1]
        if highest[-2] == highest[-1]:  # of equal scores those with the lowest ids are kept
            top = torch.sort(scores, descending=True, stable=True).indices[: params.top_k]
        scores = torch.full_like(scores, float("-inf")).index_copy(0, top, scores[top])
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p is not None and params.top_p < 1.0:
        descending, order = torch.sort(probabilities, descending=True, stable=True)
        parts = in_parts(descending)
        # A token stays if the tokens before it add up to less than top_p. So the first token always stays.
        stays = parts.cumsum(0) - parts < math.ceil(params.top_p * _WHOLE)
        probabilities = torch.zeros_like(probabilities).index_copy(0, order, descending * stays)
        probabilities = probabilities / probabilities.sum()
    return probabilities


def uniform(seed: int, position: int, device: torch.device | str = "cpu") -> Tensor:
    """The random number in [0, 1) of a request's token at `position`; exact in float64."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    number = (int.from_bytes(digest[:8], "big") >> 11) / _WHOLE
    return torch.tensor(number, dtype=torch.float64, device=device)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first token whose cumulative probability exceeds `uniform`."""
    parts = in_parts(probabilities)
    cumulative = parts.cumsum(0)
    token = torch.searchsorted(cumulative, (cumulative[-1] * uniform).long(), right=True)
    possible = torch.arange(len(parts), device=parts.device) * (parts > 0)
    return torch.minimum(token, possible.max())


def in_parts(probabilities: Tensor) -> Tensor:
    """Probabilities in units of 2 ** -53. A GPU's sum of integers, unlike floats, depends on no order."""
    return (probabilities.double() * _WHOLE).long()


def sampled(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """The tokens that an engine draws with the seeds of `params`, 0 where there is none."""
    return sample(logits, draws_of(params, positions, [one.seed or 0 for one in params]))[0]
