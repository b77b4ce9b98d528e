"""Serving with the cache gives what the token-by-token recurrence gives, and resumes where it should."""

import mambaslots as ms
import numpy as np
import pytest
import torch
from ideal_resume import IdealResume
from oracle.budget import is_quick
from oracle.serving import (
    TOLERANCE,
    assert_answers,
    expected_answer,
    is_async,
    oracle_of,
    random_tokens,
    run_checked,
    serve_checked,
    small_engine,
    small_model,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("kind")

BLOCK = 8


@pytest.mark.sampled(length=(1, 7, 8, 9, 16, 17, 33, 65))
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 18, 24, 31, 32, 33, 41, 64, 65])
def test_a_repeated_prompt_resumes_from_its_deepest_boundary(length: int) -> None:
    engine, prompt = small_engine(), random_tokens(length, seed=length)
    serve_checked(engine, [prompt])
    (again,) = serve_checked(engine, [prompt])
    assert again.num_resumed_tokens == (length - 1) // BLOCK * BLOCK


@pytest.mark.sampled
@pytest.mark.parametrize("length", [5, 8, 16, 17, 23, 24])
@pytest.mark.parametrize("extra", [1, 2, BLOCK, 3 * BLOCK + 1])
def test_an_extended_prompt_resumes_where_the_first_ended(length: int, extra: int) -> None:
    engine, prompt = small_engine(), random_tokens(length, seed=length)
    serve_checked(engine, [prompt], length=1)
    (longer,) = serve_checked(engine, [prompt + random_tokens(extra, seed=99)])
    assert longer.num_resumed_tokens == min(length, length + extra - 1) // BLOCK * BLOCK


def test_the_next_turn_resumes_from_the_state_taken_while_decoding() -> None:
    engine, prompt = small_engine(), random_tokens(20, seed=1)
    (first,) = serve_checked(engine, [prompt], length=30)
    history = prompt + first.tokens
    (second,) = serve_checked(engine, [history + random_tokens(6, seed=2)])
    assert second.num_resumed_tokens == (len(history) - 1) // BLOCK * BLOCK


def test_a_fork_is_paid_by_the_first_sibling_stored_by_it_and_used_by_the_next() -> None:
    engine, shared = small_engine(), random_tokens(40, seed=1)
    tails = [random_tokens(20, seed=seed) for seed in (2, 3, 4)]
    resumed = [serve_checked(engine, [shared + tail])[0].num_resumed_tokens for tail in tails]
    assert resumed == [0, 0, 40]


def test_branch_and_tail_are_taken_in_the_same_prefill() -> None:
    engine, shared = small_engine(), random_tokens(40, seed=1)
    for seed in (2, 3):
        serve_checked(engine, [shared + random_tokens(20, seed)])
    cache = engine.context.prefix_cache
    sibling = shared + random_tokens(20, seed=3)
    match = engine.context.admission.match(_request_like(engine, sibling))
    depths = [i + 1 for i, block in enumerate(match.blocks) if block in cache.cached_states.slot_of_block]
    assert depths == [5, 7]
    assert cache.tree.num_children[match.blocks[4]] == 2


def _request_like(engine: ms.DynamicInferenceEngine, prompt: list[int]) -> object:
    request_id = engine.add_request(prompt)
    request = engine.core.requests[request_id]
    engine.cancel(request_id)
    return request


@pytest.mark.sampled(max_tokens_per_step=(9, 20))
@pytest.mark.parametrize("max_tokens_per_step", [8, 9, 12, 20, 33])
def test_chunks_of_any_size_compute_the_same(max_tokens_per_step: int) -> None:
    engine = small_engine(max_tokens_per_step=max_tokens_per_step, max_requests=3)
    prompts = [random_tokens(n, seed=5) for n in (70, 41, 64, 16, 9, 1)]
    serve_checked(engine, prompts)
    again = serve_checked(engine, prompts)
    assert [r.num_resumed_tokens for r in again] == [(n - 1) // BLOCK * BLOCK for n in (70, 41, 64, 16, 9, 1)]


@pytest.mark.sampled(slots=(1, 2))
@pytest.mark.parametrize("slots", [1, 2, 3, 50])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_any_state_pool_serves_many_at_once(slots: int, policy: str) -> None:
    engine = small_engine(
        num_mamba_slots=slots, eviction_policy=policy, max_tokens_per_step=24,
        checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK),
    )  # fmt: skip
    base = random_tokens(60, seed=8)
    prompts = [
        base[:n] + random_tokens(m, seed=m) for n, m in ((60, 1), (33, 0), (16, 20), (60, 0), (8, 8), (59, 3))
    ]
    for _ in range(2):
        serve_checked(engine, prompts, length=12)
    if slots == 50 and policy == "lru":
        assert all(r.num_resumed_tokens for r in serve_checked(engine, prompts))


def test_a_prefix_shared_in_flight_is_computed_once() -> None:
    engine, prompt = small_engine(), random_tokens(50, seed=4)
    first, second, third = serve_checked(engine, [prompt, prompt, prompt[:30]])
    assert first.num_resumed_tokens == 0
    assert second.num_resumed_tokens == 48
    assert third.num_resumed_tokens == 0  # the plan took no state inside its part of the prefix


def test_requests_pause_when_kv_runs_out_and_all_finish() -> None:
    engine = small_engine(num_kv_blocks=12, max_requests=4)
    prompts = [random_tokens(20, seed) for seed in range(4)]
    params = ms.SamplingParams(max_tokens=40, return_log_probs=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    paused = 0
    results = {}
    while engine.has_unfinished_requests():
        results |= {result.request_id: result for result in engine.step().finished}
        engine.context.check_integrity()
        paused += engine.stats().num_paused
    assert paused > 0
    assert sum(result.num_recomputed_tokens for result in results.values()) > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_answers(prompt, results[request_id])
        assert results[request_id].num_prompt_tokens == 20


def test_an_evicted_request_restarts_from_its_last_checkpoint() -> None:
    engine, prompt = small_engine(), random_tokens(20, seed=1)
    request_id = engine.add_request(prompt, ms.SamplingParams(max_tokens=30, return_log_probs=True))
    for _ in range(16):
        engine.step()
    engine.core.scheduler.preempt(engine.core.requests[request_id])
    engine.context.check_integrity()
    result = run_checked(engine)[request_id]
    assert_answers(prompt, result)
    # Computed 35 tokens, and one in a step that was not read; the rolling state lies at 32.
    assert result.num_recomputed_tokens == 35 + is_async(engine) - 32
    assert result.num_resumed_tokens == 0  # counted on the first way through only


def test_a_paused_request_keeps_a_state_that_only_a_durable_slot_holds() -> None:
    engine = small_engine(num_kv_blocks=5, max_requests=2, num_mamba_slots=1)
    prompts = [random_tokens(8, seed=1), random_tokens(8, seed=2)]
    serve_checked(engine, prompts, length=24)


def test_salts_separate_and_equal_salts_share() -> None:
    engine, prompt = small_engine(), random_tokens(40, seed=1)
    params = ms.SamplingParams(max_tokens=1, return_log_probs=True)
    salts = [None, b"a", b"b", b"a", "a", None]
    resumed = []
    for salt in salts:
        (result,) = engine.generate([prompt], params, cache_salt=salt)
        assert_answers(prompt, result)
        resumed.append(result.num_resumed_tokens)
    assert resumed == [0, 0, 0, 32, 32, 32]


def test_prompt_log_probs_turn_resuming_off_for_that_request() -> None:
    engine, prompt = small_engine(max_tokens_per_step=16), random_tokens(41, seed=1)
    serve_checked(engine, [prompt])
    params = ms.SamplingParams(max_tokens=2, return_log_probs=True, skip_prompt_log_probs=False)
    (result,) = engine.generate([prompt], params)
    assert_answers(prompt, result)
    assert result.num_resumed_tokens == 0
    assert result.computed_by_reason["disabled"] == 41
    logits = torch.log_softmax(_oracle_logits(prompt), dim=-1)
    expected = [float(logits[i, prompt[i + 1]]) for i in range(40)]
    assert result.prompt_log_probs is not None
    np.testing.assert_allclose(result.prompt_log_probs, expected, rtol=0, atol=TOLERANCE)


def _oracle_logits(tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle_of(small_model()).logits(tokens)
    return logits


def test_sampling_depends_on_the_seed_and_not_on_the_cache() -> None:
    cached, plain = small_engine(), small_engine(enable_prefix_caching=False)
    prompt = random_tokens(30, seed=1)
    params = [
        ms.SamplingParams(max_tokens=20, temperature=1.3, top_k=20, top_p=0.9, seed=seed)
        for seed in (0, 1, 0)
    ]
    runs = [engine.generate([prompt] * 3, params) for engine in (cached, cached, plain)]
    answers = [[result.tokens for result in run] for run in runs]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == answers[0][2] != answers[0][1]


def test_an_answer_ends_at_a_stop_token_which_it_includes() -> None:
    engine, prompt = small_engine(), random_tokens(12, seed=1)
    tokens, _ = expected_answer(tuple(prompt), 12)
    stop = tokens[5]
    first = tokens.index(stop)
    for stops in ((stop,), (stop, stop)):
        params = ms.SamplingParams(max_tokens=12, stop_token_ids=stops)
        (result,) = engine.generate([prompt], params)
        assert result.tokens == tokens[: first + 1]
        assert result.finish_reason == "stop"


def test_streams_interleave_and_give_the_same_tokens() -> None:
    engine = small_engine()
    prompts = [random_tokens(20, seed=1), random_tokens(30, seed=2)]
    params = ms.SamplingParams(max_tokens=8, return_log_probs=True)
    streams = [engine.stream(prompt, params) for prompt in prompts]
    arrived = list(zip(*streams, strict=True))
    for i, prompt in enumerate(prompts):
        tokens, log_probs = expected_answer(tuple(prompt), 8)
        assert [pair[i].token for pair in arrived] == tokens
        np.testing.assert_allclose([pair[i].log_prob for pair in arrived], log_probs, rtol=0, atol=TOLERANCE)
    assert not engine.has_unfinished_requests()


def test_a_stream_closed_early_cancels_its_request() -> None:
    engine = small_engine()
    stream = engine.stream(random_tokens(20, seed=1))
    next(stream)
    stream.close()
    assert not engine.has_unfinished_requests()
    assert engine.context.prefix_cache.kv_blocks.num_held == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_frees_everything_and_keeps_what_was_computed(steps: int) -> None:
    engine, prompt = small_engine(max_tokens_per_step=16), random_tokens(40, seed=1)
    request_id = engine.add_request(prompt)
    for _ in range(steps):
        engine.step()
    result = engine.cancel(request_id)
    engine.context.check_integrity()
    assert result.finish_reason == "cancelled"
    assert engine.context.prefix_cache.kv_blocks.num_held == 0
    (repeat,) = serve_checked(engine, [prompt])
    parts = steps + (is_async(engine) and steps > 0)
    assert repeat.num_resumed_tokens == min(16 * parts, 32)


def test_cancelling_an_unknown_request_says_so() -> None:
    with pytest.raises(ValueError, match="request_id is 7"):
        small_engine().cancel(7)


def test_a_caller_may_say_that_an_answer_is_complete() -> None:
    engine = small_engine()
    request_id = engine.add_request(random_tokens(40, seed=1))
    engine.step()
    with pytest.raises(ValueError, match="reason is 'length'; accepted: one of 'cancelled', 'stop'"):
        engine.cancel(request_id, reason="length")  # type: ignore[arg-type]
    result = engine.cancel(request_id, reason="stop")
    assert (result.finish_reason, len(result.tokens)) == ("stop", 1)
    assert engine.take_result(request_id) is None
    engine.check_integrity()


@pytest.mark.parametrize("failing_call", [0, 1, 3, 6])
def test_a_failing_forward_costs_time_and_no_tokens(failing_call: int) -> None:
    engine = small_engine(max_tokens_per_step=16)
    model, calls = engine.model, []

    def failing(inputs: ms.StepInputs) -> torch.Tensor:
        calls.append(inputs)
        logits = model(inputs)  # it has written states and KV by the time it fails
        if len(calls) - 1 == failing_call:
            raise RuntimeError("device lost")
        return logits

    failing.state_spec = model.state_spec  # type: ignore[attr-defined]
    engine.model = failing  # type: ignore[assignment]
    prompts = [random_tokens(n, seed=n) for n in (40, 16, 9)]
    params = ms.SamplingParams(max_tokens=6, return_log_probs=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    results: dict[int, ms.RequestResult] = {}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            results |= {result.request_id: result for result in engine.step().finished}
        except RuntimeError:
            failures += 1
        engine.context.check_integrity()
    assert failures == 1
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_answers(prompt, results[request_id])


def test_every_block_resumes_what_is_ideal() -> None:
    """Random conversations and forks: resumed / ideal >= 0.99 with the every-block plan and enough slots."""
    rng = np.random.default_rng(0)
    engine = small_engine(
        num_mamba_slots=600,
        num_kv_blocks=800,
        max_requests=16,  # encoded states inside a prefill need idle live slots
        max_tokens_per_step=40,
        checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK),
    )
    known, oracle = [random_tokens(40, seed) for seed in range(3)], IdealResume(BLOCK)
    params = ms.SamplingParams(max_tokens=9, return_log_probs=True)
    prompts: dict[int, list[int]] = {}
    ideal: dict[int, int] = {}
    before: dict[int, int] = {}  # an async step admits by what was known a step earlier
    resumed, asked = 0, 20 if is_quick() else 40
    while len(prompts) < asked or engine.has_unfinished_requests():
        if len(prompts) < asked and rng.random() < 0.4:
            base = known[rng.integers(len(known))]
            prompt = base[: rng.integers(1, len(base) + 1)] + random_tokens(
                int(rng.integers(0, 20)), len(prompts)
            )
            prompts[engine.add_request(prompt, params)] = prompt
        for request_id in engine.core.requests:
            oracle.computed(request_id, engine.computed_prefix(request_id))
        report = engine.step()
        known_now = {request_id: oracle.ideal(prompt) for request_id, prompt in prompts.items()}
        earlier = before if is_async(engine) else known_now
        ideal |= {
            request_id: earlier.get(request_id, known_now[request_id]) for request_id in report.admitted
        }
        before = known_now
        for result in report.finished:
            prompt = prompts[result.request_id]
            assert_answers(prompt, result)
            resumed += result.num_resumed_tokens
            known.append((prompt + result.tokens)[:120])
            oracle.computed(result.request_id, (prompt + result.tokens)[:-1])
    stats = engine.context.cache_stats()
    assert (stats.num_resumed_tokens, stats.num_states_refused) == (resumed, 0)
    assert (
        stats.num_prompt_tokens
        == sum(map(len, prompts.values()))
        == stats.num_resumed_tokens + stats.num_computed_tokens
    )
    assert resumed >= 0.99 * sum(ideal.values()) > 0


def test_float32_is_equal_or_nearly_tied() -> None:
    """Exactness in float32: where cached and uncached differ, the two best logits are within 1e-4."""
    model = small_model(dtype=torch.float32)
    engines = [
        ms.DynamicInferenceEngine(
            model,
            ms.InferenceConfig(
                block_size_tokens=BLOCK, max_requests=4, max_tokens_per_step=32, max_sequence_length=256,
                num_kv_blocks=128, num_mamba_slots=64 if caching else None, enable_prefix_caching=caching,
            ),
        )
        for caching in (True, False)
    ]  # fmt: skip
    prompts = [random_tokens(40, seed=1)[:n] for n in (40, 24, 17, 33)]
    params = ms.SamplingParams(max_tokens=30, return_log_probs=True)
    for _ in range(2):
        cached, plain = (engine.generate(prompts, params) for engine in engines)
    for prompt, a, b in zip(prompts, cached, plain, strict=True):
        if a.tokens == b.tokens:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
        best = _oracle_logits(prompt + b.tokens[:at])[-1].topk(2).values
        assert float(best[0] - best[1]) < 1e-4


@pytest.mark.parametrize("max_tokens_per_step", [8, 13, 64])
def test_why_tokens_are_computed_does_not_depend_on_the_chunks(max_tokens_per_step: int) -> None:
    engine = small_engine(max_tokens_per_step=max_tokens_per_step)
    for prompt, reasons in (
        (random_tokens(20, seed=1), {"never_seen": 20}),
        (random_tokens(20, seed=1), {"partial_block": 4}),
    ):
        (result,) = engine.generate([prompt], ms.SamplingParams(max_tokens=1))
        assert {reason: n for reason, n in result.computed_by_reason.items() if n} == reasons


def test_a_state_that_a_newer_one_of_the_answer_replaces_is_not_evicted() -> None:
    engine = small_engine(num_mamba_slots=3)
    engine.generate([random_tokens(9, seed=1)], ms.SamplingParams(max_tokens=60))
    stats = engine.context.cache_stats()
    assert stats.num_states_evicted == 0
    assert stats.num_states_committed > 3
    engine.reset()
    stats = engine.context.cache_stats()
    assert (stats.num_states_committed, stats.num_states_evicted) == (0, 0)


def test_a_repeated_prompt_takes_no_second_slot_and_evicts_none() -> None:
    engine = small_engine(num_mamba_slots=3)
    other, repeated = random_tokens(9, seed=2), random_tokens(9, seed=1)
    engine.generate([other], ms.SamplingParams(max_tokens=1))
    for _ in range(3):
        engine.generate([repeated], ms.SamplingParams(max_tokens=10))
    assert engine.context.cache_stats().num_states_evicted == 0
    assert serve_checked(engine, [other])[0].num_resumed_tokens == 8


def test_blocks_of_one_token_keep_one_state_of_the_answer() -> None:
    config = ms.InferenceConfig(
        block_size_tokens=1, max_requests=2, max_tokens_per_step=8, max_sequence_length=100,
        num_kv_blocks=200,
        num_mamba_slots=64,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(small_model(1), config)
    (result,) = engine.generate([[1, 2, 3]], ms.SamplingParams(max_tokens=30))
    engine.context.check_integrity()
    stats = engine.context.cache_stats()
    assert (stats.num_committed_slots, stats.num_states_evicted) == (3, 0)
    (again,) = engine.generate([[1, 2, 3, *result.tokens]], ms.SamplingParams(max_tokens=1))
    assert again.num_resumed_tokens == 32
