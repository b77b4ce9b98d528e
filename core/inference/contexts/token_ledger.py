"""What became of prompt tokens: resumed, or computed for a reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .cache.paths import Span
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
