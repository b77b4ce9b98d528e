"""Calls of rank 0 are made on all ranks: answers are the whole model's, and all ranks' caches are equal."""

import asyncio
import gc
import os
import signal
import sys
import threading
import types
from collections import deque
from contextlib import suppress
from random import Random
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mambaslots.net.lockstep import rank_connections
from mambaslots.net.transfer.format import TransferError
from oracle.budget import dear, is_quick
from oracle.distributed_world import World, splits
from oracle.faults import InjectedError
from oracle.led_ranks import begin, check_alike, compare_steps, fail_in, on_leader, present
from oracle.observed import Recorder
from oracle.scenarios import engine_tests
from oracle.serving import TOLERANCE, random_tokens, serve_checked, small_engine, small_model
from oracle.workload import (
    Asked,
    answer,
    assert_idle,
    engine_settings,
    plans,
    pressed_engine,
    prompt_log_probs,
    requests,
)

PROMPTS = [random_tokens(length, seed=length) for length in (20, 37, 5)]
EIGHT = ms.SamplingParams(max_tokens=8)
traffic = engine_tests("test_async_engine_traffic")


@pytest.fixture(autouse=True, params=splits("tp 2", "tp 2, pp 2"))
def _led(kind: str, world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(world, request.param, monkeypatch)


# ---- any calls


class Caller:
    """Calls an engine on rank 0; holds answers against the recurrence, and ranks' caches together."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        assert isinstance(engine, msd.LeadingEngine)
        self.engine = engine
        self.asked: dict[int, Asked] = {}
        self.streams: list[ms.TokenStream] = []

    def call(self, name: str, number: int) -> None:
        """Make a call, if there is something to call it for."""
        getattr(self, name)(number)
        for request_id in list(self.asked):
            result = self.engine.take_result(request_id)
            if result is not None:
                self.take(result)
        self.engine.call_on_all(check_alike)

    def take(self, result: ms.RequestResult) -> None:
        asked = self.asked.pop(result.request_id, None)
        if asked is not None:
            assert result.tokens == answer(asked.prompt)[0][: len(result.tokens)]
            assert result.finish_reason == "cancelled" or len(result.tokens) == asked.length

    def add(self, asked: Asked, plan: ms.CheckpointPlan) -> None:
        params = ms.SamplingParams(max_tokens=asked.length, skip_prompt_log_probs=not asked.prompt_log_probs)
        number = self.engine.add_request(asked.prompt, params, cache_salt=asked.salt, checkpoint_plan=plan)
        self.asked[number] = asked

    def step(self, number: int) -> None:
        for result in self.engine.step().finished:
            self.take(result)

    def cancel(self, number: int) -> None:
        if self.asked:
            self.take(self.engine.cancel(sorted(self.asked)[number % len(self.asked)]))

    def warm(self, number: int) -> None:
        self.engine.warm(PROMPTS[number % 2])

    def pin(self, number: int) -> None:
        if not self.engine.pins():
            self.engine.warm(PROMPTS[0][:16])
            with suppress(ValueError):  # the state was not worth a slot
                self.engine.pin(PROMPTS[0])

    def unpin(self, number: int) -> None:
        for pinned in self.engine.pins():
            self.engine.unpin(pinned)

    def forget(self, number: int) -> None:
        self.engine.reset_prefix_cache()

    def stream(self, number: int) -> None:
        self.streams.append(self.engine.stream(PROMPTS[number % 3], EIGHT))
        assert next(self.streams[-1]).token == answer(tuple(PROMPTS[number % 3]))[0][0]

    def drop(self, number: int) -> None:
        thread = threading.Thread(target=self.streams.clear)
        thread.start()
        thread.join()

    def close(self, number: int) -> None:
        if self.streams:
            self.streams.pop().close()

    def name(self, number: int) -> None:
        self.engine.set_weights_version(f"version {number % 2}")

    def suspend(self, number: int) -> None:
        self.engine.suspend()
        with pytest.raises(RuntimeError, match="step is called on a suspended engine"):
            self.engine.step()
        self.engine.call_on_all(check_alike)
        self.engine.resume()

    def generate(self, number: int) -> None:
        prompts = PROMPTS[: 1 + number % 3]
        for prompt, result in zip(prompts, self.engine.generate(prompts, EIGHT), strict=True):
            assert result.tokens == answer(tuple(prompt))[0][:8]

    def score(self, number: int) -> None:
        prompt = tuple(PROMPTS[number % 3])
        (scored,) = self.engine.score([prompt])
        np.testing.assert_allclose(scored.log_probs, prompt_log_probs(prompt), rtol=0, atol=TOLERANCE)

    def reset(self, number: int) -> None:
        self.engine.reset()
        self.asked.clear()
        self.streams.clear()

    def call_wrongly(self, number: int) -> None:
        with pytest.raises(ValueError, match="accepted"):
            self.engine.cancel(10**6)
        with pytest.raises(ValueError, match="accepted"):
            self.engine.pin([1, 2, 3])
        with pytest.raises(ValueError, match="accepted"):
            self.engine.add_request([])

    def finish(self) -> None:
        self.streams.clear()
        while self.engine.has_unfinished_requests():
            self.call("step", 0)
        assert not self.asked


CALLS = (
    "step", "step", "step", "step", "cancel", "warm", "pin", "unpin", "forget", "stream", "drop", "close",
    "name", "suspend", "generate", "score", "reset", "call_wrongly",
)  # fmt: skip
calls = st.lists(
    st.one_of(
        st.tuples(requests, plans), st.tuples(st.sampled_from(CALLS), st.integers(0, 9))
    ),
    max_size=25,
)  # fmt: skip


@given(calls=calls, is_async=st.booleans())
@settings(dear(), phases=[Phase.explicit, Phase.generate])
def _make_any_calls(calls: list[tuple[Any, Any]], is_async: bool) -> None:
    with pressed_engine(async_scheduling=is_async) as engine:
        compare_steps(engine)
        caller = Caller(engine)
        for name, argument in calls:
            if isinstance(name, str):
                caller.call(name, argument)
            else:
                caller.add(name, argument)
        caller.finish()


def test_any_calls_of_rank_0_leave_equal_caches_on_all_ranks() -> None:
    on_leader(_make_any_calls)()


# ---- what no caller waits for


@on_leader
def test_streams_that_are_let_go_of_end_on_all_ranks() -> None:
    engine = small_engine()
    caller = Caller(engine)
    kept = engine.stream(PROMPTS[0], EIGHT)
    for prompt in PROMPTS[1:]:
        caller.streams.append(engine.stream(prompt))
        next(caller.streams[-1])
    caller.call("drop", 0)
    assert len(engine.core.requests) == 1
    assert [token.token for token in kept] == answer(tuple(PROMPTS[0]))[0][:8]
    assert not engine.has_unfinished_requests()


@on_leader
def test_requests_that_come_from_inside_a_step_join_the_next_one_on_all_ranks() -> None:
    engine = small_engine(async_scheduling=True)
    compare_steps(engine)
    late: list[int] = []

    class Adding:
        def step_begun(self, *arguments: object) -> None:
            if len(late) < 2:
                late.append(engine.add_request(PROMPTS[len(late)], EIGHT))

        def step_ended(self, *arguments: object) -> None:
            pass

    engine.context.observers.append(Adding())
    engine.generate([PROMPTS[2]])
    caller = Caller(engine)
    while engine.has_unfinished_requests():
        caller.call("step", 0)
    results = [engine.take_result(request_id) for request_id in late]
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert result is None or result.tokens == answer(tuple(prompt))[0][:8]
    assert engine.generate([PROMPTS[0]], EIGHT)[0].tokens == answer(tuple(PROMPTS[0]))[0][:8]


@on_leader
def test_a_stream_from_inside_a_step_that_is_closed_there_is_cancelled_once_it_is_added() -> None:
    """Its end is queued before the engine knows it, and stays queued where an observer settles the engine."""
    engine, late = small_engine(), list[int]()

    class Closing:
        def step_begun(self, *arguments: object) -> None:
            if not late:
                stream = engine.stream(PROMPTS[0], ms.SamplingParams(max_tokens=40))
                late.append(stream.request_id)
                stream.close()

        def step_ended(self, *arguments: object) -> None:
            pass

    observer = Recorder()
    observer.step_made = lambda *arguments: engine.stats()  # type: ignore[method-assign]
    engine.context.observers.append(Closing())
    engine.observe(observer)
    engine.add_request(PROMPTS[1], ms.SamplingParams(max_tokens=2))
    for _ in range(6):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert {number: result.finish_reason for number, result in observer.ended}[late[0]] == "cancelled"


@on_leader
@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_stream_from_inside_a_step_that_could_not_be_added_ends(max_tokens: int, is_sent: bool) -> None:
    """Until the reset it is unfinished, also where the step has ended all other requests."""
    engine = small_engine()
    place = (engine.core.scheduler, "add") if is_sent else (engine._followers, "send")
    late: list[ms.TokenStream] = []

    class Adding:
        def step_begun(self, *arguments: object) -> None:
            if not late:
                late.append(engine.stream(PROMPTS[0], EIGHT))
                setattr(*place, failing)

        def step_ended(self, *arguments: object) -> None:
            pass

    def failing(request: object) -> None:
        delattr(*place)
        raise MemoryError

    engine.context.observers.append(Adding())
    with pytest.raises(MemoryError):
        engine.generate([PROMPTS[2]], ms.SamplingParams(max_tokens=max_tokens))
    assert engine.has_unfinished_requests()
    engine.reset()
    assert not engine.has_unfinished_requests()
    assert late[0].result is not None
    assert late[0].result.finish_reason == "reset"
    assert engine.generate([PROMPTS[0]], EIGHT)[0].tokens == answer(tuple(PROMPTS[0]))[0][:8]


@on_leader
def test_interrupts_of_rank_0_at_any_moment_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    caller = Caller(engine)
    random, num_interrupts = Random(1), 0
    tries = 20 if is_quick() else 300
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python drops an error that a signal raises inside a callback of its collector, of which hypothesis has
    # one, or of a weak reference.
    report = sys.unraisablehook
    interrupted = KeyboardInterrupt
    monkeypatch.setattr(sys, "unraisablehook", lambda one: one.exc_type is interrupted or report(one))
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    try:
        for _ in range(tries):
            interrupt = threading.Timer(random.uniform(0.0001, 0.03), os.kill, (os.getpid(), signal.SIGINT))
            try:
                interrupt.start()
                engine.generate(PROMPTS[:2], EIGHT)
                interrupt.cancel()
                interrupt.join()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        gc.callbacks.extend(callbacks)
        signal.signal(signal.SIGINT, before)
    assert num_interrupts > tries // 4
    caller.call("generate", 2)
    assert engine.stats().num_rebuilds == 0
    assert not engine.has_unfinished_requests()


# ---- calls that fail


@on_leader
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("place", [0, 3, "SampledStep"])
def test_a_step_that_fails_on_some_ranks_breaks_the_engine_until_reset(
    ranks: list[int], place: int | str
) -> None:
    """No rank waits in a collective of this step, or of an unread one, for a rank that does not come."""
    engine = small_engine(async_scheduling=True)
    if engine.context.spec.groups.size == 4:
        ranks = [rank for one in ranks for rank in (one, one + 2)]
    engine.add_request(PROMPTS[0])
    engine.step()
    engine.call_on_all(fail_in, ranks, place)
    with pytest.raises(
        (RuntimeError, InjectedError), match=r"(^|rank [1-3] raised InjectedError: )on rank [0-3]"
    ):
        deque((engine.step() for _ in range(2)), 0)  # one may end before the error of another rank is known
    for call in (engine.step, lambda: engine.add_request(PROMPTS[0]), engine.suspend):
        with pytest.raises(RuntimeError, match="a call failed on this rank of a split model"):
            call()
    engine.reset()
    engine.call_on_all(fail_in, [])
    engine.call_on_all(check_alike)
    serve_checked(engine, PROMPTS)


@on_leader
def test_a_call_that_only_rank_0_makes_is_refused() -> None:
    engine = small_engine()
    engine.set_weights_version("seed")
    with pytest.raises(RuntimeError, match=r"call it on all: engine.call_on_all\(export_prefixes"):
        msd.export_prefixes(engine)
    with pytest.raises(RuntimeError, match="on this rank alone"):
        engine.changing_cache()
    Caller(engine).call("generate", 2)


# ---- functions of all ranks


def raise_on(engine: ms.DynamicInferenceEngine, ranks: list[int]) -> str:
    if engine.context.spec.groups.rank in ranks:
        raise InjectedError("here")
    return "done"


def meet_others_or_raise(engine: ms.DynamicInferenceEngine, ranks: list[int]) -> None:
    raise_on(engine, ranks)
    engine.context.spec.groups.gather(None)


@on_leader
@pytest.mark.parametrize(
    ("rank", "error"), [(0, "here"), (1, "rank 1 raised InjectedError: here; 0.1 s later")]
)
def test_no_rank_waits_in_a_function_for_one_where_it_raised(
    rank: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_connections, "_END_S", 0.1)
    engine = small_engine()
    with pytest.raises((RuntimeError, InjectedError), match=error):
        engine.call_on_all(meet_others_or_raise, [rank])
    with pytest.raises(RuntimeError, match="a call failed on this rank of a split model"):
        engine.step()
    engine.reset()
    assert "collective" not in [thread.name for thread in threading.enumerate()]
    serve_checked(engine, PROMPTS)


def of_a_module_of_rank_0() -> object:
    """A function that other ranks do not find."""
    module = types.ModuleType("a_module_of_rank_0")
    exec("def function(engine): pass", vars(module))
    sys.modules[module.__name__] = module
    return module.function


@on_leader
def test_functions_run_on_all_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine, folder = small_engine(), str(tmp_path_factory.mktemp("prefixes"))
    engine.set_weights_version("seed")
    caller = Caller(engine)
    caller.call("generate", 2)
    saved = engine.call_on_all(msd.save_prefixes, folder)
    assert len(saved.files) == engine.context.spec.groups.size
    engine.reset_prefix_cache()
    report = engine.call_on_all(msd.load_prefixes, folder)
    assert report.imported.states == saved.states
    engine.call_on_all(check_alike)
    result = engine.generate([PROMPTS[1]], EIGHT)[0]
    assert result.num_resumed_tokens == 32
    assert result.tokens == answer(tuple(PROMPTS[1]))[0][:8]
    # what goes wrong changes nothing
    assert engine.call_on_all(raise_on, []) == "done"
    with pytest.raises(InjectedError, match="here"):
        engine.call_on_all(raise_on, [0])
    with pytest.raises(RuntimeError, match="rank 1 raised InjectedError: here, and rank 0 made the call"):
        engine.call_on_all(raise_on, [1])
    with pytest.raises(ValueError, match="accepted: what other ranks can import by its name"):
        engine.call_on_all(lambda engine: None)
    with pytest.raises(
        ValueError, match=r"accepted: one that all ranks can import \(rank 1 raised ModuleNotF"
    ):
        engine.call_on_all(of_a_module_of_rank_0())
    with pytest.raises(ValueError, match=r"an argument of call_on_all is .*; accepted: None, bool"):
        engine.call_on_all(raise_on, {0})
    with pytest.raises(ValueError, match="function is 3"):
        engine.call_on_all(3)
    with pytest.raises(TransferError):
        engine.call_on_all(msd.load_prefixes, folder + " that is not")
    caller.call("generate", 2)


def serve_on_all(engine: ms.DynamicInferenceEngine) -> list[int]:
    return engine.generate([PROMPTS[0]], EIGHT)[0].tokens


@on_leader
def test_a_function_may_serve_requests_on_all_ranks_beside_others() -> None:
    engine = small_engine()
    caller = Caller(engine)
    kept = engine.stream(PROMPTS[1], EIGHT)
    assert engine.call_on_all(serve_on_all) == answer(tuple(PROMPTS[0]))[0][:8]
    caller.call("step", 0)
    assert [token.token for token in kept] == answer(tuple(PROMPTS[1]))[0][:8]


# ---- asyncio


def of_whole_model(**settings: Any) -> ms.DynamicInferenceEngine:
    return small_engine(**settings, model=small_model())


traffic.small_engine = of_whole_model  # type: ignore[attr-defined]  # for answers of random tokens
ASYNC_CALLS = [name for name in traffic.CALLS if name != "preempts"]  # by a change inside rank 0's engine


@given(
    sizes=engine_settings,
    visits=st.lists(traffic.visits, min_size=1, max_size=8),
    calls=st.lists(st.tuples(st.sampled_from(ASYNC_CALLS), st.integers(0, 60)), max_size=4),
    end=traffic.ends,
)
@settings(dear(), phases=[Phase.explicit, Phase.generate])
def _serve_any_traffic(sizes: dict[str, Any], visits: list[Any], calls: list[Any], end: str) -> None:
    with small_engine(**sizes) as engine:
        asyncio.run(traffic.Server(engine, []).run(visits, calls, end))
        gc.collect()
        assert not engine.has_unfinished_requests()
        assert_idle(engine)
        Caller(engine).call("generate", 2)


def test_tasks_are_answered_by_an_async_engine_over_all_ranks() -> None:
    on_leader(_serve_any_traffic)()


# ---- the end


@on_leader
def test_a_closed_engine_makes_no_calls() -> None:
    with small_engine() as engine:
        assert isinstance(engine, msd.LeadingEngine)
        engine.generate(PROMPTS, EIGHT)
    engine.close()
    assert engine._followers.lost == {}  # they left because it was closed
    assert engine.stats().num_running == 0
    with pytest.raises(RuntimeError, match="the LeadingEngine is closed"):
        engine.add_request(PROMPTS[0])


def close(engine: ms.DynamicInferenceEngine) -> None:
    if isinstance(engine, msd.LeadingEngine):
        engine.close()


@on_leader
def test_an_engine_is_not_closed_from_inside_its_own_call() -> None:
    refused: list[RuntimeError] = []

    class Closing:
        def step_begun(self, *arguments: object) -> None:
            with pytest.raises(RuntimeError, match="close is called from inside a call") as error:
                close(engine)
            refused.append(error.value)

        def step_ended(self, *arguments: object) -> None:
            pass

    engine = small_engine()
    engine.context.observers.append(Closing())
    results = engine.generate(PROMPTS[:1], EIGHT)
    assert refused
    assert results[0].tokens == answer(tuple(PROMPTS[0]))[0][:8]
    engine.context.observers.clear()
    assert isinstance(engine, msd.LeadingEngine)
    with pytest.raises(RuntimeError, match="close is called from inside a call"):
        engine.call_on_all(close)
    assert engine.generate(PROMPTS[:1], EIGHT)[0].tokens == results[0].tokens


@on_leader
def test_no_second_engine_is_built_over_groups_that_another_thread_uses() -> None:
    engine = small_engine()
    served, ended = threading.Event(), threading.Event()

    def serve() -> None:
        engine.generate(PROMPTS[:1], EIGHT)
        served.set()
        ended.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    served.wait()
    try:
        with pytest.raises(RuntimeError, match="close that engine first"):
            msd.LeadingEngine(present().model, engine.config)
    finally:
        ended.set()
        thread.join()
    with small_engine() as second:
        assert second.generate(PROMPTS[:1], EIGHT)[0].tokens == answer(tuple(PROMPTS[0]))[0][:8]


@on_leader
def test_no_second_engine_is_built_or_served_over_groups_that_an_async_engine_serves() -> None:
    """Also before the first request: the ranks' collectives of two threads would cross, and wait for ever."""

    async def main() -> None:
        async with ms.AsyncEngine(engine):
            with pytest.raises(RuntimeError, match="close that engine first"):
                msd.LeadingEngine(present().model, engine.config)
            with pytest.raises(ValueError, match="accepted: an engine that none serves"):
                ms.AsyncEngine(second).start()

    engine, second = small_engine(), small_engine()
    asyncio.run(main())


def test_who_leads_and_who_follows_is_checked(world: World) -> None:
    model = present().model
    config = ms.InferenceConfig(block_size_tokens=8, num_kv_blocks=32, num_mamba_slots=8)
    if world.rank:
        with pytest.raises(ValueError, match=f"model is of rank {world.rank}; accepted: rank 0 leads"):
            msd.LeadingEngine(model, config)
    engine = present().plain_engine(model, config)
    if world.rank == 0:
        with pytest.raises(ValueError, match="engine is of rank 0 of"):
            msd.follow(engine)
    with pytest.raises(ValueError, match=r"accepted: .* a mambaslots\.net\.LeadingEngine"):
        ms.AsyncEngine(engine)
    engine.add_request(PROMPTS[0])
    if world.rank:
        with pytest.raises(ValueError, match="engine has 1 requests"):
            msd.follow(engine)
