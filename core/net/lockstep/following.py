"""The ranks of a split model that make what rank 0 calls."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import instance
from ..heartbeat import Heartbeat, RankDiedError, StoreLostError
from .connection import Connection
from .followed_calls import FollowedCalls
from .meeting import meet_leader
from .messages import CLOSE, Outcome, left_message, outcome_message, read_call

_MEETING_S = 60.0
_LOOKING_S = 0.5


def follow(engine: DynamicInferenceEngine, *, heartbeat: Heartbeat | None = None) -> None:
    """Make the calls of the `LeadingEngine` on rank 0 of this split model, until it is closed.

    Between calls this thread sleeps, for as long as it takes; no timeout of a process group runs then. A call
    that fails here is told to rank 0, whose next step says so; `reset` there makes both engines right again.

    Args:
        engine: new, of the same settings as rank 0's. Its model is the model of this rank.
        heartbeat: also notices a rank 0 that stands still; it is not closed here. Without one, only the end
            of its process, or of its machine, is noticed.

    Raises:
        ValueError: the model is not split, this is rank 0, or the engine has requests.
        RankDiedError: rank 0 is lost: its process has ended without `close`.
    """
    instance("engine", engine, DynamicInferenceEngine)
    if heartbeat is not None:
        instance("heartbeat", heartbeat, Heartbeat)
    groups = engine.context.spec.groups
    if not groups.rank:
        raise ValueError(
            f"engine is of rank 0 of {groups.size}; accepted: another rank of a split model, whose rank 0 "
            "has a LeadingEngine"
        )
    if engine.num_unfinished_requests:
        raise ValueError(
            f"engine has {engine.num_unfinished_requests} requests that have not ended; accepted: a new one"
        )
    connection = meet_leader(groups, engine.context.spec.device, _MEETING_S)
    calls = FollowedCalls(engine)
    try:
        _Follower(connection, calls, heartbeat).follow()
    except RankDiedError:
        raise
    except BaseException as error:
        with suppress(ConnectionError):
            connection.send(left_message(error))
        raise
    finally:
        connection.close()
        calls.close()


class _Follower:
    def __init__(self, connection: Connection, calls: FollowedCalls, heartbeat: Heartbeat | None) -> None:
        self._connection = connection
        self._calls = calls
        self._heartbeat = heartbeat
        self._loaded: tuple[Callable[..., object], tuple[Any, ...]] | None = None

    def follow(self) -> None:
        try:
            while True:
                name, told = read_call(self._next_message())
                if name == CLOSE:
                    return
                outcome = self._made(name, told)
                self._connection.send(outcome_message(outcome))
        except ConnectionError as error:
            raise RankDiedError({0: f"died, or left: {error}"}) from error

    def _next_message(self) -> bytes:
        if self._heartbeat is not None:
            while not self._connection.is_readable(_LOOKING_S):
                self._heartbeat.check()
        return self._connection.receive()

    def _made(self, name: str, told: tuple[Any, ...]) -> Outcome:
        """Make a call; an error of it is for rank 0, which may have raised the same."""
        watched = nullcontext() if self._heartbeat is None else self._heartbeat.naming_the_dead()
        try:
            with watched:
                self._make(name, told)
        except (RankDiedError, StoreLostError):
            raise
        except Exception as error:
            return Outcome.of(error, self._calls.broken)
        return Outcome.of(None, self._calls.broken)

    def _make(self, name: str, told: tuple[Any, ...]) -> None:
        if name == "load":
            self._loaded = pickle.loads(told[0])
        elif name == "run":
            assert self._loaded is not None
            (function, arguments), self._loaded = self._loaded, None
            self._calls.run(function, arguments, *told)
        else:
            getattr(self._calls, name)(*told)
