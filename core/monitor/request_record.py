"""What is told of one request: numbers only, no tokens and no text."""

from dataclasses import dataclass, field
from typing import Any

from ..inference.contexts.request import DynamicInferenceRequest, RequestStep
from ..request import RequestResult
from .explanations import why_not_deeper


@dataclass
class RequestRecord:
    """One request, as it is told of.

    Attributes:
        request: the request; dropped when it has ended.
        tenant: whom it counts for.
        arrived_s: seconds since 1970.
        grid: tokens of the smallest block that the model allows.
        spans: why its prompt tokens were computed: [start, stop, reason] in order. What lies between two
            spans was resumed.
        resume_point: where it last began behind resumed tokens.
        queued_s: seconds until its first step; None before that.
        resumed_tokens, prompt_tokens_done: prompt tokens that were resumed, and those resumed or computed.
        first_token_s, last_token_s: when tokens came, on the monitor's clock.
        num_tokens: generated tokens.
    """

    request: DynamicInferenceRequest | None
    request_id: int
    tenant: str
    arrived_s: float
    num_prompt_tokens: int
    grid: int
    spans: list[list[Any]] = field(default_factory=list)
    resume_point: int = 0
    queued_s: float | None = None
    resumed_tokens: int = 0
    prompt_tokens_done: int = 0
    recomputed_tokens: int = 0
    ttft_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    finish_reason: str | None = None

    def note_step(self, step: RequestStep) -> None:
        """Note a step of a prefill."""
        counted = self.spans[-1][1] if self.spans else 0
        for span in step.spans:
            start = max(span.start, step.start, counted)
            stop = min(span.stop, step.stop, self.num_prompt_tokens)
            if start >= stop:
                continue
            last = self.spans[-1] if self.spans else None
            if last is not None and last[1] == start and last[2] == span.reason:
                last[1] = stop
            else:
                self.spans.append([start, stop, span.reason])

    def note_ledger(self) -> tuple[int, int]:
        """Read the request's counts; returns by how much resumed and all prompt tokens have grown."""
        if self.request is None:
            return 0, 0
        ledger = self.request.ledger
        resumed, done = ledger.resumed, ledger.num_prompt_tokens
        grown = resumed - self.resumed_tokens, done - self.prompt_tokens_done
        self.resumed_tokens, self.prompt_tokens_done = resumed, done
        self.recomputed_tokens = ledger.recomputed
        return grown

    def note_end(self, result: RequestResult) -> None:
        self.finish_reason = result.finish_reason
        self.num_tokens = len(result.tokens)
        self.ttft_s = result.ttft_s
        self.request = None

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between two tokens; None before the second."""
        if self.num_tokens < 2 or self.last_token_s <= self.first_token_s:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        """The record as `Monitor.snapshot` has it."""
        return {
            "id": self.request_id,
            "tenant": self.tenant,
            "arrived_s": self.arrived_s,
            "prompt_tokens": self.num_prompt_tokens,
            "resumed_tokens": self.resumed_tokens,
            "spans": [list(span) for span in self.spans],
            "generated_tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            "ttft_s": self.ttft_s,
            "inter_token_s": self.inter_token_s,
            "why": why_not_deeper(self.spans, self.resume_point, self.num_prompt_tokens, self.grid),
        }
