"""Prompts that one engine computes and another one answers: the answers, and who computes which tokens."""

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import mambaslots.net as msd
import pytest
from mambaslots.inference.engines.engine_thread import EngineThread
from mambaslots.net.prefill_decode.disaggregated_engine import PrefillCounts
from mambaslots.parallel_groups import ParallelGroups
from oracle.disaggregated import ASKED, MIN_TOKENS, PATIENCE_S, Place, answers, run
from oracle.latched_model import LatchedModel
from oracle.serving import assert_answers, random_tokens
from oracle.transfers import engine_of

BLOCK = 8
PROMPTS = [random_tokens(length, seed=length) for length in (50, 90, 130, 33)]
SALTS = (None, b"x", "y", None)


@pytest.fixture
def place() -> Place:
    return Place()


def resumable(prompt: list[int]) -> int:
    """What a request can resume of its prompt at best."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def computed(engine: ms.DynamicInferenceEngine) -> int:
    """Prompt tokens that an engine has computed."""
    cache = engine.stats().cache
    return cache.num_prompt_tokens - cache.num_resumed_tokens


@pytest.mark.usefixtures("kind")
def test_the_decode_engine_computes_only_what_is_behind_the_last_block(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            results = await answers(server, PROMPTS, SALTS)
            assert [result.num_resumed_tokens for result in results] == list(map(resumable, PROMPTS))
            assert server.prefills.remote == len(PROMPTS)
            assert server.prefills.imported_tokens == sum(map(resumable, PROMPTS))
            assert server.prefills.bytes > 0

    run(body())
    assert computed(decode) == sum(len(prompt) - resumable(prompt) for prompt in PROMPTS)
    assert computed(prefill) == sum(map(resumable, PROMPTS))


def test_a_prompt_of_whole_with_blockss_its_last_block_to_compute(place: Place) -> None:
    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            (result,) = await answers(server, [random_tokens(48, seed=1)])
            assert result.num_resumed_tokens == 40

    run(body())


def test_what_is_short_or_cached_is_not_asked_for(place: Place) -> None:
    prefill = engine_of()

    async def body() -> None:
        async with place.worker(prefill), place.server(engine_of()) as server:
            await answers(server, [random_tokens(MIN_TOKENS, seed=1)])
            assert server.prefills == PrefillCounts(short=1)
            await answers(server, [PROMPTS[0]])
            known = prefill.stats().cache.num_requests
            for more in (0, MIN_TOKENS - 2):
                (result,) = await answers(server, [PROMPTS[0] + random_tokens(more, seed=2)])
                assert result.num_resumed_tokens >= 48
            assert await server.prefill(PROMPTS[0]) is None
            assert (server.prefills.short, server.prefills.remote) == (4, 1)
            assert prefill.stats().cache.num_requests == known
            (result,) = await answers(server, [PROMPTS[0] + random_tokens(40, seed=3)])
            assert result.num_resumed_tokens == 88
            assert server.prefills.remote == 2
            assert server.prefills.imported_tokens == 88  # the second time only what was not here
            again = await server.prefill(PROMPTS[0] + random_tokens(70, seed=3))
            assert again is not None
            assert (again.imported.blocks, again.imported.states, again.failure) == (4, 1, "")

    run(body())


def test_other_tenants_share_nothing(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            results = await answers(server, [PROMPTS[0]] * 3, (None, b"a", b"b"))
            assert [result.num_resumed_tokens for result in results] == [48] * 3

    run(body())
    assert prefill.stats().cache.num_resumed_tokens == 0
    assert computed(prefill) == 3 * 48


def test_the_worker_resumes_prompts_that_begin_alike(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            await answers(server, [PROMPTS[1]])
            decode_alone = engine_of()
            async with place.server(decode_alone) as other:
                (result,) = await answers(other, [PROMPTS[1] + random_tokens(30, seed=4)])
                assert result.num_resumed_tokens == 112

    run(body())
    assert prefill.stats().cache.num_resumed_tokens >= 88


def test_prompt_log_probs_are_computed_here(place: Place) -> None:
    params = ms.SamplingParams(
        max_tokens=2,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        prompt_log_probs_start=31,
    )

    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            result = await server.generate(PROMPTS[0], params)
            assert_answers(PROMPTS[0], result)
            assert result.num_resumed_tokens == 24
            assert result.prompt_log_probs is not None
            assert len(result.prompt_log_probs) == len(PROMPTS[0]) - 31

    run(body())


def test_a_small_prefill_cache_holds_back_prompts_and_loses_none(place: Place) -> None:
    prefill = engine_of(num_kv_blocks=20, num_mamba_slots=2, max_requests=3)
    prompts = [random_tokens(60 + number, seed=number) for number in range(8)]

    async def body() -> None:
        async with place.worker(prefill), place.server(engine_of()) as server:
            results = await answers(server, prompts)
            assert server.prefills.missed == 0
            assert [result.num_resumed_tokens for result in results] == list(map(resumable, prompts))

    run(body())
    assert computed(prefill) == sum(map(resumable, prompts))


def test_a_small_decode_cache_gives_right_answers(place: Place) -> None:
    decode = engine_of(num_kv_blocks=24, num_mamba_slots=2, max_requests=2)
    prompts = [random_tokens(60 + number, seed=number) for number in range(6)]

    async def body() -> None:
        async with place.worker(engine_of()), place.server(decode) as server:
            await answers(server, prompts)
            assert server.prefills.remote > 0

    run(body())


def test_the_decode_engine_makes_steps_while_the_worker_computes(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()
    latch = LatchedModel(prefill)

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            long = asyncio.create_task(answers(server, [PROMPTS[2]]))
            await asyncio.to_thread(latch.wait_for_forward)
            assert server.num_waiting == 1
            await answers(server, [random_tokens(12, seed=1)])
            assert not long.done()
            latch.open()
            ((result,),) = await asyncio.gather(long)
            assert result.num_resumed_tokens == 128

    run(body())


def test_a_cancelled_prompt_is_cancelled_at_the_worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = engine_of(), engine_of()
    latch = LatchedModel(prefill)
    has_cancel, post_cancel = asyncio.Event(), EngineThread.post_cancel

    def noted_cancel(thread: EngineThread, *arguments: Any) -> None:
        post_cancel(thread, *arguments)
        if thread._engine is prefill:
            has_cancel.set()

    monkeypatch.setattr(EngineThread, "post_cancel", noted_cancel)

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            asking = asyncio.create_task(server.generate(PROMPTS[2], ASKED))
            await asyncio.to_thread(latch.wait_for_forward)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await has_cancel.wait()  # it comes by a message
            latch.open()
            while prefill.core.requests:
                await asyncio.sleep(0.01)
            assert (await answers(server, [PROMPTS[0]]))[0].num_resumed_tokens == 48
            assert server.num_waiting == 0

    run(body())
    assert computed(prefill) < 128 + 48  # the cancelled prompt was not computed to its end


def test_a_worker_that_takes_too_long_is_not_waited_for(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()
    latch = LatchedModel(prefill)

    async def body() -> None:
        async with place.worker(prefill), place.server(decode, timeout_s=0.2) as server:
            (result,) = await answers(server, [PROMPTS[0]])
            assert result.num_resumed_tokens == 0
            assert server.prefills.missed == 1
            latch.open()

    run(body())


def test_a_drain_computes_here_what_waits_for_the_worker(place: Place) -> None:
    prefill, decode = engine_of(), engine_of()
    latch = LatchedModel(prefill)

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            asking = asyncio.create_task(answers(server, PROMPTS[:2]))
            await asyncio.to_thread(latch.wait_for_forward)
            assert await server.drain(PATIENCE_S)
            assert [result.num_resumed_tokens for result in await asking] == [0, 0]
            with pytest.raises(RuntimeError, match="closing"):
                await server.stream(PROMPTS[0])
            latch.open()

    run(body())


def test_a_prefix_that_cannot_be_pinned_is_refused_alone(place: Place) -> None:
    """Other pins have all slots that pins may have; the worker goes on to serve."""
    prefill = engine_of()

    async def body() -> None:
        async with place.worker(prefill), place.server(engine_of()) as server:
            await answers(server, PROMPTS[:1])
            with patch.object(prefill, "pin", side_effect=ms.MambaSlotCapacityError(2, 1)):
                report = await server.prefill(PROMPTS[0] + random_tokens(40, seed=3))
            assert report is not None
            assert "its state is not cached" in report.failure
            assert await server.connected(0.0)
            (result,) = await answers(server, [PROMPTS[1]])
            assert result.num_resumed_tokens == resumable(PROMPTS[1])

    run(body())


def test_a_drain_ends_in_time_though_a_prompt_is_on_its_way(place: Place) -> None:
    """The engine's thread is in a step, and does not come to say what of the prompt is cached."""
    decode = engine_of()
    latch = LatchedModel(decode)

    async def body() -> None:
        async with place.worker(engine_of()), place.server(decode) as server:
            running = asyncio.create_task(server.generate([1, 2, 3], ASKED))
            await asyncio.to_thread(latch.wait_for_forward)
            asking = asyncio.create_task(server.generate(PROMPTS[0], ASKED))
            await asyncio.sleep(0)
            with patch("mambaslots.inference.engines.async_engine._LONGEST_STEP_S", 0.01):
                assert not await server.drain(0.0)
            assert not asking.done()
            latch.open()
            assert (await running).finish_reason == "cancelled"
            with pytest.raises(RuntimeError, match="closing"):
                await asking

    run(body())


def test_prompts_at_the_worker_count_as_waiting(place: Place) -> None:
    prefill, decode = engine_of(), engine_of(max_requests=1)
    latch = LatchedModel(prefill)

    async def body() -> None:
        async with place.worker(prefill), place.server(decode, max_waiting_requests=1) as server:
            asking = asyncio.create_task(answers(server, PROMPTS[:2]))
            await asyncio.to_thread(latch.wait_for_forward)
            with pytest.raises(ms.QueueFullError):
                await server.stream(PROMPTS[2])
            latch.open()
            await asking

    run(body())


@pytest.mark.parametrize(
    ("settings", "connects", "why"),
    [
        ({"max_sequence_length": 64, "num_kv_blocks": 16}, True, "refuses: prompt and answer have"),
        ({"salt_key": b"another key, of others"}, True, "another key"),
        ({"weights_version": "others"}, False, "weights_version is"),
        ({"block_size_tokens": 16}, False, "block_size_tokens is"),
    ],
)
def test_a_worker_that_does_not_fit_is_a_miss(
    place: Place, settings: dict[str, object], connects: bool, why: str
) -> None:
    async def body() -> None:
        prefill = engine_of(**settings)
        async with place.worker(prefill), place.server(engine_of(), connects=connects) as server:
            while True:
                missed = await server.prefill(PROMPTS[2], cache_salt=b"x")
                assert missed is not None
                assert missed.failure
                if why in missed.failure:
                    break
                await asyncio.sleep(0.05)
            assert (await answers(server, [PROMPTS[2]], [b"x"]))[0].num_resumed_tokens == 0

    run(body())


def test_wrong_calls_are_refused_before_the_worker_is_asked(place: Place) -> None:
    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            for call in (
                {"prompt": []},
                {"prompt": [0] * 300},
                {"prompt": [256]},
                {"prompt": PROMPTS[0], "cache_salt": b""},
                {"prompt": PROMPTS[0], "sampling_params": 3},
                {"prompt": PROMPTS[0], "checkpoint_plan": 3},
            ):
                with pytest.raises(ValueError, match="accepted"):
                    await server.stream(**call)  # type: ignore[arg-type]
            assert server.prefills == PrefillCounts()

    run(body())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "name is"),
        ({"min_prefill_tokens": 0}, "min_prefill_tokens"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"silence_s": -1}, "silence_s"),
        ({"hand_over_timeout_s": "x"}, "hand_over_timeout_s"),
        ({"store": 3}, "store is"),
    ],
)
def test_bad_settings(place: Place, change: dict[str, object], match: str) -> None:
    arguments = {"store": place.client()} | change
    with pytest.raises(ValueError, match=match):
        msd.DisaggregatedEngine(engine_of(), **arguments)  # type: ignore[arg-type]


def test_engines_that_cannot_hand_over(place: Place) -> None:
    uncached = engine_of(enable_prefix_caching=False, num_mamba_slots=None)
    for make in (msd.PrefillWorker, msd.DisaggregatedEngine):
        with pytest.raises(ValueError, match="enable_prefix_caching"):
            make(uncached, place.client())


def test_a_split_model_is_refused(place: Place) -> None:
    engine = engine_of()
    with patch.object(ParallelGroups, "is_split", property(lambda groups: True)):
        for make in (msd.PrefillWorker, msd.DisaggregatedEngine):
            with pytest.raises(ValueError, match="split over ranks; accepted"):
                make(engine, place.client())


def test_another_loop_may_not_close_it(place: Place) -> None:
    async def body() -> None:
        async with place.server(engine_of(), connects=False) as server:
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(server.close()))
            await answers(server, [PROMPTS[0]])

    run(body())


def test_no_thread_is_left(place: Place) -> None:
    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            await answers(server, [PROMPTS[0]])

    run(body())
    assert not [thread for thread in threading.enumerate() if thread.name == "mambaslots-engine"]
