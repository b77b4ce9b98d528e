"""What a soak counts: of one round, and of all."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RoundTally:
    """What came of a round, or of several.

    Attributes:
        requests: how many were asked.
        comparisons: answers held against an uncached model in float64; on a GPU, bit for bit against an
            uncached engine.
        tokens_compared: generated tokens of these answers.
        resumed_tokens: tokens of prompts that hits saved.
        hits: requests that resumed something.
        events: how often what happened, such as "cancelled", "preempted" or "failed copies".
        mismatches: what was wrong, each with the seed that repeats it.
    """

    requests: int = 0
    comparisons: int = 0
    tokens_compared: int = 0
    resumed_tokens: int = 0
    hits: int = 0
    events: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: "RoundTally") -> None:
        """Count what another round did, too."""
        self.requests += other.requests
        self.comparisons += other.comparisons
        self.tokens_compared += other.tokens_compared
        self.resumed_tokens += other.resumed_tokens
        self.hits += other.hits
        self.events.update(other.events)
        self.mismatches += other.mismatches
