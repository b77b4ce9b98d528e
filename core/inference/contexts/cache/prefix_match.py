"""What of a sequence is cached, and why its other tokens must be computed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .cached_states import CachedStates
from .ghosts import GhostList
from .hashing import PrefixHashChain
from .pool_stats import ComputeReason


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a prompt that must be computed, all for one reason."""

    start: int
    stop: int
    reason: ComputeReason


def compute_spans(
    keys: Sequence[int], *, num_resumed: int, num_reachable: int, num_matched: int, num_seen: int,
    num_tokens: int, block_size_tokens: int, ghosts: GhostList,
) -> tuple[Span, ...]:  # fmt: skip
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


class MatchBasis(NamedTuple):
    """What a match was asked for, and when it was right; `updated_match` writes it, and judges by it."""

    num_tokens: int = -1
    last_key: int = 0  # hash of the last whole block
    num_held: int = -1  # the path's registered blocks; -1 where nothing was looked up
    max_resume_tokens: int | None = None
    tree_version: int = -1  # this and the next two are the tree's and its ghosts'
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
            attribute that is set later: by `updated_match`, where it returns the match again.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    basis: MatchBasis = field(default=MatchBasis(), compare=False, repr=False)


def updated_match(
    states: CachedStates, chain: PrefixHashChain, num_tokens: int, path_blocks: Sequence[int], num_held: int,
    max_resume_tokens: int | None, known: PrefixMatch | None,
) -> PrefixMatch:  # fmt: skip
    """See `PrefixCache.match`; `num_held` of `path_blocks` are registered, states within do not count."""
    # The blocks of `known` that are still there are not looked up again: only leaves are removed, and a block
    # that was removed and came back is newer.
    tree, ghosts, keys, size = states.tree, states.tree.ghosts, chain.keys, chain.block_size_tokens
    blocks, num_seen, whole = tuple(path_blocks[:num_held]), 0, num_tokens // size
    if known is not None and _is_prefix_of(known.basis, chain, num_tokens, num_held, max_resume_tokens):
        since, blocks = known.basis.tree_version, known.blocks
        no_lapse = known.basis.num_lapses == ghosts.num_lapses
        if no_lapse:  # what was seen is there, or a ghost
            num_seen = known.seen_tokens // size
        if blocks and not tree.is_current(blocks[-1], since):
            blocks = blocks[: bisect_left(blocks, True, key=lambda block: not tree.is_current(block, since))]
        elif (
            no_lapse
            and num_tokens == known.basis.num_tokens
            and known.basis.state_version == states.version
            and not (len(blocks) < whole and keys[len(blocks)] in tree.block_of_key)
            and not (num_seen < whole and ghosts.has(keys[num_seen], "block"))
        ):
            return known
    first = len(blocks)
    if first < whole and keys[first] in tree.block_of_key:
        parent = blocks[-1] if blocks else chain.root
        blocks = (*blocks, *tree.match(parent, keys[first:whole], chain.tokens[first:whole]))
    num_seen = max(num_seen, len(blocks))
    while num_seen < whole and ghosts.has(keys[num_seen], "block"):
        num_seen += 1
    limit = num_tokens - 1 if max_resume_tokens is None else max_resume_tokens
    limited = limit < num_tokens - 1
    asked = limit // size if limited else whole
    reachable = min(len(blocks), min(limit, num_tokens - 1) // size)
    depth = _deepest_state(states, blocks, num_held, reachable)
    spans = compute_spans(
        keys if len(keys) == asked else keys[:asked], num_resumed=depth, num_reachable=reachable,
        num_matched=min(len(blocks), asked), num_seen=min(num_seen, asked),
        num_tokens=asked * size if limited else num_tokens, block_size_tokens=size, ghosts=ghosts,
    )  # fmt: skip
    if limited:
        spans = (*spans, Span(asked * size, num_tokens, "disabled"))
    slot = states.slot_of(blocks[depth - 1]) if depth else -1
    versions = tree.version, states.version, ghosts.num_lapses
    basis = MatchBasis(num_tokens, _last_key(chain, num_tokens), num_held, max_resume_tokens, *versions)
    match = PrefixMatch(blocks, depth * size, slot, num_seen * size, spans, basis)
    if known == match and known.basis.num_tokens == num_tokens:
        known.basis = basis
        return known
    return match


def _last_key(chain: PrefixHashChain, num_tokens: int) -> int:
    whole = num_tokens // chain.block_size_tokens
    return chain.keys[whole - 1] if whole else 0


def _is_prefix_of(
    basis: MatchBasis, chain: PrefixHashChain, num_tokens: int, num_held: int, limit: int | None
) -> bool:
    """Whether a match on this basis is one of the same sequence, or of its beginning."""
    if basis.num_held != num_held or basis.max_resume_tokens != limit or basis.num_tokens > num_tokens:
        return False
    return basis.last_key == _last_key(chain, basis.num_tokens)


def _deepest_state(states: CachedStates, blocks: tuple[int, ...], start: int, stop: int) -> int:
    """The largest d in (start, stop] where `blocks[d - 1]` has a state, or 0."""
    slot_of_block = states.slot_of_block
    if start >= stop or slot_of_block.keys().isdisjoint(blocks[start:stop][::-1]):
        return 0
    return next(d for d in range(stop, start, -1) if blocks[d - 1] in slot_of_block)
