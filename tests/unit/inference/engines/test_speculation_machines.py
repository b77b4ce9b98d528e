"""The engine's state machines and its failing steps, with drafts of every kind and with async scheduling."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from oracle.budget import costly
from oracle.drafters import MODES, speculating
from oracle.faults import POINTS, InjectedError
from oracle.model_kinds import kind_of_model, kinds
from oracle.serving import small_engine
from oracle.workload import Asked, Client, assert_idle, engine_settings, plans, requests


def beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"speculating_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine_machine = beside("test_engine_machine")
operations_machine = beside("test_operations_machine")
failing_steps = beside("test_failing_steps")
modes = st.sampled_from(list(MODES))


class SpeculatingEngine(engine_machine.EngineMachine):
    @initialize(
        mode=modes,
        kind=kinds,
        slots=st.sampled_from([1, 2, 3, 40]),
        kv_blocks=st.sampled_from([13, 20, 100]),
        max_tokens_per_step=st.sampled_from([8, 13, 32]),
        policy=st.sampled_from(["value", "lru"]),
        plan=plans,
    )
    def start(self, mode: str, max_tokens_per_step: int, **sizes: Any) -> None:
        if "decode_by_replay" in MODES[mode]:  # a step has one chunk and a decode of each other request
            max_tokens_per_step = max(13, max_tokens_per_step)
        with speculating(mode):
            super().start(max_tokens_per_step=max_tokens_per_step, **sizes)


class SpeculatingOperations(operations_machine.OperationsMachine):
    @initialize(mode=modes, kind=kinds, sizes=engine_settings)
    def start(self, mode: str, kind: str, sizes: dict[str, Any]) -> None:
        with speculating(mode):
            super().start(kind, sizes)


SpeculatingEngine.TestCase.settings = costly()
SpeculatingOperations.TestCase.settings = costly()
TestSpeculatingEngine = SpeculatingEngine.TestCase
TestSpeculatingOperations = SpeculatingOperations.TestCase


@costly()
@given(mode=modes, kind=kinds, sizes=engine_settings, asked=st.lists(requests, min_size=1, max_size=5))
def test_answers_are_those_of_plain_decoding(
    mode: str, kind: str, sizes: dict[str, Any], asked: list[Asked]
) -> None:
    with kind_of_model(kind):
        with speculating(mode):
            client = Client(small_engine(**sizes))
        for _ in range(2):
            for one in asked:
                client.ask(one)
            client.finish()
        assert_idle(client.engine)


@pytest.mark.sampled(point=("forward", "commit"))
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_anywhere_costs_no_token_and_leaks_nothing(point: str) -> None:
    tally = Counter[str]()
    for mode in ("right", "mixed", "in place", "async", "encoded, mixed"):
        for number in (0, 2, 5):
            with speculating(mode):
                client = Client(small_engine(num_kv_blocks=14, num_mamba_slots=3, max_sequence_length=96))
            for prompt in failing_steps.HEADS[3:6]:
                client.ask(Asked(tuple(prompt), 14))
            with failing_steps.failing(
                client.engine, point, after=number == 2, calls={number, number + 2}, error=InjectedError
            ) as seen:
                failing_steps.serve_through_failures(client, InjectedError, tally)
            tally.update(seen)
            assert_idle(client.engine)
    assert tally["failed"], "no call ever failed"
    assert point in failing_steps.MAY_LOSE_TRACK or not tally["said it cannot go on"]


def test_a_failed_step_leaves_no_hash_of_tokens_that_are_generated_anew() -> None:
    """Tokens accepted and dropped again may come back others, were it by rounding: their hashes go too."""
    with speculating("right"):
        engine = small_engine()
    prompt = failing_steps.HEADS[3]
    request_id = engine.add_request(prompt, ms.SamplingParams(max_tokens=20))
    request = engine.core.requests[request_id]
    while True:
        before = len(request.tokens)
        with failing_steps.failing(engine, "advance", calls={0}) as seen:
            try:
                engine.step()
            except InjectedError:
                assert len(request.tokens) == before
                assert len(request.chain.hashes) <= before // 8
        assert seen["failed"]
        engine.step()  # the restart
        if not engine.has_unfinished_requests():
            break
