"""The states that one step stores: slots are reserved before the forward and committed after it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from .checkpoint_plan import KINDS_BY_WORTH, Boundary
from .prefix_match import CachedPath
from .state_slots import PlannedState, StateSlots


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
        """The hash of the prefix that ends at block boundary `position` of the tokens and drafts."""
        chain = self.path.chain
        chain.extend_to(self.sequence, position)
        if position > len(self.sequence):  # a fork, so that drafts do not enter the sequence's chain
            chain = chain.fork()
            chain.extend_to([*self.sequence, *self.drafts], position)
        return chain.keys[position // chain.block_size_tokens - 1]

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


class RollingStates:
    """Keeps at most one decode state of a sequence, and those that a request has resumed from."""

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots

    def make_room(self, owners: Iterable[RollingOwner], num_slots: int) -> None:
        """Drop older decode states of `owners`, which store newer ones now, until `num_slots` are free."""
        for owner in owners:
            if len(self._slots.free) >= num_slots:
                return
            self._drop(owner)

    def advance(self, owner: RollingOwner, block: int, *, rolls: bool) -> None:
        """Drop the older decode state: the state of `block` is committed."""
        self._drop(owner)
        if rolls:
            owner.rolling_block = block

    def _drop(self, owner: RollingOwner) -> None:
        slots, block = self._slots, owner.rolling_block
        slot = slots.tree.slot_of(block) if block >= 0 else -1
        if slot < 0 or slot in slots.tree.used or slots.drop(block, "rolled"):
            owner.rolling_block = -1


class StepCheckpoints:
    """Carries the planned boundaries of scheduled steps into slots."""

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots
        self._rolling = RollingStates(slots)

    def reserve[S: PathStep](self, steps: Sequence[S], max_inner_states: int | None = None) -> list[S]:
        """Reserve a slot for each boundary that has no state yet, as far as slots go; may evict states."""
        certain: dict[int, tuple[int, Boundary]] = {}  # hash -> number of the step, boundary
        guessed: dict[int, tuple[int, Boundary]] = {}
        for number, step in enumerate(steps):
            for boundary in step.boundaries:
                key = step.key_at(boundary.position)
                if key not in self._slots.tree.hash_to_block_id:
                    known = boundary.position <= len(step.sequence)
                    (certain if known else guessed).setdefault(key, (number, boundary))
        if not (certain or guessed):
            return list(steps)
        wanted = sorted(certain, key=lambda key: KINDS_BY_WORTH.index(certain[key][1].kind))
        beyond: list[int] = []
        if max_inner_states is not None:
            inner = [key for key in wanted if _is_inner(steps[certain[key][0]], certain[key][1])]
            beyond = inner[max_inner_states:]
            wanted = [key for key in wanted if key not in set(beyond)]
        if not self._slots.policy.refuses:
            decoding = [steps[certain[key][0]].path for key in wanted if certain[key][1].kind == "decode"]
            self._rolling.make_room(decoding, len(wanted))
        chosen, refused = self._slots.choose(
            [_planned(key, steps[certain[key][0]], certain[key][1]) for key in wanted],
            [key for key in guessed if key not in certain],
        )
        self._slots.tree.note_refused(refused + beyond)
        places = [certain.get(key) or guessed[key] for key in chosen]
        blocks = [steps[number].block_at(boundary.position) for number, boundary in places]
        destinations: dict[int, dict[int, int]] = {}
        for (number, boundary), slot in zip(places, self._slots.reserve(blocks, chosen), strict=True):
            destinations.setdefault(number, {})[boundary.position] = slot
        return [
            replace(step, destinations=destinations[number]) if number in destinations else step
            for number, step in enumerate(steps)
        ]

    def after_verification[S: PathStep](self, planned: Sequence[S], accepted: Sequence[S]) -> list[S]:
        """Release the slots of boundaries that the `accepted` steps do not reach; reserve refused ones.

        Returns steps with the boundaries that were reached but got no slot while they were guesses: their
        states must be copied to `destinations`, which are reserved only now.
        """
        unserved = []
        for before, after in zip(planned, accepted, strict=True):
            if before.drafts:
                unreached = before.destinations.keys() - after.destinations.keys()
                self._slots.release([before.destinations[position] for position in unreached])
                missing = tuple(b for b in after.boundaries if b.position not in after.destinations)
                if missing:
                    unserved.append(replace(after, boundaries=missing, destinations={}))
        if not unserved:
            return []
        reserved = {step.key_at(position) for step in accepted for position in step.destinations}
        return self.reserve(
            [
                replace(
                    step,
                    boundaries=tuple(b for b in step.boundaries if step.key_at(b.position) not in reserved),
                )
                for step in unserved
            ]
        )

    def commit(self, step: PathStep) -> dict[int, int]:
        """See `PrefixCache.commit`."""
        path = step.path
        committed: dict[int, int] = {}
        for position, slot in sorted(step.destinations.items()):
            depth = position // path.chain.block_size_tokens
            if depth > path.num_registered:
                self._slots.release([slot])
                committed[position] = -1
                continue
            block = path.blocks[depth - 1]
            if step.decoding:  # a draft's state is planned only now that the draft is right
                self._slots.policy.plan(path.chain.keys, depth, "decode", path.request)
            (committed[position],) = self._slots.commit([slot], [block])
            if step.decoding:
                keeps = any(b.position == position and b.keeps for b in step.boundaries)
                self._rolling.advance(path, block, rolls=committed[position] == slot and not keeps)
        return committed


def _planned(key: int, step: PathStep, boundary: Boundary) -> PlannedState:
    depth = boundary.position // step.path.chain.block_size_tokens
    return PlannedState(key, step.path.chain.keys, depth, boundary.kind, step.path.request)


def _is_inner(step: PathStep, boundary: Boundary) -> bool:
    """Whether a prefill passes the boundary, so that only kernels that store states inside one keep it."""
    return not step.decoding and boundary.position < step.stop
