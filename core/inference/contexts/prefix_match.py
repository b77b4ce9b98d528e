"""What a prefix cache knows of one sequence."""

from dataclasses import dataclass

from ..policies.compute_reasons import Span


@dataclass(frozen=True)
class PrefixMatch:
    """The result of `PrefixCache.match`. A match holds and pins nothing.

    Attributes:
        blocks: the registered KV blocks of the sequence's longest known prefix.
        resume_tokens: the deepest boundary <= N-1 within `blocks` that has a state; 0 = start from zeros.
        resume_slot: the durable slot of that state, or -1.
        seen_tokens: how far the sequence follows a known path, evicted blocks included.
        spans: why each token from `resume_tokens` to N is computed, in order and without gaps.
        version: version of the cache; the match is valid as long as `PrefixCache.version` is the same.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    version: tuple[int, int] = (0, 0)
