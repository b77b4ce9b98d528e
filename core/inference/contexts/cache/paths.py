"""One sequence in the cache: what it holds, and what its next step computes and stores in which slots."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from .block_tree import Parent
from .checkpoint_plan import KINDS_BY_WORTH, Boundary, CheckpointPlan
from .hashing import PrefixHashChain, token_bytes
from .state_slots import StateSlots

TableRow = npt.NDArray[np.integer[Any]]
UNKNOWN_TOKEN = 2**32 - 1  # in place of a token that only the device knows; no vocabulary has it


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
        self.policy_ticket = -1  # what the eviction policy calls the request; -1: nothing
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

    def hash_at(self, position: int) -> int:
        """The hash of the prefix that ends at `position`; where a token is not known, one of no prefix."""
        chain = self.path.chain
        chain.extend_to(self.sequence, position)
        if position > len(self.sequence):  # a fork, so that guesses do not enter the sequence's chain
            chain = chain.fork()
            chain.extend_to([*self.sequence, *(self.drafts or (UNKNOWN_TOKEN,))], position)
        return chain.hashes[position // chain.block_size_tokens - 1]

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


class Place[S: PathStep](NamedTuple):
    """Where a state is to be stored: at a boundary of a step, under a hash."""

    step: S
    boundary: Boundary
    prefix_hash: int

    @property
    def is_known(self) -> bool:
        """Whether all tokens before the boundary are known."""
        return self.boundary.position <= len(self.step.sequence)

    @property
    def is_inner(self) -> bool:
        """Whether a prefill passes the boundary: only kernels that store states inside one keep the state."""
        return not self.step.decoding and self.boundary.position < self.step.stop


class PlannedState(NamedTuple):
    """A state that a step will store: the arguments of `EvictionPolicy.insert_planned`."""

    hashes: Sequence[int]
    depth: int
    kind: str
    ticket: int

    @classmethod
    def of[S: PathStep](cls, place: Place[S]) -> "PlannedState":
        path, boundary = place.step.path, place.boundary
        hashes, depth = path.chain.hashes, boundary.position // path.chain.block_size_tokens
        hashes = hashes if place.is_known else [*hashes[: depth - 1], place.prefix_hash]
        return cls(hashes, depth, boundary.kind, path.policy_ticket)

    @property
    def prefix_hash(self) -> int:
        return self.hashes[self.depth - 1]


class Reservations:
    """The reserved slots of steps. The eviction policy weighs each planned state against the cached ones.

    A decode whose last token only the device knows plans its state under a hash of no prefix, until `expect`.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots, self._policy = slots, slots.policy
        self._planned: dict[int, int] = {}  # reserved slot -> the hash that the policy expects there
        self._placeholders: set[int] = set()  # planned hashes of no prefix
        self._guessed_slots: set[int] = set()  # reserved ones, of whose states the policy does not know

    def reserve[S: PathStep](
        self, steps: Sequence[S], max_inner_states: int | None = None,
        make_room: Callable[[int], None] | None = None,
    ) -> list[S]:  # fmt: skip
        """Reserve a slot for each boundary that has no state yet, as far as slots go; may evict states.

        `make_room` adds free slots until so many are free, and may evict states, too.
        """
        certain, guessed = self._missing_states(steps)
        if make_room is not None and len(certain) > len(self._slots.free_slots):
            make_room(len(certain))
            certain, guessed = self._missing_states(steps)
        if not (certain or guessed):
            return list(steps)
        chosen = self._choose(list(certain.values()), max_inner_states)
        # Guesses evict nothing: drafts may be wrong, and a repeated answer's state may be cached.
        num_free = len(self._slots.free_slots) - len(chosen)
        guesses = [place for prefix_hash, place in guessed.items() if prefix_hash not in certain][:num_free]
        places = [*map(certain.__getitem__, chosen), *guesses]
        blocks = [place.step.block_at(place.boundary.position) for place in places]
        slots = self.reserve_planned(blocks, [place.prefix_hash for place in places])
        self._guessed_slots.update(slots[len(chosen) :])
        destinations: dict[int, dict[int, int]] = {id(place.step): {} for place in places}
        for place, slot in zip(places, slots, strict=True):
            destinations[id(place.step)][place.boundary.position] = slot
        return [
            replace(step, destinations=destinations[id(step)]) if id(step) in destinations else step
            for step in steps
        ]

    def _missing_states[S: PathStep](
        self, steps: Sequence[S]
    ) -> tuple[dict[int, Place[S]], dict[int, Place[S]]]:
        """By hash, where to store the states that are not cached: certain ones, and guesses."""
        certain: dict[int, Place[S]] = {}
        guessed: dict[int, Place[S]] = {}
        contents: dict[Parent, list[bytes]] = {}  # parent -> tokens of its blocks with a state, if needed
        for step in steps:
            for boundary in step.boundaries:
                place = Place(step, boundary, step.hash_at(boundary.position))
                if place.prefix_hash in self._slots.cached_states.state_block_of_hash:
                    continue
                if place.is_known or not (step.drafts or self._may_be_cached(place, contents)):
                    certain.setdefault(place.prefix_hash, place)
                else:
                    guessed.setdefault(place.prefix_hash, place)
        return certain, guessed

    def _may_be_cached[S: PathStep](self, place: Place[S], contents: dict[Parent, list[bytes]]) -> bool:
        """Whether there is a state of the tokens before the boundary, as far as known; fills `contents`."""
        tree, path = self._slots.tree, place.step.path
        depth = place.boundary.position // path.chain.block_size_tokens
        parent = path.blocks[depth - 2] if depth > 1 else path.chain.root
        if isinstance(parent, int) and not tree.num_children[parent]:
            return False
        if not contents:
            for block in self._slots.cached_states.state_block_of_hash.values():
                before, tokens = tree.content_of(block)
                contents.setdefault(before, []).append(tokens)
        known_tokens = token_bytes(place.step.sequence[(depth - 1) * path.chain.block_size_tokens :])
        return any(tokens.startswith(known_tokens) for tokens in contents.get(parent, ()))

    def _choose[S: PathStep](self, places: list[Place[S]], max_inner_states: int | None) -> list[int]:
        """Plan these states, and evict for them; the hashes of those that get slots. Remembers the others."""
        by_worth = sorted(places, key=lambda place: KINDS_BY_WORTH.index(place.boundary.kind))
        wanted = by_worth
        if max_inner_states is not None:
            inner = [place.prefix_hash for place in by_worth if place.is_inner]
            beyond = set(inner[max_inner_states:])
            wanted = [place for place in by_worth if place.prefix_hash not in beyond]
        if not self._policy.refuses:
            decoding = [place.step.path for place in wanted if place.boundary.kind == "decode"]
            self._slots.remove_rolling_states(decoding, len(wanted))
        unknown = {place.prefix_hash for place in wanted if not place.is_known}
        chosen = self.plan(list(map(PlannedState.of, wanted)), unknown)
        passed = unknown.union(chosen)  # what is unknown is remembered once its tokens are known
        hashes = [place.prefix_hash for place in by_worth]
        self._slots.cached_states.remember_refused([each for each in hashes if each not in passed])
        return chosen

    def plan(self, planned: Sequence[PlannedState], unknown: Iterable[int] = ()) -> list[int]:
        """Plan these states, evict what is worth less; the hashes with a slot. `unknown`: of later tokens."""
        policy, slots = self._policy, self._slots
        self._placeholders.update(unknown)
        for state in planned:
            policy.insert_planned(*state)
        wanted = dict.fromkeys(state.prefix_hash for state in planned)
        while len(wanted) > len(slots.free_slots):
            slot, prefix_hash = policy.least_valuable(lambda slot: slot not in slots.pins, wanted)
            if slot >= 0:
                slots.evict_slots(slots.checked_victims([slot], 1, slots.pins))
            else:
                prefix_hash = prefix_hash if prefix_hash in wanted else next(reversed(wanted))
                self._remove_planned(prefix_hash)
                del wanted[prefix_hash]
        return list(wanted)

    def reserve_planned(self, blocks: Sequence[int], hashes: Sequence[int]) -> list[int]:
        """Reserve slots for the states of these blocks, which `plan` chose, or which are guesses."""
        slots = self._slots.reserve_slots(blocks)
        self._planned.update(zip(slots, hashes, strict=True))
        return slots

    def settle_drafts[S: PathStep](self, planned: Sequence[S], accepted: Sequence[S]) -> list[S]:
        """Release the slots of boundaries that the `accepted` steps do not reach; reserve refused ones.

        Returns steps with the boundaries that were reached but got no slot while they were guesses: their
        states must be copied to `destinations`, which are reserved only now.
        """
        reserved = {step.hash_at(position) for step in accepted for position in step.destinations}
        unserved = []
        for before, after in zip(planned, accepted, strict=True):
            if before.drafts:
                unreached = before.destinations.keys() - after.destinations.keys()
                self.release(before.destinations[position] for position in unreached)
                missing = tuple(b for b in after.boundaries if after.hash_at(b.position) not in reserved)
                if missing:
                    unserved.append(replace(after, boundaries=missing, destinations={}))
        return self.reserve(unserved)

    def remember_refused(self, step: PathStep) -> None:
        """Remember the demand for states of a step that got no slot while its tokens were unknown."""
        cached_states = self._slots.cached_states
        for boundary in step.boundaries:
            prefix_hash = step.hash_at(boundary.position)
            if boundary.position in step.destinations or prefix_hash in cached_states.state_block_of_hash:
                continue
            if prefix_hash not in self._planned.values():
                self._policy.insert_planned(*PlannedState.of(Place(step, boundary, prefix_hash)))
                self._policy.remove_planned(prefix_hash)
                cached_states.remember_refused([prefix_hash])

    def expect(self, slot: int, state: PlannedState) -> None:
        """Expect this state, whose tokens may have been unknown, in a reserved slot."""
        self._policy.insert_planned(*state)
        if self._planned.get(slot, state.prefix_hash) != state.prefix_hash:
            self._forget(slot)
            self._planned[slot] = state.prefix_hash
        self._guessed_slots.discard(slot)

    def commit(self, slot: int, block: int) -> int:
        """Make a written slot findable as the block's state; returns the slot with that state now, or -1."""
        prefix_hash, planned = self._slots.tree.hash_of(block), self._planned.get(slot, 0)
        if prefix_hash and planned not in (prefix_hash, 0):
            raise ValueError(
                f"blocks has {block}, registered under hash {prefix_hash}, for slot {slot}; accepted: the "
                f"block of hash {planned}, whose state the slot is reserved for"
            )
        self._planned.pop(slot, None)
        self._guessed_slots.discard(slot)
        (committed,) = self._slots.commit_slots([slot], [block])
        if committed != slot and planned:
            self._policy.remove_planned(planned)
        return committed

    def release(self, slots: Iterable[int]) -> None:
        """Free reserved slots without committing them."""
        for slot in slots:
            self._slots.release([slot])
            self._forget(slot)

    def abort(self) -> None:
        """Free all reserved slots that are not pinned."""
        for prefix_hash in self._placeholders:
            self._policy.discard_planned(prefix_hash)
        self.clear()
        self._policy.remove_planned(None)  # also what an interrupted `plan` planned
        self._slots.release_all()

    def clear(self) -> None:
        """Expect no state any more; the caller clears slots and policy."""
        self._planned.clear()
        self._placeholders.clear()
        self._guessed_slots.clear()

    def _forget(self, slot: int) -> None:
        """Expect no state in the slot; the policy hears of it, unless the state was a guess."""
        planned = self._planned.pop(slot, None)
        if planned is not None and slot not in self._guessed_slots:
            self._remove_planned(planned)
        self._guessed_slots.discard(slot)

    def _remove_planned(self, prefix_hash: int) -> None:
        if prefix_hash in self._placeholders:
            self._placeholders.remove(prefix_hash)
            self._policy.discard_planned(prefix_hash)
        else:
            self._policy.remove_planned(prefix_hash)

    def check_integrity(self) -> None:
        """Raise AssertionError where a state is expected in a slot that is not reserved for it."""
        reserved, tree = self._slots.reserved, self._slots.tree
        assert self._planned.keys() <= reserved.keys(), "a state is planned for a slot that is not reserved"
        assert self._guessed_slots <= self._planned.keys(), "a guess has no slot"
        for slot, planned in self._planned.items():
            prefix_hash = tree.hash_of(reserved[slot]) if reserved[slot] >= 0 else 0
            assert prefix_hash in (planned, 0), "a slot is reserved for another prefix's block"
