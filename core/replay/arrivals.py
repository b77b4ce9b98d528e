"""When the requests of a trace come, given when the answers before them end."""

import heapq

from ..inference.contexts.cache.departures import NANOSECONDS
from .trace import Trace


class Arrivals:
    """The requests of a trace that have not come yet.

    A session's requests come with the gaps that the trace has between them. A request whose session still
    waits for an answer comes when that answer ends, and the session's later requests come later by the same
    time. Times are nanoseconds since the trace began.

    One after another, requests come in the order of the trace: each at its time, or at the end of the request
    before it.
    """

    def __init__(self, trace: Trace, *, one_after_another: bool = False) -> None:
        """`one_after_another`: whether each request waits for the answer of the request before it."""
        self._gap_before: list[int] = []  # of each request, behind the request before it in its session
        self._next_of: list[int] = []  # the next request of the session, or -1
        self._came_ns: dict[int, int] = {}  # of requests that run or wait
        self._coming: list[tuple[int, int]] = []  # (time, request), a heap
        last: dict[int, int] = {}
        for index, request in enumerate(trace.requests):
            at_ns = round(request.arrival_s * NANOSECONDS)
            session = 0 if one_after_another else request.session
            before = last.get(session, -1)
            self._next_of.append(-1)
            if before < 0:
                self._coming.append((at_ns, index))
                self._gap_before.append(0)
            else:
                self._next_of[before] = index
                self._gap_before.append(at_ns - round(trace.requests[before].arrival_s * NANOSECONDS))
            last[session] = index
        heapq.heapify(self._coming)

    @property
    def next_ns(self) -> int | None:
        """When the next request comes; None where none comes before an answer ends."""
        return self._coming[0][0] if self._coming else None

    @property
    def horizon_ns(self) -> int | None:
        """A time before which no request comes, as far as no answer ends; None for never."""
        return self.next_ns

    def due(self, now_ns: int) -> list[int]:
        """Take the requests that have come by now: their numbers in the trace, in the order of coming."""
        found = []
        while self._coming and self._coming[0][0] <= now_ns:
            at_ns, index = heapq.heappop(self._coming)
            self._came_ns[index] = at_ns
            found.append(index)
        return found

    def came_ns(self, index: int) -> int:
        """When a request came that has not ended."""
        return self._came_ns[index]

    def note_end(self, index: int, now_ns: int) -> None:
        """Note that the answer of a request that has come has ended."""
        came_ns, following = self._came_ns.pop(index), self._next_of[index]
        if following >= 0:
            at_ns = max(came_ns + self._gap_before[following], now_ns)
            heapq.heappush(self._coming, (at_ns, following))
