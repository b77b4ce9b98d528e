"""One replica on the clock that all replicas share."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from ...config import InferenceConfig
from ...inference.contexts.cache.departures import NANOSECONDS
from ...net.routing.router import ReplicaLoad
from ...state_spec import HybridStateSpec
from ..engine_replay import EngineReplay
from ..setting import StepCost
from ..trace import Trace


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a replica had done at a time."""

    at_ns: int
    num_ended: int
    num_tokens: int


class Outside(Protocol):
    """What a replica asks and tells. Times are nanoseconds since the trace began."""

    def route_until(self, now_ns: int) -> None:
        """Send all requests to replicas that have come by now."""
        ...

    def horizon_ns(self, replica: "Replica") -> int | None:
        """A time before which no request comes, as far as none ends at `replica`; None for never."""
        ...

    def after_step(self, replica: "Replica") -> None:
        """Note that a step of `replica` has ended; its engine has the time."""
        ...

    def note_end(self, number: int, now_ns: int) -> None:
        """Note that a request has ended."""
        ...


class Replica:
    """An `EngineReplay` with the requests that a router sends to it.

    What a step does is seen from outside when the step ends.

    Attributes:
        name: the router's name for the replica.
        engine: the scheduler and the books.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        spec: HybridStateSpec,
        config: InferenceConfig,
        cost: StepCost,
        outside: Outside,
        *,
        token_by_token: bool,
    ) -> None:
        """`outside`: what the replica asks and tells; the others are `EngineReplay`'s arguments."""
        self.name = name
        self.engine = EngineReplay(
            trace, spec, config, cost,
            token_by_token=token_by_token, source=self, after_step=self._after_step,
        )  # fmt: skip
        self._trace = trace
        self._outside = outside
        self._least_step_ns = round(cost.seconds(0, 0) * NANOSECONDS)
        self._inbox: deque[tuple[int, int]] = deque()  # (time, request), in the order of coming
        self._came_ns: dict[int, int] = {}  # of requests that have not ended
        self._num_sent = 0
        self._num_sent_tokens = 0
        self._num_ended = 0
        self._num_ended_tokens = 0
        self._progress = deque([_Progress(0, 0, 0)])  # the first is what the last caller of `load` has seen
        self._soonest_end_ns: int | None = None
        self._is_soonest_known = False

    # ---- what the router sees

    def send(self, number: int, came_ns: int) -> None:
        """Queue a request that has come now; the times of calls do not go back."""
        self._inbox.append((came_ns, number))
        self._came_ns[number] = came_ns
        self._num_sent += 1
        self._num_sent_tokens += self._num_tokens(number)
        self._is_soonest_known = False

    def load(self, now_ns: int) -> ReplicaLoad:
        """How busy the replica is, as far as steps have ended; the times of calls do not go back."""
        while len(self._progress) > 1 and self._progress[1].at_ns <= now_ns:
            self._progress.popleft()
        done = self._progress[0]
        return ReplicaLoad(
            self.name, self._num_sent - done.num_ended, self._num_sent_tokens - done.num_tokens
        )

    # ---- the clock

    @property
    def next_step_ns(self) -> int | None:
        """When the replica makes its next step; None where nothing is left."""
        if self.engine.scheduler.running or self.engine.scheduler.waiting:
            return self.engine.now_ns
        return max(self.engine.now_ns, self._inbox[0][0]) if self._inbox else None

    @property
    def soonest_end_ns(self) -> int | None:
        """A time before which no request ends here; None where nothing is left."""
        if not self._is_soonest_known:
            self._soonest_end_ns = self._find_soonest_end_ns()
            self._is_soonest_known = True
        return self._soonest_end_ns

    def _find_soonest_end_ns(self) -> int | None:
        if self._inbox:
            return self.next_step_ns
        scheduler = self.engine.scheduler
        fewest = min(
            (
                request.max_length - len(request.tokens)
                for request in chain(scheduler.running, scheduler.waiting.values())
            ),
            default=None,
        )
        return None if fewest is None else self.engine.now_ns + fewest * self._least_step_ns

    def step(self) -> None:
        """Make the next step, and the decodes behind it that change no book."""
        self.engine.step()
        self._note_progress()  # of requests that were refused

    def _after_step(self) -> None:
        self._note_progress()
        self._outside.after_step(self)

    def _note_progress(self) -> None:
        self._is_soonest_known = False
        running = (request.holding for request in self.engine.scheduler.running)
        num_tokens = sum(holding.num_computed for holding in running if holding is not None)
        self._progress.append(
            _Progress(self.engine.now_ns, self._num_ended, self._num_ended_tokens + num_tokens)
        )

    # ---- where the engine's requests come from

    @property
    def next_ns(self) -> int | None:
        return self._inbox[0][0] if self._inbox else None

    @property
    def horizon_ns(self) -> int | None:
        return self._outside.horizon_ns(self)

    def due(self, now_ns: int) -> Sequence[int]:
        self._outside.route_until(now_ns)
        found = []
        while self._inbox and self._inbox[0][0] <= now_ns:
            found.append(self._inbox.popleft()[1])
        return found

    def came_ns(self, index: int) -> int:
        return self._came_ns[index]

    def note_end(self, index: int, now_ns: int) -> None:
        del self._came_ns[index]
        self._num_ended += 1
        self._num_ended_tokens += self._num_tokens(index)
        self._outside.note_end(index, now_ns)

    def _num_tokens(self, number: int) -> int:
        request = self._trace.requests[number]
        return len(request.prompt) + len(request.answer)
