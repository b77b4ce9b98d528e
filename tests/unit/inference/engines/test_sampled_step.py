"""What a step's logits give its requests: requests without finite logits, and the seeds of requests."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from mambaslots.inference.engines.drafter import accepted_tokens
from mambaslots.inference.engines.logits_changes import LogitsChanges
from mambaslots.inference.engines.request_factory import request_seed
from mambaslots.inference.engines.step_runner import DeviceReadback, SampledStep
from oracle.sampled_rows import sample_rows
from oracle.serving import random_tokens, small_engine

VOCABULARY = 6
BAD_ROWS = (
    [math.nan] * VOCABULARY,
    [0.0, math.nan, 1.0, 0.0, 0.0, 0.0],
    [0.0, math.inf, 1.0, 0.0, 0.0, 0.0],
    [-math.inf] * VOCABULARY,
    [-math.inf, math.inf, math.nan, 0.0, 0.0, 0.0],
)
FORBIDDING_ROW = [-math.inf, -math.inf, 2.0, -math.inf, 1.0, -math.inf]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.5},
)


def request(number: int, prompt: Sequence[int] = (1, 2, 3), **settings: Any) -> DynamicInferenceRequest:
    params = ms.SamplingParams(**settings)
    return DynamicInferenceRequest(
        number, list(prompt), params, ms.CheckpointPlan(), PrefixHashChain(8), 0.0, seed=number
    )


def step(
    of: DynamicInferenceRequest, start: int, stop: int, drafts: tuple[int, ...] = ()
) -> ScheduledRequest:
    nothing: Any = SimpleNamespace(path=None)
    return ScheduledRequest(
        nothing.path, of.tokens, start, stop, bool(drafts), drafts=drafts, request=of, allocation=nothing
    )


def sample_step(batch: Sequence[ScheduledRequest], logits: torch.Tensor) -> SampledStep:
    return SampledStep(batch, logits, LogitsChanges(logits.device))


def fields(of: DynamicInferenceRequest) -> tuple[Any, ...]:
    return list(of.tokens), list(of.log_probs), list(of.prompt_log_probs), of.ttft_s


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_requests_without_finite_logits_get_nothing_and_the_others_their_tokens(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    rows = [[0.5, 1.0, 2.0, 0.0, 1.5, 0.0], FORBIDDING_ROW, *BAD_ROWS, [3.0, 1.0, 2.0, 0.0, 1.5, 0.0]]
    logits = torch.tensor(rows, dtype=dtype)
    requests = [request(i, return_log_probs=True, **settings) for i in range(len(rows))]
    before = [fields(one) for one in requests]
    sampled = sample_step([step(one, 0, 3) for one in requests], logits)
    tokens = sampled.append_tokens()
    assert sampled.invalid == (2, 3, 4, 5, 6)
    assert sorted(tokens) == [0, 1, 7]
    for i in (0, 1, 7):
        params = ms.SamplingParams(seed=i, **settings)
        ((token, log_prob, _),) = tokens[i]
        assert [token] == sample_rows(logits[i : i + 1], [params], [0]) == requests[i].new_tokens
        assert log_prob == pytest.approx(float(logits[i].double().log_softmax(-1)[token]), abs=1e-5)
        assert len(tokens[i]) == 1
    for i in sampled.invalid:
        assert fields(requests[i]) == before[i]
    assert sampled.append_tokens() is tokens


@given(data=st.data())
def test_rows_behind_the_first_wrong_draft_do_not_count(data: st.DataObject) -> None:
    """A row counts if all drafts before it are right, and none of them ends the answer."""
    drafts = tuple(data.draw(st.lists(st.integers(0, 2), max_size=4)))
    bad = data.draw(st.lists(st.booleans(), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=len(bad), max_size=len(bad)))
    stop = data.draw(st.sampled_from([VOCABULARY - 1, 2]))
    logits = torch.nn.functional.one_hot(torch.tensor(drawn), VOCABULARY).double() * 9
    for row, is_bad in enumerate(bad):
        if is_bad:
            logits[row] = torch.tensor(data.draw(st.sampled_from(BAD_ROWS)))
    drafting, other = request(5, stop_token_ids=(stop,)), request(6)
    steps = [step(drafting, 2, 3 + len(drafts), drafts), step(other, 0, 3)]
    sampled = sample_step(steps, torch.cat([logits, logits.new_ones(1, VOCABULARY)]))
    tokens = sampled.append_tokens()
    expected: list[int] | None = []
    for row, token in enumerate(drawn):
        if bad[row]:
            expected = None
            break
        expected.append(token)
        if row == len(drafts) or token != drafts[row] or token == stop:
            break
    assert [one.token for one in tokens[6]] == [0]
    assert sampled.invalid == ((5,) if expected is None else ())
    assert drafting.new_tokens == (expected or [])
    assert [one.token for one in tokens.get(5, ())] == (expected or [])
    if expected:
        assert expected == accepted_tokens(drafts, drawn, (stop,))


@pytest.mark.parametrize("bad_row", range(4))
def test_rows_of_prompt_log_probs_count(bad_row: int) -> None:
    asking = request(1, (3, 1, 2, 4), skip_prompt_log_probs=False)
    before = fields(asking)
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[bad_row, 2] = math.nan
    other = request(2)
    sampled = sample_step([step(asking, 0, 4), step(other, 0, 3)], logits)
    assert list(sampled.append_tokens()) == [2]
    assert sampled.invalid == (1,)
    assert fields(asking) == before


def test_a_part_of_a_prompt_counts_too() -> None:
    asking = request(1, (3, 1, 2, 4), skip_prompt_log_probs=False)
    logits = torch.zeros(2, VOCABULARY)
    sampled = sample_step([step(asking, 0, 2)], logits)
    assert sampled.append_tokens() == {}
    assert sampled.invalid == ()
    assert asking.prompt_log_probs == [pytest.approx(-math.log(VOCABULARY))] * 2
    logits[1] = -math.inf
    sampled = sample_step([step(asking, 2, 4)], logits)
    assert sampled.append_tokens() == {}
    assert sampled.invalid == (1,)
    assert len(asking.prompt_log_probs) == 2


def test_a_step_without_tokens_and_log_probs_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = sample_step([step(request(1), 0, 2)], torch.zeros(0, VOCABULARY))
    monkeypatch.setattr(torch, "cat", None)
    assert sampled.append_tokens() == {}
    assert sampled.invalid == ()


@pytest.mark.parametrize("commits_later", [False, True])
def test_a_step_waits_for_its_tokens_where_a_block_becomes_findable(
    commits_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other steps end first; with async scheduling all of them do. Each is read once."""
    engine = small_engine()
    engine.core.step_runner._is_async = commits_later
    read, end_step, events = DeviceReadback.read, engine.context.end_step, list[str]()

    def reading(readback: DeviceReadback) -> Any:
        events.append("read")
        return read(readback)

    def ending(*arguments: Any, **settings: Any) -> None:
        end_step(*arguments, **settings)
        events.append("end")

    monkeypatch.setattr(DeviceReadback, "read", reading)
    monkeypatch.setattr(engine.context, "end_step", ending)
    size = engine.config.block_size_tokens
    engine.generate([random_tokens(size - 3, seed=1)], ms.SamplingParams(max_tokens=5))
    if commits_later:  # the next step is launched before
        assert events == ["end", *["end", "read"] * 4, "read"]
    else:  # in the fourth step, the last token of the block is computed
        assert events == [*["end", "read"] * 3, "read", "end", "end", "read"]


def test_host_tensors_name_their_device() -> None:
    asking = request(1, (3, 1, 2, 4), skip_prompt_log_probs=False, return_log_probs=True)
    drawing = request(2, return_log_probs=True, temperature=1.0, top_k=3, top_p=0.9)
    waiting = request(3, (3, 1, 2, 4), skip_prompt_log_probs=False)
    logits = torch.zeros(7, VOCABULARY)
    with torch.device("meta"):
        tokens = sample_step(
            [step(waiting, 0, 2), step(asking, 0, 4), step(drawing, 0, 3)], logits
        ).append_tokens()
    assert sorted(tokens) == [1, 2]
    assert len(asking.prompt_log_probs) == 3
    assert len(waiting.prompt_log_probs) == 2


# ---- seeds


def test_a_seed_of_its_own_is_the_seed_of_the_request() -> None:
    assert request_seed(ms.SamplingParams(seed=7), 1, 2) == 7
    assert request_seed(ms.SamplingParams(seed=0), 1, 2) == 0
    seeds = {request_seed(ms.SamplingParams(), engine, i) for engine in range(9) for i in range(200)}
    assert len(seeds) == 1800
    assert all(0 <= seed < 2**63 for seed in seeds)


PARAMS = {"max_tokens": 12, "temperature": 1.5}


def answers(engine: ms.DynamicInferenceEngine, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    results = engine.generate(prompts, ms.SamplingParams(**PARAMS, **settings))
    return [result.tokens for result in results]


def test_requests_without_a_seed_differ_and_engines_with_the_same_seed_agree() -> None:
    prompts = [random_tokens(20, seed=1)] * 4
    first, again, other = (answers(small_engine(seed=seed), prompts) for seed in (3, 3, 4))
    assert first == again
    assert len(set(map(tuple, first + other))) == 8
    engine = small_engine(seed=3)
    alone = [answers(engine, prompts[:1])[0] for _ in prompts]
    assert alone == first  # one after the other, and resumed from the cache


def test_a_given_seed_does_not_depend_on_the_engine_or_the_request() -> None:
    prompts = [random_tokens(20, seed=1)] * 2
    first, other = (answers(small_engine(seed=seed), prompts, seed=11) for seed in (0, 5))
    assert first == other
    assert first[0] == first[1]
