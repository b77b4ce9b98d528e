"""A failing step costs time and cached hits: all finish rightly, nothing leaks, the engine goes on."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle.budget import example_or_dear, thinned
from oracle.faults import POINTS, InjectedError, Interrupted, failing
from oracle.serving import assert_answers, random_tokens, serve_checked, small_engine
from oracle.workload import HEADS, Asked, Client, assert_idle, engine_settings, pressed_engine, requests

pytestmark = pytest.mark.usefixtures("kind")

# Where an interrupted call leaves what no one can give back, the cache is forgotten; elsewhere it stays.
MAY_LOSE_TRACK = {
    "block table", "KV allocation", "KV references", "KV release", "slot pin", "slot unpin", "resume",
    "leaving", "row",
}  # fmt: skip
CANNOT = r"could not recover from a failed call; call again, or call reset\(\)"
call_numbers = st.sets(st.integers(0, 3) | st.integers(0, 30), min_size=1, max_size=3)
errors = st.sampled_from([InjectedError, Interrupted])
load = st.lists(requests, min_size=1, max_size=4)

# With these, every point is reached.
AMPLE = {
    "num_mamba_slots": 40, "num_kv_blocks": 40, "max_tokens_per_step": 13, "max_sequence_length": 96,
    "checkpoint_plan": ms.CheckpointPlan(prefill_interval=8),
}  # fmt: skip
REPEATED, LONGER = Asked(tuple(HEADS[4]), 9), Asked(tuple(HEADS[6]), 3)


def serve_through_failures(client: Client, error: type[BaseException], tally: Counter[str]) -> None:
    """To the end, over failing steps."""
    engine, client.steps_fail = client.engine, True
    for _ in range(600):
        if not engine.has_unfinished_requests():
            break
        with suppress(error):
            client.step()
        engine.check_integrity()
    assert not client.asked, "a request is lost, or the engine does not go on"
    tally["rebuilds"] += engine.stats().num_rebuilds


@pytest.mark.parametrize("point", POINTS)
def test_failing_anywhere_costs_no_token_and_leaks_nothing(point: str) -> None:
    tally = Counter[str]()

    @example_or_dear()
    @example(
        sizes=AMPLE,
        before=[REPEATED],
        during=[REPEATED, LONGER],
        after=False,
        calls={0, 1},
        error=InjectedError,
    )
    @given(
        sizes=engine_settings, before=load, during=load, after=st.booleans(), calls=call_numbers, error=errors
    )
    def check(
        sizes: dict[str, Any],
        before: list[Asked],
        during: list[Asked],
        after: bool,
        calls: set[int],
        error: type[BaseException],
    ) -> None:
        client = Client(small_engine(**sizes))
        for asked in before:
            client.ask(asked)
        client.finish()
        for asked in during + before[:2]:
            client.ask(asked)
        with failing(client.engine, point, after=after, calls=calls, error=error) as seen:
            serve_through_failures(client, error, tally)
        tally.update(seen)
        assert_idle(client.engine)

    check()
    print(f"{point}: {tally['failed']} failures injected, {tally['rebuilds']} times the cache was forgotten")
    assert tally["failed"], "no call ever failed"
    assert point in MAY_LOSE_TRACK or not tally["rebuilds"]


@pytest.mark.sampled(point=("forward", "commit", "sampled", "leaving"))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", ["forward", "register", "commit", "advance", "sampled", "leaving"])
@pytest.mark.parametrize("policy", ["value", "lru"])
def test_every_nth_call_failing_is_survived(point: str, after: bool, policy: str) -> None:
    tally = Counter[str]()
    for number in thinned((0, 1, 2, 4, 7), 2):
        client = Client(pressed_engine(eviction_policy=policy))
        for prompt in (HEADS[5], HEADS[4], HEADS[4], HEADS[6]):
            client.ask(Asked(tuple(prompt), 9))
        with failing(client.engine, point, after=after, calls={number, number + 2}) as seen:
            serve_through_failures(client, InjectedError, tally)
        tally.update(seen)
        assert_idle(client.engine)
    assert tally["failed"] >= 4


def test_random_draws_are_the_same_over_failures() -> None:
    params = ms.SamplingParams(max_tokens=12, temperature=1.2, top_k=30, seed=5)
    (expected,) = small_engine().generate([HEADS[4]], params)
    for number in thinned(range(6), every=2):
        engine = small_engine()
        request_id = engine.add_request(HEADS[4], params)
        with failing(engine, "sampled", after=True, calls={number}):
            results = []
            while engine.has_unfinished_requests():
                with suppress(InjectedError):
                    results += engine.step().finished
        assert [(r.request_id, r.tokens) for r in results] == [(request_id, expected.tokens)]


# ---- observers


@contextmanager
def observer_that_raises(
    engine: ms.DynamicInferenceEngine, error: type[BaseException], calls: set[int] | None = None
) -> Iterator[Counter[str]]:
    seen = Counter[str]()

    def observer(block_ids: list[int], hashes: set[int]) -> None:
        seen["calls"] += 1
        if calls is None or seen["calls"] - 1 in calls:
            seen["failed"] += 1
            raise error("observer")

    engine.context.prefix_cache.kv_blocks.observe_deregistration(observer)
    yield seen


@pytest.mark.sampled(policy=("value",))
@pytest.mark.parametrize("policy", ["value", "lru"])
def test_an_observer_that_raises_fails_no_step(policy: str) -> None:
    client = Client(pressed_engine(eviction_policy=policy))
    with observer_that_raises(client.engine, InjectedError) as seen:
        for prompt in HEADS:
            client.ask(Asked(tuple(prompt), 9))
        client.finish()
        client.engine.reset_prefix_cache()
    assert seen["failed"] > 3
    assert_idle(client.engine)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["value", "lru"])
def test_control_c_in_an_observer_stops_one_call_and_breaks_nothing(policy: str) -> None:
    tally = Counter[str]()
    for number in thinned(range(5), every=2):
        client = Client(pressed_engine(eviction_policy=policy))
        with observer_that_raises(client.engine, Interrupted, {number}) as seen:
            for prompt in HEADS[2:10]:
                client.ask(Asked(tuple(prompt), 9))
            serve_through_failures(client, Interrupted, tally)
        tally.update(seen)
        assert_idle(client.engine)
    assert tally["failed"] >= 2


# ---- what the model returns


@pytest.mark.sampled
@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits[:-1],
        lambda logits: torch.cat([logits, logits]),
        lambda logits: logits[:, :-1],
        lambda logits: logits.repeat(1, 2),
        lambda logits: logits[0],
        lambda logits: logits[None],
        lambda logits: logits.mT,
        lambda logits: logits.tolist(),
        lambda logits: None,
    ],
)
@pytest.mark.parametrize("failing_call", [0, 1, 5])
def test_logits_of_another_shape_are_refused(
    spoil: Callable[[torch.Tensor], object], failing_call: int
) -> None:
    client = Client(small_engine())
    engine, model = client.engine, client.engine.model
    for prompt in HEADS[3:6]:
        client.ask(Asked(tuple(prompt), 6))
    for number in range(300):
        if number == failing_call:
            with (
                patch.object(engine, "model", lambda inputs: spoil(model(inputs))),
                pytest.raises(ValueError, match=r"the model returned .* accepted: logits of shape"),
            ):
                client.step()
        else:
            client.step()
        engine.context.check_integrity()
        if not engine.has_unfinished_requests():
            break
    assert not client.asked
    assert_idle(engine)


# ---- when recovering fails too


@pytest.mark.parametrize("second", ["leaving", "slot unpin", "block table"])
@pytest.mark.parametrize("after", [False, True])
def test_a_second_failure_while_recovering_costs_the_cache_and_no_request(second: str, after: bool) -> None:
    client = Client(small_engine())
    engine = client.engine
    client.ask(Asked(tuple(HEADS[4]), 3))
    client.finish()
    engine.pin(HEADS[4])
    client.ask(Asked(tuple(HEADS[6]), 3))
    client.ask(Asked(tuple(HEADS[4]), 3))
    first = "block table" if second == "block table" else "forward"
    with (
        failing(engine, first, calls={0}),
        failing(engine, second, after=after, calls={0} if second != first else set()),
        pytest.raises(InjectedError, match=first),
    ):
        engine.step()
    assert engine.stats().num_rebuilds == 1
    assert engine.pins() == []
    client.finish()
    assert_idle(engine)


def test_the_log_has_the_contradiction_that_cost_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    engine = small_engine()
    engine.add_request(HEADS[4])
    contradiction = AssertionError("block 3 is free and cached")
    with (
        patch.object(engine.context, "check_integrity", side_effect=contradiction),
        failing(engine, "block table", calls={0}),
        pytest.raises(InjectedError, match="block table"),
    ):
        engine.step()
    assert "cached prefixes and pins are forgotten, 1 requests are queued again" in caplog.text
    assert "AssertionError: block 3 is free and cached" in caplog.text


def test_an_engine_that_cannot_recover_says_so_at_every_call_until_it_can() -> None:
    client = Client(small_engine())
    engine = client.engine
    client.ask(Asked(tuple(HEADS[4]), 3))
    client.finish()
    pinned = engine.pin(HEADS[4])
    stream = engine.stream(HEADS[6])
    repeated = client.ask(Asked(tuple(HEADS[4]), 3))
    calls: list[Callable[[], object]] = [
        engine.step,
        engine.suspend,
        engine.resume,
        engine.reset_prefix_cache,
        lambda: engine.cancel(repeated),
        lambda: engine.add_request([1, 2]),
        lambda: engine.generate([[1, 2]]),
        lambda: engine.stream([1, 2]),
        lambda: next(stream),
        lambda: engine.warm(HEADS[4]),
        lambda: engine.pin(HEADS[4]),
        lambda: engine.unpin(pinned),
        lambda: engine.set_weights_version(1),
        engine.stats,
        engine.check_integrity,
    ]
    with patch.object(engine.context, "reset", side_effect=InjectedError):
        with (
            failing(engine, "block table", calls={0}),
            pytest.raises(RuntimeError, match=CANNOT) as raised,
        ):
            engine.step()
        assert isinstance(raised.value.__cause__, InjectedError)
        for call in calls:
            with pytest.raises(RuntimeError, match=CANNOT):
                call()
    assert engine.weights_version is None
    stream.close()
    assert stream.finish_reason == "cancelled"
    assert engine.stats().num_rebuilds == 1
    client.finish()
    assert [result.num_resumed_tokens for result in client.results] == [0, 0]
    assert serve_checked(engine, [HEADS[4]])[0].num_resumed_tokens == 16
    assert_idle(engine)


def test_a_reset_that_fails_is_completed_by_the_next_call() -> None:
    engine = small_engine()
    engine.add_request(HEADS[4])
    engine.step()
    with patch.object(engine.context, "_new_admission", side_effect=InjectedError):
        with pytest.raises(InjectedError):
            engine.reset()
        with pytest.raises(RuntimeError, match=CANNOT):
            engine.step()
    assert engine.step() == ms.StepReport()
    assert_idle(engine)
    serve_checked(engine, [HEADS[4]])


# ---- calls from inside a step, and streams


@contextmanager
def model_that_calls(engine: ms.DynamicInferenceEngine, call: Callable[[], object]) -> Iterator[None]:
    """Once, in the middle of the next forward."""
    model, calls = engine.model, [call]

    def calling(inputs: ms.StepInputs) -> torch.Tensor:
        logits = model(inputs)
        if calls:
            calls.pop()()
        return logits

    with patch.object(engine, "model", calling):
        yield


CALLS_FROM_INSIDE: dict[str, Callable[[ms.DynamicInferenceEngine, int], object]] = {
    "step": lambda engine, _: engine.step(),
    "cancel": lambda engine, running: engine.cancel(running),
    "generate": lambda engine, _: engine.generate([[1, 2]]),
    "score": lambda engine, _: engine.score([[1, 2]]),
    "warm": lambda engine, _: engine.warm(HEADS[1]),
    "reset": lambda engine, _: engine.reset(),
    "reset_prefix_cache": lambda engine, _: engine.reset_prefix_cache(),
    "weights_version": lambda engine, _: engine.set_weights_version(7),
    "suspend": lambda engine, _: engine.suspend(),
    "resume": lambda engine, _: engine.resume(),
    "pin": lambda engine, _: engine.pin(HEADS[4]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("call", CALLS_FROM_INSIDE)
def test_a_call_from_inside_a_step_is_refused_and_the_step_survives(call: str, caught: bool) -> None:
    client = Client(pressed_engine())
    running = [client.ask(Asked(tuple(prompt), 12)) for prompt in (HEADS[4], HEADS[2])]

    def from_inside() -> None:
        with pytest.raises(RuntimeError, match="during a step") as refusal:
            CALLS_FROM_INSIDE[call](client.engine, running[0])
        if not caught:
            raise refusal.value

    for _ in range(2):
        client.step()
    with model_that_calls(client.engine, from_inside):
        if caught:
            client.step()
        else:
            with pytest.raises(RuntimeError, match="during a step"):
                client.step()
        client.engine.context.check_integrity()
    client.finish()
    assert_idle(client.engine)


def test_a_request_added_from_inside_a_step_is_served_also_if_the_step_fails() -> None:
    for fails in (False, True):
        client = Client(small_engine())
        client.ask(Asked(tuple(HEADS[4]), 5))

        def from_inside(client: Client = client, fails: bool = fails) -> None:
            client.ask(Asked(tuple(HEADS[2]), 5))
            if fails:
                raise InjectedError

        with model_that_calls(client.engine, from_inside), suppress(InjectedError):
            client.step()
        client.finish()
        assert len(client.results) == 2
        assert_idle(client.engine)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_a_stream_let_go_of_inside_a_step_is_cancelled_when_it_ends(length: int, fails: bool) -> None:
    engine = small_engine()
    params = ms.SamplingParams(max_tokens=length)
    kept, abandoned = engine.stream(HEADS[4], params), [engine.stream(HEADS[12], params)]

    def let_go() -> None:
        abandoned.pop().close()
        if fails:
            raise InjectedError

    with model_that_calls(engine, let_go), suppress(InjectedError):
        next(kept)
    engine.context.check_integrity()
    assert len(list(kept)) == (length if fails else length - 1)
    assert not engine.has_unfinished_requests()
    assert not engine.core.unclaimed
    assert_idle(engine)


@pytest.mark.sampled
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("how", ["closed", "dropped", "dropped in a cycle"])
def test_an_abandoned_stream_leaves_nothing(how: str, taken: int) -> None:
    client = Client(pressed_engine())
    stream = client.engine.stream(HEADS[4], ms.SamplingParams(max_tokens=9))
    client.ask(Asked(tuple(HEADS[5]), 9))
    for _ in range(taken):
        next(stream)
        client.arrived.clear()
    for request_id in client.asked:  # steps made by the stream were reported to no caller
        client.arrived[request_id] = client.engine.core.requests[request_id].new_tokens
    if how == "closed":
        stream.close()
    elif how == "dropped in a cycle":
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    gc.collect()
    client.engine.check_integrity()
    assert list(client.engine.core.requests) == list(client.asked)
    client.finish()
    assert not client.engine.core.unclaimed
    assert_idle(client.engine)


def test_a_stream_goes_on_after_a_failed_step_and_repeats_nothing() -> None:
    (expected,) = small_engine().generate([HEADS[5]], ms.SamplingParams(max_tokens=8))
    for point in ("forward", "sampled", "leaving"):
        for number in thinned(range(8), every=2):
            engine = small_engine(max_tokens_per_step=16)
            stream = engine.stream(HEADS[5], ms.SamplingParams(max_tokens=8))
            tokens: list[int] = []
            with failing(engine, point, after=point == "sampled", calls={number}):
                while True:
                    try:
                        tokens.append(next(stream).token)
                    except InjectedError:
                        engine.context.check_integrity()
                    except StopIteration:
                        break
            assert tokens == expected.tokens
            assert_idle(engine)


# ---- generate


@pytest.mark.sampled
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", ["scheduling", "row", "slot reservation", "inputs", "forward", "sample"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_generate_that_raises_leaves_no_orphan(point: str, after: bool, number: int) -> None:
    client = Client(pressed_engine())
    others = client.ask(Asked(tuple(HEADS[4]), 12))
    params = ms.SamplingParams(max_tokens=6)
    with failing(client.engine, point, after=after, calls={number}) as seen:
        raised = False
        try:
            client.engine.generate([HEADS[5], HEADS[2]], params)
        except InjectedError:
            raised = True
    assert raised == bool(seen["failed"])
    client.engine.context.check_integrity()
    assert not raised or set(client.engine.core.requests) <= {others}
    done = client.engine.take_result(others)
    if done is None:
        client.arrived[others] = client.engine.core.requests[others].new_tokens
        client.finish()
    else:
        client.arrived[others] = list(done.tokens)
        client.take(done)
    assert not client.engine.core.unclaimed
    assert_idle(client.engine)


@pytest.mark.parametrize("bad", [[], [256], [-1], [1] * 500, "text", None])
def test_a_bad_prompt_among_good_ones_leaves_no_orphan(bad: object) -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match="prompt"):
        engine.generate([HEADS[4], bad, HEADS[2]])  # type: ignore[list-item]
    assert not engine.has_unfinished_requests()
    assert_idle(engine)


# ---- the context by itself


def test_a_failure_costs_the_tokens_since_the_last_state_and_no_more() -> None:
    prompt = random_tokens(9, seed=1)
    recomputed = []
    for length in (46, 47):  # the failing step computes token 47, or token 48, which ends on a boundary
        engine = small_engine()
        request_id = engine.add_request(prompt, ms.SamplingParams(max_tokens=60, return_log_probs=True))
        while len(engine.computed_prefix(request_id)) != length:
            engine.step()
        with failing(engine, "forward", after=True), pytest.raises(InjectedError):
            engine.step()
        results = []
        while engine.has_unfinished_requests():
            results += engine.step().finished
        assert_answers(prompt, results[0])
        recomputed.append(results[0].num_recomputed_tokens)
    assert recomputed == [46 - 40, 47 - 40]


# ---- counts


def counts_since_the_beginning(engine: ms.DynamicInferenceEngine) -> dict[str, int]:
    cache = engine.stats().cache
    return {
        "prompt": cache.num_prompt_tokens,
        "committed": cache.num_states_committed,
        "refused": cache.num_states_refused,
        "unused": cache.num_states_evicted_unused,
        "registered": cache.num_kv_blocks_registered,
        "ages of states": sum(cache.state_ages.counts),
        **{f"state {cause}": number for cause, number in cache.states_removed_by_cause.items()},
        **{f"block {cause}": number for cause, number in cache.kv_blocks_removed_by_cause.items()},
    }


def evicting_engine() -> ms.DynamicInferenceEngine:
    engine = small_engine(num_mamba_slots=3, num_kv_blocks=16)
    for seed in range(4):
        engine.generate([random_tokens(60, seed)], ms.SamplingParams(max_tokens=2))
    return engine


def test_a_rebuild_keeps_the_counts_and_what_it_forgets_counts_as_reset() -> None:
    engine = evicting_engine()
    before, cache = counts_since_the_beginning(engine), engine.stats().cache
    assert before["ages of states"]
    engine.core._rebuild()
    engine.check_integrity()
    assert counts_since_the_beginning(engine) == before | {
        "state reset": cache.num_committed_slots,
        "block reset": cache.num_cached_kv_blocks,
    }
    engine.reset()
    assert not any(counts_since_the_beginning(engine).values())


def test_a_request_of_time_zero_is_cancelled_like_any_other() -> None:
    """Clocks may start at zero; whether a request has an id does not depend on when it came."""
    engine = small_engine()
    with (
        patch("mambaslots.inference.engines.request_factory.time.perf_counter", return_value=0.0),
        patch.object(engine, "_advance", side_effect=InjectedError),
        suppress(InjectedError),
    ):
        engine.generate([HEADS[4], HEADS[2]])
    assert not engine.has_unfinished_requests()
    assert_idle(engine)


def test_an_interrupt_before_a_request_has_an_id_cancels_no_other_one() -> None:
    engine = small_engine()
    other = engine.factory.new_sequence("sequence", HEADS[4], 1, None, None)
    engine.factory.assign_id(other, is_users=False, owned=True)
    engine.core.add(other)
    with patch.object(engine.factory, "assign_id", side_effect=Interrupted), suppress(Interrupted):
        engine.generate([HEADS[2]])
    assert list(engine.core.requests) == [other.request_id]
