"""The ranks of a split model that make what rank 0 calls, and the messages that carry the calls."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

import msgspec

from ...devices import on_device_of
from ...inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ...inference.contexts.cache.hashing import PrefixHashChain
from ...inference.contexts.request import DynamicInferenceRequest
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...request import SamplingParams
from ...validation import instance, shown
from ..all_ranks import RankDiedError, attempt
from ..channel import Address, Link, PeerLostError, host_name

_MEETING_S = 60.0
_LOOK_S = 0.5
WATCH_S = 0.25
"""So often a rank looks for messages while it makes a call."""


# ---- the calls


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of `DynamicInferenceEngine._apply`."""

    def make(self, engine: DynamicInferenceEngine) -> None:
        """Make the call on a rank that follows, whose arguments rank 0 has checked."""
        name, *arguments = self._method_call(engine)
        if name != "reset":
            engine.core.ensure_usable(name)
        getattr(engine.core, name)(*arguments)
        engine.core.notify_ended()  # no result has a reader here: each request has an owner

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        """The name of the method of `EngineCore`, and its arguments."""
        raise NotImplementedError


class PlanFields(msgspec.Struct, frozen=True, array_like=True):
    """A `CheckpointPlan`: "module:class", its attributes, and which of them are tuples."""

    kind: str
    attributes: dict[str, Any]
    tuples: list[str]

    @classmethod
    def of(cls, plan: CheckpointPlan) -> "PlanFields":
        check_plain("checkpoint_plan", tuple(vars(plan).values()))
        tuples = [name for name, value in vars(plan).items() if isinstance(value, tuple)]
        return cls(name_of("checkpoint_plan", type(plan)), vars(plan), tuples)

    def to_plan(self) -> CheckpointPlan:
        kind = resolve(self.kind)
        plan: CheckpointPlan = kind.__new__(kind)
        vars(plan).update(self.attributes | {name: _as_tuple(self.attributes[name]) for name in self.tuples})
        return plan


class Add(_Call, frozen=True, array_like=True, tag="add"):
    """A request is queued; its salt is in `root` alone."""

    request_id: int
    prompt_tokens: list[int]
    sampling: SamplingParams
    plan: PlanFields
    root: bytes
    seed: int
    next_token: int | None
    given_tokens: list[int]

    @classmethod
    def of(cls, request: DynamicInferenceRequest) -> "Add":
        return cls(
            request.request_id, request.prompt_tokens, request.sampling, PlanFields.of(request.plan),
            request.chain.root, request.seed, request.next_token, request.given_tokens,
        )  # fmt: skip

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        chain = PrefixHashChain(engine.config.block_size_tokens, self.root)
        if engine.config.enable_prefix_caching:
            chain.extend_to([*self.prompt_tokens, *self.given_tokens])
        return "add", DynamicInferenceRequest(
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            plan=self.plan.to_plan(),
            chain=chain,
            arrival_s=time.perf_counter(),
            seed=self.seed,
            next_token=self.next_token,
            given_tokens=self.given_tokens,
            owned=True,
        )


class Step(_Call, frozen=True, array_like=True, tag="step"):
    """A step is made."""

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        return "step", engine.model


class Pin(_Call, frozen=True, array_like=True, tag="pin"):
    """The prefix of these blocks is pinned."""

    root: bytes
    blocks: list[bytes]

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        chain = PrefixHashChain(engine.config.block_size_tokens, self.root)
        for content in self.blocks:
            chain.append(content)
        return "pin", chain


class CallMethod(_Call, frozen=True, array_like=True, tag="method"):
    """A method of `EngineCore` is called whose arguments are plain values."""

    method: Literal["end", "unpin", "reset_prefix_cache", "set_weights_version", "suspend", "resume", "reset"]
    arguments: list[Any]

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        return self.method, *self.arguments


class FindFunction(_Call, frozen=True, array_like=True, tag="find"):
    """A function is found by its name, for `CallFunction`."""

    function: str

    def make(self, engine: DynamicInferenceEngine) -> None:
        resolve(self.function)


class CallFunction(_Call, frozen=True, array_like=True, tag="function"):
    """A function is called. `ids`: `RequestFactory.next_ids` of rank 0."""

    function: str
    arguments: list[Any]
    ids: tuple[int, int]

    def make(self, engine: DynamicInferenceEngine) -> None:
        core = engine.core
        engine.factory.next_ids = self.ids
        try:
            with on_device_of(engine.context.spec.device):  # `follow` may run in any thread
                resolve(self.function)(engine, *self.arguments)
        finally:
            for ended in (core.to_cancel, core.unclaimed, core.reports):  # rank 0 has its own
                ended.clear()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A call failed on a rank: no rank waits for it in a collective."""

    reason: str


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Ranks are lost, and no call follows; `reasons` as of `RankDiedError`."""

    reasons: dict[int, str]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """No call follows."""


Call = Add | Step | Pin | CallMethod | FindFunction | CallFunction


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a follower."""

    rank: int


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """How a call ended on a rank."""

    kind: str = ""  # the name of the error's class; empty where the call returned
    text: str = ""  # the error's message
    broken: bool = False  # the rank's engine is broken now

    @classmethod
    def of(cls, error: BaseException | None, broken: bool = False) -> "Outcome":
        return cls(broken=broken) if error is None else cls(type(error).__name__, str(error)[:2000], broken)

    def __str__(self) -> str:
        """A text that follows "rank 3 "."""
        return f"raised {self.kind}: {self.text}" if self.kind else "made the call"


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The last message of a follower: what ended it."""

    reason: str


def message_of(name: str, arguments: tuple[Any, ...]) -> _Call:
    """The message for a call of `DynamicInferenceEngine._apply`; ValueError for what is no plain value."""
    if name == "step":
        return Step()
    if name == "pin":
        return Pin(arguments[0].root, arguments[0].tokens)
    if name == "add":
        return Add.of(arguments[0])
    if name == "set_weights_version":
        check_plain("version", arguments)
    return CallMethod(name, list(arguments))  # type: ignore[arg-type]


def check_plain(name: str, values: tuple[Any, ...]) -> None:
    """ValueError for values that a message does not carry as they are, but for tuples, which become lists."""
    for value in values:
        try:
            is_plain = _is_plain(value) and bool(msgspec.msgpack.encode(value))
        except (ValueError, OverflowError, RecursionError):  # of large integers, half characters, cycles
            is_plain = False
        if not is_plain:
            raise ValueError(
                f"{name} is {shown(value)}; accepted: None, bool, int, float, str, bytes, and lists and "
                "dicts of them, because each rank gets a copy"
            )


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def name_of(argument: str, thing: Callable[..., Any]) -> str:
    """ "module:name" of a function or class; ValueError for one that has none."""
    name = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', None)}"
    try:
        is_found = resolve(name) is thing
    except (ImportError, AttributeError):
        is_found = False
    if not is_found:
        raise ValueError(
            f"{argument} is {shown(thing)}; accepted: what other ranks can import by its name, from a module"
        )
    return name


def resolve(name: str) -> Any:
    """What "module:name" names."""
    module, _, path = name.partition(":")
    return attrgetter(path)(import_module(module))


# ---- a rank that follows


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
    link = _meet_leader(engine)
    to_cancel, engine.core.to_cancel = engine.core.to_cancel, deque(maxlen=0)  # rank 0 alone ends requests
    calls = _Calls(link, groups)
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
    finally:
        calls.close()
        engine.core.to_cancel = to_cancel


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


class _Calls:
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
                if self._received or (self._receive(_LOOK_S) and self._received):
                    return self._received.popleft()

    def answer(self, message: Outcome | Failure) -> None:
        with self._lock:
            self._link.send(message)

    def await_lost(self) -> None:
        """Wait until rank 0 says who is lost, 1 s at most: an exit may drop what has not left the process."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            with self._lock:
                if any(isinstance(one, Lost) for one in self._received):
                    return
                self._receive(_LOOK_S)

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
