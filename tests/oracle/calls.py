"""Every public call of an engine, each in a situation where it has work to do; and how a user goes on."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mambaslots as ms
from mambaslots.monitor import Monitor

from .ledger import Entry, Ledger
from .toy_answers import Ask, answer
from .toy_lm import TOYS, ToyKind, ToyLM

# Token ids that any wrong state or block would betray: one text, and its forks.
TEXT = [(7 * i * i + 3 * i) % 29 for i in range(40)]
OTHER = [(5 * i * i + 11 * i + 1) % 29 for i in range(40)]
FORK = [*TEXT[:17], *OTHER[:8]]
SETTINGS: dict[str, Any] = {
    "block_size_tokens": 4,
    "max_requests": 4,
    "max_tokens": 16,
    "max_sequence_length": 64,
    "num_kv_blocks": 60,
    "num_mamba_slots": 12,
}
SHORT_OF_BLOCKS = {"num_kv_blocks": 12, "num_mamba_slots": 3}


Engine = ms.DynamicInferenceEngine


class HalfRightDrafter:
    """Knows the answers of one version; every third draft is wrong."""

    def __init__(self, prompts: Sequence[Sequence[int]], kind: ToyKind) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._kind = kind

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        for prompt in self._prompts:
            done = len(tokens) - len(prompt)
            if done > 0 and tuple(tokens[: len(prompt)]) == prompt:
                right = answer(Ask(prompt, 40, kind=self._kind)).tokens[done : done + max_drafts]
                return [(token + ((done + i) % 3 == 2)) % 29 for i, token in enumerate(right)]
        return []


class Stage(Ledger):
    """An engine, its model, and what a call needs.

    Attributes:
        bystanders: streams that nobody but this list refers to.
        by_name: the ids of requests that a call is about.
        interrupted: whether the call was interrupted before.
    """

    def __init__(self, bystander_length: int | None = None, **settings: Any) -> None:
        """Settings are the engine's; also the toy's `in_place` and `toy`, one of `TOYS`.

        `watched` is one, too: whether a monitor watches the engine.

        Args:
            bystander_length: a stream of so many tokens runs beside the call; None for no stream.
        """
        watched = settings.pop("watched", False)
        in_place, kind = settings.pop("in_place", False), TOYS[settings.pop("toy", "one sum")]
        drafts = settings.get("num_speculative_tokens", 0)
        model = ToyLM(in_place, kind)
        drafter = HalfRightDrafter([TEXT[:14], TEXT[:18], FORK, OTHER[:10]], kind) if drafts else None
        config = ms.InferenceConfig(**(SETTINGS | settings))
        super().__init__(ms.DynamicInferenceEngine(model, config, drafter=drafter), model)
        if watched:
            self.monitor = Monitor(self.engine, model_name="toy")
            # An exception at the line where a `with` ends would keep a lock. No signal comes at that place.
            self.monitor._lock = nullcontext()  # type: ignore[assignment]
        self.bystanders: list[ms.TokenStream] = []
        self.by_name: dict[str, int] = {}
        self.bystander_length = bystander_length
        self.interrupted = False
        if bystander_length is not None:
            entry = self.entry(TEXT[:18], bystander_length)
            entry.may_be_cut = True
            self.strays.append(entry)
            self.bystanders.append(self.engine.stream(entry.ask.prompt, entry.params))
            self.step()
            self.step()

    def entry(self, prompt: Sequence[int], length: int = 3, **options: Any) -> Entry:
        return Entry(Ask(tuple(prompt), length, self.model.version, kind=self.model.kind), **options)

    def serve(self, *prompts: Sequence[int], length: int = 2, **options: Any) -> None:
        """Serve prompts at once, with the model's present weights, and check the answers."""
        self.generate([self.entry(prompt, length, **options) for prompt in prompts])

    def ask(self, name: str, prompt: Sequence[int], length: int = 3) -> None:
        self.by_name[name] = self.add(self.entry(prompt, length))

    def open(self, name: str, prompt: Sequence[int], length: int = 3) -> None:
        self.by_name[name] = self.stream(self.entry(prompt, length))

    def advance(self, times: int) -> None:
        for _ in range(times):
            self.step()

    def drop(self, name: str) -> None:
        """Drop the last reference to a stream. Where that is interrupted, its request may be served."""
        entry = self.entries.pop(self.by_name[name])
        entry.may_be_cut = True
        self.strays.append(entry)
        entry.stream = None

    def probe(self) -> None:
        """Prompts that share prefixes with all that came before, twice, so that the second ones resume."""
        self.serve(TEXT[:22], FORK, OTHER[:10])
        self.serve([*TEXT[:18], *OTHER[:3]], FORK + OTHER[:3], TEXT[:9])


@dataclass(frozen=True)
class Call:
    """One public call.

    Attributes:
        prepare: brings an engine into the situation.
        make: makes the call, or makes it again behind an interrupted one.
        settings: of the engine, beside `SETTINGS`.
        must_repeat: whether a user has to make an interrupted call again.
        go_on: what a user does before he serves on.
        forgets: whether nothing can be resumed, once the call has been made.
        mends: whether the call mends an engine that says that it is broken.
        absent: whether this version of the engine has no such call.
    """

    prepare: Callable[[Stage], None]
    make: Callable[[Stage], object]
    settings: dict[str, Any] = field(default_factory=dict)
    must_repeat: bool = False
    go_on: Callable[[Stage], None] = lambda stage: None
    forgets: bool = False
    mends: bool = False
    absent: bool = False


def cached(stage: Stage) -> None:
    """Texts are cached."""
    stage.serve(TEXT[:18], OTHER[:6])


def running(stage: Stage) -> None:
    """A text is cached; a request and a stream decode, and share the text."""
    cached(stage)
    stage.ask("running", FORK, 6)
    stage.open("stream", TEXT[:14], 5)
    stage.advance(3)


def queued(stage: Stage) -> None:
    running(stage)
    stage.ask("waiting", [*TEXT[:12], *OTHER[:20]], 3)


def in_prefill(stage: Stage) -> None:
    queued(stage)
    stage.step()


def new_prompts(stage: Stage) -> None:
    """Two prompts wait that fit into one step: one resumes, the other begins."""
    cached(stage)
    stage.ask("resuming", FORK, 2)
    stage.open("beginning", OTHER[:9], 2)


def long_prompt(stage: Stage) -> None:
    """A prompt of three steps, the first of which is done."""
    cached(stage)
    stage.ask("long", [*OTHER[:5], *TEXT[:36]], 2)
    stage.step()


def ending(stage: Stage) -> None:
    """A request and a stream end at the next step."""
    cached(stage)
    stage.ask("ends", FORK, 3)
    stage.open("ends, too", TEXT[:14], 2)
    stage.ask("goes on", OTHER[:7], 5)
    stage.advance(2)


def full_pool(stage: Stage) -> None:
    """The next prompt evicts cached blocks and states."""
    stage.serve(TEXT[:22], length=2)
    stage.serve(OTHER[:14], length=2)
    stage.ask("evicts", [*OTHER[:3], *TEXT[:20]], 2)
    stage.step()


def short_of_blocks(stage: Stage) -> None:
    """Two answers grow; the next step preempts the younger request, or is the last one if none ever does."""
    _grow(stage)
    stage.advance(_steps_to_preemption(stage.bystander_length))


def _grow(stage: Stage) -> None:
    stage.ask("older", TEXT[:14], 14)
    stage.ask("younger", OTHER[:15], 12)


@cache
def _steps_to_preemption(bystander_length: int | None) -> int:
    twin = Stage(bystander_length, **SHORT_OF_BLOCKS)
    _grow(twin)
    running = 0
    for number, _ in enumerate(twin.steps()):
        if twin.engine.stats().num_running < running and twin.engine.stats().num_waiting:
            return number
        running = twin.engine.stats().num_running
        if not twin.entries:
            break
    return number


def read_out(stage: Stage) -> None:
    """A stream has returned all that has arrived, and other requests run beside it."""
    running(stage)
    stage.open("read out", [*TEXT[:10], *OTHER[:3]], 5)
    stage.read(stage.by_name["read out"], 2)


def unclaimed(stage: Stage) -> None:
    """A request of `add_request` ended while `generate` served another one."""
    stage.ask("unclaimed", FORK, 1)
    stage.serve(TEXT[:18], length=3)


def pinned(stage: Stage) -> None:
    running(stage)
    stage.pins.append(stage.engine.pin(TEXT[:18]))


def new_weights(stage: Stage) -> None:
    """The weights change under cached prefixes and a running request, whose answer is nobody's then."""
    running(stage)
    stage.model.version = 1
    for entry in [*stage.entries.values(), *stage.strays]:
        entry.mixed = True


def suspended(stage: Stage) -> None:
    running(stage)
    stage.engine.suspend()


def _read_one(stage: Stage) -> None:
    if stage.by_name["read out"] in stage.entries:
        stage.read(stage.by_name["read out"], 1)


def _read_one_async(stage: Stage) -> None:
    entry = stage.entries[stage.by_name["read out"]]
    assert entry.stream is not None
    coming = entry.stream.__anext__()
    try:
        while True:
            coming.send(None)
    except StopIteration as end:
        entry.arrived.append(end.value.token)
    except StopAsyncIteration:
        pass
    finally:
        coming.close()


def _claim(stage: Stage) -> None:
    if stage.by_name["unclaimed"] in stage.entries:
        stage.claim(stage.by_name["unclaimed"])


def _unpin(stage: Stage) -> None:
    try:
        stage.engine.unpin(stage.pins[0])
    except ValueError:  # the interrupted call has unpinned it
        if not stage.interrupted:
            raise
    stage.pins.clear()


def _pin(stage: Stage) -> None:
    if stage.interrupted:  # the cache may have been forgotten
        stage.engine.warm(TEXT[:18])
    stage.pins.append(stage.engine.pin(TEXT[:18]))


def _reset(stage: Stage) -> None:
    stage.engine.reset()
    stage.forget_all()


def _forgetting(forget: Callable[[Engine], None]) -> Callable[[Stage], None]:
    """A call that unpins all."""

    def make(stage: Stage) -> None:
        forget(stage.engine)
        stage.pins.clear()

    return make


def _new_weights(engine: Engine) -> None:
    engine.set_weights_version(1)


def _cancel(name: str) -> Callable[[Stage], None]:
    def make(stage: Stage) -> None:
        if stage.by_name[name] in stage.entries:
            stage.cancel(stage.by_name[name])

    return make


def _drop(stage: Stage) -> None:
    if stage.by_name["stream"] in stage.entries:
        stage.drop("stream")


def _close(stage: Stage) -> None:
    if stage.by_name["stream"] in stage.entries:
        stage.close(stage.by_name["stream"])


def _resume(stage: Stage) -> None:
    stage.engine.resume()


CALLS = {
    "add_request": Call(running, lambda s: s.ask("new", TEXT[:17], 2)),
    "cancel (running)": Call(running, _cancel("running")),
    "cancel (waiting)": Call(queued, _cancel("waiting")),
    "cancel (in prefill)": Call(in_prefill, _cancel("waiting")),
    "step (prefill)": Call(new_prompts, Stage.step),
    "step (chunked prefill)": Call(long_prompt, Stage.step),
    "step (decode)": Call(running, Stage.step),
    "step (decode in place)": Call(running, Stage.step, {"in_place": True}),
    "step (decode with drafts)": Call(running, Stage.step, {"num_speculative_tokens": 3}),
    "step (evicts)": Call(full_pool, Stage.step, {"num_kv_blocks": 14, "num_mamba_slots": 3}),
    "step (ends requests)": Call(ending, Stage.step),
    "step (preempts)": Call(short_of_blocks, Stage.step, SHORT_OF_BLOCKS),
    "generate": Call(running, lambda s: s.serve([*TEXT[:18], 1, 2], OTHER[:7], length=1)),
    "score": Call(running, lambda s: s.score([*TEXT[:18], 1, 2], OTHER[:7], start=6)),
    "stream": Call(running, lambda s: s.open("new", TEXT[:17], 2)),
    "next(stream)": Call(read_out, _read_one),
    "async for": Call(read_out, _read_one_async),
    "stream.close": Call(running, _close),
    "del stream": Call(running, _drop),
    "take_result": Call(unclaimed, _claim),
    "warm": Call(running, lambda s: s.engine.warm(OTHER[:9])),
    "pin": Call(running, _pin),
    "unpin": Call(pinned, _unpin),
    "pins": Call(pinned, lambda s: s.engine.pins(), absent=not hasattr(Engine, "pins")),
    "reset_prefix_cache": Call(pinned, _forgetting(Engine.reset_prefix_cache), forgets=True),
    "set_weights_version": Call(new_weights, _forgetting(_new_weights), must_repeat=True, forgets=True),
    "set_weights_version (same weights)": Call(pinned, _forgetting(_new_weights), forgets=True),
    "suspend": Call(pinned, _forgetting(Engine.suspend), go_on=_resume),
    "resume": Call(suspended, _resume, go_on=_resume),
    "reset": Call(pinned, _reset, must_repeat=True, mends=True),
    "stats": Call(running, lambda s: s.engine.stats()),
    "check_integrity": Call(running, lambda s: s.engine.check_integrity()),
}
