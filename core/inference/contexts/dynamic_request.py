"""A request: its prompt, settings and answer, what it holds while it runs, and what of it a step computes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...params_and_results import (
    FinishReason,
    GeneratedToken,
    PromptFigures,
    RequestResult,
    SamplingParams,
    TopLogProbs,
)
from .cache.cached_states import PrefixMatch, Span
from .cache.checkpoint_plan import CheckpointPlan
from .cache.hashing import PrefixHashChain
from .cache.paths import CachedPath, PathStep
from .cache.pool_stats import COMPUTE_REASONS, ComputeReason


@dataclass(frozen=True)
class TokenLedger:
    """Counts of prompt tokens; those computed again after a restart are counted as recomputed only."""

    resumed: int = 0
    recomputed: int = 0
    computed: Counter[ComputeReason] = field(default_factory=Counter)

    @classmethod
    def of_step(
        cls, resumed: range, computed: range, spans: Sequence[Span], num_counted: int, num_prompt_tokens: int
    ) -> "TokenLedger":
        """The counts of a step, of prompt tokens; `num_counted` leading tokens were counted before."""
        new = range(num_counted, num_prompt_tokens)
        counts = cls(_overlap(resumed, new), _overlap(computed, range(num_counted)))
        for span in spans:
            inside = range(max(span.start, computed.start), min(span.stop, computed.stop))
            counts.computed[span.reason] += _overlap(inside, new)
        return counts

    def __add__(self, other: "TokenLedger") -> "TokenLedger":
        computed = self.computed.copy()
        computed.update(other.computed)
        return TokenLedger(self.resumed + other.resumed, self.recomputed + other.recomputed, computed)

    @property
    def num_prompt_tokens(self) -> int:
        return self.resumed + self.computed.total()

    def counts(self) -> dict[str, Any]:
        """All counts, as `CacheStats` names them."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_resumed_tokens": self.resumed,
            "num_computed_tokens": self.computed.total(),
            "computed_by_reason": self.by_reason(),
            "num_recomputed_tokens": self.recomputed,
        }

    def by_reason(self) -> dict[ComputeReason, int]:
        return {reason: self.computed[reason] for reason in COMPUTE_REASONS}


def _overlap(one: range, other: range) -> int:
    """How many integers lie in both ranges."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


@dataclass(eq=False)
class Allocation:
    """What a running request has: a row, live slots, input blocks, a path, and how far it is computed."""

    row: int
    live_slots: tuple[int, ...]  # a decode writes the state after its token i into slot i, unless it replays
    path: CachedPath
    prefill_length: int  # at the admission; decodes compute later tokens
    num_computed: int = 0  # this and `state_index` are written by `RequestStates` alone
    state_index: int = -1  # in the pool, after them (replay: at the last grid point); -1: zeros
    input_blocks: list[int] = field(default_factory=list)  # `InputBlockTable` writes it
    branch_tokens: int = 0  # shared with an earlier prompt before the two differ; `Admission` writes it
    spans: tuple[Span, ...] = ()

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prefill_length


class TokenView(Sequence[int]):
    """A request's prompt and answer so far, read only.

    A view only grows; a request whose tokens are cut back, because a step failed, gets another view. Views
    equal lists and tuples of their tokens, and are keys for a `WeakKeyDictionary` by identity.
    """

    __slots__ = ("__weakref__", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        """One token, or a list of those of a slice."""
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | tuple) and self._tokens == list(other))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"TokenView({self._tokens})"


NO_ID = -1  # in place of the id of a request that has none yet


@dataclass(eq=False)
class DynamicInferenceRequest:
    """A prompt, its settings and its answer. What the request has while it runs is its `allocation`."""

    request_id: int  # `NO_ID` until the engine gives one
    prompt_tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan
    chain: PrefixHashChain  # extended when a hash is needed
    arrival_s: float
    seed: int = 0
    next_token: int | None = None  # the last token of a sequence to score; the others are the prompt
    given_tokens: list[int] = field(default_factory=list)  # first ones, by another engine; not in results
    tokens: list[int] = field(default_factory=list)  # the prompt, then the answer
    log_probs: list[float] = field(default_factory=list)  # of tokens after the given ones, as far as asked
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)  # that `scored_positions` give
    ttft_s: float | None = None  # from the arrival to the first token
    allocation: Allocation | None = None  # None while the request waits
    ledger: TokenLedger = field(default_factory=TokenLedger)
    num_counted: int = 0  # leading tokens in `ledger`, also before a restart
    match: PrefixMatch | None = None  # the last one; `Admission` sets it, a recovery from errors clears it
    owned: bool = False  # a stream or a call of `generate` owns the result
    result: RequestResult | None = None  # of an ended request; the engine writes it
    awaited_tokens: int = 0  # boundary whose state the last step waited for; the scheduler writes it
    shared_tokens: int = 0  # with requests that waited as it was admitted; `Admission` writes it
    may_wait: bool = True  # whether it may wait again
    _token_view: TokenView | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt_tokens, *self.given_tokens]

    def __repr__(self) -> str:
        """One line, without tokens: they are the user's."""
        state = "running" if self.allocation is not None else "waiting"
        if self.result is not None:
            state = f"ended: {self.result.finish_reason}"
        return (
            f"<DynamicInferenceRequest {self.request_id}: {len(self.prompt_tokens)} prompt tokens, "
            f"{self.answer_length} generated, {state}>"
        )

    @property
    def token_view(self) -> TokenView:
        """`tokens` for a drafter to read; the same view until tokens are cut back."""
        if self._token_view is None or self._token_view._tokens is not self.tokens:
            self._token_view = TokenView(self.tokens)
        return self._token_view

    @property
    def answer_length(self) -> int:
        """Tokens of the answer, `given_tokens` included."""
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def num_new(self) -> int:
        """Tokens of the answer after `given_tokens`."""
        return self.answer_length - len(self.given_tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt_tokens) + len(self.given_tokens) :]

    @property
    def max_length(self) -> int:
        return len(self.prompt_tokens) + self.sampling.max_tokens

    @property
    def scored_positions(self) -> range:
        """The positions whose logits give log-probs of known tokens: position p that of token p + 1."""
        if self.sampling.skip_prompt_log_probs:
            return range(0)
        last = len(self.prompt_tokens) - (1 if self.next_token is None else 0)
        return range(self.sampling.prompt_log_probs_start - 1, last)

    @property
    def max_unscored_tokens(self) -> int | None:
        """How many leading tokens may stay without logits; None where only the next token needs logits."""
        scored, num_known = self.scored_positions, len(self.prompt_log_probs)
        return scored[num_known] if num_known < len(scored) else None

    @property
    def max_resume_tokens(self) -> int:
        """How many leading tokens a cached state may stand for: the last known token is always computed."""
        limit = len(self.tokens) - 1
        return limit if self.max_unscored_tokens is None else min(limit, self.max_unscored_tokens)

    def hashes_to(self, num_tokens: int) -> list[int]:
        """The hashes of the first tokens' whole blocks; a replay's chain also has the answer to come."""
        self.chain.extend_to(self.tokens)
        return self.chain.hashes[: num_tokens // self.chain.block_size_tokens]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer, or the scoring, is complete; None where it is not."""
        if self.next_token is not None:
            return "length" if len(self.prompt_log_probs) == len(self.scored_positions) else None
        if self.answer_length and self.tokens[-1] in self.sampling.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def new_from(self, first: int) -> list[GeneratedToken]:
        """The `new_tokens` from number `first` on."""
        tokens = self.new_tokens[first:]
        log_probs: Sequence[float | None] = self.log_probs[first:] or [None] * len(tokens)
        tops: Sequence[TopLogProbs | None] = self.top_log_probs[first:] or [None] * len(tokens)
        return list(map(GeneratedToken, tokens, log_probs, tops))

    @property
    def prompt_figures(self) -> PromptFigures:
        return PromptFigures(
            self.ledger.resumed,
            self.ledger.by_reason(),
            None if self.sampling.skip_prompt_log_probs else list(self.prompt_log_probs),
        )

    def result_for(self, reason: FinishReason) -> RequestResult:
        return RequestResult(
            request_id=self.request_id,
            tokens=self.new_tokens,
            log_probs=self.log_probs if self.sampling.return_log_probs else None,
            top_log_probs=self.top_log_probs if self.sampling.num_top_log_probs else None,
            prompt_log_probs=None if self.sampling.skip_prompt_log_probs else self.prompt_log_probs,
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

    def target_tokens(self, positions: range) -> list[int]:
        """The known tokens after these positions, all of `scored_positions`."""
        tokens = self.prompt_tokens[positions.start + 1 : positions.stop + 1]
        if self.next_token is not None and positions.stop == len(self.prompt_tokens):
            tokens.append(self.next_token)
        return tokens

    def set_prompt_log_probs(self, positions: range, log_probs: Sequence[float]) -> None:
        """Store the log-probs of these of the `scored_positions`; those before them are known."""
        first = positions.start - self.scored_positions.start
        self.prompt_log_probs[first : first + len(positions)] = log_probs

    def cut_to(self, num_tokens: int) -> None:
        """Cut the request to its first `num_tokens` tokens; the step that generated the others failed."""
        if num_tokens < len(self.tokens):
            self.tokens = self.tokens[:num_tokens]  # another list: views of the old one stay what they are
        del self.log_probs[self.num_new :]
        del self.top_log_probs[self.num_new :]
        self.chain.cut_to(num_tokens)
        if not self.num_new:
            self.ttft_s = None


@dataclass(frozen=True)
class ScheduledRequest(PathStep):
    """A request whose tokens [start, stop) the next step computes, along the path that the request holds."""

    request: DynamicInferenceRequest = field(kw_only=True)
    allocation: Allocation = field(kw_only=True)
    num_resumed: int = 0  # before `start`
    spans: tuple[Span, ...] = ()
    decodes_unread: bool = False  # a decode of a token that only the device knows; `tokens` has a 0 for it
    admits: bool = False  # the first one since the request waited

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def samples_token(self) -> bool:
        """Whether the request's next token is sampled after this step."""
        if self.decoding:
            return True
        return self.request.next_token is None and self.stop == len(self.request.tokens)

    @property
    def answer_length(self) -> int:
        """The request's `answer_length` before the tokens that are sampled after this step."""
        return self.stop - len(self.drafts) - len(self.request.prompt_tokens)

    def completes_block(self, block_size_tokens: int) -> bool:
        """Whether the tokens fill a KV block that becomes findable after the step."""
        path = self.allocation.path
        return path.caches and self.stop // block_size_tokens > path.num_registered

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute, drafts included."""
        if self.decodes_unread:
            return [0]
        known = self.request.tokens[self.start : self.stop]
        return [*known, *self.drafts] if self.drafts else known

    @property
    def scored_positions(self) -> range:
        """The scheduled positions among the request's `scored_positions`."""
        if self.decoding:
            return range(0)
        scored = self.request.scored_positions
        return range(max(self.start, scored.start), min(self.stop, scored.stop))

    @property
    def logit_positions(self) -> range:
        """The token positions whose logits the step must return."""
        if self.decoding:
            return range(self.start, self.stop)
        scored = self.scored_positions
        if not self.samples_token:
            return scored if scored else range(self.stop, self.stop)
        return range(scored.start if scored else self.stop - 1, self.stop)

    def max_drafts(self, num_speculative_tokens: int) -> int:
        """How many drafts can be added: 0 unless this is a decode without drafts."""
        if not self.decoding or self.drafts:
            return 0
        return max(0, min(num_speculative_tokens, self.request.max_length - self.stop - 1))


Batch = Sequence[ScheduledRequest]  # the requests of one step, each once
