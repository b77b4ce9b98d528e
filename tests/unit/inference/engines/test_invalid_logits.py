"""Logits that are NaN or infinite end their request, alone, and nothing that it computed is cached."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import mambaslots as ms
import pytest
import torch
from oracle.serving import random_tokens, small_engine
from oracle.workload import HEADS, Asked, Client, assert_idle

pytestmark = pytest.mark.usefixtures("kind")

Spoil = Callable[[torch.Tensor, int], None]

SPOILS: dict[str, Spoil] = {
    "NaN": lambda logits, row: logits[row].fill_(float("nan")),
    "one NaN": lambda logits, row: logits[row, 3:4].fill_(float("nan")),
    "infinity": lambda logits, row: logits[row, 5:6].fill_(float("inf")),
    "nothing but -infinity": lambda logits, row: logits[row].fill_(float("-inf")),
}


@contextmanager
def spoiling(engine: ms.DynamicInferenceEngine, spoil: Spoil, request_id: int, step: int) -> Iterator[None]:
    """The request's rows of logits are spoilt in the `step`-th step that has any."""
    model, num_steps = engine.model, 0

    def spoilt(inputs: ms.StepInputs) -> torch.Tensor:
        nonlocal num_steps
        logits, row = model(inputs).clone(), 0
        for request_step in engine.context.batch:
            rows = range(row, row + len(request_step.logit_positions))
            row = rows.stop
            if request_step.request.request_id == request_id and rows:
                if num_steps == step:
                    for spoilt_row in rows:
                        spoil(logits, spoilt_row)
                num_steps += 1
        return logits

    with patch.object(engine, "model", spoilt):
        yield


def resumable(engine: ms.DynamicInferenceEngine, tokens: list[int]) -> int:
    chain = ms.PrefixHashChain(8)
    chain.extend_to(tokens)
    return engine.context.prefix_cache.resumable_tokens(chain)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [0, 1, 3, 7])  # the prompt's last step, decodes, one that ends a block
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_request_with_invalid_logits_ends_alone(spoil: Spoil, step: int) -> None:
    client = Client(small_engine())
    engine = client.engine
    for prompt in (HEADS[2], HEADS[12]):
        client.ask(Asked(tuple(prompt), 12))
    prompt = random_tokens(17, seed=3)
    bad = engine.add_request(prompt, ms.SamplingParams(max_tokens=12))
    ended = []
    with spoiling(engine, spoil, bad, step):
        while bad in engine.core.requests:
            ended += [result for result in client.step().finished if result.request_id == bad]
            engine.check_integrity()
    (result,) = ended
    assert (result.finish_reason, len(result.tokens)) == ("invalid_logits", step)
    assert resumable(engine, prompt + result.tokens) == 0
    client.finish()
    assert_idle(engine)
    assert client.ask(Asked(tuple(HEADS[12]), 3))
    client.finish()


def test_forbidden_tokens_are_no_invalid_logits() -> None:
    engine = small_engine()
    request_id = engine.add_request(HEADS[4], ms.SamplingParams(max_tokens=1))
    with spoiling(engine, lambda logits, row: logits[row, :200].fill_(float("-inf")), request_id, 0):
        (result,) = engine.step().finished
    assert result.finish_reason == "length"
    assert result.tokens[0] >= 200


def test_a_prefix_that_others_resumed_from_is_forgotten_with_the_request() -> None:
    """What the request resumed from may be what was wrong."""
    engine = small_engine()
    prompt = random_tokens(24, seed=4)
    engine.generate([prompt], ms.SamplingParams(max_tokens=1))
    assert resumable(engine, prompt) == 24
    bad = engine.add_request([*prompt, 1], ms.SamplingParams(max_tokens=4))
    with spoiling(engine, SPOILS["NaN"], bad, 0):
        (result,) = engine.step().finished
    assert result.finish_reason == "invalid_logits"
    assert resumable(engine, prompt) == 0
    client = Client(engine)
    client.ask(Asked(tuple(prompt), 3))
    client.finish()
    assert client.results[0].num_resumed_tokens == 0
    assert_idle(engine)


def test_earlier_parts_of_a_prompt_are_found_until_the_part_with_invalid_logits() -> None:
    """Only a prompt's last part has logits: with them, what the parts before registered is forgotten."""
    engine = small_engine(max_tokens_per_step=16, checkpoint_plan=ms.CheckpointPlan(prefill_interval=8))
    prompt, cache = random_tokens(40, seed=6), engine.context.prefix_cache
    bad = engine.add_request(prompt, ms.SamplingParams(max_tokens=4))
    with spoiling(engine, SPOILS["NaN"], bad, 0):
        for stop in (16, 32):
            assert engine.step().finished == ()
            assert resumable(engine, prompt) == stop
        (result,) = engine.step().finished
    assert result.finish_reason == "invalid_logits"
    assert resumable(engine, prompt) == 0
    assert (cache.tree.block_of_hash, cache.cached_states.slot_of_block) == ({}, {})
    assert_idle(engine)


def test_blocks_that_another_request_resumed_from_meanwhile_stay_without_their_states() -> None:
    client = Client(
        small_engine(max_tokens_per_step=24, checkpoint_plan=ms.CheckpointPlan(prefill_interval=8))
    )
    engine, prompt = client.engine, random_tokens(40, seed=6)
    bad = engine.add_request(prompt, ms.SamplingParams(max_tokens=4))
    with spoiling(engine, SPOILS["NaN"], bad, 0):
        client.step()
        client.ask(Asked((*prompt[:16], 3), 9))
        while bad in engine.core.requests:
            client.step()
            engine.check_integrity()
    assert engine.context.requests  # the other one runs, and holds the blocks of 16 tokens
    assert len(engine.context.prefix_cache.tree.block_of_hash) == 2
    assert resumable(engine, prompt) == 0
    client.finish()
    assert client.results[0].num_resumed_tokens == 16
    assert_idle(engine)


def test_a_block_that_another_request_computes_in_the_same_step_stays() -> None:
    client = Client(small_engine())
    prompt = tuple(random_tokens(16, seed=5))
    bad = client.engine.add_request(prompt, ms.SamplingParams(max_tokens=4, skip_prompt_log_probs=False))
    client.ask(Asked(prompt, 4, prompt_log_probs=True))
    with spoiling(client.engine, SPOILS["NaN"], bad, 0):
        (result,) = client.step().finished
    assert (result.request_id, result.finish_reason) == (bad, "invalid_logits")
    assert len(client.engine.context.prefix_cache.kv_blocks.tree.block_of_hash) == 2
    client.finish()
    assert_idle(client.engine)


def test_streams_and_generate_say_so() -> None:
    engine = small_engine()
    stream = engine.stream(HEADS[4], ms.SamplingParams(max_tokens=4))
    with spoiling(engine, SPOILS["NaN"], stream.request_id, 2):
        assert len(list(stream)) == 2
    assert stream.finish_reason == "invalid_logits"
    with spoiling(engine, SPOILS["NaN"], stream.request_id + 1, 0):
        results = engine.generate([HEADS[4], HEADS[12]], ms.SamplingParams(max_tokens=2))
    assert [result.finish_reason for result in results] == ["invalid_logits", "length"]
    assert_idle(engine)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_drafts_of_a_request_with_invalid_logits_leave_nothing(step: int) -> None:
    client = Client(small_engine(num_speculative_tokens=4))
    prompt = [1, 2, 3, 4] * 5
    bad = client.engine.add_request(prompt, ms.SamplingParams(max_tokens=20))
    client.ask(Asked(tuple(HEADS[12]), 12))
    with spoiling(client.engine, SPOILS["NaN"], bad, step):
        while bad in client.engine.core.requests:
            client.step()
            client.engine.check_integrity()
    assert resumable(client.engine, prompt) == 0
    client.finish()
    assert_idle(client.engine)
