"""Why each prompt token is computed and not resumed."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
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
"""Why a prompt token was computed and not resumed:

never_seen: no earlier request had this prefix.
kv_evicted: an earlier request had this prefix, and its KV is evicted.
state_not_taken: the KV is there, but the plan stored no state that deep.
branch_first_seen: the KV is there up to where this prompt and a cached one differ first. No state was stored
    at that point, because this request is the first that differs there.
state_evicted: a state was there and was evicted.
last_token: the whole prompt is known, but its last block must be computed for the last token's logits.
partial_block: tokens after the last whole block of a prompt whose whole blocks, if it has any, are known.
    A prompt shorter than a block has no whole block: this is the reason of all its tokens, also of new ones.
capacity: a state was planned there, and no slot was available.
disabled: no prefix caching, or the log-probs of these tokens are wanted.
"""
COMPUTE_REASONS: tuple[ComputeReason, ...] = get_args(ComputeReason)
"""All values of `ComputeReason`, whose documentation explains each."""


class GhostList:
    """A bounded map from the hash of a removed prefix to the reason of its removal; O(1) a key.

    Two generations: once the younger one has `capacity` keys, the older one is forgotten at once;
    `num_lapses` counts that. Keys in `present` are cached, and so no ghosts.
    """

    def __init__(self, capacity: int, present: Container[int] = ()) -> None:
        self.capacity = capacity
        self.present = present
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}
        self.num_lapses = 0

    def add(self, key: int, reason: str) -> None:
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[int], reason: str) -> None:
        young = self._young
        for key in keys:
            young[key] = reason
        if len(young) >= self.capacity:
            self.num_lapses += bool(self._old)
            self._old, self._young = (young if self.capacity else {}), {}

    def discard_all(self, keys: Sequence[int]) -> bool:
        """Forget these keys; returns whether one of them was a ghost."""
        found = False
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(keys):
                found = True
                for key in keys:
                    generation.pop(key, None)
        return found

    def deepest(self, keys: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] whose `keys[d - 1]` is a ghost, or `start` where there is none."""
        if start >= stop or not (self._young or self._old):
            return start
        inside = keys[start:stop][::-1]
        if self._young.keys().isdisjoint(inside) and self._old.keys().isdisjoint(inside):
            return start
        return next((d for d in range(stop, start, -1) if keys[d - 1] in self), start)

    def reason(self, key: int) -> str | None:
        """Why the key is gone; None for a key that is no ghost."""
        return None if key in self.present else self._young.get(key) or self._old.get(key)

    def clear(self) -> None:
        self.num_lapses += bool(self._young or self._old)
        self._young, self._old = {}, {}

    def __contains__(self, key: int) -> bool:
        return (key in self._young or key in self._old) and key not in self.present

    def __len__(self) -> int:
        return sum(1 for key in self._young.keys() | self._old.keys() if key not in self.present)


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a prompt that must be computed, all for one reason."""

    start: int
    stop: int
    reason: ComputeReason


def compute_spans(
    keys: Sequence[int],
    *,
    num_resumed: int,
    num_reachable: int,
    num_matched: int,
    num_seen: int,
    num_tokens: int,
    block_size_tokens: int,
    state_ghosts: GhostList,
    num_lost: int | None = None,
) -> tuple[Span, ...]:
    """Why each token of a prompt from its resume point on is computed, in order and without gaps.

    The counts are leading whole blocks (hashes `keys`): resumed; reachable, with a token left to compute;
    matched, whose KV is cached; seen, evicted blocks included; lost, up to the deepest reachable ghost of a
    state, where the caller knows it.
    """
    lost = state_ghosts.deepest(keys, num_resumed, num_reachable) if num_lost is None else num_lost
    lost_reason: ComputeReason = "state_evicted"
    if lost > num_resumed and state_ghosts.reason(keys[lost - 1]) == "capacity":
        lost_reason = "capacity"
    ends: tuple[tuple[int, ComputeReason], ...] = (
        (lost, lost_reason),
        (num_reachable, "branch_first_seen" if num_seen < len(keys) else "state_not_taken"),
        (num_matched, "last_token"),
        (num_seen, "kv_evicted"),
    )
    spans = []
    start = num_resumed * block_size_tokens
    for depth, reason in ends:
        stop = depth * block_size_tokens
        if stop > start:
            spans.append(Span(start, stop, reason))
            start = stop
    if num_tokens > start:
        spans.append(Span(start, num_tokens, "partial_block" if num_seen == len(keys) else "never_seen"))
    return tuple(spans)


@dataclass(frozen=True)
class TokenLedger:
    """Counts of prompt tokens, of one request or of all; each is resumed, or computed for one reason.

    Tokens that a request computes again after a restart are counted as recomputed only.
    """

    resumed: int = 0
    recomputed: int = 0
    computed: Counter[ComputeReason] = field(default_factory=Counter)

    @classmethod
    def of_step(
        cls,
        *,
        resumed_from: int,
        start: int,
        stop: int,
        spans: Sequence[Span],
        num_counted: int,
        num_prompt_tokens: int,
    ) -> "TokenLedger":
        """The counts of one request's step, which resumed [resumed_from, start) and computes [start, stop).

        `num_counted` leading tokens were counted before a restart; only prompt tokens are counted.
        """
        counts = cls(
            resumed=_overlap(resumed_from, start, num_counted, num_prompt_tokens),
            recomputed=_overlap(start, stop, 0, num_counted),
        )
        for span in spans:
            inside = max(span.start, start), min(span.stop, stop)
            counts.computed[span.reason] += _overlap(*inside, num_counted, num_prompt_tokens)
        return counts

    def __add__(self, other: "TokenLedger") -> "TokenLedger":
        computed = self.computed.copy()
        computed.update(other.computed)
        return TokenLedger(self.resumed + other.resumed, self.recomputed + other.recomputed, computed)

    @property
    def num_prompt_tokens(self) -> int:
        return self.resumed + self.num_computed_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.computed.total()

    def by_reason(self) -> dict[ComputeReason, int]:
        return {reason: self.computed[reason] for reason in COMPUTE_REASONS}


def _overlap(start: int, stop: int, low: int, high: int) -> int:
    """How many integers lie in both [start, stop) and [low, high)."""
    return max(0, min(stop, high) - max(start, low))
