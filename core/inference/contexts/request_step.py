"""What one request does in one step."""

from dataclasses import dataclass, field
from typing import Any, Self

from .cache.checkpoints import PathStep
from .cache.reasons import Span, TokenLedger
from .holding import Holding
from .request import DynamicInferenceRequest


@dataclass(frozen=True)
class RequestStep(PathStep):
    """Tokens [start, stop) of one request, to be computed in the next step; `of` makes one.

    Attributes:
        request, holding: the request, and what it held when the step was scheduled.
        num_resumed: tokens before `start` that were resumed from a state.
        spans: why the prompt tokens of the step are computed.
        follows: whether the step is a decode of the token that the step before samples, which nobody has read
            yet. Only the device knows the token; `tokens` has a 0 in its place.
    """

    request: DynamicInferenceRequest = field(kw_only=True)
    holding: Holding = field(kw_only=True)
    num_resumed: int = 0
    spans: tuple[Span, ...] = ()
    follows: bool = False

    @classmethod
    def of(
        cls, request: DynamicInferenceRequest, holding: Holding, start: int, stop: int, **settings: Any
    ) -> Self:
        """A step of `request` along the path that it holds."""
        return cls(holding.path, request.tokens, start, stop, request=request, holding=holding, **settings)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def completes(self) -> bool:
        """Whether the request's next token is sampled after this step."""
        if self.request.next_token is not None:
            return False
        return self.follows or self.stop - len(self.drafts) == len(self.request.tokens)

    @property
    def num_generated(self) -> int:
        """How many tokens the request has generated before those that are sampled after this step."""
        return self.stop - len(self.drafts) - len(self.request.prompt_tokens)

    def completes_block(self, block_size_tokens: int) -> bool:
        """Whether the step fills a KV block that becomes findable then."""
        path = self.holding.path
        return path.shares and self.stop // block_size_tokens > path.num_registered

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute, drafts included."""
        if self.follows:
            return [0]
        known = self.request.tokens[self.start : self.stop]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def scored_positions(self) -> range:
        """The step's positions among the request's `scored_positions`."""
        scored = self.request.scored_positions
        return range(max(self.start, scored.start), min(self.stop, scored.stop))

    @property
    def logit_positions(self) -> range:
        """The token positions whose logits the step must return."""
        if self.drafts:
            return range(self.start, self.stop)
        scored = self.scored_positions
        if not self.completes:
            return scored if scored else range(self.stop, self.stop)
        return range(scored.start if scored else self.stop - 1, self.stop)

    def max_drafts(self, num_speculative_tokens: int) -> int:
        """How many drafts the step can take: 0 unless the step is a decode without drafts."""
        if not self.decoding or self.drafts:
            return 0
        return max(0, min(num_speculative_tokens, self.request.max_length - self.stop - 1))

    def token_counts(self) -> TokenLedger:
        """How many of the step's prompt tokens are resumed, computed (by reason) or recomputed."""
        return TokenLedger.of_step(
            resumed_from=self.start - self.num_resumed,
            start=self.start,
            stop=self.stop,
            spans=self.spans,
            num_counted=self.request.num_counted,
            num_prompt_tokens=len(self.request.prompt_tokens),
        )
