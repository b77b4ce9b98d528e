"""Operations of an engine, at any moment: resets, new weights, warm and pinned prefixes, suspension."""

import logging
import weakref
from collections.abc import Callable
from functools import cache

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.budget import costly, thinned
from oracle.recurrent_lm import RecurrentLM
from oracle.serving import TOLERANCE, random_tokens, serve_checked, small_engine, small_model
from oracle.workload import (
    BLOCK,
    HEADS,
    TEXTS,
    Asked,
    Client,
    answer,
    assert_idle,
    engine_settings,
    pressed_engine,
    requests,
)

pytestmark = pytest.mark.usefixtures("kind")

LONG = TEXTS[0]  # 56 tokens, 7 blocks
ONE = ms.SamplingParams(max_tokens=1)
Operation = Callable[[ms.DynamicInferenceEngine], object]


def cached(engine: ms.DynamicInferenceEngine) -> tuple[int, int]:
    """Registered KV blocks and committed states."""
    cache = engine.context.prefix_cache
    return len(cache.kv_blocks.tree.block_of_hash), len(cache.slots.cached_states.slot_of_block)


def resumed(engine: ms.DynamicInferenceEngine, prompt: list[int], salt: bytes | None = None) -> int:
    return engine.generate([prompt], ONE, cache_salt=salt)[0].num_resumed_tokens


def situations(engine: ms.DynamicInferenceEngine) -> set[str]:
    """What the running requests are in the middle of."""
    found = set()
    for request in engine.context.requests:
        paused = engine.stats().num_paused > 0
        if paused:
            found.add("paused")
        if request.allocation.path.state_slot >= 0:
            found.add("its only state in a durable slot")
        if paused and request.allocation.path.state_slot >= 0:
            found.add("paused on a durable slot")
        if 0 < request.allocation.num_computed < len(request.prompt_tokens):
            found.add("in the middle of its prompt")
            held = np.array(engine.context.prefix_cache.tree.references)[request.allocation.path.blocks]
            if int(held.max()) > 1:
                found.add("in the middle of its prompt, with shared blocks")
    if engine.core.scheduler.waiting:
        found.add("waiting")
    return found


def busy_client(**overrides: object) -> Client:
    """Requests that share prefixes, decode over boundaries and wait for each other."""
    client = Client(pressed_engine(**overrides))
    for prompt, length in ((LONG[:40], 12), (LONG[:40] + LONG[:9], 9), (LONG, 17), (TEXTS[1][:17], 24)):
        client.ask(Asked(tuple(prompt), length))
    return client


def steps_of_busy_client() -> int:
    client, steps = busy_client(), 0
    while client.engine.has_unfinished_requests():
        client.step()
        steps += 1
    return steps


# ---- reset_prefix_cache


@pytest.mark.sampled(overrides=1)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_kv_blocks": 40, "num_mamba_slots": 20}],
)
def test_resetting_between_any_two_steps_changes_no_token(overrides: dict[str, object]) -> None:
    seen = set[str]()
    moments = range(0, steps_of_busy_client(), 3)
    for moment in moments if overrides else thinned(moments, every=5):
        client = busy_client(**overrides)
        engine = client.engine
        for _ in range(moment):
            client.step()
        seen |= situations(engine)
        engine.reset_prefix_cache()
        engine.context.check_integrity()
        assert cached(engine) == (0, 0)
        assert engine.context.prefix_cache.slots.pins == {}
        client.finish()
        assert_idle(engine)
    assert {"its only state in a durable slot", "in the middle of its prompt", "waiting"} <= seen
    if overrides == {}:
        assert "paused" in seen
        assert "paused on a durable slot" in seen


def test_resetting_in_the_middle_of_a_prompt_with_shared_blocks() -> None:
    for moment in thinned(range(1, 8), every=3):
        client = Client(small_engine(max_tokens_per_step=13, num_kv_blocks=60))
        for prompt in (LONG[:40], LONG[:40] + LONG[:16], LONG):
            client.ask(Asked(tuple(prompt), 9))
        seen = set[str]()
        for _ in range(40):
            client.step()
            seen |= situations(client.engine)
            if "in the middle of its prompt, with shared blocks" in situations(client.engine):
                moment -= 1
            if not moment:
                client.engine.reset_prefix_cache()
                break
        client.finish()
        assert_idle(client.engine)
        if moment == 0:
            assert "in the middle of its prompt, with shared blocks" in seen


def test_what_began_before_a_reset_registers_and_commits_nothing() -> None:
    plan = ms.CheckpointPlan.every_block(BLOCK)
    for moment in thinned(range(1, 16, 2), every=3):
        client = Client(small_engine(max_tokens_per_step=16, checkpoint_plan=plan))
        for prompt in (LONG, LONG[:40], TEXTS[1][:9]):
            client.ask(Asked(tuple(prompt), 24))
        for _ in range(moment):
            client.step()
        old = {request.request_id for request in client.engine.context.requests}
        waiting = set(client.asked) - old
        for request_id in waiting:
            client.cancel(request_id)
        client.engine.reset_prefix_cache()
        while client.engine.has_unfinished_requests():
            client.step()
            assert cached(client.engine) == (0, 0)
        assert_idle(client.engine)


def test_requests_after_a_reset_start_clean_and_share_among_themselves() -> None:
    client = Client(small_engine(max_tokens_per_step=16, max_requests=8))
    old = client.ask(Asked(tuple(LONG), 24))
    for _ in range(6):
        client.step()
    client.engine.reset_prefix_cache()
    first = client.ask(Asked(tuple(LONG), 2))
    client.finish()
    client.ask(Asked(tuple(LONG), 2))
    client.finish()
    by_id = {result.request_id: result.num_resumed_tokens for result in client.results}
    assert by_id[first] == 0
    assert list(by_id.values())[-1] == 48
    assert by_id[old] == 0


def test_a_request_restarted_after_a_reset_shares_again() -> None:
    client = Client(small_engine())
    request_id = client.ask(Asked(tuple(LONG[:40]), 24))
    for _ in range(6):
        client.step()
    engine = client.engine
    engine.reset_prefix_cache()
    assert not engine.core.requests[request_id].allocation.path.caches
    engine.core.scheduler.preempt(engine.core.requests[request_id])
    client.step()
    assert engine.core.requests[request_id].allocation.path.caches
    assert cached(engine)[0] >= 5
    client.finish()
    assert resumed(engine, [*LONG[:40], 1]) == 40


def test_a_reset_forgets_why_states_left_too() -> None:
    engine = small_engine(num_mamba_slots=1, num_kv_blocks=14)
    for prompt in HEADS:
        engine.generate([prompt], ONE)
    engine.reset_prefix_cache()
    (result,) = engine.generate([LONG], ONE)
    assert result.computed_by_reason["never_seen"] == len(LONG)


def test_a_reset_between_two_steps_notifies_observers_of_what_left() -> None:
    engine, deregistered = small_engine(), []
    engine.context.prefix_cache.kv_blocks.observe_deregistration(
        lambda blocks, _: deregistered.append(set(blocks))
    )
    engine.generate([LONG[:40]], ONE)
    registered = set(engine.context.prefix_cache.kv_blocks.tree.block_of_hash.values())
    engine.reset_prefix_cache()
    assert deregistered == [registered]


# ---- new weights


def model_with_weights(seed: int) -> ms.models.HybridLM:
    return ms.models.HybridLM(small_model().config, seed=seed)


def answer_of_weights(seed: int, prompt: tuple[int, ...], length: int) -> tuple[list[int], list[float]]:
    return _answer_of(small_model().config, seed, prompt, length)


@cache
def _answer_of(
    config: ms.models.HybridConfig, seed: int, prompt: tuple[int, ...], length: int
) -> tuple[list[int], list[float]]:
    model = ms.models.HybridLM(config, seed=seed)
    tokens, log_probs = RecurrentLM(model).generate_greedy(prompt, length)
    return list(map(int, tokens)), list(map(float, log_probs))


class Versions:
    """An engine whose model's weights change in place."""

    def __init__(self, **sizes: object) -> None:
        self.model = model_with_weights(0)
        base: dict[str, object] = {
            "block_size_tokens": BLOCK, "max_requests": 3, "max_tokens_per_step": 13,
            "max_sequence_length": 96,
            "num_kv_blocks": 14, "num_mamba_slots": 3,
        }  # fmt: skip
        config = ms.InferenceConfig(**(base | sizes))  # type: ignore[arg-type]
        self.engine = ms.DynamicInferenceEngine(self.model, config)
        self.seed = 0
        self.expected: dict[int, tuple[list[int], list[float]]] = {}

    def change(self, seed: int) -> None:
        """Answers of requests under way are of no model any more."""
        self.model.load_state_dict(model_with_weights(seed).state_dict())
        self.engine.set_weights_version(seed)
        self.seed = seed
        self.expected.clear()

    def ask(self, prompt: list[int], length: int) -> int:
        params = ms.SamplingParams(max_tokens=length, return_log_probs=True)
        request_id = self.engine.add_request(prompt, params)
        longest = answer_of_weights(self.seed, tuple(prompt), 16)
        self.expected[request_id] = longest[0][:length], longest[1][:length]
        return request_id

    def step(self) -> None:
        for result in self.engine.step().finished:
            tokens, log_probs = self.expected.pop(result.request_id, (None, None))
            if tokens is not None:
                assert result.tokens == tokens
                np.testing.assert_allclose(result.log_probs, log_probs, rtol=0, atol=TOLERANCE)  # type: ignore[arg-type]
        self.engine.context.check_integrity()

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
        assert not self.expected


def test_the_two_models_answer_differently() -> None:
    assert answer_of_weights(0, tuple(LONG), 16) != answer_of_weights(1, tuple(LONG), 16)


@pytest.mark.sampled(moment=(6,), sizes=1)
@pytest.mark.parametrize("moment", range(0, 24, 3))
@pytest.mark.parametrize(
    "sizes", [{}, {"num_kv_blocks": 60, "num_mamba_slots": 40, "max_tokens_per_step": 32}]
)
def test_after_new_weights_nothing_of_the_old_is_reachable(moment: int, sizes: dict[str, object]) -> None:
    versions = Versions(**sizes)
    for prompt in (LONG[:40], LONG, LONG[:40] + LONG[:9]):
        versions.ask(prompt, 16)
    for _ in range(moment):
        versions.step()
    versions.change(1)
    assert cached(versions.engine) == (0, 0)
    for prompt in (LONG, LONG[:40], LONG[:17]):
        versions.ask(prompt, 9)
    versions.finish()
    for prompt in (LONG, LONG[:40] + LONG[:9]):  # also what requests of both weights left behind
        versions.ask(prompt, 9)
    versions.finish()
    assert_idle(versions.engine)


@costly()
@given(
    sizes=engine_settings,
    moves=st.lists(
        st.tuples(
            st.just("ask"), st.sampled_from([LONG[:n] for n in (9, 17, 40, 48, 56)]), st.integers(1, 16)
        )
        | st.tuples(st.just("step"), st.just([]), st.integers(1, 8))
        | st.tuples(st.just("change"), st.just([]), st.integers(0, 1)),
        min_size=5,
        max_size=25,
    ),
)
def test_answers_are_those_of_the_weights_they_began_and_ended_with(
    sizes: dict[str, object], moves: list[tuple[str, list[int], int]]
) -> None:
    versions = Versions(**sizes)
    versions.engine.set_weights_version(0)
    for move, prompt, number in moves:
        if move == "ask":
            versions.ask(prompt, number)
        elif move == "step":
            for _ in range(number):
                versions.step()
        elif number != versions.seed:
            versions.change(number)
    versions.finish()
    assert_idle(versions.engine)


def test_the_same_version_again_resets_nothing() -> None:
    engine = small_engine()
    engine.set_weights_version("step 100")
    engine.generate([LONG], ONE)
    pinned = engine.pin(LONG)
    engine.set_weights_version("step 100")
    assert engine.weights_version == "step 100"
    assert resumed(engine, LONG) == 48
    engine.unpin(pinned)
    engine.set_weights_version("step 200")
    assert resumed(engine, LONG) == 0


def test_weights_can_change_while_the_engine_is_suspended() -> None:
    versions = Versions()
    versions.ask(LONG, 5)
    versions.finish()
    versions.engine.suspend()
    versions.change(1)
    versions.engine.reset_prefix_cache()
    versions.engine.resume()
    versions.ask(LONG, 5)
    versions.finish()
    assert versions.engine.weights_version == 1


# ---- warm


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 23, 24, 55, 56])
def test_warm_returns_what_later_prompts_resume(length: int) -> None:
    engine = small_engine()
    whole = length // BLOCK * BLOCK
    assert engine.warm(LONG[:length]) == whole
    assert not engine.core.unclaimed
    assert_idle(engine)
    assert resumed(engine, [*LONG[:length], 1, 2]) == whole
    stats = engine.context.cache_stats()
    assert engine.warm(LONG[:length]) == whole
    assert engine.context.cache_stats() == stats  # nothing to compute
    if whole:
        serve_checked(engine, [LONG[:length]])


def test_warm_separates_salts() -> None:
    engine = small_engine()
    assert engine.warm(LONG, cache_salt="tenant") == 56
    assert resumed(engine, [*LONG, 1]) == 0
    assert resumed(engine, [*TEXTS[1], 1], b"tenant") == 0
    assert resumed(engine, [*LONG, 1], b"tenant") == 56


def test_warm_extends_what_is_there_and_takes_tensors() -> None:
    engine = small_engine()
    assert engine.warm(torch.tensor(LONG[:16])) == 16
    before = engine.context.cache_stats().num_resumed_tokens
    assert engine.warm(torch.tensor(LONG)) == 56
    assert engine.context.cache_stats().num_resumed_tokens - before == 16


def test_warm_under_load_serves_the_others_along() -> None:
    client = busy_client()
    engine = client.engine
    for _ in range(5):
        client.step()
    engine.warm(TEXTS[1])
    engine.context.check_integrity()
    for request_id in list(client.asked):
        result = engine.take_result(request_id)
        if result is None:
            client.arrived[request_id] = list(engine.core.requests[request_id].new_tokens)
        else:
            client.arrived[request_id] = list(result.tokens)
            client.take(result)
    client.finish()
    assert not engine.core.unclaimed
    assert_idle(engine)


@pytest.mark.parametrize("slots", [1, 2])
def test_warm_with_few_slots_reports_the_truth(slots: int) -> None:
    engine = small_engine(num_mamba_slots=slots, num_kv_blocks=16)
    for prompt in (LONG, TEXTS[1], LONG[:20]):
        assert engine.warm(prompt) == resumed(engine, [*prompt, 1])


def test_warm_returns_0_where_nothing_is_kept() -> None:
    assert small_engine(enable_prefix_caching=False).warm(LONG) == 0


def test_warm_refuses_what_can_never_be_computed() -> None:
    engine = small_engine(num_kv_blocks=5)
    with pytest.raises(ValueError, match=r"accepted: .*the KV pool"):
        engine.warm(LONG)
    for bad in ([256], [-1], "text", None, [1.5]):
        with pytest.raises(ValueError, match="tokens"):
            engine.warm(bad)  # type: ignore[arg-type]
    assert_idle(engine)
    assert not engine.has_unfinished_requests()


# ---- pin


@pytest.mark.sampled(slots=(1,), policy=("value",))
@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pinned_prefix_survives_any_pressure(policy: str, slots: int) -> None:
    client = Client(pressed_engine(eviction_policy=policy, num_mamba_slots=slots, max_tokens_per_step=24))
    engine = client.engine
    running = client.ask(Asked(tuple(LONG[:17]), 24))
    client.step()
    client.step()
    pinned = engine.pin(LONG[:16])
    assert pinned.num_tokens == 16
    for prompt in HEADS + HEADS:
        client.ask(Asked(tuple(prompt), 9))
    client.finish()
    assert running not in client.asked
    assert_idle(engine, pinned_blocks=2)
    assert resumed(engine, [*LONG[:16], 1, 2]) == 16
    engine.unpin(pinned)
    assert_idle(engine)
    for prompt in HEADS[8:] * 2:
        client.ask(Asked(tuple(prompt), 9))
    client.finish()
    if slots == 1:
        assert resumed(engine, [*LONG[:16], 1, 2]) == 0


def test_pins_of_one_prefix_and_of_overlapping_ones_nest() -> None:
    engine = small_engine(num_mamba_slots=3, num_kv_blocks=20)
    engine.warm(LONG[:16])
    short = engine.pin(LONG[:16])
    engine.warm(LONG[:40])
    long, again = engine.pin(LONG[:40]), engine.pin([*LONG[:40], 1])
    assert [pin.num_tokens for pin in (short, long, again)] == [16, 40, 40]
    for step, (pin, blocks, depth) in enumerate(((long, 5, 40), (again, 2, 16), (short, 0, 0))):
        engine.unpin(pin)
        assert engine.context.prefix_cache.kv_blocks.num_held == blocks
        for seed in range(6):
            engine.generate([random_tokens(48, 100 * step + seed)], ONE)
        assert resumed(engine, [*LONG[:40], 1]) == depth
        engine.context.check_integrity()


def test_a_pin_lets_go_once() -> None:
    engine, other = small_engine(), small_engine()
    for one in (engine, other):
        one.warm(LONG)
    pinned = engine.pin(LONG)
    engine.unpin(pinned)
    foreign = other.pin(LONG)
    for bad in (pinned, foreign, None, 0, "prefix"):
        with pytest.raises(ValueError, match=r"prefix is .* accepted: a prefix that is pinned"):
            engine.unpin(bad)  # type: ignore[arg-type]
    assert_idle(engine)


@pytest.mark.parametrize(
    "operation",
    [
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.reset(),
        lambda engine: engine.set_weights_version(1),
        lambda engine: (engine.suspend(), engine.resume()),
    ],
)
def test_a_reset_drops_pins(operation: Operation) -> None:
    engine = small_engine()
    engine.warm(LONG)
    pins = [engine.pin(LONG), engine.pin(LONG)]
    operation(engine)
    assert_idle(engine)
    for pin in pins:
        with pytest.raises(ValueError, match="accepted: a prefix that is pinned"):
            engine.unpin(pin)
    assert resumed(engine, LONG) == 0


def test_what_has_no_state_is_not_pinned() -> None:
    engine = small_engine()
    engine.generate([LONG], ms.SamplingParams(max_tokens=1))
    for tokens in ([], LONG[:7], LONG[:40], TEXTS[1]):
        with pytest.raises(ValueError, match="accepted: one with a cached state"):
            engine.pin(tokens)
    with pytest.raises(ValueError, match="accepted: one with a cached state"):
        engine.pin(LONG, cache_salt=b"tenant")
    with pytest.raises(ValueError, match="accepted: one with a cached state"):
        small_engine(enable_prefix_caching=False).pin(LONG)
    assert_idle(engine)


def test_pins_that_leave_too_little_for_a_request_are_reported_and_unpinning_helps() -> None:
    engine = small_engine(num_kv_blocks=10)
    engine.warm(LONG)
    pinned = engine.pin(LONG)
    client = Client(engine)
    request_id = client.ask(Asked(tuple(TEXTS[1][:31]), 2))
    for _ in range(2):
        with pytest.raises(ms.KVBlockCapacityError) as raised:
            engine.step()
        error = raised.value
        assert (error.required, error.available, error.request_id) == (4, 3, request_id)
        engine.context.check_integrity()
    assert len(engine.generate([[1]], ONE)) == 1  # others pass
    assert list(engine.core.requests) == [request_id]
    engine.unpin(pinned)
    client.finish()
    assert_idle(engine)


def test_an_answer_that_outgrows_what_pins_leave_is_reported() -> None:
    engine = small_engine(num_kv_blocks=10)
    engine.warm(LONG)
    pinned = engine.pin(LONG)
    client = Client(engine)
    client.ask(Asked(tuple(TEXTS[1][:17]), 24))
    with pytest.raises(ms.KVBlockCapacityError, match="4 KV blocks required, 3 available"):
        client.finish()
    engine.context.check_integrity()
    engine.unpin(pinned)
    client.finish()
    assert_idle(engine)


def test_a_prompt_that_continues_a_pinned_prefix_needs_only_the_rest() -> None:
    engine = small_engine(num_kv_blocks=8)
    engine.warm(LONG)
    pinned = engine.pin(LONG)
    client = Client(engine)
    client.ask(Asked((*LONG, 1), 7))
    client.finish()
    assert client.results[0].num_resumed_tokens == 56
    assert_idle(engine, pinned_blocks=7)
    engine.unpin(pinned)


# ---- suspend and resume


def test_suspending_frees_the_pools() -> None:
    engine = small_engine()
    serve_checked(engine, [LONG])
    context = engine.context
    pool = context.memory.state_pool
    tensors = [weakref.ref(t) for t in (pool.memory, context.memory.kv_cache)]
    storages = [t().untyped_storage() for t in tensors]  # type: ignore[union-attr]
    sizes = [storage.nbytes() for storage in storages]
    owners = [weakref.ref(storage) for storage in storages]
    del storages
    assert sizes[0]
    assert bool(sizes[1]) == bool(context.spec.num_attention_layers)
    engine.suspend()
    assert [t() for t in tensors] == [None] * 2
    assert [owner() for owner in owners] == [None] * 2
    names = [state.name for state in pool.states]
    states = [view(name) for view in (pool.__getitem__, pool.durable) for name in names]
    assert {t.untyped_storage().nbytes() for t in (*states, context.memory.kv_cache)} == {0}
    assert cached(engine) == (0, 0)
    assert_idle(engine)
    engine.resume()
    back = (pool.memory, context.memory.kv_cache)
    assert [t.untyped_storage().nbytes() for t in back] == sizes
    assert not any(t.any() for t in back)
    assert serve_checked(engine, [LONG])[0].num_resumed_tokens == 0
    assert serve_checked(engine, [LONG])[0].num_resumed_tokens == 48


def test_suspending_between_any_two_steps_changes_no_token() -> None:
    seen = set[str]()
    for moment in thinned(range(0, steps_of_busy_client(), 3), every=5):
        client = busy_client()
        engine = client.engine
        for _ in range(moment):
            client.step()
        seen |= situations(engine)
        engine.suspend()
        engine.suspend()
        assert engine.context.requests == []
        with pytest.raises(RuntimeError, match="step is called on a suspended engine; resume it first"):
            engine.step()
        late = client.ask(Asked(tuple(LONG[:17]), 5))
        cancelled = client.ask(Asked(tuple(LONG[:17]), 5))
        client.cancel(cancelled)
        engine.context.check_integrity()
        engine.resume()
        engine.resume()
        assert cached(engine) == (0, 0)
        client.finish()
        assert late in {result.request_id for result in client.results}
        assert_idle(engine)
    assert {"its only state in a durable slot", "in the middle of its prompt", "waiting"} <= seen


def test_serving_while_suspended_says_so_and_leaves_no_orphan() -> None:
    engine = small_engine()
    stream = engine.stream(LONG, ONE)
    engine.suspend()
    calls: list[Operation] = [
        lambda e: e.step(),
        lambda e: e.generate([LONG]),
        lambda e: e.warm(LONG),
        lambda e: next(stream),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="suspended"):
            call(engine)
        assert len(engine.core.requests) == 1
    with pytest.raises(RuntimeError, match="pin is called on a suspended engine"):
        engine.pin(LONG)
    engine.reset_prefix_cache()
    engine.resume()
    assert [token.token for token in stream] == answer(tuple(LONG))[0][:1]
    assert_idle(engine)


def test_a_suspended_engine_can_be_reset_and_stays_suspended() -> None:
    engine = small_engine()
    engine.add_request(LONG)
    engine.step()
    engine.suspend()
    engine.reset()
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="suspended"):
        engine.step()
    engine.resume()
    serve_checked(engine, [LONG])


# ---- reset


def test_a_reset_at_any_moment_leaves_a_new_engine() -> None:
    for moment in thinned(range(0, steps_of_busy_client(), 4), every=5):
        client = busy_client()
        engine = client.engine
        stream = engine.stream(LONG[:9], ONE)
        for _ in range(moment):
            engine.step()
        engine.reset()
        assert_idle(engine)
        assert not engine.has_unfinished_requests()
        stats = engine.context.cache_stats()
        counts = (
            stats.num_requests,
            stats.num_prompt_tokens,
            stats.num_states_committed,
            stats.num_states_evicted,
        )
        assert counts == (0, 0, 0, 0)
        assert len(list(stream)) <= 1  # what had arrived, and no more
        assert serve_checked(engine, [LONG[:40]])[0].num_resumed_tokens == 0


def test_a_reset_drops_results_that_were_not_taken() -> None:
    engine = small_engine()
    request_id = engine.add_request(LONG, ONE)
    engine.generate([LONG], ms.SamplingParams(max_tokens=9))
    engine.reset()
    assert engine.take_result(request_id) is None


# ---- the start-up line


def test_the_start_up_line_counts_the_bytes_there_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mambaslots"):
        context = small_engine(num_kv_blocks=100, num_mamba_slots=50).context
    line, promise = [record.getMessage() for record in caplog.records]
    assert promise.startswith("batch invariance: off, because the model is on cpu")
    assert line == context.memory.summary()
    pool = context.memory.state_pool
    states = pool.memory.nbytes
    kv, total = context.memory.kv_cache.nbytes, states + context.memory.kv_cache.nbytes
    assert f"live states 4 x {states / 54 / 2**20:.3g} MiB" in line
    assert f"cached states 50 x {states / 54 / 2**20:.3g} MiB" in line
    assert f"KV 100 blocks of 8 tokens, {kv / 2**20:.3g} MiB" in line
    assert f"total {total / 2**20:.1f} MiB on cpu" in line


# ---- everything at once, cancelled at any point


@costly()
@given(
    sizes=engine_settings,
    asked=st.lists(requests, min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10)), max_size=12),
)
def test_cancelling_between_any_two_calls(
    sizes: dict[str, object], asked: list[Asked], moves: list[tuple[int, int]]
) -> None:
    client = Client(small_engine(**sizes))
    for request in asked:
        client.ask(request)
    for steps, which in moves:
        for _ in range(steps):
            client.step()
        if client.asked:
            client.cancel(list(client.asked)[which % len(client.asked)])
        client.engine.context.check_integrity()
    client.finish()
    assert_idle(client.engine)
