"""What is cached of a sequence, and why each of its other tokens is computed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from .hashing import GhostList, PrefixHashChain
from .prefix_tree import PrefixTree

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
    """Why each token from the resume point on is computed; counts are leading blocks of hashes `keys`."""
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


MAX_COMPARED = 32
"""Waiting requests with which one that begins is compared."""


def depth_worth_a_state(keys: Sequence[int], others: Iterable[Sequence[int]], num_known: int) -> int:
    """After how many blocks of `keys` a state saves `others` the most blocks; 0 where it saves none.

    `num_known` blocks are saved without it. Example: of keys [a b c] and others [[a b x], [a b y], [a z]],
    2: a state after b saves two of them 2 blocks each, one after a would save three of them 1 block each.
    """
    depth = saved = 0
    key = keys[num_known] if num_known < len(keys) else None
    deeper = [other for other in others if len(other) > num_known and other[num_known] == key]
    shared = sorted((_num_shared(keys, other) for other in deeper), reverse=True)
    for count, num_shared in enumerate(shared, 1):
        if (num_shared - num_known) * count > saved:
            depth, saved = num_shared, (num_shared - num_known) * count
    return depth


def _num_shared(keys: Sequence[int], other: Sequence[int]) -> int:
    """Leading blocks that two sequences have in common; a key stands for all blocks up to its own."""
    return bisect_left(range(min(len(keys), len(other))), True, key=lambda i: keys[i] != other[i])


class MatchBasis(NamedTuple):
    """What a match was asked for, and when it was right; `match_prefix` writes it, and judges by it."""

    num_tokens: int = -1
    last_key: int = 0  # hash of the last whole block
    num_held: int = -1  # the path's registered blocks; -1 where nothing was looked up
    max_resume_tokens: int | None = None
    block_version: int = -1  # this and the next two are the tree's and its ghosts'
    state_version: int = -1
    num_lapses: int = -1


@dataclass
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
        basis: what was asked for, and when the match was right. No part of what the match says, and the only
            attribute that is set later: by `match_prefix`, where it returns the match again.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    basis: MatchBasis = field(default=MatchBasis(), compare=False, repr=False)


def match_prefix(
    tree: PrefixTree,
    chain: PrefixHashChain,
    num_tokens: int,
    path_blocks: Sequence[int],
    num_held: int,
    max_resume_tokens: int | None,
    known: PrefixMatch | None,
) -> PrefixMatch:
    """See `PrefixCache.match`; `num_held` of `path_blocks` are registered, states within do not count.

    What stands of `known` is not looked up again: only leaves are removed, and what came back was registered
    later.
    """
    ghosts, keys, size = tree.ghosts, chain.keys, chain.block_size_tokens
    blocks, num_seen, whole = tuple(path_blocks[:num_held]), 0, num_tokens // size
    if known is not None and _is_of_beginning(known.basis, chain, num_tokens, num_held, max_resume_tokens):
        since, blocks = known.basis.block_version, known.blocks
        no_lapse = known.basis.num_lapses == ghosts.num_lapses
        if no_lapse:  # what was seen is there, or a ghost
            num_seen = known.seen_tokens // size
        if blocks and not tree.stands(blocks[-1], since):
            blocks = blocks[: bisect_left(blocks, True, key=lambda block: not tree.stands(block, since))]
        elif (
            no_lapse
            and num_tokens == known.basis.num_tokens
            and known.basis.state_version == tree.state_version
            and not (len(blocks) < whole and keys[len(blocks)] in tree.block_of_hash)
            and not (num_seen < whole and ghosts.has(keys[num_seen], "block"))
        ):
            return known
    first = len(blocks)
    if first < whole and keys[first] in tree.block_of_hash:
        parent = blocks[-1] if blocks else chain.root
        blocks = (*blocks, *tree.match(parent, keys[first:whole], chain.tokens[first:whole]))
    num_seen = max(num_seen, len(blocks))
    while num_seen < whole and ghosts.has(keys[num_seen], "block"):
        num_seen += 1
    limit = num_tokens - 1 if max_resume_tokens is None else max_resume_tokens
    limited = limit < num_tokens - 1
    asked = limit // size if limited else whole
    reachable = min(len(blocks), min(limit, num_tokens - 1) // size)
    depth = _deepest_state(tree, blocks, num_held, reachable)
    spans = compute_spans(
        keys if len(keys) == asked else keys[:asked],
        num_resumed=depth,
        num_reachable=reachable,
        num_matched=min(len(blocks), asked),
        num_seen=min(num_seen, asked),
        num_tokens=asked * size if limited else num_tokens,
        block_size_tokens=size,
        ghosts=ghosts,
    )
    if limited:
        spans = (*spans, Span(asked * size, num_tokens, "disabled"))
    slot = tree.slot_of(blocks[depth - 1]) if depth else -1
    versions = tree.block_version, tree.state_version, ghosts.num_lapses
    basis = MatchBasis(num_tokens, _last_key(chain, num_tokens), num_held, max_resume_tokens, *versions)
    match = PrefixMatch(blocks, depth * size, slot, num_seen * size, spans, basis)
    if known == match and known.basis.num_tokens == num_tokens:
        known.basis = basis
        return known
    return match


def _last_key(chain: PrefixHashChain, num_tokens: int) -> int:
    whole = num_tokens // chain.block_size_tokens
    return chain.keys[whole - 1] if whole else 0


def _is_of_beginning(
    basis: MatchBasis, chain: PrefixHashChain, num_tokens: int, num_held: int, limit: int | None
) -> bool:
    """Whether a match on this basis is one of the same sequence, or of its beginning."""
    if basis.num_held != num_held or basis.max_resume_tokens != limit or basis.num_tokens > num_tokens:
        return False
    return basis.last_key == _last_key(chain, basis.num_tokens)


def _deepest_state(tree: PrefixTree, blocks: tuple[int, ...], start: int, stop: int) -> int:
    """The largest d in (start, stop] where `blocks[d - 1]` has a state, or 0."""
    slot_of_block = tree.slot_of_block
    if start >= stop or slot_of_block.keys().isdisjoint(blocks[start:stop][::-1]):
        return 0
    return next(d for d in range(stop, start, -1) if blocks[d - 1] in slot_of_block)


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
