"""The states that one step takes: their slots are reserved before the forward and committed after it."""

from collections.abc import Sequence
from dataclasses import replace

from ..request_step import RequestStep
from .cached_path import CachedPath
from .checkpoint_plan import KINDS_BY_WORTH, Boundary
from .durable_slots import DurableSlots
from .eviction_order import PlannedState
from .prefix_tree import PrefixTree
from .rolling_states import RollingStates

Candidate = tuple[RequestStep, Boundary]


def _planned(key: int, step: RequestStep, boundary: Boundary) -> PlannedState:
    path = step.holding.path
    depth = boundary.position // path.chain.block_size_tokens
    return PlannedState(key, path.chain.keys, depth, boundary.kind, path.visit)


class StepCheckpoints:
    """Carries the planned boundaries of scheduled steps into durable slots."""

    def __init__(self, slots: DurableSlots, tree: PrefixTree, rolling: RollingStates) -> None:
        self._slots = slots
        self._tree = tree
        self._rolling = rolling

    def reserve(self, steps: Sequence[RequestStep], max_inner_states: int | None = None) -> list[RequestStep]:
        """Reserve a slot for each boundary that has no state yet, as far as slots go.

        May evict states. A boundary that only drafts reach evicts nothing: it gets a free slot or none. A
        boundary without a slot is no error.

        Args:
            max_inner_states: how many states inside prefills the steps can take, the worthiest of them; None:
                any number.

        Returns:
            The steps with their `destinations`.
        """
        certain: dict[int, Candidate] = {}
        guessed: dict[int, Candidate] = {}
        for step in steps:
            for boundary in step.boundaries:
                key = step.key_at(boundary.position)
                if key not in self._slots.map.hash_to_block_id:
                    known = boundary.position <= len(step.request.tokens)
                    (certain if known else guessed).setdefault(key, (step, boundary))
        if not (certain or guessed):
            return list(steps)
        by_worth = sorted(certain, key=lambda key: KINDS_BY_WORTH.index(certain[key][1].kind))
        by_worth, unstaged = _within(by_worth, certain, max_inner_states)
        if not self._slots.order.refuses:
            decoding = [certain[key][0] for key in by_worth if certain[key][1].kind == "decode"]
            self._rolling.make_room([step.holding.path for step in decoding], len(by_worth))
        chosen, refused = self._slots.choose(
            [_planned(key, *certain[key]) for key in by_worth],
            [key for key in guessed if key not in certain],
        )
        self._slots.refuse(refused + unstaged)
        taken = [certain.get(key) or guessed[key] for key in chosen]
        slots = self._slots.reserve([step.block_at(boundary.position) for step, boundary in taken], chosen)
        destinations: dict[int, dict[int, int]] = {}
        for (step, boundary), slot in zip(taken, slots, strict=True):
            destinations.setdefault(step.holding.row, {})[boundary.position] = slot
        return [
            replace(step, destinations=destinations[step.holding.row])
            if step.holding.row in destinations
            else step
            for step in steps
        ]

    def after_verification(
        self, planned: Sequence[RequestStep], accepted: Sequence[RequestStep]
    ) -> list[RequestStep]:
        """Once drafts are verified, release the slots of unreached boundaries and reserve refused ones.

        Args:
            planned: the steps as they were reserved.
            accepted: what remains of them, in the same order.

        Returns:
            Steps with the boundaries that were reached but got no slot while they were guesses. The slots in
            their `destinations` are reserved only now, so that the states must be copied there.
        """
        unserved = []
        for before, after in zip(planned, accepted, strict=True):
            if before.drafts:
                beyond = before.destinations.keys() - after.destinations.keys()
                self._slots.release([before.destinations[position] for position in beyond])
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

    def commit(self, step: RequestStep) -> dict[int, int]:
        """Make the states of a launched step findable; the request's blocks must be registered already.

        Returns:
            boundary -> the committed slot that holds its state: the reserved slot, or the slot that another
                request committed for the same prefix; -1 where the prefix cannot be registered.
        """
        path = step.holding.path
        committed: dict[int, int] = {}
        for position, slot in sorted(step.destinations.items()):
            depth = position // path.chain.block_size_tokens
            if depth > path.num_registered:
                self._slots.release([slot])
                committed[position] = -1
                continue
            block = path.blocks[depth - 1]
            if step.decoding:  # a draft's state is planned only now that the draft is right
                self._slots.order.plan(
                    PlannedState(path.chain.keys[depth - 1], path.chain.keys, depth, "decode", path.visit)
                )
            (committed[position],) = self._slots.commit([slot], [block])
            if step.decoding:
                rolls = committed[position] == slot and not path.plan.keeps_decode_state(position)
                self._rolling.advance(path, block, rolls=rolls)
        if committed:
            newest = step.block_at(step.stop) if step.stop in committed else -1
            self._trim(path, newest)
        return committed

    def _trim(self, path: CachedPath, newest: int) -> None:
        """Drop a path's shallowest states until its plan's maximum number is met.

        The deepest state, forks, and the state of block `newest`, which the request may continue from, stay.
        """
        cap = path.plan.max_states_per_path
        if cap is None:
            return
        states = [block for block in path.blocks[: path.num_registered] if block in self._slots.map]
        num_excess = len(states) - cap
        for block in states[:-1]:
            if num_excess <= 0:
                return
            exempt = block == newest or self._tree.num_children(block) > 1
            if not exempt and self._slots.drop(block, "path_limit"):
                num_excess -= 1


def _within(
    by_worth: list[int], candidates: dict[int, Candidate], max_inner_states: int | None
) -> tuple[list[int], list[int]]:
    """The keys without those of states inside prefills beyond the limit, and these."""
    if max_inner_states is None:
        return by_worth, []
    inner = [key for key in by_worth if _is_inner(*candidates[key])]
    beyond = set(inner[max_inner_states:])
    return [key for key in by_worth if key not in beyond], [key for key in by_worth if key in beyond]


def _is_inner(step: RequestStep, boundary: Boundary) -> bool:
    return not step.decoding and boundary.position < step.stop
