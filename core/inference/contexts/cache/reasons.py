"""Why each prompt token is computed and not resumed."""

from collections import Counter
from collections.abc import Iterable, Sequence
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


GoneFact = Literal["block", "continuation", "state", "refused state"]
"""What is gone under a prefix hash: its KV block, a block that continued it, its state, or a state for which
no slot was available."""
_BITS: dict[GoneFact, int] = {"block": 1, "continuation": 2, "state": 4, "refused state": 8}
_STATES = _BITS["state"] | _BITS["refused state"]


class GhostList:
    """A bounded map from the hashes of prefixes to what is gone under them; O(1) a hash.

    Two generations: once the younger one has `capacity` hashes, the older one is forgotten at once. What is
    there again (a block that is registered, a state of a host that is not named yet) may still be listed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[int, int] = {}  # hash -> bits
        self._old: dict[int, int] = {}

    def add_all(self, keys: Iterable[int], fact: GoneFact) -> None:
        young, old, bit = self._young, self._old, _BITS[fact]
        others = ~_STATES if bit & _STATES else -1
        for key in keys:
            young[key] = (young.get(key) or old.get(key, 0)) & others | bit
        if len(young) >= self.capacity:
            self._old, self._young = (young if self.capacity else {}), {}

    def has(self, key: int, fact: GoneFact) -> bool:
        return bool((self._young.get(key) or self._old.get(key, 0)) & _BITS[fact])

    def discard_states(self, keys: Iterable[int]) -> None:
        """Note that the states under these hashes are there."""
        for generation in (self._young, self._old):
            if generation:
                for key in generation.keys() & keys:
                    generation[key] &= ~_STATES
                    if not generation[key]:
                        del generation[key]

    def deepest_state(self, keys: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] where the state under `keys[d - 1]` is gone, else `start`."""
        young, old = self._young, self._old
        inside = keys[start:stop][::-1]
        if not inside or (young.keys().isdisjoint(inside) and old.keys().isdisjoint(inside)):
            return start
        gone = ((young.get(key) or old.get(key, 0)) & _STATES for key in inside)
        return next((stop - i for i, bits in enumerate(gone) if bits), start)

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


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
    ghosts: GhostList,
) -> tuple[Span, ...]:
    """Why each token of a prompt from its resume point on is computed, in order and without gaps.

    The counts are leading whole blocks (hashes `keys`): resumed; reachable, with a token left to compute;
    matched, whose KV is cached; seen, evicted blocks included.
    """
    lost = ghosts.deepest_state(keys, num_resumed, num_reachable)
    refused = lost > num_resumed and ghosts.has(keys[lost - 1], "refused state")
    lost_reason: ComputeReason = "capacity" if refused else "state_evicted"
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
