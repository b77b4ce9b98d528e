"""Which replicas answer: heard by an ingress, read by the request router in the same process."""

import time
from collections.abc import Callable, Iterable
from functools import cache

SILENT_S = 5.0
"""A replica that has answered nothing for so long is silent where another one answers."""
_GIVEN_UP_S = 10.0
"""Where none answers, so long all are taken to be busy."""


class Pulses:
    """When each replica has answered last, and where requests are that no replica has confirmed.

    Methods may be called in any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._sent: dict[str, str] = {}

    def expect(self, replicas: Iterable[str]) -> None:
        """Know these replicas alone; a new one counts as heard now."""
        now = self._clock()
        self._heard_s = {name: self._heard_s.get(name, now) for name in replicas}

    def forget(self, replica: str) -> None:
        self._heard_s.pop(replica, None)

    def note_answer(self, replica: str) -> None:
        if replica in self._heard_s:
            self._heard_s[replica] = self._clock()

    @property
    def num_serving(self) -> int:
        """Replicas that were heard within 5 s; where none was, those of the last 10 s."""
        return self._heard_within(SILENT_S) or self._heard_within(_GIVEN_UP_S)

    def is_silent(self, replica: str) -> bool:
        """Whether a replica was not heard for 5 s, though another one was."""
        heard_s = self._heard_s.get(replica)
        late = heard_s is not None and self._clock() - heard_s >= SILENT_S
        return late and self._heard_within(SILENT_S) > 0

    def _heard_within(self, seconds: float) -> int:
        horizon = self._clock() - seconds
        return sum(heard_s > horizon for heard_s in list(self._heard_s.values()))

    def note_sent(self, request: str, replica: str) -> None:
        """A request waits for the confirmation of this replica."""
        self._sent[request] = replica

    def replica_of(self, request: str) -> str:
        """Where a request is; "" before a replica was chosen."""
        return self._sent.get(request, "")

    def note_ended(self, request: str) -> None:
        self._sent.pop(request, None)


@cache
def pulses_of(channel: str) -> Pulses:
    """This process' own of an application; `channel` is the name of its `StateChannel`."""
    return Pulses()
