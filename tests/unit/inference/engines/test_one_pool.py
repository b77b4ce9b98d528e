"""Live and cached states share one pool: idle rows hold cached states, and requests take the slots back."""

import mambaslots as ms
import pytest
from oracle.drafters import MODES
from oracle.plans import SwitchedPlan
from oracle.serving import assert_answers, random_tokens, run_checked, serve_checked, small_engine

ONE = ms.SamplingParams(max_tokens=1)
TAIL = SwitchedPlan(branch=False, step_ends=False, decode="off")


@pytest.mark.sampled(mode=("right", "in place", "replay, mixed"))
@pytest.mark.parametrize("mode", ["right", "in place", "in place, no drafts", "replay", "replay, mixed"])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_idle_rows_hold_cached_states_and_running_requests_take_them_back(
    mode: str, slots: int, rows: int
) -> None:
    settings = {"num_mamba_slots": slots, "max_requests": rows, "checkpoint_plan": TAIL} | MODES[mode]
    engine = small_engine(num_kv_blocks=400, **settings)
    drafts = 0 if "replay" in mode else int(str(settings.get("num_speculative_tokens", 0)))
    idle = (rows - 1) * (1 + drafts)  # of the rows that a single request leaves idle
    prompts = [random_tokens(20, seed) for seed in range(slots + idle + 3)]
    for prompt in prompts:
        serve_checked(engine, [prompt], length=1)
    slots_ = engine.context.prefix_cache.slots
    assert (len(slots_.cached_states.slot_of_block), slots_.live_slots) == (slots + idle, set())
    assert slots_.num_slots == slots + idle + 1 + drafts
    for prompt in prompts[3:]:
        (result,) = serve_checked(engine, [[*prompt[:16], 1]], length=1)
        assert result.num_resumed_tokens == 16
    several = [[*prompt[:16], 2] for prompt in prompts[-rows:]]
    params = ms.SamplingParams(max_tokens=7, return_log_probs=True)
    for prompt in several:
        engine.add_request(prompt, params)
    assert len(engine.step().admitted) == rows
    assert len(slots_.live_slots) == rows * (1 + drafts)
    assert len(slots_.cached_states.slot_of_block) <= slots
    for result in run_checked(engine).values():
        assert result.num_resumed_tokens == 16
    stats = engine.stats().cache
    assert stats.num_live_slots == 0
    assert (stats.states_removed_by_cause["live_state"] > 0) == (rows > 1)  # one row has its slots back
    assert stats.num_states_evicted == sum(
        stats.states_removed_by_cause[cause] for cause in ("new_state", "live_state")
    )
    assert serve_checked(engine, several)


@pytest.mark.parametrize("mode", ["in place, no drafts", "replay", "async"])
def test_a_request_takes_over_the_only_slot_left_and_resumes_from_it(mode: str) -> None:
    settings = {"num_mamba_slots": 1, "max_requests": 2, "checkpoint_plan": TAIL} | MODES[mode]
    engine = small_engine(**settings)
    pinned, shared = random_tokens(20, seed=1), random_tokens(20, seed=2)
    for prompt in (pinned, shared):
        engine.generate([prompt], ONE)
        if prompt is pinned:
            engine.pin(pinned)
    params = ms.SamplingParams(max_tokens=12, return_log_probs=True)
    engine.add_request([3, 4, 5], params)
    engine.step()
    slots_ = engine.context.prefix_cache.slots
    assert (len(slots_.cached_states.slot_of_block), slots_.free_slots) == (2, [])
    (taken,) = set(slots_.cached_states.slot_of_block.values()) - slots_.pins.keys()
    request_id = engine.add_request([*shared, 1], params)
    assert request_id in (*engine.step().admitted, *engine.step().admitted)  # a step may be under way
    assert taken in slots_.live_slots
    assert len(slots_.cached_states.slot_of_block) == 1
    result = run_checked(engine)[request_id]
    assert result.num_resumed_tokens == 16
    assert_answers([*shared, 1], result)


def test_pins_keep_no_more_than_the_slots_beside_the_live_ones() -> None:
    engine = small_engine(num_mamba_slots=2, max_requests=4, checkpoint_plan=TAIL)
    prompts = [random_tokens(20, seed) for seed in range(4)]
    engine.generate(prompts[:3], ONE)
    for prompt in (prompts[0], prompts[1], prompts[0]):
        engine.pin(prompt)
    with pytest.raises(ms.MambaSlotCapacityError) as raised:
        engine.pin(prompts[2])
    assert (raised.value.required, raised.value.available) == (3, 2)
    assert len(engine.pins()) == 3
    engine.check_integrity()
    serve_checked(engine, [[*prompt, 1] for prompt in prompts], length=12)
    engine.unpin(engine.pins()[1])
    engine.generate([prompts[2]], ONE)
    engine.pin(prompts[2])


def test_a_request_that_finds_no_live_slot_is_refused_by_that_name() -> None:
    engine = small_engine(num_mamba_slots=1, max_requests=2)
    slots = engine.context.prefix_cache.slots
    slots.reserve_slots([-1] * slots.num_slots)  # which the failing step releases
    request_id = engine.add_request(random_tokens(9, seed=1))
    with pytest.raises(
        ms.KVBlockCapacityError, match="1 live slots required, 0 available for request"
    ) as raised:
        engine.step()
    assert (raised.value.request_id, raised.value.required, raised.value.available) == (request_id, 1, 0)
    assert run_checked(engine)[request_id].finish_reason == "length"


def test_without_a_prefix_cache_live_slots_are_a_pool_of_their_own() -> None:
    engine = small_engine(enable_prefix_caching=False)
    engine.add_request(random_tokens(9, seed=1))
    engine.step()
    pool = engine.context.memory.state_pool
    assert (pool.num_live, pool.num_durable, pool.is_shared) == (4, 0, False)
    assert [request.allocation.live_slots for request in engine.context.requests] == [(0,)]
    assert engine.stats().cache.num_live_slots == 0
    engine.check_integrity()


def test_the_engine_says_what_is_live() -> None:
    engine = small_engine(num_mamba_slots=5, max_requests=3)
    engine.add_request(random_tokens(20, seed=1))
    engine.step()
    stats = engine.stats().cache
    counted = stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots
    assert counted + stats.num_live_slots == 5 + 3
    assert stats.num_live_slots == 1
    assert f"{stats.num_committed_slots} of 8 slots hold a state and 1 are live" in repr(stats)
    assert "live states 3 x" in engine.context.memory.summary()
    assert "and the live ones of idle rows" in engine.context.memory.summary()


def test_reset_and_suspend_free_live_slots_and_a_reset_of_the_cache_does_not() -> None:
    engine = small_engine(num_mamba_slots=1, max_requests=2)
    slots_ = engine.context.prefix_cache.slots
    params = ms.SamplingParams(max_tokens=30, return_log_probs=True)
    engine.add_request(random_tokens(16, seed=1), params)
    engine.step()
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert (len(slots_.live_slots), len(slots_.free_slots), len(slots_.cached_states.slot_of_block)) == (
        1,
        2,
        0,
    )
    engine.suspend()
    engine.check_integrity()
    assert (len(slots_.live_slots), len(slots_.free_slots)) == (0, 3)
    engine.resume()
    engine.step()
    assert len(slots_.live_slots) == 1
    engine.reset()
    engine.check_integrity()
    assert (len(slots_.live_slots), len(slots_.free_slots)) == (0, 3)
