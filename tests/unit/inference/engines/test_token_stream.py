"""Streams: `for` and `with`, and what becomes of the request when a stream ends early."""

import asyncio
import gc
from unittest.mock import Mock, call

import mambaslots as ms
import pytest
from mambaslots.inference.engines.streams import RequestSource
from mambaslots.params_and_results import GeneratedToken
from oracle.serving import random_tokens, small_engine

PROMPTS = [random_tokens(20, seed=1), random_tokens(33, seed=2)]
LENGTH = 6
PARAMS = ms.SamplingParams(max_tokens=LENGTH, return_log_probs=True)


def expected(prompts: list[list[int]] = PROMPTS) -> list[ms.RequestResult]:
    return small_engine().generate(prompts, PARAMS)


def assert_nothing_runs(engine: ms.DynamicInferenceEngine) -> None:
    stats = engine.stats()
    assert not engine.has_unfinished_requests()
    assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
    assert stats.cache.num_held_kv_blocks == 0
    engine.check_integrity()


# ---- for


def test_the_tokens_of_a_stream_are_those_of_generate() -> None:
    engine = small_engine()
    arrived = list(engine.stream(PROMPTS[0], PARAMS))
    (whole,) = expected(PROMPTS[:1])
    assert [token.token for token in arrived] == whole.tokens
    assert [token.log_prob for token in arrived] == whole.log_probs
    assert_nothing_runs(engine)


def test_a_stream_has_its_result_and_its_reason_once_it_ends() -> None:
    engine = small_engine()
    first = engine.add_request(PROMPTS[1], PARAMS)
    stream = engine.stream(PROMPTS[0], PARAMS)
    assert stream.request_id == first + 1
    assert (stream.result, stream.finish_reason) == (None, None)
    next(stream)
    assert (stream.result, stream.finish_reason) == (None, None)
    tokens = [token.token for token in stream]
    assert stream.result is not None
    assert stream.result.request_id == stream.request_id
    assert stream.result.tokens[1:] == tokens
    assert stream.finish_reason == stream.result.finish_reason == "length"
    assert list(stream) == []


def test_a_stream_says_that_a_stop_token_ended_it() -> None:
    (whole,) = expected(PROMPTS[:1])
    stop = whole.tokens[3]
    params = ms.SamplingParams(max_tokens=LENGTH, stop_token_ids=(stop,))
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], params)
    tokens = [token.token for token in stream]
    (generated,) = small_engine().generate(PROMPTS[:1], params)
    assert tokens == generated.tokens
    assert stream.finish_reason == generated.finish_reason == "stop"


def test_a_result_of_a_stream_is_not_claimed_elsewhere() -> None:
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    assert len(list(stream)) == LENGTH
    assert engine.take_result(stream.request_id) is None
    assert stream.result is not None


def test_steps_of_others_bring_a_stream_its_tokens() -> None:
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    engine.generate([PROMPTS[1]], ms.SamplingParams(max_tokens=2 * LENGTH))
    assert stream.finish_reason == "length"
    assert_nothing_runs(engine)
    assert [token.token for token in stream] == expected()[0].tokens


# ---- with


def test_a_stream_closed_by_with_before_its_end_cancels_its_request() -> None:
    engine = small_engine()
    with engine.stream(PROMPTS[0], PARAMS) as stream:
        first = next(stream)
    assert_nothing_runs(engine)
    assert stream.finish_reason == "cancelled"
    assert stream.result is not None
    assert stream.result.tokens == [first.token]
    assert list(stream) == []


def test_with_closes_a_stream_whose_body_raises() -> None:
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)

    def body() -> None:
        with stream:
            next(stream)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        body()
    assert stream.finish_reason == "cancelled"
    assert_nothing_runs(engine)


def test_with_leaves_the_result_of_a_stream_that_ended() -> None:
    engine = small_engine()
    with engine.stream(PROMPTS[0], PARAMS) as stream:
        tokens = [token.token for token in stream]
    assert stream.finish_reason == "length"
    assert stream.result is not None
    assert stream.result.tokens == tokens == expected()[0].tokens
    stream.close()
    assert stream.finish_reason == "length"


# ---- models that raise


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_a_model_that_raises_the_end_of_an_iteration_ends_no_stream(error: type[Exception]) -> None:
    engine = small_engine()
    stream, model = engine.stream(PROMPTS[0], PARAMS), engine.model

    def raising(inputs: ms.StepInputs) -> object:
        raise error("from the model")

    engine.model = raising  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the step raised Stop"):
        next(stream)
    engine.model = model
    assert [token.token for token in stream] == expected(PROMPTS[:1])[0].tokens


# ---- letting go


def test_letting_go_of_a_stream_cancels_its_request() -> None:
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    del stream
    gc.collect()
    assert engine.has_unfinished_requests()  # which ends nothing
    assert engine.core.requests
    assert engine.step() == ms.StepReport()
    assert not engine.has_unfinished_requests()
    assert_nothing_runs(engine)


def test_letting_go_of_a_stream_of_a_split_model_cancels_nothing_and_closing_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks collect garbage at different times, so collection must not change what a rank serves."""
    monkeypatch.setattr(ms.DynamicInferenceEngine, "has_one_caller", False)
    engine = small_engine()
    let_go, closed = engine.stream(PROMPTS[0], PARAMS), engine.stream(PROMPTS[1], PARAMS)
    next(let_go)
    request_id = let_go.request_id
    del let_go
    gc.collect()
    closed.close()
    assert closed.finish_reason == "cancelled"
    assert engine.stats().num_running == 1
    (result,) = [result for _ in range(LENGTH) for result in engine.step().finished]
    assert (result.request_id, result.finish_reason) == (request_id, "length")
    assert result.tokens == expected()[0].tokens
    assert_nothing_runs(engine)


@pytest.mark.parametrize("cancels", [True, False])
def test_a_dropped_stream_cancels_only_where_it_may(cancels: bool) -> None:
    engine, abandoned = small_engine(), Mock()
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    request = engine.core.requests[request_id]
    stream = ms.TokenStream[GeneratedToken](
        RequestSource(request, lambda: None, lambda: None, abandoned, has_one_caller=cancels)
    )
    del stream
    gc.collect()
    assert abandoned.mock_calls == [call(request_id, "cancelled")] * cancels


def test_a_stream_ends_when_its_engine_is_reset() -> None:
    engine = small_engine()
    stream, other = (engine.stream(prompt, PARAMS) for prompt in PROMPTS)
    next(stream)
    engine.reset()
    with pytest.raises(StopIteration):
        next(stream)
    assert len(list(other)) == 1  # the token that came with the first one of `stream`
    assert stream.result is not None
    assert len(stream.result.tokens) == 1
    assert (stream.finish_reason, other.finish_reason) == ("reset", "reset")
    assert_nothing_runs(engine)


def test_a_stream_let_go_of_during_a_step_leaves_no_result() -> None:
    engine = small_engine()
    streams = [engine.stream(PROMPTS[0], ms.SamplingParams(max_tokens=1))]
    model = engine.model

    def forgetting(inputs: ms.StepInputs) -> object:
        streams.clear()
        return model(inputs)

    forgetting.state_spec = model.state_spec  # type: ignore[attr-defined]
    engine.model = forgetting  # type: ignore[assignment]
    while engine.has_unfinished_requests():
        engine.step()
    assert not engine.core.unclaimed
    assert_nothing_runs(engine)


def test_async_for_is_for_an_async_engine() -> None:
    engine = small_engine()

    async def first_token() -> None:
        async with engine.stream(PROMPTS[0], PARAMS) as stream:
            with pytest.raises(RuntimeError, match="engine in this thread; use `for`"):
                await anext(stream)

    asyncio.run(first_token())
    assert_nothing_runs(engine)
