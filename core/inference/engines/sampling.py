"""The next token of each request, from its logits."""

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...config import SamplingParams
from ...request import DynamicInferenceRequest
from ...validation import described, holds_data, integers, shown
from ..contexts.scheduled_chunk import ScheduledChunk
from .token_stream import GeneratedToken


def sample_step(chunks: Sequence[ScheduledChunk], logits: Tensor) -> dict[int, GeneratedToken]:
    """Append a token to every request whose chunk completes, and return the tokens by request.

    `logits` [tokens wanted, vocabulary]: those of each chunk's `logit_positions`, chunk after chunk. Also
    fills in the log-probs that requests asked for. When it raises, no request has a new token.
    """
    last_rows: list[int] = []
    requests: list[DynamicInferenceRequest] = []
    first = 0
    for chunk in chunks:
        wanted = len(chunk.logit_positions)
        if chunk.request.sampling.returns_prompt_log_probs:
            _record_prompt_log_probs(chunk, logits[first : first + wanted])
        first += wanted
        if chunk.completes:
            last_rows.append(first - 1)
            requests.append(chunk.request)
    if not requests:
        return {}
    last = logits[last_rows]
    tokens = sample(last, [r.sampling for r in requests], [r.num_generated for r in requests])
    log_probs: Sequence[float | None] = [None] * len(tokens)
    if any(request.sampling.return_log_probs for request in requests):
        log_probs = log_softmax(last)[range(len(tokens)), tokens].tolist()
    now = time.perf_counter()
    generated: dict[int, GeneratedToken] = {}
    for request, token, value in zip(requests, tokens, log_probs, strict=True):
        log_prob = value if request.sampling.return_log_probs else None
        if log_prob is not None:
            request.log_probs.append(log_prob)
        request.tokens.append(token)
        if request.ttft_s is None:
            request.ttft_s = now - request.arrival_s
        generated[request.request_id] = GeneratedToken(token, log_prob)
    return generated


def _record_prompt_log_probs(chunk: ScheduledChunk, logits: Tensor) -> None:
    """The logits at position p are of the token at p + 1."""
    prompt = chunk.request.prompt_tokens
    positions = [p for p in chunk.logit_positions if p + 1 < len(prompt)]
    if positions:
        log_probs = log_softmax(logits[: len(positions)])
        values = log_probs[range(len(positions)), [prompt[p + 1] for p in positions]].tolist()
        chunk.request.prompt_log_probs[positions[0] : positions[-1] + 1] = values


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of the model's own distribution, in max(float32, the logits' dtype)."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary].

    `positions[i]` is how many tokens row i's request has generated so far: a request's random number for its
    n-th token depends on its seed and n alone. Synchronises once for all greedy rows, once for each other.
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
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if not param.greedy:
            tokens[row] = _draw(token_distribution(logits[row], param), param.seed, position)
    return tokens


def token_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocabulary] after temperature, then top-k, then top-p."""
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
        # A token stays if those before it have not reached top_p yet, so at least one stays.
        kept = order[descending.cumsum(0) - descending < params.top_p]
        probabilities = torch.zeros_like(probabilities).index_copy(0, kept, probabilities[kept])
        probabilities = probabilities / probabilities.sum()
    return probabilities


def _draw(probabilities: Tensor, seed: int, position: int) -> int:
    """Inverse transform sampling: the first token at which the cumulative probability passes a uniform."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # in [0, 1), as float64 holds it
    cumulative = probabilities.to("cpu", torch.float64).cumsum(0)
    token = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    return min(token, int(probabilities.nonzero()[-1]))
