"""The next token of each request, from its logits."""

import hashlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...sampling_params import SamplingParams
from ...validation import described, holds_data, integers, shown
from ..contexts.request import DynamicInferenceRequest, GeneratedToken
from ..contexts.request_step import RequestStep
from .acceptance import accepted_tokens

_WHOLE = 1 << 53


class SampledStep:
    """The new tokens of a step, on the device of the logits; perhaps not computed yet."""

    def __init__(
        self, sampled: "list[_Sampled]", prompts: "list[_PromptPart]", columns: list[Tensor]
    ) -> None:
        """
        Args:
            sampled: the requests that get new tokens.
            prompts: the requests that get prompt log-probs.
            columns: the log-probs of each entry of `prompts`; then, if `sampled` is not empty, the drawn
                tokens; then their log-probs, if a request returns log-probs.
        """
        self._sampled = sampled
        self._prompts = prompts
        self._columns = columns
        self._tokens: dict[int, tuple[GeneratedToken, ...]] | None = None

    def num_accepted(self, request_id: int) -> int | None:
        """How many tokens of a request's step are right; None without a new token. Waits as `wait` does."""
        tokens = self.wait().get(request_id)
        return None if tokens is None else len(tokens)

    @property
    def invalid(self) -> tuple[int, ...]:
        return ()

    def is_valid(self, request_id: int) -> bool:
        return True

    def wait(self) -> dict[int, tuple[GeneratedToken, ...]]:
        """Append the new tokens to their requests, and return them by request id.

        The first call waits until the tokens are computed and copied to the CPU, in one copy. The call waits
        for nothing where the step returns no tokens and no log-probs. Later calls return the same tokens and
        append nothing. When the call raises, no request has a new token.
        """
        if self._tokens is None:
            self._tokens = self._read()
        return self._tokens

    def _read(self) -> dict[int, tuple[GeneratedToken, ...]]:
        numbers = iter(_read(self._columns))
        for part in self._prompts:
            part.request.set_prompt_log_probs(part.positions, next(numbers))
        if not self._sampled:
            return {}
        drawn = [int(token) for token in next(numbers)]
        no_log_probs: Sequence[float | None] = [None] * len(drawn)
        log_probs = next(numbers, no_log_probs)
        now_s = time.perf_counter()
        generated: dict[int, tuple[GeneratedToken, ...]] = {}
        first = 0
        for request, drafts in self._sampled:
            stop = first + 1 + len(drafts)
            tokens = accepted_tokens(drafts, drawn[first:stop], request.sampling.stops)
            values = log_probs if request.sampling.return_log_probs else no_log_probs
            own = values[first : first + len(tokens)]
            generated[request.request_id] = tuple(map(GeneratedToken, tokens, own))
            request.append(tokens, own, now_s)
            first = stop
        return generated


class _Sampled(NamedTuple):
    """A request that gets new tokens, and its drafts, which are verified now."""

    request: DynamicInferenceRequest
    drafts: tuple[int, ...]


class _PromptPart(NamedTuple):
    """A request that gets prompt log-probs, and where they belong in the request's list."""

    request: DynamicInferenceRequest
    positions: slice


def sample_step(steps: Sequence[RequestStep], logits: Tensor) -> SampledStep:
    """Choose the next tokens of the requests whose known tokens are all computed. Does not synchronise.

    A request gets one token, and one more for each draft that turns out right.

    Args:
        steps: what each request does, in the order of the logits.
        logits: [tokens, vocabulary]: the logits at each step's `logit_positions`, step after step.
    """
    rows: list[int] = []
    sampled: list[_Sampled] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    prompts: list[_PromptPart] = []
    columns: list[Tensor] = []
    first = 0
    for step in steps:
        num_logits = len(step.logit_positions)
        request = step.request
        if request.sampling.returns_prompt_log_probs:
            part, log_probs = _prompt_log_probs(step, logits[first : first + num_logits])
            prompts.append(_PromptPart(request, part))
            columns.append(log_probs)
        first += num_logits
        if step.completes:
            sampled.append(_Sampled(request, step.drafts))
            num_tokens = 1 + len(step.drafts)
            rows += range(first - num_tokens, first)
            params += [request.sampling] * num_tokens
            positions += range(request.num_generated, request.num_generated + num_tokens)
    if sampled:
        chosen = logits
        if rows != list(range(len(logits))):
            chosen = logits.index_select(0, _on_device(torch.tensor(rows), logits.device))
        tokens = sample(chosen, params, positions)
        columns.append(tokens)
        if any(request.sampling.return_log_probs for request, _ in sampled):
            columns.append(log_softmax(chosen).gather(1, tokens[:, None])[:, 0])
    return SampledStep(sampled, prompts, columns)


def _prompt_log_probs(step: RequestStep, logits: Tensor) -> tuple[slice, Tensor]:
    """The positions in the request's list, and the log-probs: the logits at p belong to token p + 1."""
    prompt = step.request.prompt_tokens
    start, stop = step.logit_positions.start, min(step.logit_positions.stop, len(prompt) - 1)
    following = _on_device(torch.tensor(prompt[start + 1 : stop + 1], dtype=torch.int64), logits.device)
    log_probs = log_softmax(logits[: len(following)]).gather(1, following[:, None])[:, 0]
    return slice(start, start + len(following)), log_probs


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of the model's own distribution, in max(float32, the logits' dtype)."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose one token for each row of logits. Does not synchronise.

    Args:
        logits: [rows, vocabulary], floating point.
        params: the settings of each row.
        positions: how many tokens the request of each row has generated so far. The random number of a
            request's n-th token depends on the request's seed and on n alone.

    Returns:
        [rows] int64 on the device of the logits.

    Raises:
        ValueError: an argument is of another type, or the three differ in length.
    """
    if (
        not isinstance(logits, Tensor)
        or not (logits.is_floating_point() and holds_data(logits))
        or logits.dim() != 2
        or not logits.shape[1]
    ):
        raise ValueError(f"logits {described(logits)}; accepted: floating-point logits [rows, vocabulary]")
    if not isinstance(params, Sequence) or not all(isinstance(param, SamplingParams) for param in params):
        raise ValueError(f"params is {shown(params)}; accepted: a list of SamplingParams")
    positions = integers("positions", positions, 0)
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(
            f"logits has {logits.shape[0]} rows, params {len(params)} entries and positions "
            f"{len(positions)}; accepted: equally many"
        )
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, param in enumerate(params) if not param.greedy]
    if drawn:
        numbers = [_uniform(params[row].seed, positions[row]) for row in drawn]
        uniforms = _on_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
        for row, uniform in zip(drawn, uniforms, strict=True):
            tokens[row] = _draw(token_distribution(logits[row], params[row]), uniform)
    return tokens


def token_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocabulary] after temperature, then top-k, then top-p. Does not synchronise."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    smallest = torch.finfo(scores.dtype).tiny  # a temperature that rounds to 0 would turn ties into NaN
    temperature = 1.0 if params.temperature is None else max(params.temperature, smallest)
    scores = (scores - scores.max()) / temperature
    if params.top_k and params.top_k < scores.numel():
        top = torch.topk(scores, params.top_k).indices
        scores = torch.full_like(scores, float("-inf")).index_copy(0, top, scores[top])
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p is not None and params.top_p < 1.0:
        descending, order = torch.sort(probabilities, descending=True, stable=True)
        parts = _in_parts(descending)
        # A token stays if the tokens before it add up to less than top_p. So the first token always stays.
        stays = parts.cumsum(0) - parts < math.ceil(params.top_p * _WHOLE)
        probabilities = torch.zeros_like(probabilities).index_copy(0, order, descending * stays)
        probabilities = probabilities / probabilities.sum()
    return probabilities


def _uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a request's token at `position`; exact in float64."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / _WHOLE


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first token whose cumulative probability exceeds `uniform`."""
    parts = _in_parts(probabilities)
    cumulative = parts.cumsum(0)
    token = torch.searchsorted(cumulative, (cumulative[-1] * uniform).long(), right=True)
    possible = torch.arange(len(parts), device=parts.device) * (parts > 0)
    return torch.minimum(token, possible.max())


def _in_parts(probabilities: Tensor) -> Tensor:
    """Probabilities in units of 2 ** -53. A GPU's sum of integers, unlike floats, depends on no order."""
    return (probabilities.double() * _WHOLE).long()


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to the device, without synchronising."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _read(columns: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of 1-D tensors. Waits until they are computed. float64 holds token ids exactly."""
    if not columns:
        return []
    together = torch.cat([column.double() for column in columns])
    if together.device.type == "cuda":
        there = together
        together = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        together.copy_(there, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()
    return [part.tolist() for part in torch.split(together, [len(column) for column in columns])]
