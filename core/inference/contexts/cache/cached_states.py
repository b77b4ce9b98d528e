"""The index of cached states, and the match: what of a sequence is cached, and why no more."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from .block_tree import BlockTree, GhostList
from .eviction import EvictionPolicy
from .hashing import PrefixHashChain
from .pool_stats import (
    EVICTIONS,
    STATE_EVICTIONS,
    STATE_REMOVAL_CAUSES,
    Clock,
    ComputeReason,
    StateRemovalCause,
    Turnover,
)
from .state_tiers import StateTiers

_MAX_CHANGES = 4096


class CachedStates:
    """Which slot holds the state at the end of which block, which hash finds it, and when it was last used.

    The eviction policy and the order of the tree's leaves are notified of each change.
    """

    def __init__(
        self, num_slots: int, tree: BlockTree, policy: EvictionPolicy, clock: Clock, tiers: StateTiers | None
    ) -> None:
        self.tree = tree
        self.policy = policy
        self.offloaded_hashes: StateTiers | frozenset[int] = frozenset() if tiers is None else tiers
        self.slot_of_block: dict[int, int] = {}  # of the state at its end, in the order of commits
        self.state_block_of_hash: dict[int, int] = {}  # prefix hash -> the block whose state it finds
        self.used_slots: set[int] = set()  # slots from which a request resumed since their commit
        self.turnover = Turnover[StateRemovalCause](STATE_REMOVAL_CAUSES)
        self.version = 0  # counts changes of what a hash finds, and never falls
        self._changed = deque[int](maxlen=_MAX_CHANGES)  # the hashes of the last changes
        # For each slot the last state's block, hash (0: none) and last use; stale without a state.
        self._block_of_slot = [0] * num_slots
        self._hash_of_slot = [0] * num_slots
        self._last_used_ns = [0] * num_slots
        self._clock = clock
        self._latest_ns = 0  # no two changes happen at one time, also where the clock stands
        tree.leaves.connect(self.holds_state)

    # ---- lookup

    def slot_of(self, block: int) -> int:
        """The slot of the block's state, or -1."""
        return self.slot_of_block.get(block, -1)

    def block_of(self, slot: int) -> int:
        """The block whose state the slot holds, or -1."""
        block = self._block_of_slot[slot]
        return block if self.slot_of_block.get(block) == slot else -1

    def hash_of(self, slot: int) -> int:
        """The hash that finds the state in this slot, or 0, which is no hash."""
        return self._hash_of_slot[slot] if self.block_of(slot) >= 0 else 0

    def holds_state(self, block: int) -> bool:
        """Whether the registered block's state is in a slot, or has a copy in a tier."""
        return block in self.slot_of_block or self.tree.hash_of(block) in self.offloaded_hashes

    def by_recency(self) -> list[int]:
        """The slots of all states, least recently used first: the same on all ranks, under all policies."""
        return sorted(self.slot_of_block.values(), key=self._last_used_ns.__getitem__)

    # ---- changes

    def insert(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Index the states of these blocks, which the slots hold; no hash finds the states yet."""
        slot_of_block, block_of_slot = self.slot_of_block, self._block_of_slot
        hash_of_slot, last_used_ns = self._hash_of_slot, self._last_used_ns
        now_ns = self._now_ns()
        for block, slot in zip(blocks, slots, strict=True):
            slot_of_block[block] = slot
            block_of_slot[slot] = block
            hash_of_slot[slot] = 0
            last_used_ns[slot] = now_ns
        self.turnover.num_entered += len(blocks)
        self.tree.leaves.reorder(blocks)
        self.policy.insert(slots)

    def set_hashes(self, blocks: Sequence[int], slots: Sequence[int], hashes: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash in use keeps finding its older state."""
        state_block_of_hash, hash_of_slot = self.state_block_of_hash, self._hash_of_slot
        self.mark_changed(hashes)
        for block, slot, prefix_hash in zip(blocks, slots, hashes, strict=True):
            if state_block_of_hash.setdefault(prefix_hash, block) == block:
                if (former := hash_of_slot[slot]) and former != prefix_hash:
                    self.mark_changed([former])
                    del state_block_of_hash[former]
                hash_of_slot[slot] = prefix_hash
        self.tree.ghosts.remove_states(hashes)
        self.policy.set_hashes(slots, hashes, lambda i: self.tree.hashes_to(blocks[i]))

    def record_use(self, slot: int) -> None:
        """A request resumed from this slot, or an import brought its state again."""
        self.policy.use(slot)
        self._last_used_ns[slot] = self._now_ns()
        self.used_slots.add(slot)

    def remove(self, blocks: Sequence[int], cause: StateRemovalCause) -> list[int]:
        """Remove the states of these blocks, as far as they have one; returns the slots of these states."""
        slot_of_block, hash_of_slot = self.slot_of_block, self._hash_of_slot
        removed = [block for block in blocks if block in slot_of_block]
        slots = [slot_of_block[block] for block in removed]
        hashes = [prefix_hash for slot in slots if (prefix_hash := hash_of_slot[slot])]
        if cause in STATE_EVICTIONS:
            self.tree.ghosts.add_all(hashes, "state")
        self.mark_changed(hashes)
        for prefix_hash in hashes:  # the hash goes first, because it is what makes a state findable
            self.state_block_of_hash.pop(prefix_hash, None)
        for block in removed:
            del slot_of_block[block]
        turnover = self.turnover
        turnover.by_cause[cause] += len(slots)
        if slots and cause in EVICTIONS:
            last_used_ns, now_ns = self._last_used_ns, max(self._latest_ns, self._clock())
            turnover.count_ages(now_ns, [last_used_ns[slot] for slot in slots])
            turnover.num_unused += sum(slot not in self.used_slots for slot in slots)
        if self.used_slots:
            self.used_slots.difference_update(slots)
        self.tree.leaves.reorder(removed)
        self.policy.remove(slots, cause in EVICTIONS)
        return slots

    def clear(self) -> None:
        """Remove every state and ghost."""
        num_removed = len(self.slot_of_block)
        self.version += 1
        self._changed.clear()  # there are too many changes to list
        self.state_block_of_hash.clear()
        self.slot_of_block.clear()
        self.used_slots.clear()
        self.tree.ghosts.clear()
        self.turnover.by_cause["reset"] += num_removed
        self.policy.clear()

    def _now_ns(self) -> int:
        self._latest_ns = now_ns = max(self._latest_ns + 1, self._clock())
        return now_ns

    # ---- what changed under which hash

    def mark_changed(self, hashes: Collection[int]) -> None:
        """There may be a state, or a copy of one, under each of these hashes, or none any more."""
        self.version += len(hashes)
        self._changed.extend(hashes)

    def changed_since(self, version: int) -> Iterable[int] | None:
        """The hashes that changed after this version; None where they are too many."""
        count = self.version - version
        return islice(reversed(self._changed), count) if count <= len(self._changed) else None

    def remember_refused(self, hashes: Sequence[int]) -> None:
        """No slot was available for the states under these hashes."""
        self.turnover.num_refused += len(hashes)
        self.tree.ghosts.add_all(hashes, "refused state")
        self.mark_changed(hashes)

    def mark_copies_lost(self, hashes: Collection[int]) -> None:
        """The tiers have no copy under these hashes any more."""
        block_of_hash = self.tree.block_of_hash
        self.mark_changed(hashes)
        self.tree.leaves.reorder(
            [block_of_hash[prefix_hash] for prefix_hash in hashes if prefix_hash in block_of_hash]
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other or the hashes of blocks."""
        slots = {slot: block for block, slot in self.slot_of_block.items()}
        assert len(slots) == len(self.slot_of_block), "two blocks share a slot"
        assert all(self._block_of_slot[slot] == slots[slot] for slot in slots), "a slot's block is another"
        assert all(self._last_used_ns[slot] <= self._latest_ns for slot in slots), "a use is in the future"
        assert self.used_slots <= slots.keys(), "a slot without a state counts as used"
        hashes = {each: block for slot, block in slots.items() if (each := self._hash_of_slot[slot])}
        assert hashes == self.state_block_of_hash, "a state's hash is another"
        for prefix_hash, block in hashes.items():
            assert self.tree.hash_of(block) == prefix_hash, f"block {block} has a state of another hash"
        self.turnover.check_integrity(len(slots), "states")
        self.policy.check_integrity(slots)


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a prompt that must be computed, all for one reason."""

    start: int
    stop: int
    reason: ComputeReason


def compute_spans(
    hashes: Sequence[int], *, num_resumed: int, num_reachable: int, num_matched: int, num_seen: int,
    num_tokens: int, block_size_tokens: int, ghosts: GhostList,
) -> tuple[Span, ...]:  # fmt: skip
    """Why each of `num_tokens` tokens from the resume point on is computed; later blocks do not count."""
    whole = num_tokens // block_size_tokens
    lost = ghosts.deepest_state(hashes, num_resumed, num_reachable)
    refused = lost > num_resumed and ghosts.has(hashes[lost - 1], "refused state")
    lost_reason: ComputeReason = "capacity" if refused else "state_evicted"
    ends: tuple[tuple[int, ComputeReason], ...] = (
        (lost, lost_reason),
        (num_reachable, "branch_first_seen" if num_seen < whole else "state_not_taken"),
        (min(num_matched, whole), "last_token"),
        (min(num_seen, whole), "kv_evicted"),
    )
    spans = []
    start = num_resumed * block_size_tokens
    for depth, reason in ends:
        stop = depth * block_size_tokens
        if stop > start:
            spans.append(Span(start, stop, reason))
            start = stop
    if num_tokens > start:
        spans.append(Span(start, num_tokens, "never_seen" if num_seen < whole else "partial_block"))
    return tuple(spans)


class MatchBasis(NamedTuple):
    """What a match was asked for, and when it was right; `match_prefix` writes it, and judges by it."""

    num_tokens: int = -1
    last_hash: int = 0  # hash of the last whole block
    num_registered: int = -1  # of the path's blocks; -1 where nothing was looked up
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
            attribute that is set later: by `match_prefix`, where it returns the match again.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    basis: MatchBasis = field(default=MatchBasis(), compare=False, repr=False)


def match_prefix(
    cached_states: CachedStates, chain: PrefixHashChain, num_tokens: int, registered: Sequence[int],
    max_resume_tokens: int | None, known: PrefixMatch | None,
) -> PrefixMatch:  # fmt: skip
    """See `PrefixCache.match`; `registered`: blocks of the path, states within do not count."""
    tree, size = cached_states.tree, chain.block_size_tokens
    blocks, num_registered, num_seen = tuple(registered), len(registered), 0
    if known is not None and _is_prefix_of(known.basis, chain, num_tokens, num_registered, max_resume_tokens):
        if _is_unchanged(known, cached_states, chain, num_tokens):
            return known
        blocks = _registered_still(known, tree)
        if known.basis.num_lapses == tree.ghosts.num_lapses:  # what was seen is there, or a ghost
            num_seen = known.seen_tokens // size
    blocks = _matched_blocks(tree, chain, num_tokens, blocks)
    num_seen = _num_seen(tree.ghosts, chain, num_tokens, max(num_seen, len(blocks)))
    last = num_tokens - 1
    limit = last if max_resume_tokens is None else min(max_resume_tokens, last)
    num_reachable = min(len(blocks), limit // size)
    depth = _deepest_state(cached_states, blocks, num_registered, num_reachable)
    slot = cached_states.slot_of(blocks[depth - 1]) if depth else -1
    stop = num_tokens if limit == last else limit // size * size  # no state after it counts
    spans = compute_spans(
        chain.hashes, num_resumed=depth, num_reachable=num_reachable, num_matched=len(blocks),
        num_seen=num_seen, num_tokens=stop, block_size_tokens=size, ghosts=tree.ghosts,
    )  # fmt: skip
    if stop < num_tokens:
        spans = (*spans, Span(stop, num_tokens, "disabled"))
    query = num_tokens, _last_hash(chain, num_tokens), num_registered, max_resume_tokens
    basis = MatchBasis(*query, tree.version, cached_states.version, tree.ghosts.num_lapses)
    match = PrefixMatch(blocks, depth * size, slot, num_seen * size, spans, basis)
    if known == match and known.basis.num_tokens == num_tokens:
        known.basis = basis
        return known
    return match


def _last_hash(chain: PrefixHashChain, num_tokens: int) -> int:
    whole = num_tokens // chain.block_size_tokens
    return chain.hashes[whole - 1] if whole else 0


def _is_prefix_of(
    basis: MatchBasis, chain: PrefixHashChain, num_tokens: int, num_registered: int, limit: int | None
) -> bool:
    """Whether a match on this basis is one of the same sequence, or of its beginning."""
    if (basis.num_registered, basis.max_resume_tokens) != (num_registered, limit):
        return False
    return basis.num_tokens <= num_tokens and basis.last_hash == _last_hash(chain, basis.num_tokens)


def _is_unchanged(
    match: PrefixMatch, cached_states: CachedStates, chain: PrefixHashChain, num_tokens: int
) -> bool:
    """Whether a match of the same sequence would be found again; O(1)."""
    tree, ghosts, basis = cached_states.tree, cached_states.tree.ghosts, match.basis
    hashes, whole = chain.hashes, num_tokens // chain.block_size_tokens
    num_matched, num_seen = len(match.blocks), match.seen_tokens // chain.block_size_tokens
    return (
        num_tokens == basis.num_tokens
        and basis.state_version == cached_states.version
        and basis.num_lapses == ghosts.num_lapses
        and not (match.blocks and not tree.is_current(match.blocks[-1], basis.tree_version))
        and not (num_matched < whole and hashes[num_matched] in tree.block_of_hash)
        and not (num_seen < whole and ghosts.has(hashes[num_seen], "block"))
    )


def _registered_still(match: PrefixMatch, tree: BlockTree) -> tuple[int, ...]:
    """The blocks of a match that are registered since: only leaves are removed, one that returns is newer."""
    blocks, since = match.blocks, match.basis.tree_version
    if not blocks or tree.is_current(blocks[-1], since):
        return blocks
    return blocks[: bisect_left(blocks, True, key=lambda block: not tree.is_current(block, since))]


def _matched_blocks(
    tree: BlockTree, chain: PrefixHashChain, num_tokens: int, blocks: tuple[int, ...]
) -> tuple[int, ...]:
    """The registered blocks of the first `num_tokens` tokens, of which `blocks` are the first."""
    first, whole = len(blocks), num_tokens // chain.block_size_tokens
    if first >= whole or chain.hashes[first] not in tree.block_of_hash:
        return blocks
    parent = blocks[-1] if blocks else chain.root
    return (*blocks, *tree.match(parent, chain.hashes[first:whole], chain.tokens[first:whole]))


def _num_seen(ghosts: GhostList, chain: PrefixHashChain, num_tokens: int, num_known: int) -> int:
    """How many leading blocks are registered or ghosts, at least `num_known`."""
    hashes, whole = chain.hashes, num_tokens // chain.block_size_tokens
    while num_known < whole and ghosts.has(hashes[num_known], "block"):
        num_known += 1
    return num_known


def _deepest_state(cached_states: CachedStates, blocks: tuple[int, ...], start: int, stop: int) -> int:
    """The largest d in (start, stop] where `blocks[d - 1]` has a state, or 0."""
    slot_of_block = cached_states.slot_of_block
    if start >= stop or slot_of_block.keys().isdisjoint(blocks[start:stop][::-1]):
        return 0
    return next(d for d in range(stop, start, -1) if blocks[d - 1] in slot_of_block)
