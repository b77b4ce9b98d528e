"""One sequence in the cache: what of it is cached, what it holds, and which states its step stores."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from .cached_states import CachedStates
from .checkpoint_plan import KINDS_BY_WORTH, Boundary, CheckpointPlan
from .ghosts import GhostList
from .hashing import PrefixHashChain
from .pool_stats import ComputeReason
from .state_slots import PlannedState, StateSlots

TableRow = npt.NDArray[np.integer[Any]]


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


UNKNOWN_TOKEN = 2**32 - 1
"""In place of a token that only the device knows; no vocabulary has it."""


class CachedPath:
    """The KV blocks of one sequence, and the durable slot of its state; only `PrefixCache` changes it."""

    def __init__(
        self, chain: PrefixHashChain, plan: CheckpointPlan, table_row: TableRow, caches: bool
    ) -> None:
        """`table_row`: [blocks of the longest sequence], all -1. The path writes its `blocks` there."""
        self.chain = chain
        self.plan = plan
        self.caches = caches  # False without caching, and once the cache was reset
        self.blocks: list[int] = []  # each with a reference of this path, as in the block table's row
        self.num_registered = 0  # leading blocks that are complete and never written again
        self.state_slot = -1  # whose state the sequence continues from, pinned; -1: none
        self.rolling_block = -1  # of the newest decode state that rolls, or -1
        self.policy_ticket = -1  # the eviction policy's number, or -1
        self._table_row = table_row

    def check_fits(self, num_blocks: int) -> None:
        """ValueError where the row of the block table cannot show so many blocks."""
        if num_blocks > len(self._table_row):
            raise ValueError(
                f"table_row has {len(self._table_row)} entries; accepted: at least {num_blocks}, one for "
                "each block that the path will hold"
            )

    def append(self, blocks: list[int]) -> None:
        first = len(self.blocks)
        self.blocks += blocks
        self._table_row[first : first + len(blocks)] = blocks

    def replace(self, first: int, blocks: list[int]) -> None:
        """Put `blocks` in the place of block `first` and all later blocks; O(these blocks)."""
        self._table_row[first : len(self.blocks)] = -1
        del self.blocks[first:]
        self.append(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError where the row of the block table shows other blocks."""
        assert 0 <= self.num_registered <= len(self.blocks), "more blocks are registered than held"
        assert self._table_row[: len(self.blocks)].tolist() == self.blocks, "the block table is off"
        assert (self._table_row[len(self.blocks) :] == -1).all(), "the block table has stale entries"


@dataclass(frozen=True)
class PathStep:
    """Tokens [start, stop) of one sequence, which the next step computes.

    The last tokens may be drafts: guesses at the sequence's next tokens, which the step verifies.

    Attributes:
        path: the sequence's path in the cache.
        sequence: the known tokens of the sequence; drafts are not among them.
        start, stop: token positions.
        decoding: whether the step is a decode; else it is (a part of) a prefill.
        boundaries: where states are to be stored.
        destinations: boundary position -> the slot reserved for its state; `PrefixCache.reserve` fills it.
        drafts: the drafts of a decode.
    """

    path: CachedPath
    sequence: Sequence[int] = field(repr=False, compare=False)
    start: int
    stop: int
    decoding: bool = False
    boundaries: tuple[Boundary, ...] = ()
    destinations: dict[int, int] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()

    def key_at(self, position: int) -> int:
        """The hash of the prefix that ends at `position`; where a token is not known, one of no prefix."""
        chain = self.path.chain
        chain.extend_to(self.sequence, position)
        if position > len(self.sequence):  # a fork, so that guesses do not enter the sequence's chain
            chain = chain.fork()
            chain.extend_to([*self.sequence, *(self.drafts or (UNKNOWN_TOKEN,))], position)
        return chain.keys[position // chain.block_size_tokens - 1]

    def knows(self, boundary: Boundary) -> bool:
        """Whether all tokens before the boundary are known."""
        return boundary.position <= len(self.sequence)

    def block_at(self, position: int) -> int:
        return self.path.blocks[position // self.path.chain.block_size_tokens - 1]

    def accepted(self, num_tokens: int) -> Self:
        """This decode cut to its first `num_tokens` tokens; the others are wrong drafts."""
        stop = self.start + num_tokens
        return replace(
            self,
            stop=stop,
            drafts=self.drafts[: num_tokens - 1],
            boundaries=tuple(boundary for boundary in self.boundaries if boundary.position <= stop),
            destinations={p: slot for p, slot in self.destinations.items() if p <= stop},
        )


class RollingOwner(Protocol):
    """A sequence that decodes; `rolling_block` ends at its newest decode state that rolls, or is -1."""

    rolling_block: int


def remove_rolling(slots: StateSlots, owner: RollingOwner) -> None:
    """Remove the owner's newest decode state that rolls; one that a request has resumed from stays."""
    block = owner.rolling_block
    slot = slots.states.slot_of(block) if block >= 0 else -1
    if slot < 0 or slot in slots.states.used or slots.remove_unpinned(block, "rolled"):
        owner.rolling_block = -1


def remove_rolling_states(slots: StateSlots, owners: Iterable[RollingOwner], num_slots: int) -> None:
    """Remove decode states of `owners`, which store newer ones now, until `num_slots` slots are free."""
    for owner in owners:
        if len(slots.free_slots) >= num_slots:
            return
        remove_rolling(slots, owner)


def reserve_states[S: PathStep](
    slots: StateSlots, steps: Sequence[S], max_inner_states: int | None = None
) -> list[S]:
    """Reserve a slot for each boundary that has no state yet, as far as slots go; may evict states."""
    certain: dict[int, tuple[S, Boundary]] = {}  # by hash
    guessed: dict[int, tuple[S, Boundary]] = {}
    for step in steps:
        for boundary in step.boundaries:
            key = step.key_at(boundary.position)
            if key not in slots.states.block_of_key:
                is_draft = step.drafts and boundary.position > len(step.sequence)
                (guessed if is_draft else certain).setdefault(key, (step, boundary))
    if not (certain or guessed):
        return list(steps)
    wanted = sorted(certain, key=lambda key: KINDS_BY_WORTH.index(certain[key][1].kind))
    beyond: list[int] = []
    if max_inner_states is not None:
        inner = [key for key in wanted if _is_inner(*certain[key])]
        beyond = inner[max_inner_states:]
        dropped = set(beyond)
        wanted = [key for key in wanted if key not in dropped]
    if not slots.policy.refuses:
        decoding = [certain[key][0].path for key in wanted if certain[key][1].kind == "decode"]
        remove_rolling_states(slots, decoding, len(wanted))
    unknown = {key for key in wanted if not certain[key][0].knows(certain[key][1])}
    chosen = slots.plan_states([planned_state(*certain[key], key) for key in wanted], unknown)
    passed = unknown.union(chosen)  # what is unknown is noted once its tokens are known
    slots.states.note_refused([key for key in wanted if key not in passed] + beyond)
    # States of drafts evict nothing, because the drafts may be wrong.
    num_free = len(slots.free_slots) - len(chosen)
    chosen += [key for key in guessed if key not in certain][:num_free]
    places = [certain.get(key) or guessed[key] for key in chosen]
    blocks = [step.block_at(boundary.position) for step, boundary in places]
    destinations: dict[int, dict[int, int]] = {id(step): {} for step, _ in places}
    for (step, boundary), slot in zip(places, slots.reserve_slots(blocks, chosen), strict=True):
        destinations[id(step)][boundary.position] = slot
    return [
        replace(step, destinations=destinations[id(step)]) if id(step) in destinations else step
        for step in steps
    ]


def planned_state(step: PathStep, boundary: Boundary, key: int) -> PlannedState:
    keys, depth = step.path.chain.keys, boundary.position // step.path.chain.block_size_tokens
    keys = keys if step.knows(boundary) else [*keys[: depth - 1], key]
    return PlannedState(keys, depth, boundary.kind, step.path.policy_ticket)


def _is_inner(step: PathStep, boundary: Boundary) -> bool:
    """Whether a prefill passes the boundary, so that only kernels that store states inside one keep it."""
    return not step.decoding and boundary.position < step.stop
