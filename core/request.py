"""What a finished request returns, and a scored sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .brief_repr import brief_repr
from .inference.contexts.cache.reasons import ComputeReason

TopLogProbs = tuple[tuple[int, float], ...]
"""Token ids and their log-probs: the most likely tokens at one position, the most likely one first."""
FinishReason = Literal["length", "stop", "cancelled", "reset", "invalid_logits"]
EarlyEnd = Literal["cancelled", "stop"]
"""The finish reasons that a caller may end a request with."""


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """What became of a request's prompt; known once the answer has a token.

    Attributes:
        num_resumed_tokens, computed_by_reason, prompt_log_probs: as in `RequestResult`.
    """

    num_resumed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    prompt_log_probs: list[float] | None = None

    def __repr__(self) -> str:
        return brief_repr(self)


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    Attributes:
        request_id: as `add_request` returned it.
        tokens: the generated tokens.
        log_probs: one a generated token; None unless asked for.
        top_log_probs: for each generated token the most likely tokens at its position with their log-probs;
            None unless asked for.
        prompt_log_probs: of prompt tokens `SamplingParams.prompt_log_probs_start` .. N-1, in order; None
            unless asked for. Fewer where the request ended before all were computed.
        num_prompt_tokens: tokens of the prompt.
        num_resumed_tokens: prompt tokens that were not computed on the request's first way through its
            prompt, because it started from a cached state behind them.
        computed_by_reason: the other prompt tokens, by why they were computed.
        num_recomputed_tokens: tokens computed again after the request was preempted.
        ttft_s: seconds from the arrival to the first token; None without one.
        finish_reason: "length", "stop" (a stop token, or the caller found the end), "cancelled", "reset"
            (the engine was reset) or "invalid_logits" (the model's logits for the next token were NaN or
            infinite).
    """

    request_id: int
    tokens: list[int]
    log_probs: list[float] | None
    top_log_probs: list[TopLogProbs] | None
    prompt_log_probs: list[float] | None
    num_prompt_tokens: int
    num_resumed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    ttft_s: float | None
    finish_reason: FinishReason

    def __repr__(self) -> str:
        return brief_repr(self)


@dataclass(frozen=True)
class ScoreResult:
    """A scored sequence of N tokens.

    The last token is never computed, because nothing follows it: N - 1 = `num_resumed_tokens` + the sum of
    `computed_by_reason`.

    Attributes:
        log_probs: of tokens `start` .. N-1, in order, under the model's own distribution (before temperature,
            top_k and top_p), as `RequestResult.log_probs` has them. Fewer where `finish_reason` is not
            "length".
        start: position of the first scored token.
        num_tokens: N.
        num_resumed_tokens: tokens before `start` that were not computed on the first way through the
            sequence, because that started from a cached state behind them.
        computed_by_reason: the other tokens but the last, by why they were computed.
        num_recomputed_tokens: tokens computed again after the request was preempted.
        finish_reason: "length": all log-probs are there. Else "invalid_logits" (the model's logits were NaN
            or infinite), "cancelled" or "reset", as for a `RequestResult`.
    """

    log_probs: list[float]
    start: int
    num_tokens: int
    num_resumed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    finish_reason: FinishReason

    def __repr__(self) -> str:
        return brief_repr(self)
