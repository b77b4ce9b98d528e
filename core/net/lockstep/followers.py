"""The leading rank's view of the ranks that follow: what they were told, and how far each has come."""

import time
from collections import deque
from collections.abc import Mapping

from ..heartbeat import RankDiedError
from .connection import Connection
from .messages import LEFT, Outcome, read_outcome

_LEAVING_S = 5.0


class Followers:
    """The connections to all followers, and what each of them answered to the calls that it was told of.

    Every rank has an outcome for each call: what it raised. A call whose outcome is not the same on all ranks
    has been made by some of them alone.

    Attributes:
        lost: rank -> how its loss is known, a text that follows "rank 3 ".
        any_broken: whether the engine of a rank is broken, as far as answers tell.
    """

    def __init__(self, connections: Mapping[int, Connection], timeout_s: float) -> None:
        """
        Args:
            connections: rank -> connection.
            timeout_s: how long a rank may take to a call's end once the leading rank is there.
        """
        self._connections = dict(connections)
        self._timeout_s = timeout_s
        self._own: dict[int, deque[Outcome]] = {rank: deque() for rank in connections}
        self._theirs: dict[int, deque[Outcome]] = {rank: deque() for rank in connections}
        self._num_open = dict.fromkeys(connections, 0)
        self.lost: dict[int, str] = {}
        self.any_broken = False

    def tell(self, message: bytes) -> None:
        """Tell all ranks of a call.

        Raises:
            RankDiedError: a rank is lost.
        """
        self.read()  # who died while nothing was called
        self.check_lives()
        for rank, connection in self._connections.items():
            try:
                connection.send(message)
            except ConnectionError as error:
                self._lose(rank, error)
            self._num_open[rank] += 1
        self.check_lives()

    def note_own(self, outcome: Outcome) -> None:
        """Note how the last call ended on the leading rank."""
        for outcomes in self._own.values():
            outcomes.append(outcome)

    def read(self) -> None:
        """Read what has been answered; waits for nothing. `lost` then has who is gone."""
        for rank, connection in self._connections.items():
            while rank not in self.lost and connection.is_readable():
                self._read_one(rank)

    def await_all(self) -> list[str]:
        """Wait until each rank has come to the end of all calls.

        Returns:
            How ranks and the leading rank differ, a text for each; empty where all are alike.

        Raises:
            RankDiedError: a rank is lost.
            TimeoutError: a rank does not come to the end.
        """
        self.await_answers(self._timeout_s)
        self.check_lives()
        behind = [rank for rank, number in self._num_open.items() if number]
        if behind:
            raise TimeoutError(f"ranks {behind} have not come to the end of a call in {self._timeout_s:g} s")
        return self.differences()

    def await_answers(self, timeout_s: float | None) -> None:
        """Wait until each rank has come to the end of all calls or is lost, at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for rank, connection in self._connections.items():
            while self._num_open[rank] and rank not in self.lost:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not connection.is_readable(left):
                    return
                self._read_one(rank)

    def forget(self) -> None:
        """Forget what ranks answered to calls that have ended: a reset makes all alike."""
        for outcomes in (*self._own.values(), *self._theirs.values()):
            outcomes.clear()
        self.any_broken = False

    def _read_one(self, rank: int) -> None:
        try:
            message = self._connections[rank].receive()
        except ConnectionError as error:
            self._lose(rank, error)
            return
        if message[:1] == LEFT:
            self.lost[rank] = message[1:].decode(errors="replace")
            return
        self._num_open[rank] -= 1
        outcome = read_outcome(message)
        self.any_broken |= outcome.broken
        self._theirs[rank].append(outcome)

    def differences(self) -> list[str]:
        """How calls ended otherwise on a rank than on rank 0, a text for each; each is told once."""
        found = []
        for rank, theirs in self._theirs.items():
            own = self._own[rank]
            while theirs and own:
                answered, expected = theirs.popleft(), own.popleft()
                if answered.kind != expected.kind or answered.broken:
                    found.append(f"rank {rank} {answered}, and rank 0 {expected}")
        return found

    def _lose(self, rank: int, error: ConnectionError) -> None:
        self.lost.setdefault(rank, f"died, or left: {error}")

    def check_lives(self) -> None:
        """Raise RankDiedError where a rank is lost."""
        if self.lost:
            raise RankDiedError(self.lost)

    def close(self, message: bytes) -> None:
        """Send a last message, and close the connections once all ranks have read it; waits 5 s at most.

        A connection that is closed before may lose the message.
        """
        deadline = time.monotonic() + _LEAVING_S
        self.await_answers(_LEAVING_S)
        for rank, connection in self._connections.items():
            try:
                if rank not in self.lost:
                    connection.send(message)
            except ConnectionError as error:
                self._lose(rank, error)
        for rank, connection in self._connections.items():
            while rank not in self.lost and connection.is_readable(max(0.0, deadline - time.monotonic())):
                self._read_one(rank)
            connection.close()
