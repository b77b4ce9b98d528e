"""A replay decides as a real engine that serves the same requests at the same steps."""

from collections.abc import Sequence
from typing import Any

import mambaslots as ms
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.eviction import EVICTION_POLICIES
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.replay.engine_replay import EngineReplay
from mambaslots.replay.setting import StepCost
from mambaslots.replay.trace import Trace
from mambaslots.state_spec import StateTensor
from oracle.budget import costly
from oracle.kv_index import eviction_order
from oracle.session_traces import small_trace

VOCABULARY, BLOCK = 100, 4
COST = StepCost(0.05, 1e-3, 1e-3)
SPEC = ms.HybridStateSpec(
    states=(StateTensor("state", 1, (2,), torch.float32, grid=2),),
    num_attention_layers=1,
    num_kv_heads=1,
    head_dim=1,
    kv_dtype=torch.float32,
    vocab_size=VOCABULARY,
    device=torch.device("cpu"),
)


class Reader:
    """A model that computes nothing and answers what the trace says; counts what the steps cost."""

    def __init__(self, trace: Trace) -> None:
        self._texts = [[*one.prompt.tolist(), *one.answer.tolist()] for one in trace.requests]
        self._next: list[int] = []
        self.numbers: dict[int, int] = {}  # request id -> number in the trace
        self.now_s = 0.0

    def state_spec(self) -> ms.HybridStateSpec:
        return SPEC

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: ms.StepInputs) -> None:
        self._next = [
            self._texts[self.numbers[scheduled.request.request_id]][position + 1]
            for scheduled in batch
            for position in scheduled.logit_positions
        ]
        num_decodes = sum(scheduled.decoding for scheduled in batch)
        num_prefill_tokens = sum(scheduled.length for scheduled in batch if not scheduled.decoding)
        self.now_s += COST.seconds(num_prefill_tokens, num_decodes)

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None: ...

    def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self._next, dtype=torch.long), VOCABULARY).double()


def serve(
    trace: Trace, config: ms.InferenceConfig
) -> tuple[ms.DynamicInferenceEngine, list[ms.RequestResult]]:
    """Serve the trace with a real engine; a session's request comes behind the answer before it."""
    reader = Reader(trace)
    engine = ms.DynamicInferenceEngine(reader, config)  # type: ignore[arg-type]
    engine.context.observers.append(reader)
    coming = sorted((one.arrival_s, number) for number, one in enumerate(trace.requests))
    coming = [
        entry
        for entry in coming
        if all(one.session != trace.requests[entry[1]].session for one in trace.requests[: entry[1]])
    ]
    came: dict[int, float] = {}
    results: dict[int, ms.RequestResult] = {}
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            reader.now_s = max(reader.now_s, coming[0][0])
        while coming and coming[0][0] <= reader.now_s + 1e-9:
            at_s, number = coming.pop(0)
            came[number] = at_s
            asked = ms.SamplingParams(max_tokens=len(trace.requests[number].answer))
            reader.numbers[engine.add_request(trace.requests[number].prompt.tolist(), asked)] = number
        for result in engine.step().finished:
            number = reader.numbers[result.request_id]
            results[number] = result
            assert result.tokens == trace.requests[number].answer.tolist()
            mine = trace.requests[number]
            later = [n for n, one in enumerate(trace.requests) if n > number and one.session == mine.session]
            if later:
                gap_s = trace.requests[later[0]].arrival_s - mine.arrival_s
                coming = sorted([*coming, (max(came[number] + gap_s, reader.now_s), later[0])])
    return engine, [results[number] for number in range(len(trace.requests))]


@costly()
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 12),
    num_blocks=st.sampled_from([60, 80, 400]),
    max_requests=st.integers(2, 4),
    policy=st.sampled_from(EVICTION_POLICIES),
)
@example(
    seed=628, num_slots=1, num_blocks=60, max_requests=2, policy="lru"
)  # a waiting prompt holds an answer to come
def test_a_replay_decides_as_a_real_engine(
    seed: int, num_slots: int, num_blocks: int, max_requests: int, policy: str
) -> None:
    trace = small_trace(seed, num_sessions=6, vocab_size=VOCABULARY)
    sizes: dict[str, Any] = {
        "block_size_tokens": BLOCK, "max_requests": max_requests, "max_tokens_per_step": 16,
        "max_sequence_length": 4096, "num_kv_blocks": num_blocks, "num_mamba_slots": num_slots,
        "eviction_policy": policy,
    }  # fmt: skip
    config = ms.InferenceConfig(**sizes)
    engine, results = serve(trace, config)
    replay = EngineReplay(trace, SPEC, config, COST)
    found = replay.run()
    assert found.resumed_lengths == tuple(result.num_resumed_tokens for result in results)
    real, replayed = engine.context.prefix_cache, replay.context.prefix_cache
    assert real.slots.cached_states.state_block_of_hash == replayed.slots.cached_states.state_block_of_hash
    assert real.slots.cached_states.slot_of_block == replayed.slots.cached_states.slot_of_block
    assert eviction_order(real.slots) == eviction_order(replayed.slots)
    assert real.kv_blocks.tree.block_of_hash == replayed.kv_blocks.tree.block_of_hash
    assert engine.context.cache_stats() == replay.context.cache_stats()
    stats = engine.context.cache_stats()
    assert found.lost_by_reason == {why: number for why, number in stats.computed_by_reason.items() if number}
    assert found.num_states_taken == stats.num_states_committed
