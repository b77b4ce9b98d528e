"""What a prefix cache knows of one sequence."""

from dataclasses import dataclass, field

from .compute_reasons import Span


@dataclass(slots=True)
class MatchBasis:
    """What a match was asked for, and when it was right. `PrefixMatcher` writes it, and judges by it.

    Attributes:
        num_tokens: tokens of the sequence.
        last_key: the hash of its last whole block, or 0.
        num_held: leading registered blocks of the sequence's path; -1 where nothing was looked up.
        max_resume_tokens: states deeper than this did not count; None for no limit.
        num_lost: leading blocks up to the deepest ghost of a state behind the resume point.
        clock: the clock of the prefix tree when the match was right.
        family_change: the last change of a state of the prefix's family at that time; see `PrefixTree`.
        num_lapses: how often ghosts had lapsed by then.
    """

    num_tokens: int = -1
    last_key: int = 0
    num_held: int = -1
    max_resume_tokens: int | None = None
    num_lost: int = 0
    clock: int = -1
    family_change: int = -1
    num_lapses: int = -1


@dataclass(frozen=True)
class PrefixMatch:
    """The result of `PrefixCache.match`. A match holds and pins nothing.

    A match is right until the cache changes. `PrefixCache.match(..., known=match)` then costs only what the
    changes cost, and returns the same object where the result is the same.

    Attributes:
        blocks: the registered KV blocks of the sequence's longest known prefix.
        resume_tokens: the deepest boundary <= N-1, and within the limit that was asked for, that has a state
            within `blocks`; 0 = start from zeros.
        resume_slot: the durable slot of that state, or -1.
        seen_tokens: how far the sequence follows a known path, evicted blocks included.
        spans: why each token from `resume_tokens` to N is computed, in order and without gaps.
        basis: what was asked for, and when the match was right. No part of what the match says.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    basis: MatchBasis = field(default_factory=MatchBasis, compare=False, repr=False)
