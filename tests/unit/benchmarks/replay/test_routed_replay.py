"""Replicas on one clock: each is an engine of its own, and a router changes only who serves a request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mambaslots as ms
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_index import StateIndex
from mambaslots.net.routing.state_router import ReplicaLoad, RouteRequest
from mambaslots.replay.compared_caches import DEFAULT_CACHE, spec_of
from mambaslots.replay.engine_replay import TOO_LONG, EngineReplay
from mambaslots.replay.generate import generate
from mambaslots.replay.setting import ModelShape, ReplaySetting, StepCost, model_shape
from mambaslots.replay.trace import Trace, TraceRequest
from oracle.budget import costly
from oracle.kv_index import eviction_order
from oracle.session_traces import small_trace
from oracle.state_channel import keys_of
from routed import one_cache_replay, sum_of
from routed import routed_replay as routed_by
from routed_replay import ONE_CACHE, RoutedReplay, Routing
from routers import ROUTERS, Router

SHAPE = ModelShape("small", 1024, 1024, 64, 4, 64, 4, 1, 1, 16)
COST = StepCost(0.01, 1e-3, 1e-3)
BLOCK = 4
MS = 1_000_000


class Noted:
    """A router that asks another one, and notes what it received."""

    reads_events = True

    def __init__(self, inner: Router) -> None:
        self.index = StateIndex()
        self.loads: list[tuple[ReplicaLoad, ...]] = []
        self.events: list[StateEvents] = []
        self.num_received: list[int] = []  # messages before each choice
        self._inner = inner

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> Sequence[str]:
        self.loads.append(tuple(loads))
        self.num_received.append(len(self.events))
        return self._inner.choose(request, loads)

    def record_routed(self, request: RouteRequest, replica: str) -> None:
        raise AssertionError("a replay sends requests where the router says first")

    def apply(self, events: StateEvents) -> bool:
        self.events.append(msgspec.structs.replace(events, epoch=0))
        assert self.index.apply(events), "a message is missing"
        return self._inner.apply(events)

    def remove(self, replica: str) -> None:
        raise AssertionError("no replica is lost")


class ByFirstBlock:
    """A router that sends prompts with one first block to one replica."""

    reads_events = False

    def __init__(self, homes: Sequence[int]) -> None:
        self._homes = list(homes)
        self._home_of: dict[int, int] = {}

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> Sequence[str]:
        known = len(self._home_of)
        home = self._home_of.setdefault(request.hashes[0], self._homes[known % len(self._homes)])
        return [loads[home % len(loads)].replica]

    def record_routed(self, request: RouteRequest, replica: str) -> None: ...

    def apply(self, events: StateEvents) -> bool:
        return True

    def remove(self, replica: str) -> None: ...


def config_of(**settings: Any) -> ms.InferenceConfig:
    sizes: dict[str, Any] = {
        "block_size_tokens": BLOCK, "max_requests": 3, "max_tokens_per_step": 16, "max_sequence_length": 4096,
        "num_kv_blocks": 400, "num_mamba_slots": 8,
    }  # fmt: skip
    return ms.InferenceConfig(**(sizes | settings))


def routed(
    trace: Trace, router: Router, num_replicas: int, cost: StepCost = COST, **settings: Any
) -> RoutedReplay:
    options = {name: settings.pop(name) for name in ("event_delay_ms",) if name in settings}
    token_by_token = settings.pop("token_by_token", False)
    replay = RoutedReplay(trace, spec_of(SHAPE), config_of(**settings), cost, router, num_replicas, **options)
    if token_by_token:
        for replica in replay.replicas:
            replica.engine._pass_quiet_decodes = lambda: None  # type: ignore[method-assign]
    return replay


def plain(trace: Trace, cost: StepCost = COST, **settings: Any) -> EngineReplay:
    return EngineReplay(trace, spec_of(SHAPE), config_of(**settings), cost)


def check(replay: RoutedReplay) -> None:
    for replica in replay.replicas:
        scheduler = replica.engine.scheduler
        known = {request.request_id: request for request in scheduler.running} | dict(scheduler.waiting)
        replica.engine.context.check_integrity()
        scheduler.check_integrity(known)


def state_of(engine: EngineReplay) -> tuple[object, ...]:
    cache = engine.context.prefix_cache
    return (
        engine.now_ns, cache.slots.cached_states.slot_of_block, cache.slots.cached_states.state_block_of_hash,
        eviction_order(cache.slots), list(cache.kv_blocks.references), engine.context.cache_stats(),
    )  # fmt: skip


def request(at_s: float, session: int, num_tokens: int, num_answer: int) -> TraceRequest:
    return TraceRequest(at_s, session, np.arange(num_tokens), np.arange(num_answer))


SIZES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "num_slots": st.integers(1, 12),
    "num_blocks": st.sampled_from([60, 400]),
    "max_requests": st.integers(1, 4),
}


@costly()
@pytest.mark.parametrize("name", ROUTERS)
@given(**SIZES)
def test_one_replica_is_the_plain_replay(
    name: str, seed: int, num_slots: int, num_blocks: int, max_requests: int
) -> None:
    trace = small_trace(seed)
    settings: dict[str, Any] = {
        "num_mamba_slots": num_slots, "num_kv_blocks": num_blocks, "max_requests": max_requests,
    }  # fmt: skip
    alone, one = plain(trace, **settings), routed(trace, ROUTERS[name](seed), 1, event_delay_ms=5, **settings)
    expected, result = alone.run(), one.run()
    assert result.replicas[0].served == expected
    assert state_of(one.replicas[0].engine) == state_of(alone)
    assert list(one.replicas[0].engine.first_token_ns) == alone.first_token_ns
    assert (result.num_moved_sessions, result.token_imbalance, result.request_imbalance) == (0, 1.0, 1.0)


@costly()
@given(
    **SIZES,
    homes=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    num_replicas=st.integers(2, 4),
    token_by_token=st.booleans(),
)
def test_replicas_with_sessions_of_their_own_are_plain_replays_of_their_parts(
    seed: int,
    num_slots: int,
    num_blocks: int,
    max_requests: int,
    homes: list[int],
    num_replicas: int,
    token_by_token: bool,
) -> None:
    drawn = small_trace(seed, num_sessions=8)
    trace = replace(
        drawn,
        requests=[
            replace(one, prompt=np.concatenate([np.full(BLOCK, 200 + one.session // 2), one.prompt]))
            for one in drawn.requests
        ],
    )
    settings: dict[str, Any] = {
        "num_mamba_slots": num_slots, "num_kv_blocks": num_blocks, "max_requests": max(2, max_requests),
    }  # fmt: skip
    replay = routed(trace, ByFirstBlock(homes), num_replicas, token_by_token=token_by_token, **settings)
    result = replay.run()
    assert result.num_moved_sessions == 0
    for index, replica in enumerate(replay.replicas):
        own = [number for number, where in enumerate(replay.replica_of) if where == index]
        alone = plain(Trace("part", [trace.requests[number] for number in own]), **settings)
        expected, served = alone.run(), replica.engine.result()
        lengths = tuple(served.resumed_lengths[number] for number in own)
        assert replace(served, resumed_lengths=lengths) == expected
        assert [replica.engine.first_token_ns[number] for number in own] == alone.first_token_ns
        assert state_of(replica.engine) == state_of(alone)


@costly()
@given(
    **SIZES,
    name=st.sampled_from(list(ROUTERS)),
    num_replicas=st.integers(2, 4),
    delay_ms=st.sampled_from([0.0, 7.3, 400.0]),
    base_s=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_many_decodes_at_once_are_seen_as_single_ones(
    name: str,
    seed: int,
    num_slots: int,
    num_blocks: int,
    max_requests: int,
    num_replicas: int,
    delay_ms: float,
    base_s: float,
) -> None:
    trace = small_trace(seed, num_sessions=6)
    settings: dict[str, Any] = {
        "num_mamba_slots": num_slots, "num_kv_blocks": num_blocks, "max_requests": max_requests,
        "event_delay_ms": delay_ms,
    }  # fmt: skip
    cost = StepCost(base_s, 1e-3, 1e-3)
    coarse_router, fine_router = Noted(ROUTERS[name](seed)), Noted(ROUTERS[name](seed))
    coarse = routed(trace, coarse_router, num_replicas, cost, **settings)
    fine = routed(trace, fine_router, num_replicas, cost, **settings, token_by_token=True)
    while coarse.step():
        check(coarse)
    assert fine.run() == coarse.result()
    assert fine_router.loads == coarse_router.loads
    assert fine_router.events == coarse_router.events
    for one, other in zip(coarse.replicas, fine.replicas, strict=True):
        assert state_of(one.engine) == state_of(other.engine)


@costly()
@given(**SIZES, num_replicas=st.integers(1, 5), delay_ms=st.sampled_from([0.0, 30.0]))
def test_each_request_is_served_once_and_the_router_learns_all_states(
    seed: int, num_slots: int, num_blocks: int, max_requests: int, num_replicas: int, delay_ms: float
) -> None:
    trace = small_trace(seed, num_sessions=6)
    settings: dict[str, Any] = {
        "num_mamba_slots": num_slots, "num_kv_blocks": num_blocks, "max_requests": max_requests,
        "event_delay_ms": delay_ms,
    }  # fmt: skip
    router = Noted(ROUTERS["random"](seed))
    replay = routed(trace, router, num_replicas, **settings)
    result = replay.run()
    check(replay)
    number = len(trace.requests)
    counts = [replay.replica_of.count(index) for index in range(num_replicas)]
    assert [one.served.num_requests for one in result.replicas] == counts
    assert result.num_requests == number == len(router.loads)
    assert result.prompt_tokens == trace.num_prompt_tokens
    assert result.resumed_tokens + sum(result.lost_by_reason.values()) == result.prompt_tokens
    whole = sum(len(one.prompt) + len(one.answer) for one in trace.requests)
    computed = sum(one.num_computed_tokens for one in result.replicas)
    assert computed == whole - result.resumed_tokens
    for events in replay.channel.take_due(10**18):  # what was on its way at the end
        router.apply(events)
    assert result.num_events == len(router.events)
    num_keys = sum(len(events.inserted) + len(events.removed) for events in router.events)
    assert 9 * num_keys < result.event_bytes < 9 * num_keys + 60 * len(router.events)
    for replica in replay.replicas:
        states = replica.engine.context.prefix_cache.slots.cached_states.state_block_of_hash
        assert keys_of(router.index, replica.name) == states.keys()


def test_a_router_sees_what_has_ended_and_learns_states_later() -> None:
    """The first request computes 5 tokens in 15 ms, and has one more to generate."""
    asked = [(0, 5, 2), (14, 9, 1), (15, 9, 1), (54, 9, 1), (55, 9, 1)]
    trace = Trace("by hand", [request(at / 1000, i, *sizes) for i, (at, *sizes) in enumerate(asked)])
    router = Noted(ByFirstBlock([1]))
    replay = routed(trace, router, 2, event_delay_ms=40, max_tokens_per_step=64, num_mamba_slots=64)
    replay.run()
    assert replay.replica_of == [1] * 5
    assert all(loads[0] == ReplicaLoad("replica-0", 0, 0) for loads in router.loads)
    seen = [(loads[1].num_requests, loads[1].num_tokens) for loads in router.loads]
    assert seen[:3] == [(0, 0), (1, 5 + 2), (2, 2 + 10)]
    assert router.num_received == [0, 0, 0, 0, 1]


def test_a_session_waits_for_its_answer_at_another_replica() -> None:
    trace = Trace("by hand", [request(0.0, 7, 4, 3), request(0.001, 7, 4, 1), request(0.002, 8, 4, 1)])
    replay = routed(trace, ROUTERS["round-robin"](0), 3)
    result = replay.run()
    first_end_ns = (10 + 4 + 11 + 11) * MS
    assert replay.replica_of == [0, 2, 1]
    assert replay.replicas[2].engine.now_ns == first_end_ns + 14 * MS
    assert result.first_token_s == (0.014, 0.014, 0.014)
    assert result.num_moved_sessions == 1
    assert result.duration_s == (first_end_ns + 14 * MS) / 1e9


def test_a_request_that_fits_in_no_pool_is_lost_and_its_session_goes_on() -> None:
    trace = Trace("long", [request(0.0, 7, 200, 4), request(0.0, 7, 8, 1), request(0.0, 8, 8, 1)])
    result = routed(trace, ROUTERS["round-robin"](0), 2, num_kv_blocks=40).run()
    assert result.num_requests == 3
    assert result.lost_by_reason[TOO_LONG] == 200
    assert len(result.first_token_s) == 2
    assert sum(one.num_computed_tokens for one in result.replicas) + result.resumed_tokens == 18


@pytest.mark.parametrize(
    "setting",
    [
        ReplaySetting(model_shape("nemotron-h-8b"), state_gb=0.5, kv_gb=4.0),
        ReplaySetting(model_shape("nemotron-h-8b"), total_gb=6.0, host_gb=1.0),
    ],
    ids=["apart", "in all"],
)
def test_one_cache_of_one_replica_is_the_plain_row(setting: ReplaySetting) -> None:
    trace = generate("chat", 0, scale=0.05)
    expected = DEFAULT_CACHE.replay(trace, setting)
    assert one_cache_replay(trace, setting, Routing(1, ONE_CACHE)).replicas[0].served == expected
    assert routed_by(trace, setting, Routing(1, "prefix")).replicas[0].served == expected


def test_one_cache_has_what_all_replicas_have() -> None:
    setting = ReplaySetting(model_shape("nemotron-h-8b"), state_gb=2.0, kv_gb=20.0, host_gb=3.0)
    whole = sum_of(setting, 4)
    assert (whole.state_gb, whole.kv_gb, whole.total_gb, whole.host_gb) == (8, 80, None, 12)
    assert (whole.max_requests, whole.max_tokens_per_step) == (
        4 * setting.max_requests,
        setting.max_tokens_per_step,
    )
    assert 4 * whole.cost.seconds(100, 7) == pytest.approx(setting.cost.seconds(100, 7))


def test_with_one_row_requests_come_one_after_another_wherever_they_run() -> None:
    trace = generate("chat", 0, scale=0.02)
    setting = ReplaySetting(model_shape("nemotron-h-8b"), state_gb=2.0, kv_gb=20.0, max_requests=1)
    results = [
        one_cache_replay(trace, setting, Routing(3, ONE_CACHE)),
        *(routed_by(trace, setting, Routing(3, router)) for router in ("random", "state")),
    ]
    for result in results:
        assert max(result.first_token_s) < setting.cost.seconds(trace.longest, 0) + 1
