"""What one request does in one step."""

from dataclasses import dataclass, field, replace

from ...cache_stats import Span, TokenLedger
from ...request import DynamicInferenceRequest
from ..policies.checkpoint_plan import Boundary


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [start, stop) of one request, to be computed in the next step.

    The last of them may be drafts: guesses at what follows the request's tokens, to be verified in this step.

    Attributes:
        skipped: tokens before `start` that were resumed from a state.
        spans: why the prompt tokens of the chunk are computed.
        boundaries: where states are to be taken.
        destinations: boundary position -> the durable slot reserved for its state.
        drafts: of a decode; not among the request's tokens.
    """

    request: DynamicInferenceRequest
    start: int
    stop: int
    skipped: int = 0
    spans: tuple[Span, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    destinations: dict[int, int] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def decoding(self) -> bool:
        return self.start >= self.request.prefill_length

    @property
    def completes(self) -> bool:
        """Whether the request's next token is sampled after this step."""
        return self.stop - len(self.drafts) == len(self.request.tokens)

    @property
    def tokens(self) -> list[int]:
        """Those to compute."""
        known = self.request.tokens[self.start : self.stop]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def logit_positions(self) -> range:
        """The token positions whose logits the step must return."""
        request = self.request
        if self.drafts:
            return range(self.start, self.stop)
        if request.sampling.returns_prompt_log_probs and self.start < len(request.prompt_tokens):
            return range(self.start, self.stop)
        return range(self.stop - 1 if self.completes else self.stop, self.stop)

    def kept(self, count: int) -> "ScheduledChunk":
        """The first `count` tokens of a decode, once those behind them turned out to be wrong drafts."""
        stop = self.start + count
        return replace(
            self,
            stop=stop,
            drafts=self.drafts[: count - 1],
            boundaries=tuple(boundary for boundary in self.boundaries if boundary.position <= stop),
            destinations={p: slot for p, slot in self.destinations.items() if p <= stop},
        )

    def token_counts(self) -> TokenLedger:
        """What becomes of the chunk's tokens; prompt tokens count on their first way through only."""
        prompt, seen = len(self.request.prompt_tokens), self.request.accounted
        counts = TokenLedger(
            resumed=_overlap(self.start - self.skipped, self.start, seen, prompt),
            recomputed=_overlap(self.start, self.stop, 0, seen),
        )
        for span in self.spans:
            start, stop = max(span.start, self.start), min(span.stop, self.stop)
            counts.computed[span.reason] += _overlap(start, stop, seen, prompt)
        return counts


def _overlap(start: int, stop: int, low: int, high: int) -> int:
    return max(0, min(stop, high) - max(start, low))
