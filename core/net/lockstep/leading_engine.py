"""The engine of a split model for one caller: it makes each call on all ranks."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self, cast

import msgspec

from ...config import InferenceConfig
from ...devices import on_device_of
from ...errors import KVBlockCapacityError, MambaSlotCapacityError
from ...inference.contexts.dynamic_request import DynamicInferenceRequest
from ...inference.contexts.step_inputs import Model
from ...inference.engines.drafter import Drafter
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.engine_core import CoreCall, signals_deferred
from ...inference.engines.engine_thread import thread_over
from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, real, refused
from ..all_ranks import RankDiedError
from .call_messages import Add, CallFunction, FindFunction, Outcome, check_plain, message_of, name_of
from .rank_connections import RankConnections

_CAPACITY = (KVBlockCapacityError, MambaSlotCapacityError)
_DEATH_S = 0.5  # the connection of a process that died ends so soon after its collectives
_CLOSING_S = 10.0
_open_engines: "weakref.WeakSet[LeadingEngine]" = weakref.WeakSet()


class LeadingEngine(DynamicInferenceEngine):
    """An engine on rank 0 of a split model that one caller drives, as if the model were whole.

    The other ranks build a `DynamicInferenceEngine` and call `follow`. Whatever changes the engine here,
    also a stream that is dropped, is made by all ranks at the same place. What is only read is read here.
    So an `AsyncEngine`, and a server, can serve a split model.

        with msd.LeadingEngine(model, config) as engine:  # on rank 0
            engine.generate(prompts)

        msd.follow(ms.DynamicInferenceEngine(model, config))  # on each other rank

    Control-C and SIGTERM stop no call half-way: they are handled once this rank has made the call. A step
    that fails breaks the engine until `reset`, as that of any split model. Where a rank dies, this call or
    the next one raises a `RankDiedError`, and all ranks must be started again. A request that is added from
    inside a step waits for the step's end.

    The ranks exchange messages outside their process groups, which carry the key: connections are encrypted
    and authenticated, and messages hold plain values. Where the model is not split, the engine is one like
    any other.
    """

    _followers: RankConnections  # only where the model is split

    def __init__(
        self,
        model: Model,
        config: InferenceConfig,
        *,
        drafter: Drafter | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Allocate all pools, and wait until all other ranks follow. All ranks take part.

        Args:
            model, config, drafter, seed: as for `DynamicInferenceEngine`; the same on all ranks.
            timeout_s: how long another rank may take to follow, and to end a call after this rank, in
                seconds. It bounds a rank that hangs while its process runs. Whatever it is, a process that
                has ended is noticed within 1 s, and one that is stopped or cut off within 13 s: 2.5 s at
                most until its silence begins, 10 s of silence, 0.5 s until the ranks look.

        Raises:
            ValueError: this is not rank 0 of the model, or as for `DynamicInferenceEngine`.
            RuntimeError: another thread calls an open LeadingEngine of these process groups.
            RankDiedError: a rank does not follow within `timeout_s`.
        """
        timeout_s = real("timeout_s", timeout_s, 0.001, LONGEST_TIMEOUT_S)
        spec = model.state_spec() if hasattr(model, "state_spec") and not isinstance(model, type) else None
        if spec is not None and spec.groups.rank:
            raise ValueError(
                f"model is of rank {spec.groups.rank}; accepted: rank 0 leads, the others call `follow`"
            )
        if spec is not None:
            self._check_unused(spec.groups)
        super().__init__(model, config, drafter=drafter, seed=seed)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._late_requests: deque[tuple[Add, DynamicInferenceRequest]] = deque()  # from inside a step
        self._calling_thread_id: int | None = None  # the thread that makes a call now
        self._last_caller = threading.current_thread()  # of the last call
        self._finalizer: Callable[[], object] = lambda: None
        self._leads = self.core.is_split  # calls are sent to followers; not inside a function of all ranks
        if self._leads:
            self._followers = RankConnections(self.context.spec.groups, self.context.spec.device, timeout_s)
            self._finalizer = weakref.finalize(self, _close, self._closed, self._lock, self._followers)
            _open_engines.add(self)

    @staticmethod
    def _check_unused(groups: ParallelGroups) -> None:
        """RuntimeError where another thread uses these groups: collectives of two threads would cross."""
        engines = [engine for engine in list(_open_engines) if groups.overlaps(engine.context.spec.groups)]
        callers = [engine._last_caller for engine in engines if not engine._closed.is_set()]
        for caller in (thread_over(groups), *callers):
            if caller is not None and caller is not threading.current_thread() and caller.is_alive():
                raise RuntimeError(
                    f"thread {caller.name!r} calls an open LeadingEngine over the process groups of this "
                    "model; close that engine first"
                )

    @property
    def has_one_caller(self) -> bool:
        return True

    # ---- calls

    @property
    def _can_cancel(self) -> bool:
        if not self.core.is_split:
            return True
        ended = self._closed.is_set() or bool(self._followers.lost)
        return self._leads and self._calling_thread_id is None and not ended

    def has_unfinished_requests(self) -> bool:
        return bool(self._late_requests) or super().has_unfinished_requests()

    def _add(self, request: DynamicInferenceRequest) -> None:
        if self._leads and self._calling_thread_id == threading.get_ident():
            self._late_requests.append((Add.of(request), request))
        else:
            super()._add(request)

    def _apply[**P, R](self, change: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Make a call on all ranks.

        Before a step, in which ranks wait for each other, all followers have made the calls before; where one
        ended otherwise than here, the engine is broken.
        """
        if not self._leads:
            return super()._apply(change, *arguments, **options)
        assert not options, "a message has arguments by position"
        call = cast(CoreCall, change.__name__)
        message = message_of(call, arguments)
        self._last_caller = threading.current_thread()
        if self._calling_thread_id == threading.get_ident():
            raise RuntimeError(f"{call} is called from inside a step; call it between steps")
        with signals_deferred(), self._lock:
            try:
                if call == "reset":
                    # They could not be queued: `reset` ends them, too.
                    self.core.requests |= {late.request_id: late for _, late in self._late_requests}
                    self._late_requests.clear()
                    self._await_differences()
                    self._followers.has_broken_rank = False
                elif call == "step":
                    self._await_followers()
                value = self._lead(message, partial(change, *arguments, **options))
                if call == "reset":
                    self._await_followers()
                return value
            finally:
                # `reset` ends those of a broken engine.
                while self._late_requests and self.core.broken_by is None:
                    message, request = self._late_requests[0]
                    self._lead(message, partial(self.core.add, request))
                    self._late_requests.popleft()

    def _lead[T](self, message: msgspec.Struct, make: Callable[[], T]) -> T:
        self._check_open()
        followers = self._followers
        try:
            followers.send(message)
            self._calling_thread_id = threading.get_ident()
            value = make()
        except BaseException as error:
            followers.record_own(Outcome.of(error))
            if isinstance(error, _CAPACITY):
                raise
            self._break(error)
            if isinstance(error, RuntimeError) and not isinstance(error, RankDiedError):
                followers.await_answers(_DEATH_S)
                if followers.lost:
                    raise RankDiedError(followers.lost) from error
            raise
        finally:
            self._calling_thread_id = None
        followers.record_own(Outcome())
        return value

    def _break(self, error: BaseException) -> None:
        """Break the engine, and let no rank wait for another one in a collective."""
        self.core.break_on_failure(error)
        self._followers.abort(f"rank 0 {Outcome.of(error)}; call reset()")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the LeadingEngine is closed; its followers make no more calls")
        self._followers.check_ranks()

    def _await_followers(self) -> None:
        """Wait until all ranks have made all calls, and made them alike."""
        if differences := self._await_differences():
            error = RuntimeError(
                f"a call was not made alike on all ranks: {'; '.join(differences)}; call reset()"
            )
            self._break(error)
            raise error

    def _await_differences(self) -> list[str]:
        self._check_open()
        try:
            return self._followers.await_differences()
        except TimeoutError as late:
            error = RuntimeError(f"{late}; start all ranks again")
            self._break(error)
            raise error from None

    def changing_cache(self, *harmless: type[Exception]) -> AbstractContextManager[None]:
        """As `DynamicInferenceEngine.changing_cache`; RuntimeError where only this rank would change."""
        if self._leads and self._calling_thread_id is None:
            raise RuntimeError(
                "a LeadingEngine is about to change on this rank alone; call the function that changes it "
                "through `call_on_all`"
            )
        return super().changing_cache(*harmless)

    # ---- functions of all ranks

    def call_on_all(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function(engine, *arguments)` on all ranks at once, each with its own engine.

        For functions that all ranks call, as those that move prefixes, and for what every rank does to its
        part of the model:

            engine.call_on_all(msd.save_prefixes, "prefixes")

        Inside, each rank makes its calls by itself: all ranks must make the same ones. The model's device is
        the current one. Streams and requests whose results are wanted belong outside. If the function raises
        on one rank, and another rank is inside for 5 s more, all ranks abort the model's process groups, and
        the engine is broken until `reset`.

        Args:
            function: of a module that all ranks can import; they find it by its name.
            arguments: None, bools, numbers, strs, bytes, and lists and dicts of them. Each rank gets a copy,
                in which tuples are lists.

        Returns:
            What the function returns on this rank.

        Raises:
            ValueError: another rank does not find the function, or an argument is of another kind; nothing is
                called.
            RankDiedError: a rank is lost.
            RuntimeError: the function raised an error on another rank alone.
            Exception: what the function raises here.
        """
        if not callable(function):
            raise refused("function", function, "a function of the engine")
        self.ensure_usable("call_on_all")
        if not self.core.is_split:
            return function(self, *arguments)
        if not self._leads:
            raise RuntimeError("call_on_all is called by a function that it calls; call the inner one itself")
        check_plain("an argument of call_on_all", arguments)
        run = CallFunction(name_of("function", function), list(arguments), self.factory.next_ids)
        with signals_deferred(), self._lock:
            self._await_followers()
            self._lead(FindFunction(run.function), lambda: None)
            if refusals := "; ".join(self._await_differences()):
                raise ValueError(
                    f"function is {run.function}; accepted: one that all ranks can import ({refusals})"
                )
            return self._run(run, partial(function, self, *arguments))

    def _run[T](self, run: CallFunction, function: Callable[[], T]) -> T:
        followers = self._followers
        followers.send(run)
        error: Exception | None = None
        self._leads, self._calling_thread_id = False, threading.get_ident()
        try:
            with on_device_of(self.context.spec.device):
                value = function()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            self._break(raised)
            raise
        finally:
            self._leads, self._calling_thread_id = True, None
            followers.record_own(Outcome.of(error, self.core.broken_by is not None))
        followers.await_answers(float("inf"))
        differences = followers.await_differences()
        if followers.has_broken_rank:
            self._break(error or RuntimeError("; ".join(differences)))
        if error is not None:
            raise error
        if differences:
            raise RuntimeError(f"a call was not made on all ranks: {'; '.join(differences)}")
        return value

    def ensure_usable(self, call: str) -> None:
        """As `DynamicInferenceEngine.ensure_usable`.

        Raises:
            RuntimeError: also where a function that all ranks call is called here alone.
        """
        if self._leads and not hasattr(type(self), call):
            raise RuntimeError(
                f"{call} is called on one rank of a split model; call it on all: "
                f"engine.call_on_all({call}, ...)"
            )
        super().ensure_usable(call)

    def check_ranks(self) -> None:
        """Raise RankDiedError where a rank is lost; returns at once, also from another thread."""
        if self.core.is_split and not self._closed.is_set():
            self._followers.check_ranks()

    # ---- the end

    def close(self) -> None:
        """End the calls: `follow` returns on all other ranks. A second call does nothing.

        Waits for a call under way, 10 s at most. Requests that have not ended stay where they are, unserved.

        Raises:
            RuntimeError: a call of this engine calls it, for which it would wait in vain; nothing is closed.
        """
        if self._calling_thread_id == threading.get_ident():
            raise RuntimeError("close is called from inside a call of the engine; call it afterwards")
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(closed: threading.Event, lock: threading.Lock, followers: RankConnections) -> None:
    """End the followers; without a reference to the engine."""
    closed.set()
    if lock.acquire(timeout=_CLOSING_S):  # else a call hangs, whose thread uses the connections
        try:
            followers.close()
        finally:
            lock.release()
