"""One request, while it runs and once it is done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .cache_stats import ComputeReason, Span, TokenLedger
from .inference.policies.checkpoint_plan import CheckpointPlan
from .inference.policies.prefix_hash import PrefixHashChain
from .sampling_params import SamplingParams

FinishReason = Literal["length", "stop", "cancelled"]


@dataclass(eq=False)
class DynamicInferenceRequest:
    """A request and what it holds in the context; the context and the engine update it.

    `computed` tokens of `tokens` have their KV in `blocks` and their state at pool index `state_index`.
    While it has no row (`row` = -1) it waits and holds nothing.
    """

    request_id: int
    prompt_tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan
    hashes: PrefixHashChain
    arrival_s: float
    tokens: list[int] = field(default_factory=list)  # prompt, then answer
    log_probs: list[float] = field(default_factory=list)
    prompt_log_probs: list[float | None] = field(default_factory=list)
    ttft_s: float | None = None

    row: int = -1
    blocks: list[int] = field(default_factory=list)
    immutable_blocks: int = 0  # leading blocks whose KV is whole and was registered: never written again
    shares_cache: bool = False  # it registers and commits; not so once the cache it began with is reset
    computed: int = 0
    prefill_length: int = 0  # tokens known when it was admitted: prefill up to here, then decode
    state_index: int = -1  # pool index of the state after `computed` tokens; -1 = zeros
    pinned_slot: int = -1  # the durable slot behind state_index, if it is one
    rolling_block: int = -1  # whose slot holds the last state taken while decoding
    seen_tokens: int = 0  # how far the prompt followed a known path, at its last match
    spans: tuple[Span, ...] = ()  # why its prompt tokens are computed, as of where it last resumed
    paused: bool = False

    ledger: TokenLedger = field(default_factory=TokenLedger)
    accounted: int = 0  # tokens counted in the ledger: how far it ever got

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)
        if self.sampling.returns_prompt_log_probs:
            self.prompt_log_probs = [None] * (len(self.prompt_tokens) - 1)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt_tokens) :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def max_length(self) -> int:
        return len(self.prompt_tokens) + self.sampling.num_tokens_to_generate

    @property
    def decoding(self) -> bool:
        return self.row >= 0 and self.computed >= self.prefill_length

    @property
    def finished_chunk_token_count(self) -> int:
        """megatron-core's name for `computed`."""
        return self.computed


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    `tokens` and `log_probs` (None unless asked for) cover generated tokens only, one float a token;
    `prompt_log_probs` (None unless asked for) prompt tokens 1 .. N-1. `num_prompt_tokens` and
    `num_resumed_tokens` are counts, `ttft_s` seconds from arrival to the first token (None without one).
    """

    request_id: int
    tokens: list[int]
    log_probs: list[float] | None
    prompt_log_probs: list[float] | None
    num_prompt_tokens: int
    num_resumed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    ttft_s: float | None
    finish_reason: FinishReason
