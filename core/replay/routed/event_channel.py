"""What replicas tell the router, on its way."""

import heapq

from ...net.routing.event_bytes import encode_events
from ...net.routing.state_events import StateEvents


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
        self._coming: list[tuple[int, int, StateEvents]] = []  # (time, number, message), a heap

    def send(self, events: StateEvents, now_ns: int) -> None:
        """Send a message at `now_ns`; times may go back from one replica to the next."""
        heapq.heappush(self._coming, (now_ns + self._delay_ns, self.num_events, events))
        self.num_events += 1
        self.num_bytes += len(encode_events(events))

    def due(self, now_ns: int) -> list[StateEvents]:
        """Take the messages that have arrived by now, in the order of their arrival."""
        found = []
        while self._coming and self._coming[0][0] <= now_ns:
            found.append(heapq.heappop(self._coming)[2])
        return found
