"""What became of every prompt token, and how full the pools are."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

ComputeReason = Literal[
    "never_seen",
    "kv_evicted",
    "state_not_taken",
    "branch_first_seen",
    "state_evicted",
    "last_token",
    "partial_block",
    "capacity",
    "disabled",
]
COMPUTE_REASONS: tuple[ComputeReason, ...] = get_args(ComputeReason)
"""Why a prompt token was computed and not resumed:

never_seen: no earlier request had this prefix.
kv_evicted: one had, and the KV is gone.
state_not_taken: KV is there, but the plan took no state that deep.
branch_first_seen: KV is there up to where this prompt leaves a known path; no state was taken there, because
    this is the first request to leave it at that point.
state_evicted: a state was there and was evicted.
last_token: the whole prompt is known, but its last block must be computed for the last token's logits.
partial_block: tokens after the last whole block of a prompt that is otherwise known.
capacity: a state was planned there, and no slot was available.
disabled: no prefix caching, or none for this request.
"""


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a prompt that must be computed, all for one reason."""

    start: int
    stop: int
    reason: ComputeReason


@dataclass
class TokenLedger:
    """Running counts of prompt tokens dealt with, of one request or of all.

    Every prompt token is counted once, when the step that computes it, or the first one after it, has been
    launched; tokens computed again after a restart only in `recomputed`.
    """

    resumed: int = 0
    recomputed: int = 0
    computed: Counter[ComputeReason] = field(default_factory=Counter)

    def add(self, other: "TokenLedger") -> None:
        self.resumed += other.resumed
        self.recomputed += other.recomputed
        self.computed.update(other.computed)

    @property
    def prompt(self) -> int:
        return self.resumed + self.computed_tokens

    @property
    def computed_tokens(self) -> int:
        return self.computed.total()

    def by_reason(self) -> dict[ComputeReason, int]:
        return {reason: self.computed[reason] for reason in COMPUTE_REASONS}


@dataclass(frozen=True)
class SpeculationStats:
    """What drafts were worth, so far. Counted are decodes: one a step and request that decodes in it.

    `num_tokens` counts the tokens that decodes generated. Each decode generates its accepted drafts and one
    token more; a drafted stop token ends the answer, so such a decode generates its accepted drafts alone.
    """

    num_decodes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted of drafted; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_decode(self) -> float:
        return self.num_tokens / self.num_decodes if self.num_decodes else 0.0


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. Token counts are of the prompt tokens dealt with so far; generated tokens are not counted.

    `num_prompt_tokens = num_resumed_tokens + num_computed_tokens`, and `num_computed_tokens` is the sum of
    `computed_by_reason`. `num_recomputed_tokens`, tokens computed again after a request was evicted and
    restarted, come on top.
    """

    num_requests: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_held_kv_blocks: int
