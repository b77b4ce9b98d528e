"""Serves a trace with several replicas behind a router, without a model."""

from ...config import InferenceConfig
from ...inference.contexts.cache.departures import NANOSECONDS
from ...net.routing.router import Router, RouteRequest
from ...net.routing.state_publisher import StatePublisher
from ...state_spec import HybridStateSpec
from ..arrivals import Arrivals
from ..prompt_hashes import chains_of
from ..setting import Progress, StepCost
from ..trace import Trace
from .event_channel import EventChannel
from .replica import Replica
from .setting import ReplicaResult, RoutedResult

_NANOSECONDS_PER_MS = 1_000_000


class RoutedReplay:
    """One trace, served by several engines on one clock, each with a scheduler, rows and a cache of its own.

    A request comes as in a replay with one engine: behind the last answer of its session, wherever that was
    computed. The router then sends it to a replica. The router knows at once how many requests and tokens it
    has sent, learns when a step has ended what it has computed, and is told of states later.

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
        token_by_token: bool = False,
    ) -> None:
        """
        Args:
            trace: the requests.
            spec: of the model; its tensors are not made.
            config: sizes and switches of each replica; with one row, requests come one after another.
            cost: how long a replica's steps take.
            router: new; it is told of nothing else.
            num_replicas: one or more.
            event_delay_ms: from the end of a step until the router knows of its states.
            token_by_token: whether each decode is a step of its own.
        """
        self.replicas = [
            Replica(f"replica-{index}", trace, spec, config, cost, self, token_by_token=token_by_token)
            for index in range(num_replicas)
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
        if router.reads_events:
            self._publishers = {
                replica.name: StatePublisher(replica.engine.context, replica.name)
                for replica in self.replicas
            }
        self._num_ended = 0
        self._last_end_ns = 0

    def run(self, progress: Progress = lambda num_served, num_all: None) -> RoutedResult:
        """Serve all requests that are left."""
        while self.step():
            progress(self._num_ended, len(self._trace.requests))
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

    # ---- what replicas ask and tell

    def route_until(self, now_ns: int) -> None:
        """Send all requests to replicas that have come by now, each at its time."""
        while (coming_ns := self._arrivals.next_ns) is not None and coming_ns <= now_ns:
            for events in self.channel.due(coming_ns):
                self._router.apply(events)
            for number in self._arrivals.due(coming_ns):
                self._route(number, coming_ns)

    def horizon_ns(self, replica: Replica) -> int | None:
        """The next request that is known to come, or the soonest end at another replica."""
        times = [other.soonest_end_ns for other in self.replicas if other is not replica]
        return min((time for time in (self._arrivals.next_ns, *times) if time is not None), default=None)

    def after_step(self, replica: Replica) -> None:
        """Send what the replica tells of its states."""
        if replica.name in self._publishers:
            events = self._publishers[replica.name].take()
            if events is not None:
                self.channel.send(events, replica.engine.now_ns)

    def note_end(self, number: int, now_ns: int) -> None:
        """The session's next request may come."""
        self._num_ended += 1
        self._last_end_ns = max(self._last_end_ns, now_ns)
        self._arrivals.note_end(number, now_ns)

    def _route(self, number: int, now_ns: int) -> None:
        entry = self._trace.requests[number]
        request = RouteRequest(
            keys=self._chains[number].keys[: len(entry.prompt) // self._block_size],
            num_tokens=len(entry.prompt),
            block_size_tokens=self._block_size,
            num_answer_tokens=len(entry.answer),
        )
        first, *_ = self._router.choose(request, [replica.load(now_ns) for replica in self.replicas])
        index = self._number_of[first]
        self.replica_of[number] = index
        self.replicas[index].send(number, now_ns)
