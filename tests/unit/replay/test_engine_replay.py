"""The driver: many decodes at once decide as single ones do, and runs repeat."""

from typing import Any

import mambaslots as ms
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.eviction import EVICTION_POLICIES
from mambaslots.replay.compared_caches import spec_of
from mambaslots.replay.engine_replay import TOO_LONG, EngineReplay
from mambaslots.replay.setting import ModelShape, StepCost
from mambaslots.replay.trace import Trace, TraceRequest
from oracle.kv_index import eviction_order
from oracle.session_traces import small_trace

SHAPE = ModelShape("small", 1024, 1024, 64, 4, 64, 4, 1, 1, 16)


def replay_of(trace: Trace, cost: StepCost | None = None, **settings: Any) -> EngineReplay:
    sizes: dict[str, Any] = {
        "block_size_tokens": 4, "max_requests": 3, "max_tokens_per_step": 16, "max_sequence_length": 4096,
        "num_kv_blocks": 400, "num_mamba_slots": 8,
    }  # fmt: skip
    config = ms.InferenceConfig(**(sizes | settings))
    return EngineReplay(trace, spec_of(SHAPE), config, cost or StepCost(0.01, 1e-3, 1e-3))


def state_of(replay: EngineReplay) -> tuple[object, ...]:
    """All that the next decisions depend on."""
    cache = replay.context.prefix_cache
    return (
        replay.now_ns,
        cache.slots.cached_states.slot_of_block.copy(),
        cache.slots.cached_states.state_block_of_hash.copy(),
        list(cache.slots.free_slots),
        eviction_order(cache.slots),
        cache.slots.pins.copy(),
        list(cache.kv_blocks.references),
        cache.kv_blocks.tree.block_of_hash.copy(),
        [
            (r.request_id, len(r.tokens), r.allocation and r.allocation.num_computed)
            for r in replay.scheduler.running
        ],
        replay.context.cache_stats(),
    )


@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 12),
    num_blocks=st.sampled_from([60, 80, 400]),
    max_requests=st.integers(1, 4),
    policy=st.sampled_from(EVICTION_POLICIES),
    base_s=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_many_decodes_at_once_decide_as_single_ones(
    seed: int, num_slots: int, num_blocks: int, max_requests: int, policy: str, base_s: float
) -> None:
    trace, cost = small_trace(seed), StepCost(base_s, 1e-3, 1e-3)
    settings: dict[str, Any] = {
        "num_mamba_slots": num_slots, "num_kv_blocks": num_blocks, "max_requests": max_requests,
        "eviction_policy": policy,
    }  # fmt: skip
    coarse = replay_of(trace, cost, **settings)
    fine = replay_of(trace, cost, **settings)
    fine._pass_quiet_decodes = lambda: None  # type: ignore[method-assign]  # each decode is a step
    while coarse.step():
        coarse.context.check_integrity()
        while fine.now_ns < coarse.now_ns:
            assert fine.step()
        assert state_of(fine) == state_of(coarse)
    assert not fine.step()
    assert fine.result() == coarse.result()
    assert fine.context.cache_stats().state_ages == coarse.context.cache_stats().state_ages
    result = coarse.result()
    assert result.num_requests == len(trace.requests)
    assert result.prompt_tokens == trace.num_prompt_tokens
    assert result.resumed_tokens + sum(result.lost_by_reason.values()) == result.prompt_tokens
    assert sum(result.resumed_lengths) == result.resumed_tokens


def test_two_runs_are_equal() -> None:
    trace = small_trace(3, num_sessions=12)
    first, second = replay_of(trace, num_mamba_slots=4), replay_of(trace, num_mamba_slots=4)
    assert first.run() == second.run()
    assert state_of(first) == state_of(second)
    assert first.context.cache_stats().state_ages == second.context.cache_stats().state_ages


def test_a_request_that_fits_in_no_pool_is_lost_and_its_session_goes_on() -> None:
    short = small_trace(0, num_sessions=1, max_turns=1).requests[0]
    long = TraceRequest(0.0, 7, short.prompt.repeat(40)[:200], short.answer)
    after = TraceRequest(0.0, 7, short.prompt, short.answer)
    result = replay_of(Trace("long", [long, after]), num_kv_blocks=40).run()
    assert result.num_requests == 2
    assert result.lost_by_reason[TOO_LONG] == 200
    assert result.prompt_tokens == 200 + len(short.prompt)
