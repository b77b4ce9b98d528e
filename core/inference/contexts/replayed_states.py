"""Where the state of each running request is, where decodes replay the inputs since the last grid point."""

from collections.abc import Mapping

from .cache.prefix_cache import PrefixCache
from .holding import Holding
from .request_states import RequestStates
from .request_step import RequestStep
from .state_pool import StatePool


class ReplayedStates(RequestStates):
    """A request's state is the state at its last grid point, in its live slot or in a pinned durable slot.

    Decodes read their request's state again and again. So that no decode keeps a durable slot pinned, the
    state is in the live slot before the first decode: where the last step of a prefill, or a decode, leaves
    the state in a durable slot, the state is copied. A request has one live slot, whatever it drafts.
    """

    def __init__(self, pool: StatePool, cache: PrefixCache, chunk_size: int) -> None:
        """`chunk_size`: grid points are its multiples."""
        super().__init__(pool, cache)
        self._chunk_size = chunk_size

    def _last_grid_point(self, position: int) -> int:
        return position // self._chunk_size * self._chunk_size

    def _reaches_grid_point(self, step: RequestStep) -> bool:
        return self._last_grid_point(step.stop) > step.start

    def inner_destinations(self, step: RequestStep) -> list[tuple[int, int]]:
        inner, last = super().inner_destinations(step), self._last_grid_point(step.stop)
        if step.start < last < step.stop and last not in step.destinations:
            inner.append((last, self._live_slot(step, last)))
        return inner

    def destinations(self, step: RequestStep) -> list[int]:
        if step.decoding:
            return [-1] * step.length
        return [self._destination(step, step.stop) if step.stop % self._chunk_size == 0 else -1]

    def completed_destination(self, step: RequestStep) -> int:
        if not step.decoding or step.stop % self._chunk_size:
            return -1
        return self._destination(step, step.stop)

    def _live_slot(self, step: RequestStep, position: int) -> int:
        return step.holding.live_slots[0]

    def leave_source(self, step: RequestStep) -> None:
        if self._reaches_grid_point(step):
            super().leave_source(step)

    def advance(self, step: RequestStep, committed: Mapping[int, int]) -> None:
        step.holding.num_computed = step.stop
        if self._reaches_grid_point(step):
            self._move(step, self._last_grid_point(step.stop), committed)
        if step.holding.decoding:
            self.move_to_live(step.holding)

    def _has_state(self, holding: Holding) -> bool:
        return holding.num_computed >= self._chunk_size
