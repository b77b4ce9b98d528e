"""Penalties, biases, min_p and min_tokens, against plain Python on the logits of the recurrence."""

import math
from contextlib import suppress
from functools import cache
from typing import Any
from unittest import mock

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.kernels.reference import torch_penalties
from oracle.budget import costly
from oracle.drafters import RightDrafter, WrongDrafter
from oracle.sampled_rows import sample_rows
from oracle.serving import oracle_of, random_tokens, run_checked, small_engine, small_model

LENGTH = 14
PROMPT = random_tokens(29, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": -2.0},  # below 0: this model seldom repeats itself
    "frequency": {"frequency_penalty": -1.0, "presence_penalty": -1.5},
    "all": {
        "repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.4, "min_p": 0.2,
        "temperature": 0.7, "top_p": 0.9, "seed": 5, "logit_bias": {3: 2.0, 9: -100.0},
    },
    "min_p": {"min_p": 0.3, "temperature": 1.5, "seed": 1},
    "bias": {"logit_bias": {7: 100.0}, "temperature": 1.0, "seed": 2},
}  # fmt: skip


def changed_row(
    row: torch.Tensor, prompt: list[int], answer: list[int], params: ms.SamplingParams
) -> torch.Tensor:
    """One row of logits after all changes, by their definitions."""
    values = row.double().tolist()
    for token in range(len(values)):
        count = answer.count(token)
        if token in prompt or count:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        values[token] += dict(params.biases).get(token, 0.0)
        if len(answer) < params.min_tokens and token in params.stops:
            values[token] = -math.inf
    if params.min_p and not params.greedy:
        temperature = 1.0 if params.temperature is None else params.temperature
        likelihoods = [math.exp((value - max(values)) / temperature) for value in values]
        values = [
            value if likely >= params.min_p else -math.inf
            for value, likely in zip(values, likelihoods, strict=True)
        ]
    return torch.tensor(values, dtype=torch.float64)


def expected(prompt: list[int], params: ms.SamplingParams) -> list[int]:
    return _expected(tuple(prompt), params, small_model())


@cache
def _expected(prompt: tuple[int, ...], params: ms.SamplingParams, model: Any) -> list[int]:
    lm = oracle_of(model)
    first = len(prompt)
    tokens = list(prompt)
    while len(tokens) - first < params.max_tokens:
        row = lm.logits(tokens)[-1]
        row = changed_row(row, tokens[:first], tokens[first:], params)
        (token,) = sample_rows(row[None], [params], [len(tokens) - first])
        tokens.append(token)
        if token in params.stops:
            break
    return tokens[len(prompt) :]


def params_of(name: str, **more: Any) -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=LENGTH, **SETTINGS[name] | more)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_definitions(name: str) -> None:
    params = params_of(name)
    wanted = expected(PROMPT, params)
    plain = expected(PROMPT, ms.SamplingParams(max_tokens=LENGTH))
    assert wanted != plain, "the setting changes something here"
    engine = small_engine()
    ids = [engine.add_request(PROMPT, one) for one in (params, ms.SamplingParams(max_tokens=LENGTH))]
    results = run_checked(engine)
    assert [results[one].tokens for one in ids] == [wanted, plain], "and nothing of its neighbour"
    (again,) = engine.generate([PROMPT], params)
    assert again.tokens == wanted
    assert again.num_resumed_tokens > 0


@pytest.mark.sampled
@pytest.mark.parametrize("drafter", [RightDrafter, WrongDrafter])
@pytest.mark.parametrize("name", ["repetition", "all"])
def test_a_draft_counts_at_its_position(name: str, drafter: Any) -> None:
    params = params_of(name)
    engine = small_engine(num_speculative_tokens=3, make_drafter=drafter)
    results = engine.generate([PROMPT, PROMPT[:11]], params)
    assert [result.tokens for result in results] == [expected(PROMPT, params), expected(PROMPT[:11], params)]


@pytest.mark.sampled(overrides=2)
@pytest.mark.parametrize(
    "overrides", [{"num_kv_blocks": 14}, {"async_scheduling": True}, {"max_tokens_per_step": 9}], ids=str
)
def test_counts_survive_pauses_cuts_and_steps_launched_ahead(overrides: dict[str, Any]) -> None:
    params = params_of("all", return_log_probs=True)
    engine = small_engine(**{"max_sequence_length": 64, **overrides})
    prompts = [PROMPT, PROMPT[:9], PROMPT[3:20], PROMPT[::-1]]
    for result, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        assert result.tokens == expected(prompt, params)


@pytest.mark.sampled
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "place", ["model", "_up_to_date", "_to_device", "_biases", "_apply_penalties", "count", "_free_row"]
)
def test_a_step_that_fails_anywhere_counts_no_token_twice(place: str, drafts: int) -> None:
    params = params_of("all")
    drafting: Any = {"num_speculative_tokens": drafts, "make_drafter": WrongDrafter} if drafts else {}
    for good_calls in (1, 2):
        engine = small_engine(**drafting)
        owner = engine if place == "model" else engine.core.step_runner.logits_changes
        real, calls = getattr(owner, place), []

        def failing(*arguments: Any, calls: Any = calls, real: Any = real, after: int = good_calls) -> Any:
            calls.append(1)
            if len(calls) == after + 1 and after % 2:
                raise MemoryError
            result = real(*arguments)
            if len(calls) == after + 1:
                raise MemoryError
            return result

        with mock.patch.object(owner, place, failing):
            ids = [engine.add_request(prompt, params) for prompt in (PROMPT, PROMPT[:11])]
            results: dict[int, ms.RequestResult] = {}
            while engine.has_unfinished_requests():
                with suppress(MemoryError):
                    results |= {one.request_id: one for one in engine.step().finished}
        assert [results[one].tokens for one in ids] == [
            expected(PROMPT, params),
            expected(PROMPT[:11], params),
        ]


def test_steps_of_the_same_requests_send_nothing_to_the_device_again() -> None:
    params = params_of("all", min_tokens=6)
    engine = small_engine()
    changes = engine.core.step_runner.logits_changes
    ids = [engine.add_request(prompt, params) for prompt in (PROMPT, PROMPT[1:12])]
    results: dict[int, ms.RequestResult] = {}
    sent: list[int] = []
    with mock.patch.object(changes, "_to_device", side_effect=changes._to_device) as sending:
        while engine.has_unfinished_requests():
            if len(sent) == 9:
                ids.append(engine.add_request(PROMPT[:9], params))
            before = sending.call_count
            results |= {one.request_id: one for one in engine.step().finished}
            sent.append(sending.call_count - before)
    decodes = sent[2:9]  # `min_tokens` end within them, once
    assert sorted(map(bool, decodes)) == [False] * 6 + [True]
    assert any(sent[9:]), "another request makes another batch"
    for one, prompt in zip(ids, (PROMPT, PROMPT[1:12], PROMPT[:9]), strict=True):
        assert results[one].tokens == expected(prompt, params)


def test_counts_are_freed_with_their_requests() -> None:
    engine = small_engine()
    engine.generate([PROMPT, PROMPT[:9]], params_of("all"))
    assert not engine.core.step_runner.logits_changes._counted
    assert not engine.core.step_runner.logits_changes._counts.numel()


def test_the_beginning_of_an_answer_counts_as_answer() -> None:
    params = params_of("frequency")
    whole = expected(PROMPT, params)
    more = params_of("frequency", num_given_tokens=5)
    (rest,) = small_engine().generate([PROMPT + whole[:5]], more)
    assert rest.tokens == whole[5:]


def test_no_stop_token_ends_an_answer_before_min_tokens_or_with_ignore_eos() -> None:
    (free,) = small_engine().generate([PROMPT], ms.SamplingParams(max_tokens=LENGTH))
    stop = free.tokens[2]
    stops = {"max_tokens": LENGTH, "stop_token_ids": (stop,)}
    engine = small_engine()
    (ended,) = engine.generate([PROMPT], ms.SamplingParams(**stops))
    assert ended.tokens == free.tokens[: free.tokens.index(stop) + 1]
    (ignoring,) = engine.generate([PROMPT], ms.SamplingParams(**stops, ignore_eos=True))
    assert ignoring.tokens == free.tokens
    params = ms.SamplingParams(**stops, min_tokens=8)
    (longer,) = engine.generate([PROMPT], params)
    assert longer.tokens == expected(PROMPT, params)
    assert stop not in longer.tokens[:8]


@costly()
@given(data=st.data())
def test_kernels_agree_with_the_definition(data: st.DataObject) -> None:
    vocabulary, generator = data.draw(st.sampled_from([5, 4096, 5000])), torch.Generator().manual_seed(0)
    logits = torch.randn(4, vocabulary, generator=generator)
    counts = torch.randint(0, 6, (3, vocabulary), generator=generator, dtype=torch.int32)
    count_rows = torch.tensor([2, -1, 1, -1])
    numbers = data.draw(st.tuples(st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2)))
    settings = torch.tensor([[1.3, 9.0, one, 9.0] for one in numbers])
    wanted = logits.clone().double()
    for row, (count_row, (r, f, p)) in enumerate(zip(count_rows, settings.T.double().tolist(), strict=True)):
        if count_row < 0:
            continue
        values = []
        for value, found in zip(wanted[row].tolist(), counts[count_row].tolist(), strict=True):
            if found:
                value = value / r if value > 0 else value * r
            values.append(value - f * (found // 2) - p * (found > 1))
        wanted[row] = torch.tensor(values)
    ours = torch_penalties.penalize(logits, counts, count_rows, settings)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    pytest.importorskip("triton")
    from mambaslots.inference.kernels.penalties import penalize

    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [one.to(device) for one in (counts, count_rows, settings)]
    compiled = penalize(logits.to(device), *on_device)
    torch.testing.assert_close(compiled.cpu(), ours, rtol=1e-6, atol=1e-6)
    strided = logits.bfloat16().to(device).T.contiguous().T
    assert torch.equal(
        penalize(strided, *on_device), penalize(logits.bfloat16().float().to(device), *on_device)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5), ("frequency_penalty", 2.5), ("presence_penalty", -3), ("repetition_penalty", 0),
        ("min_tokens", 99), ("logit_bias", {3: 200.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", 5),
        ("logit_bias", {"a": 1.0}), ("ignore_eos", 1), ("min_p", math.nan),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        ms.SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_where_every_token_is_a_stop_token_min_tokens_is_refused() -> None:
    engine = small_engine()
    every = tuple(range(engine.context.spec.vocab_size))
    with pytest.raises(ValueError, match="min_tokens is 2 and every token is a stop token"):
        engine.add_request(PROMPT, ms.SamplingParams(min_tokens=2, stop_token_ids=every))


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        small_engine().add_request(PROMPT, ms.SamplingParams(logit_bias={10**6: 1.0}))
