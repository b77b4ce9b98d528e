"""Observers of an engine: what they are called with, when, and what becomes of one that fails."""

import logging
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest
from mambaslots.monitor import Monitor
from oracle.faults import InjectedError, failing
from oracle.observed import Recorder
from oracle.serving import random_tokens, small_engine

PROMPTS = [random_tokens(40, 1), random_tokens(40, 1)[:24] + random_tokens(9, 2), random_tokens(3, 3)]
PARAMS = ms.SamplingParams(max_tokens=5)


def observed(**settings: object) -> tuple[ms.DynamicInferenceEngine, Recorder]:
    engine, recorder = small_engine(**settings), Recorder()
    engine.observe(recorder)
    return engine, recorder


def test_what_observers_receive_adds_up_to_the_engines_own_counts() -> None:
    engine, recorder = observed(max_tokens_per_step=16)
    results = [result for _ in range(2) for result in engine.generate(PROMPTS, PARAMS)]
    cache = engine.stats().cache
    assert recorder.requests == {}
    assert [result for _, result in sorted(recorder.ended, key=lambda one: one[0])] == results
    assert recorder.tokens == {result.request_id: result.tokens for result in results}
    assert (recorder.num_resumed, +recorder.reasons) == (
        cache.num_resumed_tokens,
        {reason: number for reason, number in cache.computed_by_reason.items() if number},
    )
    assert recorder.num_resumed
    begun = [step for step in recorder.resumed if not step.num_resumed]
    assert [step.start for step in begun] == [0] * len(begun)
    assert {step.request.request_id for step in recorder.resumed} == {result.request_id for result in results}


def test_ends_are_reported_however_a_request_ends() -> None:
    engine, recorder = observed()
    waiting, running = engine.add_request(PROMPTS[0], PARAMS), engine.add_request(PROMPTS[1], PARAMS)
    engine.cancel(waiting)
    engine.step()
    engine.cancel(running)
    engine.stream(PROMPTS[0], PARAMS).close()
    dropped = engine.stream(PROMPTS[0], PARAMS)
    next(dropped)
    del dropped
    engine.stats()
    engine.add_request(PROMPTS[2], PARAMS)
    engine.reset()
    assert [result.finish_reason for _, result in recorder.ended] == ["cancelled"] * 4 + ["reset"]
    assert [request_id for request_id, _ in recorder.ended] == list(range(5))


@pytest.mark.parametrize("point", ["forward", "commit", "sampled"])
def test_a_step_that_fails_is_not_reported(point: str) -> None:
    engine, recorder = observed()
    engine.add_request(PROMPTS[0], ms.SamplingParams(max_tokens=1))
    with failing(engine, point, after=False, error=InjectedError), suppress(InjectedError):
        engine.step()
    assert (recorder.num_steps, recorder.ended, recorder.tokens) == (0, [], {})
    while engine.has_unfinished_requests():
        engine.step()
    ((_, result),) = recorder.ended
    assert recorder.tokens == {0: result.tokens}


class Failing(Recorder):
    """Raises in one of its calls."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.num_calls = 0
        setattr(self, call, self._fail)

    def _fail(self, *arguments: Any) -> None:
        self.num_calls += 1
        raise InjectedError


@pytest.mark.parametrize("call", ["request_added", "request_resumed", "step_made", "request_ended"])
def test_an_observer_that_raises_is_logged_and_dropped(call: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, recorder = observed()
    failing_one = Failing(call)
    engine.observe(failing_one)
    with caplog.at_level(logging.ERROR):
        results = engine.generate(PROMPTS, PARAMS)
    assert failing_one.num_calls == 1
    assert [record.name for record in caplog.records] == ["mambaslots.inference.engines.engine_observer"]
    assert call in caplog.text
    assert len(recorder.ended) == len(results)
    with pytest.raises(ValueError, match="one that observes this engine"):
        engine.unobserve(failing_one)


class Interrupted(KeyboardInterrupt):
    """Control-C."""


class Interrupting(Recorder):
    """Is interrupted at the first end, before it has noted it or after that."""

    def __init__(self, notes: bool) -> None:
        super().__init__()
        self.notes = notes
        self.num_ends = 0

    def request_ended(self, request: DynamicInferenceRequest, result: ms.RequestResult) -> None:
        self.num_ends += 1
        if self.num_ends > 1 + self.notes:  # an end that was noted comes twice
            super().request_ended(request, result)
        elif self.num_ends == 1:
            if self.notes:
                super().request_ended(request, result)
            raise Interrupted


@pytest.mark.parametrize("notes", [False, True])
def test_an_end_is_reported_again_where_an_observer_is_interrupted(notes: bool) -> None:
    engine, recorder = small_engine(), Interrupting(notes)
    engine.observe(recorder)
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(Interrupted):
        engine.cancel(request_id)
    engine.stats()
    engine.generate([PROMPTS[1]], PARAMS)
    assert [ended for ended, _ in recorder.ended] == [0, 1]
    assert (recorder.requests, recorder.num_ends) == ({}, 3)
    assert not engine.core.observers.pending_ends


@pytest.mark.parametrize("after", [False, True])
def test_an_end_is_reported_where_noting_it_is_interrupted(after: bool) -> None:
    engine, recorder = observed()
    monitor = Monitor(engine, model_name="small")
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    queue_end = engine.core._queue_end

    def interrupted(request: DynamicInferenceRequest, result: ms.RequestResult) -> None:
        if after:
            queue_end(request, result)
        raise Interrupted

    with patch.object(engine.core, "_queue_end", interrupted), pytest.raises(Interrupted):
        engine.cancel(request_id)
    engine.check_integrity()
    assert (recorder.ended, list(monitor._running)) == ([], [request_id])  # it goes on
    while engine.has_unfinished_requests():
        engine.step()
    assert [result.finish_reason for _, result in recorder.ended] == ["length"]
    assert (recorder.requests, monitor._running) == ({}, {})
    assert monitor.figures().num_ended["length"] == monitor.figures().num_added == 1


class Asking(Recorder):
    """Asks the engine from inside each of its calls."""

    engine: ms.DynamicInferenceEngine

    def request_ended(self, request: DynamicInferenceRequest, result: ms.RequestResult) -> None:
        super().request_ended(request, result)
        self.engine.stats()
        if self.requests:
            self.engine.cancel(min(self.requests))


def test_an_observer_may_call_the_engine_when_a_request_ends() -> None:
    recorder = Asking()
    recorder.engine = engine = small_engine()
    engine.observe(recorder)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    engine.cancel(1)
    assert [request_id for request_id, _ in recorder.ended] == [1, 0, 2]
    engine.unobserve(recorder)
    engine.check_integrity()


def test_who_no_longer_observes_receives_nothing_and_none_observes_twice() -> None:
    engine, recorder = observed()
    engine.observe(recorder)
    engine.generate(PROMPTS[:1], PARAMS)
    assert len(recorder.ended) == 1
    engine.unobserve(recorder)
    engine.generate(PROMPTS[:1], PARAMS)
    assert len(recorder.ended) == 1


@pytest.mark.parametrize("observer", [None, object(), Recorder])
def test_an_observer_needs_all_calls(observer: Any) -> None:
    with pytest.raises(ValueError, match="accepted: an object with the methods request_added"):
        small_engine().observe(observer)
