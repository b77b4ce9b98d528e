"""Where the state of each running request is."""

from collections.abc import Mapping, Sequence

from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors
from .holding import Holding
from .prefix_cache import PrefixCache
from .request_step import RequestStep
from .state_pool import StatePool


class RequestStates:
    """A request's state is in a live slot of its own, or in a durable slot, pinned until a step has read it.

    This class alone writes `Holding.state_index` and `Holding.num_computed`. Here, and nowhere else, is
    decided what kernels cost that update states in place: states are copied to where such kernels update
    them (`gather`), and boundary states are copied away from there (`scatter`), each in one launch a step.
    """

    def __init__(self, pool: StatePool, cache: PrefixCache, separate: bool = True) -> None:
        """`separate`: whether kernels read a state at one index and write it at others."""
        self._pool = pool
        self._cache = cache
        self._separate = separate

    def start_from(self, holding: Holding, slot: int, num_tokens: int) -> None:
        """The request continues from a durable slot, which holds the state after `num_tokens` tokens."""
        self._cache.hold_state(holding.path, slot, resumes=True)
        holding.state_index = self._pool.durable_index(slot)
        holding.num_computed = num_tokens

    def gather(self, steps: Sequence[RequestStep]) -> None:
        """Before a step: copy the states that kernels update in place to the live slots where they do so."""
        if self._separate:
            return
        sources, places = [], []
        for step in steps:
            holding = step.holding
            live = holding.live_slots[0]
            if holding.num_computed and holding.state_index != live:
                sources.append(holding.state_index)
                places.append(live)
                holding.state_index = live
                self._cache.release_state(holding.path)
        self._copy(sources, places)

    def scatter(self, steps: Sequence[RequestStep], late: Sequence[RequestStep] = ()) -> None:
        """After a step: copy boundary states from live slots to the slots reserved for them.

        Kernels that update states in place leave all boundary states in live slots. Other kernels leave only
        those of `late`, whose slots were reserved after the step.
        """
        sources, places = [], []
        for step in late if self._separate else steps:
            for position, slot in step.destinations.items():
                if position >= step.stop - len(step.drafts):  # the prefill itself stores those inside it
                    sources.append(self._live_slot(step, position))
                    places.append(self._pool.durable_index(slot))
        self._copy(sources, places)

    def destinations(self, step: RequestStep) -> list[int]:
        """The pool index for the last state of a step; for a decode with drafts those after each token."""
        if not step.drafts:
            return [self._destination(step, step.stop)]
        return [self._destination(step, position + 1) for position in range(step.start, step.stop)]

    def _destination(self, step: RequestStep, position: int) -> int:
        """The slot reserved for the state at `position`, or a live slot."""
        slot = step.destinations.get(position, -1) if self._separate else -1
        return self._live_slot(step, position) if slot < 0 else self._pool.durable_index(slot)

    def _live_slot(self, step: RequestStep, position: int) -> int:
        """The live slot for the state at `position`: the end of the step, or after any token of a decode."""
        return step.holding.live_slots[position - step.stop + len(step.drafts)]

    def advance(self, step: RequestStep, committed: Mapping[int, int]) -> None:
        """The step has been launched: its request's state is where the step left it.

        `committed`: boundary -> the slot that holds the state there now, -1 where it was not kept.
        """
        holding = step.holding
        holding.num_computed = step.stop
        slot = committed.get(step.stop, -1) if self._separate else -1
        if slot >= 0:
            self._cache.hold_state(holding.path, slot, resumes=False)
            holding.state_index = self._pool.durable_index(slot)
            return
        written = self._destination(step, step.stop)
        holding.state_index = self._live_slot(step, step.stop)
        if written != holding.state_index:  # not kept; nothing has been launched that could overwrite it
            self._copy([written], [holding.state_index])

    def move_to_live(self, holding: Holding) -> None:
        """Copy a state that the request has only in a durable slot to its live slot, and unpin the slot."""
        if holding.path.state_slot >= 0:
            live = holding.live_slots[0]
            self._copy([holding.state_index], [live])
            holding.state_index = live
            self._cache.release_state(holding.path)

    def _copy(self, sources: list[int], destinations: list[int]) -> None:
        if sources:
            states = StateTensors(self._pool.conv_states, self._pool.ssm_states)
            copy_states(states, sources, states, destinations)

    def check_integrity(self, holdings: Sequence[Holding], during_step: bool) -> None:
        """Raise AssertionError where a request's state is neither in its pinned slot nor in a live slot."""
        for holding in holdings:
            if holding.path.state_slot >= 0:
                assert holding.state_index == self._pool.durable_index(holding.path.state_slot)
            elif holding.num_computed and not during_step:
                assert holding.state_index in holding.live_slots, "a request's state is somewhere else"
