"""The next token of each request, from its logits."""

import hashlib
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...request import DynamicInferenceRequest
from ...sampling_params import SamplingParams
from ...validation import described, holds_data, integers, shown
from ..contexts.scheduled_chunk import ScheduledChunk
from .acceptance import accepted_tokens
from .token_stream import GeneratedToken

_WHOLE = 1 << 53


def sample_step(chunks: Sequence[ScheduledChunk], logits: Tensor) -> dict[int, tuple[GeneratedToken, ...]]:
    """Append its next tokens to every request whose chunk completes, and return them by request.

    That is one token, and one more for each draft that stands. `logits` [tokens wanted, vocabulary]: those of
    each chunk's `logit_positions`, chunk after chunk. Also fills in the log-probs that requests asked for.
    When it raises, no request has a new token.

    Everything is computed where the logits are and comes back in one copy, for which alone it waits; a step
    from which nobody wants a number waits for nothing.
    """
    last_rows: list[int] = []
    sampled: list[tuple[DynamicInferenceRequest, tuple[int, ...]]] = []
    params: list[SamplingParams] = []
    positions: list[int] = []
    prompts: list[tuple[DynamicInferenceRequest, slice]] = []
    columns: list[Tensor] = []
    first = 0
    for chunk in chunks:
        wanted = len(chunk.logit_positions)
        if chunk.request.sampling.returns_prompt_log_probs:
            asked, log_probs = _prompt_log_probs(chunk, logits[first : first + wanted])
            prompts.append((chunk.request, asked))
            columns.append(log_probs)
        first += wanted
        if chunk.completes:
            request = chunk.request
            sampled.append((request, chunk.drafts))
            for behind in range(-len(chunk.drafts), 1):
                last_rows.append(first - 1 + behind)
                params.append(request.sampling)
                positions.append(request.num_generated + len(chunk.drafts) + behind)
    if sampled:
        last = logits
        if last_rows != list(range(len(logits))):
            last = logits.index_select(0, _on_device(torch.tensor(last_rows), logits.device))
        tokens = sample(last, params, positions)
        columns.append(tokens)
        if any(request.sampling.return_log_probs for request, _ in sampled):
            columns.append(log_softmax(last).gather(1, tokens[:, None])[:, 0])
    numbers = iter(_read(columns))

    for request, asked in prompts:
        request.prompt_log_probs[asked] = next(numbers)
    if not sampled:
        return {}
    values: Sequence[float | None] = [None] * len(params)
    drawn = [int(token) for token in next(numbers)]
    values = next(numbers, values)
    now = time.perf_counter()
    generated: dict[int, tuple[GeneratedToken, ...]] = {}
    first = 0
    for request, drafts in sampled:
        stop = first + 1 + len(drafts)
        new = accepted_tokens(drafts, drawn[first:stop], request.sampling.stops) if drafts else [drawn[first]]
        wanted = request.sampling.return_log_probs
        own = values[first : first + len(new)] if wanted else [None] * len(new)
        request.log_probs += [value for value in own if value is not None]
        request.tokens += new
        if request.ttft_s is None:
            request.ttft_s = now - request.arrival_s
        generated[request.request_id] = tuple(map(GeneratedToken, new, own))
        first = stop
    return generated


def _prompt_log_probs(chunk: ScheduledChunk, logits: Tensor) -> tuple[slice, Tensor]:
    """Where they belong in the request's list, and the log-probs: logits at p are of the token at p + 1."""
    prompt = chunk.request.prompt_tokens
    start, stop = chunk.logit_positions.start, min(chunk.logit_positions.stop, len(prompt) - 1)
    following = _on_device(torch.tensor(prompt[start + 1 : stop + 1], dtype=torch.int64), logits.device)
    log_probs = log_softmax(logits[: len(following)]).gather(1, following[:, None])[:, 0]
    return slice(start, start + len(following)), log_probs


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of the model's own distribution, in max(float32, the logits' dtype)."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """One token for each row of `logits` [rows, vocabulary]: [rows] int64, where the logits are.

    `positions[i]` is how many tokens row i's request has generated so far: a request's random number for its
    n-th token depends on its seed and n alone. Does not synchronise.
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
    smallest = torch.finfo(scores.dtype).tiny  # a temperature that rounds to 0 would make NaNs of ties
    temperature = 1.0 if params.temperature is None else max(params.temperature, smallest)
    scores = (scores - scores.max()) / temperature
    if params.top_k and params.top_k < scores.numel():
        kept = torch.topk(scores, params.top_k).indices
        scores = torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept])
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p is not None and params.top_p < 1.0:
        descending, order = torch.sort(probabilities, descending=True, stable=True)
        parts = _in_parts(descending)
        # A token stays if those before it have not reached top_p yet, so at least one stays.
        stays = parts.cumsum(0) - parts < math.ceil(params.top_p * _WHOLE)
        probabilities = torch.zeros_like(probabilities).index_copy(0, order, descending * stays)
        probabilities = probabilities / probabilities.sum()
    return probabilities


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), as float64 holds it."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / _WHOLE


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulative probability passes a uniform."""
    parts = _in_parts(probabilities)
    cumulative = parts.cumsum(0)
    token = torch.searchsorted(cumulative, (cumulative[-1] * uniform).long(), right=True)
    possible = torch.arange(len(parts), device=parts.device) * (parts > 0)
    return torch.minimum(token, possible.max())


def _in_parts(probabilities: Tensor) -> Tensor:
    """In whole parts of 2 ** -53: a GPU adds floats up in another order each time, integers to the same."""
    return (probabilities.double() * _WHOLE).long()


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host's, on the device, without waiting for what runs there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _read(columns: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of 1-D tensors; waits until they are computed. Token ids are exact in float64."""
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
