"""One request: its prompt and settings, and its answer so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...request import FinishReason, PromptFigures, RequestResult, SamplingParams, TopLogProbs
from .cache.checkpoint_plan import CheckpointPlan
from .cache.hashing import PrefixHashChain
from .cache.prefix_match import PrefixMatch
from .cache.reasons import TokenLedger
from .holding import Holding
from .token_view import TokenView


class GeneratedToken(NamedTuple):
    """One token of an answer.

    Attributes:
        token: its id.
        log_prob: its log-prob; None unless asked for.
        top_log_probs: the most likely tokens at its position and their log-probs; None unless asked for.
    """

    token: int
    log_prob: float | None
    top_log_probs: TopLogProbs | None = None


@dataclass(eq=False)
class DynamicInferenceRequest:
    """A prompt, its settings and its answer. What the request holds while it runs is its `holding`.

    The fields from `tokens` on change while the request is served. `RequestRows` writes `holding`; the
    methods below write the others.

    Attributes:
        seed: seed of the request's random numbers.
        next_token: the token behind the prompt, of a request that scores. Such a request generates nothing:
            it ends with the log-prob of this token.
        given_tokens: the answer's first tokens, which another engine has generated. The request goes on as
            one that was preempted behind them, and returns the tokens behind them.
        hashes: hashes of the whole blocks of `tokens`; the chain is extended when a hash is needed.
        tokens: the prompt, then the answer.
        log_probs: log-probs of the generated tokens behind `given_tokens`; empty unless asked for.
        top_log_probs: the most likely tokens at these tokens' positions; empty unless asked for.
        prompt_log_probs: the log-probs that the logits at `scored_positions` give, as far as they are known.
        ttft_s: seconds from the arrival to the first token; None until then.
        holding: None while the request waits.
        ledger: how many prompt tokens were resumed, computed (by reason) and recomputed.
        num_counted: leading tokens that the ledger has counted, also before a restart.
        match: what was cached of the tokens when that was last asked; `Admission` writes it.
        owned: whether somebody who holds the request takes its result: a stream, or a call of `generate`.
        result: the result; None until the request has ended. The engine writes it.
        num_overtaken: later requests that were admitted while this one waited for memory or for a state; the
            scheduler writes it.
        awaited_tokens, awaits_states: up to which boundary the request waited for a state in the last step (0
            for none), and whether it may wait again; the scheduler writes them.
    """

    request_id: int
    prompt_tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan
    hashes: PrefixHashChain
    arrival_s: float
    seed: int = 0
    next_token: int | None = None
    given_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    ttft_s: float | None = None
    holding: Holding | None = None
    ledger: TokenLedger = field(default_factory=TokenLedger)
    num_counted: int = 0
    match: PrefixMatch | None = None
    owned: bool = False
    result: RequestResult | None = None
    num_overtaken: int = 0
    awaited_tokens: int = 0
    awaits_states: bool = True
    _token_view: TokenView | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt_tokens, *self.given_tokens]

    def __repr__(self) -> str:
        """One line, without tokens: they are the user's."""
        state = "running" if self.holding is not None else "waiting"
        if self.result is not None:
            state = f"ended: {self.result.finish_reason}"
        return (
            f"<DynamicInferenceRequest {self.request_id}: {len(self.prompt_tokens)} prompt tokens, "
            f"{self.num_generated} generated, {state}>"
        )

    @property
    def token_view(self) -> TokenView:
        """`tokens` for a drafter to read; the same view until tokens are cut back."""
        if self._token_view is None or not self._token_view.shows(self.tokens):
            self._token_view = TokenView(self.tokens)
        return self._token_view

    @property
    def generated(self) -> list[int]:
        """The answer behind `given_tokens`."""
        return self.tokens[len(self.prompt_tokens) + len(self.given_tokens) :]

    @property
    def num_generated(self) -> int:
        """Tokens of the answer, `given_tokens` included."""
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def max_length(self) -> int:
        return len(self.prompt_tokens) + self.sampling.num_tokens_to_generate

    @property
    def scored_positions(self) -> range:
        """The positions whose logits give log-probs of known tokens: position p that of token p + 1."""
        if not self.sampling.returns_prompt_log_probs:
            return range(0)
        last = len(self.prompt_tokens) - (self.next_token is None)
        return range(self.sampling.prompt_log_probs_start - 1, last)

    @property
    def max_resume_tokens(self) -> int | None:
        """How many leading tokens may stay without logits; None where only the next token needs logits."""
        scored, num_known = self.scored_positions, len(self.prompt_log_probs)
        return scored[num_known] if num_known < len(scored) else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer, or the scoring, is complete; None where it is not."""
        if self.next_token is not None:
            return "length" if len(self.prompt_log_probs) == len(self.scored_positions) else None
        if self.num_generated and self.tokens[-1] in self.sampling.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def generated_from(self, first: int) -> list[GeneratedToken]:
        """The generated tokens behind `given_tokens`, from number `first` on."""
        tokens = self.generated[first:]
        log_probs: Sequence[float | None] = self.log_probs[first:] or [None] * len(tokens)
        tops: Sequence[TopLogProbs | None] = self.top_log_probs[first:] or [None] * len(tokens)
        return list(map(GeneratedToken, tokens, log_probs, tops))

    @property
    def prompt_figures(self) -> PromptFigures:
        """What has become of the prompt so far."""
        return PromptFigures(
            self.ledger.resumed,
            self.ledger.by_reason(),
            list(self.prompt_log_probs) if self.sampling.returns_prompt_log_probs else None,
        )

    def result_for(self, reason: FinishReason) -> RequestResult:
        """The result of a request that ends for `reason`."""
        return RequestResult(
            request_id=self.request_id,
            tokens=self.generated,
            log_probs=self.log_probs if self.sampling.return_log_probs else None,
            top_log_probs=self.top_log_probs if self.sampling.num_top_log_probs else None,
            prompt_log_probs=self.prompt_log_probs if self.sampling.returns_prompt_log_probs else None,
            num_prompt_tokens=len(self.prompt_tokens),
            num_resumed_tokens=self.ledger.resumed,
            computed_by_reason=self.ledger.by_reason(),
            num_recomputed_tokens=self.ledger.recomputed,
            ttft_s=self.ttft_s,
            finish_reason=reason,
        )

    def append(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float | None],
        now_s: float,
        tops: Sequence[TopLogProbs | None] = (),
    ) -> None:
        """Add generated tokens, and what is asked for of them. `now_s`: the time of `time.perf_counter`."""
        self.tokens += tokens
        self.log_probs += [value for value in log_probs if value is not None]
        self.top_log_probs += [top for top in tops if top is not None]
        if self.ttft_s is None:
            self.ttft_s = now_s - self.arrival_s

    def following_tokens(self, positions: range) -> list[int]:
        """The known tokens behind these positions, all of `scored_positions`."""
        tokens = self.prompt_tokens[positions.start + 1 : positions.stop + 1]
        if self.next_token is not None and positions.stop == len(self.prompt_tokens):
            tokens.append(self.next_token)
        return tokens

    def set_prompt_log_probs(self, positions: range, log_probs: Sequence[float]) -> None:
        """Note the log-probs of these of the `scored_positions`; those before them are known."""
        first = positions.start - self.scored_positions.start
        self.prompt_log_probs[first : first + len(positions)] = log_probs

    def cut_to(self, num_tokens: int) -> None:
        """Cut the request to its first `num_tokens` tokens; the step that generated the others failed."""
        if num_tokens < len(self.tokens):
            self.tokens = self.tokens[:num_tokens]  # another list: views of the old one stay what they are
        num_new = self.num_generated - len(self.given_tokens)
        del self.log_probs[num_new:]
        del self.top_log_probs[num_new:]
        self.hashes.cut_to(num_tokens)
        if not num_new:
            self.ttft_s = None
