"""What one request does in one step."""

from dataclasses import dataclass, field, replace

from .cache.checkpoint_plan import Boundary
from .cache.compute_reasons import Span, TokenLedger
from .holding import Holding
from .request import DynamicInferenceRequest


@dataclass(frozen=True)
class RequestStep:
    """Tokens [start, stop) of one request, to be computed in the next step.

    The last tokens may be drafts: guesses at the request's next tokens, which this step verifies.

    Attributes:
        request, holding: the request, and what it held when the step was scheduled.
        start, stop: token positions.
        decoding: whether the step is a decode; else it is (a part of) a prefill.
        num_resumed: tokens before `start` that were resumed from a state.
        spans: why the prompt tokens of the step are computed.
        boundaries: where states are to be taken.
        destinations: boundary position -> the durable slot reserved for its state.
        drafts: the drafts of a decode. They are not among the request's tokens.
        follows: whether the step is a decode of the token that the step before samples, which nobody has read
            yet. Only the device knows the token; `tokens` has a 0 in its place.
    """

    request: DynamicInferenceRequest
    holding: Holding
    start: int
    stop: int
    decoding: bool = False
    num_resumed: int = 0
    spans: tuple[Span, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    destinations: dict[int, int] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()
    follows: bool = False

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

    def key_at(self, position: int) -> int:
        """The hash of the prefix that ends at block boundary `position` of the tokens and drafts."""
        request, chain = self.request, self.holding.path.chain
        chain.extend_to(request.tokens, position)
        if position > len(request.tokens):  # a fork, so that drafts do not enter the request's chain
            chain = chain.fork()
            chain.extend_to([*request.tokens, *self.drafts], position)
        return chain.keys[position // chain.block_size_tokens - 1]

    def boundary_keys(self) -> set[int]:
        """The hashes under which the planned states will be found."""
        return {self.key_at(boundary.position) for boundary in self.boundaries}

    def block_at(self, position: int) -> int:
        """The KV block that ends at block boundary `position`."""
        path = self.holding.path
        return path.blocks[position // path.chain.block_size_tokens - 1]

    def accepted(self, num_tokens: int) -> "RequestStep":
        """This decode cut to its first `num_tokens` tokens; the others are wrong drafts."""
        stop = self.start + num_tokens
        return replace(
            self,
            stop=stop,
            drafts=self.drafts[: num_tokens - 1],
            boundaries=tuple(boundary for boundary in self.boundaries if boundary.position <= stop),
            destinations={p: slot for p, slot in self.destinations.items() if p <= stop},
        )

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
