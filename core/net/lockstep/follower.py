"""The ranks of a split model that make what rank 0 calls."""

import threading
import time
from collections import deque
from contextlib import closing, suppress
from typing import Any

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...validation import instance, shown
from ..all_ranks import RankDiedError, attempt
from ..message_sockets import Address, Link, PeerLostError, host_name
from .call_messages import Abort, Call, Close, Failure, Hello, Lost, Outcome

_MEETING_S = 60.0
_POLL_INTERVAL_S = 0.5
WATCH_S = 0.25  # so often a rank looks for messages while it makes a call


def follow(engine: DynamicInferenceEngine) -> None:
    """Make the calls of the `LeadingEngine` on rank 0 of this split model, until it is closed.

    Between calls this thread sleeps, for as long as it takes; no timeout of a process group runs then. A call
    that fails here is reported to rank 0, whose next step raises that; `reset` there repairs both engines.

    Args:
        engine: new, of the same settings as rank 0's. Its model is the model of this rank.

    Raises:
        ValueError: the model is not split, this is rank 0, or the engine has requests.
        RankDiedError: rank 0 is lost: its process has ended without `close`, stands still, or is cut off; or
            rank 0 has lost another rank. A process that has ended is noticed within 1 s, other ranks within
            13 s, during calls and between them.
    """
    instance("engine", engine, DynamicInferenceEngine)
    groups = engine.context.spec.groups
    if not groups.rank:
        raise ValueError(
            f"engine is of rank 0 of {groups.size}; accepted: another rank of a split model, whose rank 0 "
            "has a LeadingEngine"
        )
    if requests := engine.core.requests:
        raise ValueError(f"engine has {len(requests)} requests that have not ended; accepted: a new one")
    with closing(_LeaderCalls(_meet_leader(engine), groups)) as calls, engine.core.dropping_cancels():
        try:
            while not isinstance(call := calls.next(), Close):
                if isinstance(call, Lost):
                    raise RankDiedError(call.reasons)
                calls.answer(_outcome_of(call, engine))
        except PeerLostError as error:
            raise RankDiedError({0: f"died, or left: {error}"}) from error
        except RankDiedError:
            raise
        except BaseException as error:
            with suppress(PeerLostError):
                calls.answer(Failure(f"ended with {shown(error)[:500]}"))
                calls.await_lost()
            raise


def _meet_leader(engine: DynamicInferenceEngine) -> Link:
    """Connect with rank 0; RankDiedError where it cannot be reached, RuntimeError where it cannot listen."""
    spec = engine.context.spec
    spec.groups.gather(host_name(), spec.device)
    met = attempt(spec.groups, spec.device, lambda notes: None)
    met.result(RuntimeError)
    address = Address.from_bytes(met.notes[0]["address"])
    try:
        link = Link(address, Call | Abort | Lost | Close, _MEETING_S, max_queued=0)
        link.send(Hello(spec.groups.rank))
    except PeerLostError as error:
        raise RankDiedError({0: f"was lost: {error}"}) from error
    return link


class _LeaderCalls:
    """What rank 0 sends. While a call is made, a thread receives, because rank 0 may end its collectives."""

    def __init__(self, link: Link, groups: ParallelGroups) -> None:
        self._link, self._groups = link, groups
        self._lock = threading.Lock()  # of the link
        self._received: deque[Any] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="calls", daemon=True).start()

    def next(self) -> Any:
        """Wait for the next call; PeerLostError where rank 0 is lost."""
        while True:
            with self._lock:
                if self._received or (self._receive(_POLL_INTERVAL_S) and self._received):
                    return self._received.popleft()

    def answer(self, message: Outcome | Failure) -> None:
        with self._lock:
            self._link.send(message)

    def await_lost(self) -> None:
        """Wait until rank 0 says who is lost, 1 s at most: an exit may drop what has not left the process."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            with self._lock:
                if any(isinstance(message, Lost) for message in self._received):
                    return
                self._receive(_POLL_INTERVAL_S)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._link.close()

    def _receive(self, timeout_s: float) -> bool:
        received = self._link.receive(timeout_s)
        if received is not None and isinstance(received[0], Abort):
            self._groups.abort(received[0].reason)
        elif received is not None:
            self._received.append(received[0])
        return received is not None

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                with self._lock:
                    while not self._closed.is_set() and self._receive(0.0):
                        pass
            except PeerLostError as error:
                self._groups.abort(f"rank 0 died, or left: {error}")
                return


def _outcome_of(call: Any, engine: DynamicInferenceEngine) -> Outcome:
    """Make a call; an error of it is for rank 0, which may have raised the same."""
    error: Exception | None = None
    try:
        call.make(engine)
    except Exception as raised:
        error = raised
    return Outcome.of(error, engine.core.broken_by is not None)
