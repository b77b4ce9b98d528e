"""Control-C and errors in every call of an engine: no wrong token, no leak, no lost request.

Where steps fail, `test_failing_steps.py` looks closer.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.engines.engine_core import signals_deferred
from oracle.budget import is_quick
from oracle.faults import InjectedError, Interrupted, acting, failing
from oracle.fresh_process import run_code
from oracle.serving import serve_checked, small_engine
from oracle.workload import HEADS, assert_idle

LENGTH = 6
PARAMS = ms.SamplingParams(max_tokens=LENGTH)
Engine = ms.DynamicInferenceEngine


def expected(prompt: list[int]) -> list[int]:
    return _expected(tuple(prompt))


@cache
def _expected(prompt: tuple[int, ...]) -> list[int]:
    (result,) = small_engine(enable_prefix_caching=False, num_mamba_slots=0).generate([list(prompt)], PARAMS)
    return result.tokens


def busy_engine() -> tuple[Engine, ms.TokenStream]:
    """A request runs, and a prefix is cached and pinned."""
    engine = small_engine()
    engine.warm(HEADS[6])
    engine.pin(HEADS[6])
    stream = engine.stream(HEADS[4], PARAMS)
    next(stream)
    return engine, stream


@pytest.fixture(autouse=True)
def control_c_raises() -> Iterator[None]:
    """Where tests run in a shell's background, SIGINT is ignored from the start."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


CALLS: dict[str, Callable[[Engine], object]] = {
    "add_request": lambda engine: engine.add_request(HEADS[12], PARAMS),
    "stream": lambda engine: list(engine.stream(HEADS[12], PARAMS)),
    "generate": lambda engine: engine.generate([HEADS[12], HEADS[5]], PARAMS),
    "score": lambda engine: engine.score([HEADS[12]]),
    "step": lambda engine: engine.step(),
    "warm": lambda engine: engine.warm(HEADS[15]),
    "pin": lambda engine: engine.pin(HEADS[6][:17]),
    "unpin": lambda engine: engine.unpin(engine.pins()[0]),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "set_weights_version": lambda engine: engine.set_weights_version("two"),
    "suspend": lambda engine: engine.suspend(),
}
# What a call does: an owner and a method, which raises before or after its work.
PLACES: dict[str, Callable[[Engine], tuple[object, str]]] = {
    "queue": lambda engine: (engine.core.scheduler, "add"),
    "match": lambda engine: (engine.context.prefix_cache, "match"),
    "admission": lambda engine: (engine.context.admission, "schedule_request"),
    "build": lambda engine: (engine.context, "begin_step"),
    "forward": lambda engine: (engine, "model"),
    "register": lambda engine: (engine.context.prefix_cache.tree, "register"),
    "commit": lambda engine: (engine.context.prefix_cache.slots, "commit_slots"),
    "sampling": lambda engine: (ms.inference.engines.step_runner.SampledStep, "append_tokens"),
    "release": lambda engine: (engine.context, "release"),
    "end": lambda engine: (engine.core, "_end"),
    "pin": lambda engine: (engine.context.prefix_cache, "pin"),
    "unpin": lambda engine: (engine.context.prefix_cache.pins, "unpin"),
    "forgetting": lambda engine: (engine.context, "reset_prefix_cache"),
    "suspending": lambda engine: (engine.context, "suspend"),
}


@contextmanager
def raising(engine: Engine, place: str, error: type[BaseException], after: bool) -> Iterator[list[str]]:
    """The first call at a place raises; the list then names the place."""
    owner, name = PLACES[place](engine)
    real, raised = getattr(owner, name), list[str]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs) if after or raised else None
        if not raised:
            raised.append(place)
            raise error(place)
        return result

    with patch.object(owner, name, wrapped):
        yield raised


def check_goes_on(engine: Engine, stream: ms.TokenStream) -> None:
    """The user goes on: the running request gets its tokens, others too, and nothing is left."""
    engine.check_integrity()
    if not engine.context.memory.is_allocated:
        engine.resume()
    list(stream)
    assert stream.result is not None
    assert stream.result.tokens == expected(HEADS[4])
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            assert result.tokens == expected(HEADS[12])
    serve_checked(engine, [HEADS[6], HEADS[12], HEADS[5]])
    for pin in engine.pins():
        engine.unpin(pin)
    assert_idle(engine)


@pytest.mark.sampled
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [Interrupted, MemoryError, RuntimeError])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_at_any_place_loses_no_token(call: str, error: type[BaseException], after: bool) -> None:
    """In quick runs each second place, the others with the next call."""
    reached = []
    places = list(PLACES)
    for place in places[list(CALLS).index(call) % 2 :: 2] if is_quick() else places:
        engine, stream = busy_engine()
        with raising(engine, place, error, after) as raised:
            with suppress(error):
                CALLS[call](engine)
            if not raised:  # a call that does not come to this place
                continue
        reached.append(place)
        check_goes_on(engine, stream)
    assert reached


@pytest.mark.parametrize("place", ["entering", "leaving"])
def test_control_c_while_handlers_change_leaves_all_as_they_were(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    change, changed = signal.signal, list[int]()

    def changing(number: int, handler: Any) -> Any:
        old = change(number, handler)
        changed.append(number)
        if len(changed) == 1 + 2 * (place == "leaving"):  # after the first one, SIGINT's
            raise KeyboardInterrupt
        return old

    monkeypatch.setattr(signal, "signal", changing)
    with pytest.raises(KeyboardInterrupt), signals_deferred():
        pass
    monkeypatch.undo()
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("call", ["step", "stream", "generate"])
def test_control_c_waits_for_the_end_of_the_step(call: str) -> None:
    engine, stream = busy_engine()
    model, sent = engine.model, []

    def interrupting(inputs: ms.StepInputs) -> torch.Tensor:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return model(inputs)

    with patch.object(engine, "model", interrupting), pytest.raises(KeyboardInterrupt):
        CALLS[call](engine)
    assert engine.stats().num_rebuilds == 0
    assert len(stream.take()) == 1, "the step was made"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check_goes_on(engine, stream)


def test_a_second_control_c_stops_the_step_and_costs_no_token() -> None:
    engine, stream = busy_engine()

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with acting(engine, "forward", twice), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not stream.take()
    check_goes_on(engine, stream)


TERMINATED = """
import os, signal, sys
sys.path.append("tests")
from oracle.serving import small_engine
engine = small_engine()
engine.add_request(range(20))
model = engine.model
def terminating(inputs):
    os.kill(os.getpid(), signal.SIGTERM)
    return model(inputs)
engine.model = terminating
commit = engine.context.end_step
def committing(*given, **named):
    commit(*given, **named)
    print("the step was made", flush=True)
engine.context.end_step = committing
engine.step()
print("the signal was lost")
"""


def test_a_program_without_a_handler_ends_by_sigterm_after_the_step() -> None:
    done = run_code(TERMINATED)
    assert done.stdout == "the step was made\n", done.stderr
    assert done.returncode == -signal.SIGTERM


WITHOUT_CHECKS = """
from oracle.faults import acting
from oracle.serving import random_tokens, small_engine
engine = small_engine()
with acting(engine, "end", lambda: [][0]):
    try:
        engine.generate([random_tokens(20, seed=1)])
    except IndexError:
        print(engine.core.num_rebuilds)
print(len(engine.generate([random_tokens(20, seed=1)])))
"""


@pytest.mark.long  # python -O compiles torch anew
@pytest.mark.parametrize(("options", "num_rebuilds"), [((), 0), (("-O",), 1)])
def test_without_checks_a_failed_step_forgets_the_cache(options: tuple[str, ...], num_rebuilds: int) -> None:
    """`python -O` removes the asserts of `check_integrity`: what it does not find may be there."""
    command = [sys.executable, *options, "-c", WITHOUT_CHECKS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == f"{num_rebuilds}\n1\n", done.stderr


def test_the_report_of_an_interrupted_step_is_returned_by_the_next_call() -> None:
    engine = small_engine()
    request_id = engine.add_request(HEADS[4], PARAMS)
    interrupt = acting(engine, "forward", lambda: os.kill(os.getpid(), signal.SIGINT))
    with interrupt, pytest.raises(KeyboardInterrupt):
        engine.step()
    num_steps = engine.computed_prefix(request_id)
    assert list(engine.step().tokens) == [request_id]
    assert engine.computed_prefix(request_id) == num_steps, "no step was made for the report"


@pytest.mark.parametrize("error", [InjectedError, Interrupted])
def test_a_repair_that_fails_is_repeated_by_the_next_call(error: type[BaseException]) -> None:
    engine, stream = busy_engine()
    aborting, rebuilding = (
        patch.object(engine.context, n, side_effect=error) for n in ("abort_step", "reset")
    )
    with failing(engine, "forward"), aborting, rebuilding, suppress(RuntimeError, Interrupted):
        engine.step()
    check_goes_on(engine, stream)
