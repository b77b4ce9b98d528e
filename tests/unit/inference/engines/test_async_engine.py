"""An engine in a thread of its own: answers, limits, failures and ends, each made to happen."""

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
from mambaslots.inference.engines import async_engine, engine_thread
from mambaslots.inference.engines.streams import AsyncStream
from oracle.latched_model import PATIENCE_S, LatchedModel, raising_calls
from oracle.plans import SwitchedPlan
from oracle.serving import random_tokens, small_engine
from oracle.workload import answer, assert_idle

PROMPTS = [random_tokens(20, seed=1), random_tokens(33, seed=2), random_tokens(9, seed=3)]
LENGTH = 6
PARAMS = ms.SamplingParams(max_tokens=LENGTH)


def expected(prompt: list[int], length: int = LENGTH) -> list[int]:
    return answer(tuple(prompt))[0][:length]


def assert_nothing_left(engine: ms.DynamicInferenceEngine) -> None:
    """No thread, no request, no row and no KV is left, and the engine serves."""
    assert [thread for thread in threading.enumerate() if thread.name == "mambaslots-engine"] == []
    engine.settle()
    assert not engine.has_unfinished_requests()
    assert not engine.core.unclaimed
    engine.check_integrity()
    assert_idle(engine)
    assert engine.generate([PROMPTS[0]], PARAMS)[0].tokens == expected(PROMPTS[0])


def serve(
    body: Callable[[ms.AsyncEngine], Coroutine[None, None, None]], engine: ms.DynamicInferenceEngine
) -> None:
    """Run a body with an AsyncEngine over `engine`; nothing may be left."""

    async def main() -> None:
        async with ms.AsyncEngine(engine) as server:
            await asyncio.wait_for(body(server), PATIENCE_S)

    asyncio.run(main())
    assert_nothing_left(engine)


async def at_once(server: ms.AsyncEngine, *asking: Coroutine[None, None, Any]) -> list[asyncio.Task[Any]]:
    """Start these calls of a server; the engine gets all of them before its next step."""
    held = threading.Event()
    holding = asyncio.create_task(server.call(lambda engine: held.wait(PATIENCE_S)))
    tasks = [asyncio.create_task(one) for one in asking]
    await asyncio.sleep(0)
    held.set()
    await holding
    return tasks


async def streams_at_once(
    server: ms.AsyncEngine, prompts: list[list[int]], params: ms.SamplingParams = PARAMS
) -> list[AsyncStream]:
    tasks = await at_once(server, *(server.stream(prompt, params) for prompt in prompts))
    return [await task for task in tasks]


async def entered(latch: LatchedModel) -> None:
    await asyncio.to_thread(latch.wait_for_forward)


async def tokens_of(stream: AsyncStream) -> list[int]:
    return [one.token async for some in stream for one in some]


# ---- answers


def test_streams_and_generate_give_the_answers_of_the_recurrence() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        streams = [await server.stream(prompt, PARAMS) for prompt in PROMPTS]
        answers = await asyncio.gather(*map(tokens_of, streams))
        assert answers == [expected(prompt) for prompt in PROMPTS]
        for stream, tokens in zip(streams, answers, strict=True):
            assert stream.result is not None
            assert (stream.result.request_id, stream.result.tokens) == (stream.request_id, tokens)
            assert stream.result.finish_reason == "length"
        results = await asyncio.gather(*(server.generate(prompt, PARAMS) for prompt in PROMPTS))
        assert [result.tokens for result in results] == answers
        assert results[0].num_resumed_tokens == 16
        assert (server.num_waiting, server.num_running, server.failure) == (0, 0, None)

    serve(body, small_engine())


def test_salts_and_plans_reach_the_engine() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        none = SwitchedPlan(tail=False, decode="off", branch=False, step_ends=False)
        for salt, plan, resumed in ((b"a", none, 0), (b"a", None, 0), (b"b", None, 0), ("a", None, 16)):
            result = await server.generate(PROMPTS[0], PARAMS, cache_salt=salt, checkpoint_plan=plan)
            assert result.num_resumed_tokens == resumed

    serve(body, small_engine())


def test_a_slow_reader_gets_all_tokens_at_once_and_a_quick_one_each_by_itself() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        quick, slow = await streams_at_once(server, PROMPTS[:2])
        latch.open()
        assert len(await tokens_of(quick)) == LENGTH
        await server.drain()
        items = [tuple(one.token for one in some) async for some in slow]
        assert items == [tuple(expected(PROMPTS[1]))]

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_each_step_brings_its_token_and_wakes_the_loop_once() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        streams = await streams_at_once(server, PROMPTS)
        woken: list[int] = []
        wake = loop.call_soon_threadsafe
        with patch.object(loop, "call_soon_threadsafe", lambda *args: (woken.append(1), wake(*args))[1]):
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            latch.open()
            await asyncio.gather(*readers)
        assert len(woken) <= latch.num_forwards

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_a_thread_without_work_sleeps() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        await server.generate(PROMPTS[0], PARAMS)
        with patch.object(engine, "has_unfinished_requests", wraps=engine.has_unfinished_requests) as asked:
            for _ in range(100):
                await asyncio.sleep(0.001)
        assert asked.call_count <= 1

    engine = small_engine()
    serve(body, engine)


# ---- bad input and limits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "prompt is empty"),
        (("text",), "tokenize text first"),
        (([1, 2, 10**6],), "prompt"),
        (([1], ms.SamplingParams(max_tokens=10**6)), "max_sequence_length"),
        (([1], "greedy"), "sampling_params"),
    ],
)
def test_bad_input_raises_as_add_request_does(arguments: tuple[object, ...], message: str) -> None:
    async def body(server: ms.AsyncEngine) -> None:
        with pytest.raises(ValueError, match=message):
            await server.stream(*arguments)  # type: ignore[arg-type]
        assert await server.drain()

    serve(body, small_engine())


@pytest.mark.parametrize(
    "arguments",
    [{"engine": None}, {"max_waiting_requests": 0}, {"max_waiting_requests": 1.5}, {"max_step_failures": 0}],
)
def test_bad_settings_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is .*accepted"):
        ms.AsyncEngine(**({"engine": small_engine()} | arguments))  # type: ignore[arg-type]


def test_a_split_model_is_refused() -> None:
    engine = small_engine()
    engine.core.is_split = True
    with pytest.raises(ValueError, match="split over ranks; accepted"):
        ms.AsyncEngine(engine)


def test_requests_beyond_the_limit_are_refused_until_others_run() -> None:
    async def main() -> None:
        async with ms.AsyncEngine(engine, max_waiting_requests=2) as server:
            first = await server.stream(PROMPTS[0], PARAMS)
            await entered(latch)
            assert (server.num_waiting, server.num_running) == (0, 1)
            latch.allow()
            await entered(latch)
            assert (server.num_waiting, server.num_running) == (0, 1)
            others = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS[1:]]
            await asyncio.sleep(0)
            assert server.num_waiting == 2
            with pytest.raises(ms.QueueFullError, match="2 requests wait, 2 may") as raised:
                await server.stream(PROMPTS[0], PARAMS)
            assert (raised.value.num_waiting, raised.value.limit) == (2, 2)
            latch.open()
            assert await tokens_of(first) == expected(PROMPTS[0])
            assert [one.tokens for one in await asyncio.gather(*others)] == list(map(expected, PROMPTS[1:]))
            assert (await server.generate(PROMPTS[0], PARAMS)).tokens == expected(PROMPTS[0])

    engine = small_engine(max_requests=1)
    latch = LatchedModel(engine)
    asyncio.run(main())
    assert_nothing_left(engine)


def test_requests_that_get_a_free_row_do_not_count_against_the_limit() -> None:
    async def main() -> None:
        async with ms.AsyncEngine(engine, max_waiting_requests=1) as server:
            asked = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS]
            await asyncio.sleep(0)
            with pytest.raises(ms.QueueFullError, match="1 requests wait, 1 may"):
                await server.stream(PROMPTS[0], PARAMS)
            latch.open()
            assert [(await one).tokens for one in asked] == list(map(expected, PROMPTS))

    engine = small_engine(max_requests=2)
    latch = LatchedModel(engine)
    asyncio.run(main())
    assert_nothing_left(engine)


def test_requests_without_a_stream_count_against_the_limit() -> None:
    async def main() -> None:
        ids = [engine.add_request(PROMPTS[0], PARAMS)]
        async with ms.AsyncEngine(engine, max_waiting_requests=2) as server:
            assert server.num_waiting + server.num_running == 1
            await entered(latch)
            adding = [
                asyncio.create_task(server.call(lambda engine: engine.add_request(PROMPTS[1], PARAMS)))
                for _ in range(2)
            ]
            await asyncio.sleep(0)
            latch.allow()
            ids += [await one for one in adding]
            await entered(latch)
            assert (server.num_waiting, server.num_running) == (2, 1)
            with pytest.raises(ms.QueueFullError, match="2 requests wait, 2 may"):
                await server.stream(PROMPTS[0], PARAMS)
            latch.open()
            await asyncio.wait_for(claimed(server, ids), PATIENCE_S)

    take_result = ms.DynamicInferenceEngine.take_result

    async def claimed(server: ms.AsyncEngine, ids: list[int]) -> None:
        while await server.call(lambda engine: engine.has_unfinished_requests()):
            pass
        results = [await server.call(partial(take_result, request_id=each)) for each in ids * 2]
        tokens = [None if result is None else result.tokens for result in results]
        assert tokens == [*map(expected, [PROMPTS[0], PROMPTS[1], PROMPTS[1]]), None, None, None]

    engine = small_engine(max_requests=1)
    latch = LatchedModel(engine)
    asyncio.run(main())
    assert_nothing_left(engine)


def test_a_crowd_of_requests_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: ms.AsyncEngine) -> None:
        first = await server.stream(PROMPTS[0], ms.SamplingParams(max_tokens=40))
        await entered(latch)
        crowd = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS]
        stamped = [asyncio.create_task(server.call(lambda engine: latch.num_forwards)) for _ in range(3)]
        await asyncio.sleep(0)
        latch.open()
        before = latch.num_forwards
        assert [await one for one in stamped] == [before + 3, before + 4, before + 5]
        first.cancel()
        assert [(await one).tokens for one in crowd] == list(map(expected, PROMPTS))

    clock = itertools.count(0, 1)  # each call takes a second
    monkeypatch.setattr(engine_thread, "thread_time", lambda: next(clock))
    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_a_request_that_pins_leave_no_room_ends_alone() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        long = random_tokens(60, seed=9)
        pinned = await server.call(lambda engine: (engine.warm(long), engine.pin(long))[1])
        big, small = (
            asyncio.create_task(server.generate(random_tokens(length, seed=8), PARAMS)) for length in (48, 9)
        )
        with pytest.raises(ms.KVBlockCapacityError) as raised:
            await big
        assert raised.value.request_id is not None
        assert (await small).tokens == expected(random_tokens(9, seed=8))
        await server.call(lambda engine: engine.unpin(pinned))
        assert server.failure is None

    serve(body, small_engine(num_kv_blocks=10))


# ---- requests that are not wanted any more


@pytest.mark.parametrize("how", ["cancel", "leave", "drop", "task", "generate"])
def test_a_request_that_is_not_wanted_leaves_after_the_step_under_way(how: str) -> None:
    async def body(server: ms.AsyncEngine) -> None:
        if how == "generate":
            asked = await at_once(
                server, server.stream(PROMPTS[1], PARAMS), server.generate(PROMPTS[0], PARAMS)
            )
            other, task = await asked[0], asked[1]
        else:
            other, stream = await streams_at_once(server, [PROMPTS[1], PROMPTS[0]])
            task = None
        await entered(latch)
        latch.allow()
        await entered(latch)
        if task is None:
            first = await anext(stream)
            assert [one.token for one in first] == expected(PROMPTS[0], 1)
        if how == "cancel":
            stream.cancel()
            stream.cancel()
        elif how == "leave":
            async with stream:
                pass
        elif how == "drop":
            del stream
            gc.collect()
        else:
            task = task or asyncio.create_task(tokens_of(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if how == "task":
                stream.cancel()  # the stream outlives its reader
        latch.allow()
        running = await server.call(lambda engine: [one.request_id for one in engine.context.requests])
        assert running == [other.request_id]
        if how == "cancel":
            assert await tokens_of(stream) == expected(PROMPTS[0], 2)[1:]
            assert (stream.result.finish_reason, stream.result.tokens) == (
                "cancelled", expected(PROMPTS[0], 2),
            )  # fmt: skip
        latch.open()
        assert await tokens_of(other) == expected(PROMPTS[1])

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_a_request_whose_caller_goes_before_the_engine_has_it_is_cancelled() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        first = await server.stream(PROMPTS[0], PARAMS)
        await entered(latch)
        asking = asyncio.create_task(server.stream(PROMPTS[1], PARAMS))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        latch.open()
        assert await server.call(lambda engine: len(engine.core.requests)) == 1
        assert await tokens_of(first) == expected(PROMPTS[0])

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_two_readers_of_one_stream_are_refused() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        stream = await server.stream(PROMPTS[0], PARAMS)
        readers = [asyncio.create_task(tokens_of(stream)) for _ in range(2)]
        await asyncio.sleep(0)
        latch.open()
        first, second = await asyncio.gather(*readers, return_exceptions=True)
        assert first == expected(PROMPTS[0])
        assert isinstance(second, RuntimeError)
        assert "one reader at a time" in str(second)

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


# ---- calls


def test_calls_return_and_raise_what_their_functions_do() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        assert await server.call(lambda engine: engine.stats().num_running) == 0
        for error, raised in ((KeyError("a"), KeyError), (StopIteration(), RuntimeError)):
            with pytest.raises(raised):
                await server.call(lambda engine, error=error: raise_(error))
        for wrong in (None, tokens_of):
            with pytest.raises(ValueError, match=r"function is .*accepted"):
                await server.call(wrong)  # type: ignore[arg-type]

    serve(body, small_engine())


def raise_(error: BaseException) -> None:
    raise error


def test_a_call_that_makes_steps_or_ends_requests_loses_no_token() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        stream = await server.stream(PROMPTS[0], PARAMS)
        latch.open()
        await server.call(lambda engine: engine.generate([PROMPTS[1]], PARAMS))
        assert await tokens_of(stream) == expected(PROMPTS[0])
        long = ms.SamplingParams(max_tokens=100)
        cancelled, reset = await streams_at_once(server, PROMPTS[:2], long)
        await server.call(lambda engine: engine.cancel(cancelled.request_id))
        await server.call(lambda engine: engine.reset())
        for stream, reason in ((cancelled, "cancelled"), (reset, "reset")):
            tokens = await tokens_of(stream)
            assert stream.result is not None
            assert (stream.result.tokens, stream.result.finish_reason) == (tokens, reason)

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_requests_of_a_suspended_engine_wait_until_it_is_resumed() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        await server.call(lambda engine: engine.suspend())
        stream = await server.stream(PROMPTS[0], PARAMS)
        for _ in range(3):
            await server.call(lambda engine: engine.stats())
        assert server.num_waiting == 1
        await server.call(lambda engine: engine.resume())
        assert await tokens_of(stream) == expected(PROMPTS[0])

    serve(body, small_engine())


# ---- steps that fail


def test_failed_steps_are_made_again() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        latch.errors = [KeyError("1"), MemoryError("2"), None, KeyError("3"), KeyError("4"), None]
        results = await asyncio.gather(*(server.generate(prompt, PARAMS) for prompt in PROMPTS))
        assert [result.tokens for result in results] == list(map(expected, PROMPTS))
        assert latch.errors == []

    engine = small_engine()
    latch = LatchedModel(engine, is_open=True)
    serve(body, engine)


def test_after_too_many_failed_steps_all_requests_end_with_the_error_and_later_ones_are_served() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        streams = await streams_at_once(server, [*PROMPTS, PROMPTS[0]])
        latch.errors = [None, KeyError("1"), KeyError("2"), KeyError("3")]
        latch.open()
        for stream in streams:
            with pytest.raises(KeyError, match="3"):
                await tokens_of(stream)
            assert stream.result is None
        assert server.failure is None
        assert (await server.generate(PROMPTS[0], PARAMS)).tokens == expected(PROMPTS[0])

    engine = small_engine(max_requests=2)
    latch = LatchedModel(engine)
    serve(body, engine)


def test_failing_requests_that_a_call_added_do_not_keep_the_thread_busy() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        latch.errors = [KeyError(str(number)) for number in range(3)]
        await server.call(lambda engine: engine.add_request(PROMPTS[1], PARAMS))
        while latch.errors:
            await server.call(lambda engine: None)
        assert (await server.generate(PROMPTS[0], PARAMS)).tokens == expected(PROMPTS[0])
        assert await server.call(lambda engine: len(engine.core.requests)) == 0

    engine = small_engine()
    latch = LatchedModel(engine, is_open=True)
    serve(body, engine)


def test_a_thread_that_cannot_start_leaves_the_engine_to_others() -> None:
    async def main() -> None:
        with (
            patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
            pytest.raises(RuntimeError, match="new thread"),
        ):
            ms.AsyncEngine(engine).start()
        assert not engine_thread._running_threads
        async with ms.AsyncEngine(engine) as server:
            assert (await server.generate(PROMPTS[0], PARAMS)).tokens == expected(PROMPTS[0])

    engine = small_engine()
    asyncio.run(main())
    assert_nothing_left(engine)


async def assert_dead(server: ms.AsyncEngine, stream: AsyncStream, failure: type[BaseException]) -> None:
    with pytest.raises(ms.EngineDeadError) as raised:
        await tokens_of(stream)
    assert isinstance(raised.value.__cause__, failure)
    assert isinstance(server.failure, failure)
    for call in (server.stream(PROMPTS[0]), server.call(lambda engine: None), server.drain()):
        with pytest.raises(ms.EngineDeadError):
            await call


def test_a_thread_whose_work_exits_gives_up() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        stream = await server.stream(PROMPTS[0], PARAMS)
        waiting = asyncio.create_task(server.call(lambda engine: None))
        await entered(latch)
        latch.errors = [SystemExit(3)]
        latch.open()
        await assert_dead(server, stream, SystemExit)
        with pytest.raises(ms.EngineDeadError):
            await waiting

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_a_call_that_exits_ends_the_thread_and_raises_at_its_caller() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        stream = await server.stream(PROMPTS[0], ms.SamplingParams(max_tokens=100))
        with pytest.raises(ms.EngineDeadError):
            await server.call(lambda engine: raise_(KeyboardInterrupt()))
        await assert_dead(server, stream, KeyboardInterrupt)

    serve(body, small_engine())


def test_an_engine_that_cannot_be_reset_ends_the_thread() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        undo = [
            raising_calls(engine, "settle", lambda: RuntimeError("beyond repair")),
            raising_calls(engine, "reset", lambda: RuntimeError("beyond reset")),
        ]
        stream = await server.stream(PROMPTS[0], PARAMS)
        with pytest.raises(RuntimeError, match="beyond repair"):
            await tokens_of(stream)
        while server.failure is None:
            await asyncio.sleep(0)
        assert "beyond reset" in str(server.failure)
        for call in undo:
            call()

    engine = small_engine()
    serve(body, engine)


# ---- ends


def test_drain_waits_for_all_and_takes_no_more() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        tasks = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS]
        await entered(latch)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="is closing"):
            await server.stream(PROMPTS[0])
        latch.open()
        assert await draining
        assert await server.call(lambda engine: engine.stats().num_running) == 0
        assert [(await task).tokens for task in tasks] == list(map(expected, PROMPTS))
        assert await server.drain(0)

    engine = small_engine(max_requests=1)
    latch = LatchedModel(engine)
    serve(body, engine)


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_drain_waits_for_requests_whose_tasks_were_cancelled(timeout_s: float | None) -> None:
    """The engine gets such a request after the call under way, and cancels it then."""

    async def body(server: ms.AsyncEngine) -> None:
        holding = asyncio.create_task(server.call(lambda engine: held.wait(PATIENCE_S)))
        task = asyncio.create_task(server.generate(PROMPTS[0], PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        asyncio.get_running_loop().call_later(0.05, held.set)
        assert await server.drain(timeout_s)
        assert server.num_waiting == server.num_running == 0
        await holding

    held = threading.Event()
    serve(body, small_engine())


def test_no_request_is_counted_after_drain_however_slow_the_loop_is() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        tasks = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS * 4]
        draining = asyncio.create_task(server.drain())
        while not draining.done():
            await asyncio.sleep(0)
            time.sleep(0.002)
        assert server.num_waiting == server.num_running == 0
        await asyncio.wait(tasks)

    engine = small_engine(max_requests=2)
    serve(body, engine)


def test_drain_cancels_what_takes_too_long() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        tasks = [asyncio.create_task(server.generate(prompt, PARAMS)) for prompt in PROMPTS]
        await entered(latch)
        draining = asyncio.create_task(server.drain(0.01))
        await asyncio.sleep(0.05)
        latch.open()
        assert not await draining
        assert {(await task).finish_reason for task in tasks} == {"cancelled"}

    engine = small_engine(max_requests=1)
    latch = LatchedModel(engine)
    serve(body, engine)


def test_close_cancels_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        server = ms.AsyncEngine(engine)
        await server.close()
        with pytest.raises(RuntimeError, match="make another"):
            server.start()
        server = ms.AsyncEngine(engine)
        with pytest.raises(RuntimeError, match="before the AsyncEngine is started"):
            await server.generate(PROMPTS[0])
        server.start()
        with pytest.raises(RuntimeError, match="was started before"):
            server.start()
        with pytest.raises(ValueError, match="served by another AsyncEngine"):
            ms.AsyncEngine(engine).start()
        task = asyncio.create_task(server.generate(PROMPTS[0], PARAMS))
        await entered(latch)
        closing = [asyncio.create_task(server.close()) for _ in range(2)]
        await asyncio.sleep(0)
        late = asyncio.create_task(server.call(lambda engine: None))
        latch.open()
        await asyncio.gather(*closing)
        assert (await task).finish_reason == "cancelled"
        for call in (late, server.generate(PROMPTS[0]), server.call(lambda engine: None), server.drain()):
            with pytest.raises(RuntimeError, match="clos"):
                await call
        await server.close()

    engine = small_engine()
    latch = LatchedModel(engine)
    asyncio.run(main())
    assert_nothing_left(engine)


def test_drain_and_close_wait_no_longer_than_they_may_for_a_step_that_hangs() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        task = asyncio.create_task(server.generate(PROMPTS[0], PARAMS))
        await entered(latch)
        with patch.object(async_engine, "_LONGEST_STEP_S", 0.01):
            assert not await server.drain(0.01)
        assert not task.done()
        assert not await server.close(0.01)
        latch.open()
        assert await server.close(PATIENCE_S)
        assert (await task).finish_reason == "cancelled"

    engine = small_engine()
    latch = LatchedModel(engine)
    serve(body, engine)


def test_control_c_during_a_step_leaves_nothing() -> None:
    async def main() -> None:
        async with ms.AsyncEngine(engine) as server:
            stream = await server.stream(PROMPTS[0], PARAMS)
            await entered(latch)
            os.kill(os.getpid(), signal.SIGINT)
            latch.open()
            await asyncio.gather(tokens_of(stream), asyncio.Event().wait())

    engine = small_engine()
    latch = LatchedModel(engine)
    # A process that a shell starts in the background ignores Control-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert_nothing_left(engine)


def test_functions_behind_an_interrupted_one_run_when_the_loop_goes_on() -> None:
    ran, interrupts = [], [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        ran.append("interrupted")

    loop = asyncio.new_event_loop()
    thread = engine_thread.EngineThread(small_engine(), loop, 1)
    for function in (lambda: ran.append("before"), interrupted, lambda: ran.append("behind"), loop.stop):
        thread._posted.append(function)
    thread._wake_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert ran == ["before"]
    loop.run_forever()
    assert ran == ["before", "interrupted", "behind"]
    loop.close()


def test_a_thread_whose_loop_is_closed_cancels_its_requests_and_ends() -> None:
    engine = small_engine()
    latch = LatchedModel(engine)
    servers = []

    async def main() -> None:
        servers.append(ms.AsyncEngine(engine))
        servers[0].start()
        await servers[0].stream(PROMPTS[0], ms.SamplingParams(max_tokens=200))
        await entered(latch)

    asyncio.run(main())
    latch.open()
    asyncio.run(servers[0].close())
    assert_nothing_left(engine)


def test_an_unreferenced_async_engine_ends_its_thread() -> None:
    async def main() -> None:
        server = ms.AsyncEngine(engine)
        server.start()
        await server.generate(PROMPTS[0], PARAMS)
        await server.call(lambda engine: None)  # the thread has let go of the answer
        gone = weakref.ref(server)
        del server
        gc.collect()
        assert gone() is None

    engine = small_engine()
    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "mambaslots-engine":
            thread.join(PATIENCE_S)
    assert_nothing_left(engine)


def test_other_event_loops_are_refused() -> None:
    async def body(server: ms.AsyncEngine) -> None:
        stream = await server.stream(PROMPTS[0], PARAMS)
        for call in (
            lambda: server.stream(PROMPTS[0]), lambda: server.call(lambda engine: None),
            lambda: server.drain(), lambda: server.close(), lambda: anext(stream),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(lambda call=call: asyncio.run(awaited(call)))
        assert await tokens_of(stream) == expected(PROMPTS[0])

    async def awaited(call: Callable[[], Coroutine[None, None, object]]) -> None:
        await call()

    serve(body, small_engine())


@pytest.mark.long
def test_a_program_that_forgets_to_close_ends() -> None:
    program = """
import asyncio, mambaslots as ms
model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
config = ms.InferenceConfig(block_size_tokens=32, max_tokens_per_step=512, num_kv_blocks=512,
num_mamba_slots=64)
server = ms.AsyncEngine(ms.DynamicInferenceEngine(model, config))
loop = asyncio.new_event_loop()
async def main():
    server.start()
    await server.stream([1, 2, 3], ms.SamplingParams(max_tokens=4000))
loop.run_until_complete(main())
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
