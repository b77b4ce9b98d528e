"""Answers over replicas that are lost, against one engine that never is."""

import asyncio
from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.errors import NoReplicaError, QueueFullError
from mambaslots.fleet import fleet_engine
from mambaslots.fleet.fleet_engine import FleetEngine
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain, SaltKey
from oracle.budget import costly
from oracle.fleet import SALT_KEY, Replicas, in_fleet
from oracle.serving import TOLERANCE, random_tokens, small_engine

PROMPT = random_tokens(37, 1)
LENGTH = 11
PARAMS = {
    "greedy": ms.SamplingParams(max_tokens=LENGTH, return_log_probs=True, num_top_log_probs=2),
    "sampled": ms.SamplingParams(
        max_tokens=LENGTH, temperature=1.5, top_p=0.98, seed=5, return_log_probs=True
    ),
    "prompt": ms.SamplingParams(max_tokens=LENGTH, temperature=2.0, seed=6, skip_prompt_log_probs=False),
}


def engine(**overrides: Any) -> ms.DynamicInferenceEngine:
    return small_engine(salt_key=SALT_KEY, **overrides)


def replicas(number: int = 3, **overrides: Any) -> Replicas:
    return Replicas([engine(**overrides) for _ in range(number)])


def whole(prompt: list[int], params: ms.SamplingParams) -> ms.RequestResult:
    (result,) = engine(enable_prefix_caching=False).generate([prompt], params)
    return result


async def answered(
    fleet: FleetEngine, prompt: list[int], params: ms.SamplingParams, **more: Any
) -> ms.RequestResult:
    stream = await fleet.stream(prompt, params, **more)
    tokens = [one async for new in stream for one in new]
    result = stream.result
    assert result is not None
    assert [one.token for one in tokens] == result.tokens
    if params.return_log_probs:
        assert [one.log_prob for one in tokens] == result.log_probs
    return result


def check_same(result: ms.RequestResult, expected: ms.RequestResult) -> None:
    assert result.tokens == expected.tokens
    assert result.finish_reason == expected.finish_reason
    assert result.num_prompt_tokens == expected.num_prompt_tokens
    assert result.num_resumed_tokens + sum(result.computed_by_reason.values()) == expected.num_prompt_tokens
    for ours, theirs in (
        (result.log_probs, expected.log_probs),
        (result.prompt_log_probs, expected.prompt_log_probs),
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours == pytest.approx(theirs, abs=TOLERANCE)
    assert (result.top_log_probs is None) == (expected.top_log_probs is None)
    if result.top_log_probs is not None and expected.top_log_probs is not None:
        for top, other in zip(result.top_log_probs, expected.top_log_probs, strict=True):
            assert [token for token, _ in top] == [token for token, _ in other]
            assert [value for _, value in top] == pytest.approx([v for _, v in other], abs=TOLERANCE)


@pytest.mark.sampled(params=2)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_an_answer_is_the_same_wherever_its_replica_is_lost(params: ms.SamplingParams) -> None:
    expected = whole(PROMPT, params)
    group = replicas()

    async def main(fleet: FleetEngine) -> None:
        for loss in range(LENGTH + 1):
            del group.requests[:]
            group.losses[:] = [loss]
            check_same(await answered(fleet, PROMPT, params), expected)
            first, *others = group.requests
            assert len(others) == (loss < LENGTH)  # the whole answer has come: no replica is asked again
            for second in others:
                assert list(second.prompt) == PROMPT + expected.tokens[:loss]
                assert second.num_given_tokens == loss
                assert second.route.num_answer_tokens == LENGTH - loss
                assert second.sampling.seed == first.sampling.seed
                if loss:  # its prompt's log-probs have come
                    assert second.sampling.skip_prompt_log_probs

    in_fleet(group, main)


@costly()
@given(data=st.data())
def test_answers_that_lose_replicas_are_those_of_one_engine(data: st.DataObject) -> None:
    """Requests side by side, with stop tokens and salts, each with its losses; some are cancelled."""
    group = replicas(
        num_speculative_tokens=data.draw(st.sampled_from([0, 2])),
        enable_prefix_caching=data.draw(st.sampled_from([True, True, False])),
    )
    group.is_cut = data.draw(st.booleans())
    group.losses[:] = data.draw(st.lists(st.none() | st.integers(0, 9), max_size=8))
    wanted = []
    for seed in range(data.draw(st.integers(1, 4))):
        prompt = random_tokens(data.draw(st.integers(1, 40)), data.draw(st.integers(0, 1)))
        params = ms.SamplingParams(
            max_tokens=data.draw(st.integers(1, 10)),
            temperature=data.draw(st.sampled_from([None, 1.0, 3.0])),
            seed=seed,
            stop_token_ids=tuple(data.draw(st.lists(st.integers(0, 255), max_size=60))),
            return_log_probs=True,
        )
        wanted.append((prompt, params, data.draw(st.sampled_from([None, b"a", b"b"]))))
    left_after = data.draw(st.none() | st.integers(0, 3))

    async def leave(fleet: FleetEngine) -> None:
        prompt, params, _ = wanted[0]
        stream = await fleet.stream(prompt, params)
        async with stream:
            for _ in range(left_after or 0):
                if (await anext(stream, None)) is None:
                    break

    async def main(fleet: FleetEngine) -> list[Any]:
        calls = [answered(fleet, prompt, params, cache_salt=salt) for prompt, params, salt in wanted]
        leaving = [leave(fleet)] if left_after is not None else []
        return (await asyncio.gather(*calls, *leaving))[: len(wanted)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_engine, "MAX_RETRIES", 20)
        patch.setattr(fleet_engine, "RETRY_DELAY_S", 0.0)
        results = in_fleet(group, main)
    for (prompt, params, _), result in zip(wanted, results, strict=True):
        check_same(result, whole(prompt, params))


def test_without_a_seed_the_fleet_draws_one() -> None:
    group = replicas()
    params = ms.SamplingParams(max_tokens=LENGTH, temperature=2.0)

    async def main(fleet: FleetEngine) -> list[ms.RequestResult]:
        group.losses[:] = [4]
        return [await answered(fleet, PROMPT, params) for _ in range(2)]

    first, second = in_fleet(group, main)
    assert first.tokens != second.tokens
    seed = group.requests[0].sampling.seed
    assert group.requests[1].sampling.seed == seed
    assert first.tokens == whole(PROMPT, replace(params, seed=seed)).tokens


def test_requests_carry_the_keys_of_their_blocks() -> None:
    """The keys are those under which replicas find states, also of an answer that goes on."""
    group = replicas(2)

    async def main(fleet: FleetEngine) -> None:
        group.losses[:] = [9]
        await answered(fleet, PROMPT, PARAMS["greedy"], cache_salt=b"salt", tenant="alice")

    in_fleet(group, main)
    assert [request.tenant for request in group.requests] == ["alice"] * 2
    assert [request.lost for request in group.requests] == [(), ("0",)]
    for request in group.requests:
        chain = PrefixHashChain(8, SaltKey(SALT_KEY).root(b"salt"))
        chain.extend_to(request.prompt)
        assert list(request.hashes) == chain.hashes
    assert [len(request.hashes) for request in group.requests] == [4, 5]
    assert group.engines[1].context.prefix_cache.resumable_tokens(chain) == 40


@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_request_survives_two_losses(num_lost: int) -> None:
    group = replicas()
    group.losses[:] = [3] * num_lost

    expected = whole(PROMPT, PARAMS["greedy"]).tokens

    async def main(fleet: FleetEngine) -> None:
        stream = await fleet.stream(PROMPT, PARAMS["greedy"])
        if num_lost == 2:
            assert (await _rest(stream)).tokens == expected
            return
        with pytest.raises(NoReplicaError, match="3 replicas were lost"):
            await _rest(stream)
        assert stream.result is None
        assert [list(request.prompt) for request in group.requests] == [
            PROMPT + expected[:number] for number in (0, 3, 6)
        ]

    in_fleet(group, main)
    assert len(group.requests) == 3


def test_an_engine_that_dies_or_is_reset_is_a_loss() -> None:
    """A model that ends its engine's thread, and one whose steps fail: others answer."""
    group = replicas()
    expected = whole(PROMPT, PARAMS["greedy"]).tokens

    async def main(fleet: FleetEngine) -> None:
        stream = await fleet.stream(PROMPT, PARAMS["greedy"])
        await anext(stream)
        await group.local[0].call(lambda engine: engine.reset())
        assert len([one async for new in stream for one in new]) < LENGTH
        assert stream.result is not None
        assert stream.result.tokens == expected
        assert len(group.requests) == 2

        async def failing() -> None:
            await group.local[2].call(_fails)
            assert (await answered(fleet, PROMPT, PARAMS["greedy"])).tokens == expected

        await failing()
        assert len(group.requests) == 4
        await group.local[2].call(lambda engine: setattr(engine, "model", group.engines[0].model))

    in_fleet(group, main)


def _fails(engine: ms.DynamicInferenceEngine) -> None:
    def model(step: Any) -> Any:
        raise RuntimeError("a kernel failed")

    engine.model = model  # type: ignore[assignment]


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    group = replicas(1)
    long = ms.SamplingParams(max_tokens=180)

    async def main(fleet: FleetEngine) -> None:
        for reason in ("cancelled", "stop"):
            stream = await fleet.stream(PROMPT, long)
            await anext(stream)
            assert fleet.num_running == 1
            stream.finish() if reason == "stop" else stream.cancel()
            async for _ in stream:
                pass
            assert stream.result is not None
            assert stream.result.finish_reason == reason
            assert 0 < len(stream.result.tokens) < 180
            assert stream.result.num_resumed_tokens == (32 if reason == "stop" else 0)
        calls = [asyncio.create_task(answered(fleet, PROMPT, long)) for _ in range(3)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    in_fleet(group, main)
    assert len(group.requests) <= 5


def test_a_drain_cancels_what_is_late_and_takes_nothing() -> None:
    group = replicas(1)

    async def main(fleet: FleetEngine) -> None:
        stream = await fleet.stream(PROMPT, ms.SamplingParams(max_tokens=200))
        assert not await fleet.drain(0.0)
        with pytest.raises(RuntimeError, match="accepts no more requests"):
            await fleet.stream(PROMPT, PARAMS["greedy"])
        async for _ in stream:
            pass
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"

    in_fleet(group, main)


def test_refusals_are_raised_and_a_full_queue_stops_no_answer_that_has_begun() -> None:
    group = replicas(1)

    async def main(fleet: FleetEngine) -> None:
        with pytest.raises(ValueError, match="max_sequence_length"):
            await fleet.stream(PROMPT, ms.SamplingParams(max_tokens=9999))
        for error in (QueueFullError(5, 4), ms.KVBlockCapacityError(3, 2)):
            group.refusals[:] = [error]
            with pytest.raises(type(error)):
                await fleet.stream(PROMPT, PARAMS["greedy"])
        group.losses[:] = [4]
        stream = await fleet.stream(PROMPT, PARAMS["greedy"])
        group.refusals[:] = [QueueFullError(5, 4)]
        assert (await _rest(stream)).tokens == whole(PROMPT, PARAMS["greedy"]).tokens

    in_fleet(group, main)


async def _rest(stream: Any) -> ms.RequestResult:
    async for _ in stream:
        pass
    result: ms.RequestResult = stream.result
    return result


def test_limits_follow_the_number_of_replicas() -> None:
    group = replicas(2)

    async def main(fleet: FleetEngine) -> None:
        assert (fleet.max_running, fleet.failure) == (8, None)
        calls = [fleet.stream(PROMPT, ms.SamplingParams(max_tokens=20)) for _ in range(10)]
        streams = await asyncio.gather(*calls)
        with pytest.raises(QueueFullError, match="2 requests wait, 2 may"):
            await fleet.stream(PROMPT, PARAMS["greedy"])
        await asyncio.gather(*map(_rest, streams))
        group.num_serving = 0
        assert isinstance(fleet.failure, NoReplicaError)
        with pytest.raises(NoReplicaError):
            await fleet.stream(PROMPT, PARAMS["greedy"])

    in_fleet(group, main, max_waiting_requests=2)


def test_a_close_in_the_moment_of_a_new_request_ends_it() -> None:
    """The request's task is cancelled before it has begun."""
    group = replicas(1)

    async def main(fleet: FleetEngine) -> None:
        asking = asyncio.create_task(fleet.stream(PROMPT, PARAMS["greedy"]))
        closing = asyncio.create_task(fleet.close(5))
        stream = await asyncio.wait_for(asking, 5)
        assert (await _rest(stream)).finish_reason == "cancelled"
        assert await closing

    in_fleet(group, main)
    assert not group.requests
