"""A request: its prompt, settings and answer, what it holds while it runs, and what it does in one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, overload

from ...request import FinishReason, PromptFigures, RequestResult, SamplingParams, TopLogProbs
from .cache.checkpoint_plan import CheckpointPlan
from .cache.checkpoints import PathStep
from .cache.hashing import PrefixHashChain
from .cache.prefix_match import CachedPath, PrefixMatch
from .cache.reasons import Span, TokenLedger


class TokenView(Sequence[int]):
    """A request's prompt and answer so far, to be read but not changed.

    A view only grows: the tokens that it has shown stay. A request whose tokens are cut back, because the
    step that generated them failed, gets another view. So what a drafter derives from a view's tokens holds
    as long as the view lives. A view equals lists and tuples of its tokens. Among themselves, views are
    compared and hashed by identity, and they can be weakly referenced: they are keys for a
    `WeakKeyDictionary`.
    """

    __slots__ = ("__weakref__", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens`: the list to show. It may only grow."""
        self._tokens = tokens

    def shows(self, tokens: list[int]) -> bool:
        """Whether this is a view of this very list."""
        return tokens is self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """A token, or a list of the tokens in a slice."""
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | tuple) and self._tokens == list(other))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"TokenView({self._tokens})"


@dataclass(eq=False)
class Holding:
    """A row, live slots, a path in the prefix cache, and how far the request is computed.

    A request that waits has no Holding, so that a released request cannot keep anything by mistake.

    Attributes:
        row: the request's row in the block table; `RequestRows` assigns the row.
        live_slots: 1 + K live slots, where K is `num_speculative_tokens`. A decode of 1 + K tokens writes the
            state after token i into slot i; the request continues from the slot of the last accepted token.
            One live slot where decodes replay.
        path: KV blocks and the pinned durable slot.
        prefill_length: tokens that the request had at its admission. Prefill computes these tokens, decodes
            the later ones.
        num_computed: tokens whose KV is in the path's blocks; only `RequestStates` writes this field.
        state_index: pool index of the state after `num_computed` tokens, or at the last grid point where
            decodes replay; -1 for zeros. Only `RequestStates` writes this field.
        branch_tokens: tokens that the prompt shares with an earlier one before the two differ, or 0; only
            `Admission` writes this field.
        spans: why the prompt tokens after the last resume point are computed; only `Admission` writes this
            field.
    """

    row: int
    live_slots: tuple[int, ...]
    path: CachedPath
    prefill_length: int
    num_computed: int = 0
    state_index: int = -1
    branch_tokens: int = 0
    spans: tuple[Span, ...] = ()

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prefill_length


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
