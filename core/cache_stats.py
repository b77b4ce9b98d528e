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
class CacheStats:
    """A snapshot. Token counts are of the prompt tokens dealt with so far; generated tokens are not counted.

    `prompt_tokens = resumed_tokens + computed_tokens`, and `computed_tokens` is the sum of
    `computed_by_reason`. `recomputed_tokens`, tokens computed again after a request was evicted and
    restarted, come on top.
    """

    requests: int
    prompt_tokens: int
    resumed_tokens: int
    computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    recomputed_tokens: int
    slots_free: int
    slots_reserved: int
    slots_committed: int
    states_committed_total: int
    states_evicted_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_held: int
