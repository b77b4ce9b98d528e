"""An answer that one engine begins and another one goes on with, against an engine that does all of it."""

from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.budget import costly
from oracle.serving import TOLERANCE, random_tokens, small_engine


def parts_of(
    engine: ms.DynamicInferenceEngine, prompt: list[int], params: ms.SamplingParams, cuts: list[int]
) -> list[ms.RequestResult]:
    """The answer in parts: each request is cancelled behind so many tokens, and the next one goes on."""
    given: list[int] = []
    results = []
    for cut in [*cuts, None]:
        stream = engine.stream([*prompt, *given], replace(params, num_given_tokens=len(given)))
        while cut is None or stream._source.request.answer_length < cut:
            if next(stream, None) is None:
                break
        stream.close()
        assert stream.result is not None
        results.append(stream.result)
        given += stream.result.tokens
        if stream.result.finish_reason != "cancelled":
            return results
    raise AssertionError("the last part has no end")


@costly()
@given(data=st.data())
def test_an_answer_in_parts_is_the_answer(kind: str, data: st.DataObject) -> None:
    prompt = random_tokens(data.draw(st.integers(1, 40)), 1)
    length = data.draw(st.integers(2, 20))
    params = ms.SamplingParams(
        max_tokens=length,
        temperature=data.draw(st.sampled_from([None, 1.0, 3.0])),
        seed=data.draw(st.integers(0, 3)),
        stop_token_ids=tuple(data.draw(st.lists(st.integers(0, 255), max_size=40))),
        return_log_probs=True,
        num_top_log_probs=1,
        skip_prompt_log_probs=data.draw(st.booleans()),
    )
    settings: dict[str, Any] = {
        "num_speculative_tokens": data.draw(st.sampled_from([0, 2])),
        "enable_prefix_caching": data.draw(st.booleans()),
        "decode_by_replay": data.draw(st.booleans()),
    }
    cuts = sorted(set(data.draw(st.lists(st.integers(1, length - 1), max_size=3))))
    (expected,) = small_engine(**settings).generate([prompt], params)
    engine = small_engine(**settings)
    results = parts_of(engine, prompt, params, cuts)
    assert [token for one in results for token in one.tokens] == expected.tokens
    log_probs = [value for one in results for value in one.log_probs or []]
    assert log_probs == pytest.approx(expected.log_probs, abs=TOLERANCE)
    tops = [top[0][0] for one in results for top in one.top_log_probs or []]
    assert tops == [top[0][0] for top in expected.top_log_probs or []]
    assert results[-1].finish_reason == expected.finish_reason
    for one in results:
        assert one.num_prompt_tokens == len(prompt)
        assert one.num_resumed_tokens + sum(one.computed_by_reason.values()) == len(prompt)
        if one.prompt_log_probs is not None:
            assert one.prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=TOLERANCE)
    stats = engine.stats().cache
    assert stats.num_prompt_tokens == len(results) * len(prompt)
    engine.check_integrity()


def test_a_part_resumes_from_states_in_the_answer() -> None:
    """The tokens of the answer are cached as those of a prompt are."""
    engine, prompt = small_engine(), random_tokens(16, 1)
    params = ms.SamplingParams(max_tokens=30)
    (whole,) = engine.generate([prompt], params)
    sequence = prompt + whole.tokens[:20]
    (rest,) = engine.generate([sequence], replace(params, num_given_tokens=20))
    assert rest.tokens == whole.tokens[20:]
    assert rest.num_resumed_tokens == 16  # of the prompt; the state lies behind it
    assert engine.stats().cache.num_recomputed_tokens == 0
    stream = engine.stream(sequence, replace(params, num_given_tokens=20))
    assert len(stream._source.request.prompt_tokens) == 16


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_failed_step_costs_a_part_no_token(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = small_engine(), random_tokens(20, 2)
    params = ms.SamplingParams(max_tokens=9, temperature=2.0, seed=4, return_log_probs=True)
    (whole,) = small_engine().generate([prompt], params)
    request_id = engine.add_request(prompt + whole.tokens[:4], replace(params, num_given_tokens=4))
    run, num_steps = type(engine.core.step_runner).run_model, 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == fails_at:
            raise RuntimeError("a kernel failed")
        return run(*arguments)

    monkeypatch.setattr(type(engine.core.step_runner), "run_model", failing)
    while engine.has_unfinished_requests():
        try:
            finished = engine.step().finished
        except RuntimeError:
            engine.check_integrity()
    (rest,) = finished
    assert rest.request_id == request_id
    assert rest.tokens == whole.tokens[4:]
    assert rest.log_probs == pytest.approx((whole.log_probs or [])[4:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("num_given_tokens", "changes", "message"),
    [
        (3, {}, "num_given_tokens is 3 and the prompt has 3 tokens"),
        (2, {"stop_token_ids": (7,)}, "the last given token ends the answer"),
        (1, {"max_tokens": 255}, "2 \\+ 255 tokens; accepted: together at most"),
    ],
)
def test_what_cannot_go_on_is_refused(num_given_tokens: int, changes: dict[str, Any], message: str) -> None:
    engine = small_engine()
    params = ms.SamplingParams(**({"max_tokens": 5} | changes), num_given_tokens=num_given_tokens)
    with pytest.raises(ValueError, match=message):
        engine.add_request([5, 6, 7], params)
    assert not engine.has_unfinished_requests()


def test_no_answer_goes_on_behind_its_length() -> None:
    with pytest.raises(ValueError, match="num_given_tokens is 5; accepted: an integer from 0 to 4"):
        ms.SamplingParams(max_tokens=5, num_given_tokens=5)
