"""Where the state of each running request is."""

from collections.abc import Mapping, Sequence

from .cache.prefix_cache import PrefixCache
from .holding import Holding
from .request_step import RequestStep
from .state_pool import StatePool


class RequestStates:
    """Where each request's state is: in its live slot, or in a durable slot, pinned until a step reads it.

    This class alone writes `Holding.state_index` and `Holding.num_computed`. This class alone also handles
    kernels that update states in place: it copies states to where such kernels update them (`gather`), and
    copies boundary states away from there (`scatter`). Each of the two takes one launch per step.
    """

    def __init__(self, pool: StatePool, cache: PrefixCache, separate: bool = True) -> None:
        """`separate`: whether kernels read a state at one pool index and write new states at others."""
        self._pool = pool
        self._cache = cache
        self._separate = separate

    def start_from(self, holding: Holding, slot: int, num_tokens: int) -> None:
        """Let the request continue from a durable slot that holds the state after `num_tokens` tokens.

        The slot may be one that the request has taken over as a live slot.
        """
        if not (self._pool.is_shared and slot in holding.live_slots):
            self._cache.hold_state(holding.path, slot, resumes=True)
        holding.state_index = self._pool.durable_index(slot)
        holding.num_computed = num_tokens

    def max_inner_states(self, steps: Sequence[RequestStep]) -> int | None:
        """How many states inside their prefills the steps can take; None: any number."""
        return None

    def gather(self, steps: Sequence[RequestStep]) -> None:
        """Before a step: copy states to live slots, where kernels that update states in place need them."""
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
                if position >= step.stop - len(step.drafts):  # a prefill itself stores the states inside it
                    sources.append(self._live_slot(step, position))
                    places.append(self._pool.durable_index(slot))
        self._copy(sources, places)

    def inner_destinations(self, step: RequestStep) -> list[tuple[int, int]]:
        """Positions inside a prefill, and the pool indices where the prefill stores the states there."""
        return [
            (position, self._pool.durable_index(slot))
            for position, slot in step.destinations.items()
            if position != step.stop
        ]

    def completed_destination(self, step: RequestStep) -> int:
        """The pool index for the state of a chunk that a decode by replay completes; -1: none."""
        return -1

    def destinations(self, step: RequestStep) -> list[int]:
        """The pool index for the state after the step; with drafts, one index for each token's state."""
        if not step.drafts:
            return [self._destination(step, step.stop)]
        return [self._destination(step, position + 1) for position in range(step.start, step.stop)]

    def _destination(self, step: RequestStep, position: int) -> int:
        """The slot reserved for the state at `position`, or a live slot."""
        slot = step.destinations.get(position, -1) if self._separate else -1
        return self._live_slot(step, position) if slot < 0 else self._pool.durable_index(slot)

    def _live_slot(self, step: RequestStep, position: int) -> int:
        """The live slot for the state at `position`: the step's end, or the end of any token of a decode."""
        return step.holding.live_slots[position - step.stop + len(step.drafts)]

    def leave_source(self, step: RequestStep) -> None:
        """After a launched step: unpin the durable slot that the step read, unless a later step reads it."""
        self._cache.release_state(step.holding.path)

    def advance(self, step: RequestStep, committed: Mapping[int, int]) -> None:
        """Note where a launched step leaves its request's state.

        `committed`: boundary -> the slot that holds the state there now, or -1 where no slot holds it.
        """
        step.holding.num_computed = step.stop
        self._move(step, step.stop, committed)

    def _move(self, step: RequestStep, position: int, committed: Mapping[int, int]) -> None:
        """Let the request continue from the state that the step has left at `position`."""
        holding = step.holding
        slot = committed.get(position, -1) if self._separate else -1
        if slot >= 0:
            self._cache.hold_state(holding.path, slot, resumes=False)
            holding.state_index = self._pool.durable_index(slot)
            return
        written = self._destination(step, position)
        holding.state_index = self._live_slot(step, position)
        if written != holding.state_index:  # the slot was refused; no launched kernel overwrites it yet
            self._copy([written], [holding.state_index])

    def pass_over(self, holding: Holding, num_tokens: int) -> None:
        """Count tokens as computed whose decodes left the request's state where it is."""
        holding.num_computed += num_tokens

    def move_to_live(self, holding: Holding) -> None:
        """Copy a state that is only in a durable slot to the request's live slot, and unpin the former."""
        if holding.path.state_slot >= 0:
            live = holding.live_slots[0]
            self._copy([holding.state_index], [live])
            holding.state_index = live
            self._cache.release_state(holding.path)

    def _copy(self, sources: list[int], destinations: list[int]) -> None:
        if sources:
            self._pool.copy(sources, destinations)

    def check_integrity(self, holdings: Sequence[Holding], during_step: bool) -> None:
        """Raise AssertionError where a request's state is neither in its pinned slot nor in a live slot."""
        for holding in holdings:
            if holding.path.state_slot >= 0:
                assert holding.state_index == self._pool.durable_index(holding.path.state_slot)
            elif self._has_state(holding) and not during_step:
                assert holding.state_index in holding.live_slots, "a request's state is somewhere else"

    def _has_state(self, holding: Holding) -> bool:
        """Whether the request's state is that of one token or more, so that a slot holds it."""
        return holding.num_computed > 0
