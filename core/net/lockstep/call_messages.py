"""The messages between the leading rank of a split model and those that follow: calls, and how they ended."""

import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import msgspec

from ...devices import on_device_of
from ...inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ...inference.contexts.cache.hashing import PrefixHashChain
from ...inference.contexts.dynamic_request import DynamicInferenceRequest
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.engine_core import CoreCall
from ...params_and_results import SamplingParams
from ...validation import refused, shown


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
        kind = resolve_name(self.kind)
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
    """Any other method of `EngineCore` is called; `step` with this rank's model, others with plain values."""

    method: CoreCall
    arguments: list[Any]

    def _method_call(self, engine: DynamicInferenceEngine) -> tuple[Any, ...]:
        return self.method, *([engine.model] if self.method == "step" else self.arguments)


class FindFunction(_Call, frozen=True, array_like=True, tag="find"):
    """A function is found by its name, for `CallFunction`."""

    function: str

    def make(self, engine: DynamicInferenceEngine) -> None:
        resolve_name(self.function)


class CallFunction(_Call, frozen=True, array_like=True, tag="function"):
    """A function is called. `ids`: `RequestFactory.next_ids` of rank 0."""

    function: str
    arguments: list[Any]
    ids: tuple[int, int]

    def make(self, engine: DynamicInferenceEngine) -> None:
        engine.factory.next_ids = self.ids
        try:
            with on_device_of(engine.context.spec.device):  # `follow` may run in any thread
                resolve_name(self.function)(engine, *self.arguments)
        finally:
            engine.core.discard_results()  # rank 0 has its own


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A call failed on a rank: no rank waits for it in a collective."""

    reason: str


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Ranks are lost, and no call follows; `reasons` as of `RankDiedError`."""

    reasons: dict[int, str]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """No call follows."""


Call = Add | Pin | CallMethod | FindFunction | CallFunction


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a follower."""

    rank: int


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """How a call ended on a rank."""

    kind: str = ""  # the name of the error's class; empty where the call returned
    text: str = ""  # the error's message
    is_broken: bool = False  # the rank's engine is broken now

    @classmethod
    def of(cls, error: BaseException | None, is_broken: bool = False) -> "Outcome":
        kind, text = ("", "") if error is None else (type(error).__name__, str(error)[:2000])
        return cls(kind, text, is_broken)

    def __str__(self) -> str:
        """A text that follows "rank 3 "."""
        return f"raised {self.kind}: {self.text}" if self.kind else "made the call"


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The last message of a follower: what ended it."""

    reason: str


def message_of(call: CoreCall, arguments: tuple[Any, ...]) -> _Call:
    """The message for a call of `DynamicInferenceEngine._apply`; ValueError for what is no plain value."""
    if call == "add":
        return Add.of(arguments[0])
    if call == "pin":
        return Pin(arguments[0].root, arguments[0].tokens)
    if call == "set_weights_version":
        check_plain("version", arguments)
    return CallMethod(call, [] if call == "step" else list(arguments))


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
        is_found = resolve_name(name) is thing
    except (ImportError, AttributeError, ValueError):  # the last for "<locals>"
        is_found = False
    if not is_found:
        raise refused(argument, thing, "what other ranks can import by its name, from a module")
    return name
