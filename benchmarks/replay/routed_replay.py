"""Serves a trace with several replicas behind a router, without a model."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import msgspec
from mambaslots.config import InferenceConfig
from mambaslots.inference.contexts.cache.pool_stats import NANOSECONDS
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.net.routing.state_events import StateEvents, StatePublisher
from mambaslots.net.routing.state_router import ReplicaLoad, RouteRequest
from mambaslots.replay.engine_replay import Arrivals, EngineReplay, chains_of
from mambaslots.replay.setting import ReplayResult, StepCost
from mambaslots.replay.trace import Trace
from mambaslots.state_spec import HybridStateSpec
from routers import Router

ONE_CACHE = "one cache"
"""Stands where a router's name would: one engine that is as large as all replicas together."""
EVENT_DELAY_MS = 50.0
"""From the end of a step to the router's index."""


@dataclass(frozen=True)
class Routing:
    """Which replicas there are, and what chooses among them.

    Attributes:
        num_replicas: how many; each has the memory of the setting.
        router: one of `ROUTERS`, or `ONE_CACHE`.
        seed: of the router.
        event_delay_ms: from the end of a step to the router's index.
    """

    num_replicas: int
    router: str
    seed: int = 0
    event_delay_ms: float = EVENT_DELAY_MS

    @property
    def is_one_cache(self) -> bool:
        return self.router == ONE_CACHE


@dataclass(frozen=True)
class ReplicaResult:
    """What one replica made of the requests that came to it.

    Attributes:
        served: prompts, and what was resumed.
        num_generated_tokens: of the answers.
    """

    served: ReplayResult
    num_generated_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not resumed, and the tokens of answers: the replica's load."""
        lost = self.served.lost_by_reason
        return sum(lost.values()) - lost.get("too_long", 0) + self.num_generated_tokens


@dataclass(frozen=True)
class RoutedResult:
    """What the replicas made of a trace.

    Attributes:
        replicas: each replica's part.
        replica_of: the number of the replica that served each request of the trace.
        first_token_s: of each request that fits into a pool, the seconds from its coming to its first token.
        duration_s: seconds until the last answer ended.
        num_sessions: sessions of the trace.
        num_moved_sessions: sessions whose requests went to more than one replica.
        num_events: messages about states that the router got; 0 where it reads none.
        event_bytes: their bytes.
    """

    replicas: tuple[ReplicaResult, ...]
    replica_of: tuple[int, ...]
    first_token_s: tuple[float, ...]
    duration_s: float
    num_sessions: int
    num_moved_sessions: int
    num_events: int = 0
    event_bytes: int = 0

    @property
    def num_requests(self) -> int:
        return sum(replica.served.num_requests for replica in self.replicas)

    @property
    def prompt_tokens(self) -> int:
        return sum(replica.served.prompt_tokens for replica in self.replicas)

    @property
    def resumed_tokens(self) -> int:
        return sum(replica.served.resumed_tokens for replica in self.replicas)

    @property
    def lost_by_reason(self) -> dict[str, int]:
        """Computed prompt tokens by reason, of all replicas."""
        reasons = dict.fromkeys(why for replica in self.replicas for why in replica.served.lost_by_reason)
        return {
            why: sum(replica.served.lost_by_reason.get(why, 0) for replica in self.replicas)
            for why in reasons
        }

    @property
    def share(self) -> float:
        """Resumed tokens / prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def token_imbalance(self) -> float:
        """The most tokens that a replica computed, over their mean."""
        return _imbalance([replica.num_computed_tokens for replica in self.replicas])

    @property
    def request_imbalance(self) -> float:
        """The most requests that a replica served, over their mean."""
        return _imbalance([replica.served.num_requests for replica in self.replicas])

    @property
    def mean_first_token_s(self) -> float:
        return fmean(self.first_token_s or [0.0])

    @property
    def p95_first_token_s(self) -> float:
        """The smallest time that 95 % of the requests do not exceed."""
        ordered = sorted(self.first_token_s) or [0.0]
        return ordered[-(-95 * len(ordered) // 100) - 1]

    @property
    def event_bytes_per_request(self) -> float:
        return self.event_bytes / self.num_requests if self.num_requests else 0.0

    @property
    def event_bytes_per_s(self) -> float:
        return self.event_bytes / self.duration_s if self.duration_s else 0.0


def _imbalance(numbers: Sequence[int]) -> float:
    """Largest over mean; 1 where all are 0."""
    return max(numbers) / fmean(numbers) if any(numbers) else 1.0


class EventChannel:
    """Messages that arrive a fixed time after they were sent, and how many bytes they have.

    Attributes:
        num_events: messages that were sent.
        num_bytes: their bytes.
    """

    def __init__(self, delay_ns: int) -> None:
        self.num_events = 0
        self.num_bytes = 0
        self._delay_ns = delay_ns
        self._upcoming: list[tuple[int, int, StateEvents]] = []  # (time, number, message), a heap

    def send(self, events: StateEvents, now_ns: int) -> None:
        """Send a message at `now_ns`; times may go back from one replica to the next."""
        heapq.heappush(self._upcoming, (now_ns + self._delay_ns, self.num_events, events))
        self.num_events += 1
        self.num_bytes += len(msgspec.msgpack.encode(events))

    def take_due(self, now_ns: int) -> list[StateEvents]:
        """Take the messages that have arrived by now, in the order of their arrival."""
        found = []
        while self._upcoming and self._upcoming[0][0] <= now_ns:
            found.append(heapq.heappop(self._upcoming)[2])
        return found


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a replica had done at a time."""

    at_ns: int
    num_ended: int
    num_tokens: int


class _ReplicaEngine(EngineReplay):
    """An `EngineReplay` that says when a step has ended."""

    after_step: Callable[[], None]

    def _run_batch(self, batch: Sequence[ScheduledRequest]) -> None:
        super()._run_batch(batch)
        self.after_step()

    def _pass_decodes(self, number: int, step_ns: int) -> None:
        for part in (number - 1, 1):
            if part:
                super()._pass_decodes(part, step_ns)
                self.after_step()


class Replica:
    """An `EngineReplay` with the requests that a router sends to it.

    What a step does is seen from outside when the step ends.

    Attributes:
        name: the router's name for the replica.
        engine: the scheduler and the cache.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        spec: HybridStateSpec,
        config: InferenceConfig,
        cost: StepCost,
        outside: "RoutedReplay",
    ) -> None:
        """`outside`: what the replica asks and publishes; the others are `EngineReplay`'s arguments."""
        self.name = name
        self.engine = _ReplicaEngine(trace, spec, config, cost)
        self.engine.arrivals, self.engine.after_step = self, self._after_step  # type: ignore[assignment]
        self._trace = trace
        self._outside = outside
        self._least_step_ns = round(cost.seconds(0, 0) * NANOSECONDS)
        self._inbox: deque[tuple[int, int]] = deque()  # (time, request), in the order of coming
        self._arrival_ns: dict[int, int] = {}  # of requests that have not ended
        self._num_sent = 0
        self._num_sent_tokens = 0
        self._num_ended = 0
        self._num_ended_tokens = 0
        self._progress = deque([_Progress(0, 0, 0)])  # the first is what the last caller of `load` has seen
        self._soonest_end_ns: int | None = None
        self._is_soonest_known = False

    # ---- what the router sees

    def send(self, number: int, arrival_ns: int) -> None:
        """Queue a request that has come now; the times of calls do not go back."""
        self._inbox.append((arrival_ns, number))
        self._arrival_ns[number] = arrival_ns
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
        """Make the next step, and the decodes after it that change no index."""
        self.engine.step()
        self._note_progress()  # of requests that were refused

    def _after_step(self) -> None:
        self._note_progress()
        self._outside.after_step(self)

    def _note_progress(self) -> None:
        self._is_soonest_known = False
        running = (request.allocation for request in self.engine.scheduler.running)
        num_tokens = sum(allocation.num_computed for allocation in running if allocation is not None)
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

    def take_due(self, now_ns: int) -> Sequence[int]:
        self._outside.route_until(now_ns)
        found = []
        while self._inbox and self._inbox[0][0] <= now_ns:
            found.append(self._inbox.popleft()[1])
        return found

    def arrival_ns(self, index: int) -> int:
        return self._arrival_ns[index]

    def schedule_next(self, index: int, now_ns: int) -> None:
        del self._arrival_ns[index]
        self._num_ended += 1
        self._num_ended_tokens += self._num_tokens(index)
        self._outside.schedule_next(index, now_ns)

    def _num_tokens(self, number: int) -> int:
        request = self._trace.requests[number]
        return len(request.prompt) + len(request.answer)


_NANOSECONDS_PER_MS = 1_000_000


class RoutedReplay:
    """One trace, served by several engines on one clock, each with a scheduler, rows and a cache of its own.

    A request comes as in a replay with one engine: behind the last answer of its session, wherever that was
    computed. The router then sends it to a replica. The router knows at once how many requests and tokens it
    has sent, learns when a step has ended what it has computed, and receives states later.

    What happens at one time happens in this order: steps end, messages arrive, requests come, steps begin.

    Attributes:
        replicas: the engines, with what is on its way to them.
        channel: the messages of replicas to the router.
        replica_of: of each request of the trace that has come, the number of its replica; else -1.
    """

    def __init__(
        self,
        trace: Trace,
        spec: HybridStateSpec,
        config: InferenceConfig,
        cost: StepCost,
        router: Router,
        num_replicas: int,
        *,
        event_delay_ms: float = 0.0,
    ) -> None:
        """
        Args:
            trace: the requests.
            spec: of the model; its tensors are not made.
            config: sizes and switches of each replica; with one row, requests come one after another.
            cost: how long a replica's steps take.
            router: new; it receives nothing else.
            num_replicas: one or more.
            event_delay_ms: from the end of a step until the router knows of its states.
        """
        self.replicas = [
            Replica(f"replica-{index}", trace, spec, config, cost, self) for index in range(num_replicas)
        ]
        self.channel = EventChannel(round(event_delay_ms * _NANOSECONDS_PER_MS))
        self.replica_of = [-1] * len(trace.requests)
        self._trace = trace
        self._router = router
        self._block_size = config.block_size_tokens
        self._chains = chains_of(trace, self._block_size)
        self._arrivals = Arrivals(trace, one_after_another=config.max_requests == 1)
        self._number_of = {replica.name: index for index, replica in enumerate(self.replicas)}
        self._publishers: dict[str, StatePublisher] = {}
        if getattr(router, "reads_events", True):
            self._publishers = {
                replica.name: StatePublisher(replica.engine.context, replica.name)
                for replica in self.replicas
            }
        self._num_ended = 0
        self._last_end_ns = 0

    def run(self) -> RoutedResult:
        """Serve all requests that are left."""
        while self.step():
            pass
        return self.result()

    def step(self) -> bool:
        """Send the requests that come next, or make a replica's next step; False where nothing is left."""
        coming_ns = self._arrivals.next_ns
        begins = [
            (at_ns, index)
            for index, replica in enumerate(self.replicas)
            if (at_ns := replica.next_step_ns) is not None
        ]
        if coming_ns is not None and (not begins or coming_ns <= min(begins)[0]):
            self.route_until(coming_ns)
            return True
        if not begins:
            return False
        self.replicas[min(begins)[1]].step()
        return True

    def result(self) -> RoutedResult:
        """What came of the requests so far."""
        answers = [0] * len(self.replicas)
        waits: list[int] = []
        replicas_of: dict[int, set[int]] = {}
        for number, (request, index) in enumerate(zip(self._trace.requests, self.replica_of, strict=True)):
            replicas_of.setdefault(request.session, set()).add(index)
            waited_ns = None if index < 0 else self.replicas[index].engine.first_token_ns[number]
            if waited_ns is not None:
                waits.append(waited_ns)
                answers[index] += len(request.answer)
        return RoutedResult(
            replicas=tuple(
                ReplicaResult(replica.engine.result(), num_tokens)
                for replica, num_tokens in zip(self.replicas, answers, strict=True)
            ),
            replica_of=tuple(self.replica_of),
            first_token_s=tuple(wait_ns / NANOSECONDS for wait_ns in waits),
            duration_s=self._last_end_ns / NANOSECONDS,
            num_sessions=len(replicas_of),
            num_moved_sessions=sum(len(indices) > 1 for indices in replicas_of.values()),
            num_events=self.channel.num_events,
            event_bytes=self.channel.num_bytes,
        )

    # ---- what replicas ask and publish

    def route_until(self, now_ns: int) -> None:
        """Send all requests to replicas that have come by now, each at its time."""
        while (coming_ns := self._arrivals.next_ns) is not None and coming_ns <= now_ns:
            for events in self.channel.take_due(coming_ns):
                self._router.apply(events)
            for number in self._arrivals.take_due(coming_ns):
                self._route(number, coming_ns)

    def horizon_ns(self, replica: Replica) -> int | None:
        """The next request that is known to come, or the soonest end at another replica."""
        times = [other.soonest_end_ns for other in self.replicas if other is not replica]
        return min((time for time in (self._arrivals.next_ns, *times) if time is not None), default=None)

    def after_step(self, replica: Replica) -> None:
        """Send what the replica publishes of its states."""
        if replica.name in self._publishers:
            events = self._publishers[replica.name].take()
            if events is not None:
                self.channel.send(events, replica.engine.now_ns)

    def schedule_next(self, number: int, now_ns: int) -> None:
        """The session's next request may come."""
        self._num_ended += 1
        self._last_end_ns = max(self._last_end_ns, now_ns)
        self._arrivals.schedule_next(number, now_ns)

    def _route(self, number: int, now_ns: int) -> None:
        entry = self._trace.requests[number]
        request = RouteRequest(
            hashes=self._chains[number].hashes[: len(entry.prompt) // self._block_size],
            num_tokens=len(entry.prompt),
            block_size_tokens=self._block_size,
            num_answer_tokens=len(entry.answer),
        )
        first, *_ = self._router.choose(request, [replica.load(now_ns) for replica in self.replicas])
        index = self._number_of[first]
        self.replica_of[number] = index
        self.replicas[index].send(number, now_ns)
