"""Engines under pressure, requests whose answers the recurrence knows, and a client that checks them all."""

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import mambaslots as ms
import numpy as np
import torch
from hypothesis import strategies as st
from oracle.plans import SwitchedPlan
from oracle.serving import TOLERANCE, expected_answer, oracle_of, random_tokens, small_engine, small_model

BLOCK = 8
LONGEST_ANSWER = 24
TEXTS = [random_tokens(56, seed) for seed in range(2)]
HEADS = [text[:n] for text in TEXTS for n in (1, 8, 9, 16, 17, 31, 40, 56)]
FORKS = [TEXTS[0][:n] + random_tokens(9, seed=n) for n in (8, 24, 40)]


class Asked(NamedTuple):
    """One request of a client."""

    prompt: tuple[int, ...]
    length: int
    prompt_log_probs: bool = False
    salt: bytes | None = None


plans = st.builds(
    SwitchedPlan,
    step_ends=st.booleans(),
    branch=st.booleans(),
    decode=st.sampled_from(["rolling", "off", BLOCK, 2 * BLOCK]),
    prefill_interval=st.sampled_from([None, BLOCK, 2 * BLOCK]),
    marks=st.lists(st.integers(0, 60), max_size=2).map(tuple),
)
engine_settings = st.fixed_dictionaries(
    {
        "num_mamba_slots": st.sampled_from([1, 2, 3, 40]),
        "num_kv_blocks": st.sampled_from([12, 16, 24, 100]),
        "max_tokens_per_step": st.sampled_from([10, 13, 32]),
        "max_requests": st.just(3),
        "max_sequence_length": st.just(96),
        "eviction_policy": st.sampled_from(["value", "lru"]),
        "checkpoint_plan": plans,
    }
)
requests = st.builds(
    Asked,
    prompt=st.sampled_from(HEADS + FORKS).map(tuple),
    length=st.integers(1, LONGEST_ANSWER),
    prompt_log_probs=st.sampled_from([False, False, False, True]),
    salt=st.sampled_from([None, None, None, b"tenant"]),
)


def answer(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The longest answer; shorter ones are its heads."""
    return expected_answer(prompt, LONGEST_ANSWER)


def prompt_log_probs(prompt: tuple[int, ...]) -> list[float]:
    return _prompt_log_probs(small_model(), prompt)


@cache
def _prompt_log_probs(model: Any, prompt: tuple[int, ...]) -> list[float]:
    logits = oracle_of(model).logits(prompt)
    return torch.log_softmax(logits, dim=-1)[range(len(prompt) - 1), prompt[1:]].tolist()


class Client:
    """Asks an engine, and holds what comes back against the recurrence, and each token against its report."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self.engine = engine
        self.asked: dict[int, Asked] = {}
        self.arrived: dict[int, list[int]] = defaultdict(list)
        self.results: list[ms.RequestResult] = []
        self.own: set[int] = set()
        self.steps_fail = False  # a request then resumes behind the prompt log-probs that it has already

    def ask(self, asked: Asked, plan: ms.CheckpointPlan | None = None) -> int:
        params = ms.SamplingParams(
            max_tokens=asked.length,
            return_log_probs=True,
            skip_prompt_log_probs=not asked.prompt_log_probs,
        )
        request_id = self.engine.add_request(
            asked.prompt, params, cache_salt=asked.salt, checkpoint_plan=plan
        )
        self.asked[request_id] = asked
        self.own.add(request_id)
        return request_id

    def step(self) -> ms.StepReport:
        report = self.engine.step()
        assert all(report.tokens.values())
        for request_id in self.own & report.tokens.keys():
            self.arrived[request_id] += [one.token for one in report.tokens[request_id]]
        for result in report.finished:
            if result.request_id in self.own:
                self.take(result)
        return report

    def take(self, result: ms.RequestResult) -> None:
        asked = self.asked.pop(result.request_id)
        assert result.finish_reason == "cancelled" or len(result.tokens) == asked.length
        tokens, log_probs = (values[: len(result.tokens)] for values in answer(asked.prompt))
        assert result.tokens == tokens == self.arrived.pop(result.request_id, [])
        np.testing.assert_allclose(result.log_probs or [], log_probs, rtol=0, atol=TOLERANCE)
        if result.finish_reason != "cancelled":
            computed = sum(result.computed_by_reason.values())
            assert result.num_prompt_tokens == len(asked.prompt) == result.num_resumed_tokens + computed
            if asked.prompt_log_probs:
                assert result.num_resumed_tokens == 0 or self.steps_fail
                expected = prompt_log_probs(asked.prompt)
                np.testing.assert_allclose(result.prompt_log_probs, expected, rtol=0, atol=TOLERANCE)  # type: ignore[arg-type]
        self.results.append(result)

    def cancel(self, request_id: int) -> None:
        self.take(self.engine.cancel(request_id))

    def finish(self, most_steps: int = 600) -> None:
        """Step to the end, checking integrity after every step."""
        while self.engine.has_unfinished_requests():
            most_steps -= 1
            assert most_steps > 0, "the engine does not go on"
            self.step()
            self.engine.context.check_integrity()
        assert not self.asked, "a request is lost"


def assert_idle(engine: ms.DynamicInferenceEngine, pinned_blocks: int = 0) -> None:
    """Nothing is held any more but what is pinned."""
    context, slots = engine.context, engine.context.prefix_cache.slots
    context.check_integrity()
    assert context.prefix_cache.kv_blocks.num_held == pinned_blocks
    assert slots.reserved == {}
    assert pinned_blocks or slots.pins == {}
    assert context.requests == []


def counted_moves(engine: ms.DynamicInferenceEngine) -> list[int]:
    """Units that went to states, and to KV, from now on: a list that the engine's memory counts up."""
    unit_borrower: Any = engine.context.prefix_cache.kv_blocks.unit_borrower
    counts = [0, 0]

    def count(side: int, name: str) -> None:
        give = getattr(unit_borrower, name)

        def counted(unit: int) -> None:
            give(unit)
            counts[side] += 1

        setattr(unit_borrower, name, counted)

    count(0, "_give_to_states")
    count(1, "_give_to_kv")
    return counts


def pressed_engine(**overrides: object) -> ms.DynamicInferenceEngine:
    """Few of everything: chunked prefill, pauses, evictions of requests, KV and states."""
    settings: dict[str, object] = {
        "num_kv_blocks": 12,
        "num_mamba_slots": 3,
        "max_tokens_per_step": 13,
        "max_requests": 3,
        "max_sequence_length": 96,
    }
    return small_engine(**(settings | overrides))
