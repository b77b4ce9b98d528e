"""Inputs of replays in KV blocks, which requests allocate as they come to them."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.contexts.input_blocks import InputBlocks, input_bytes, input_shapes
from mambaslots.inference.contexts.pool_sizes import PoolSizes
from mambaslots.models import hybrid_lm
from mambaslots.state_spec import HybridStateSpec, StateTensor, gated_delta_net_states, mamba2_states
from oracle.budget import dear
from oracle.drafters import MixedDrafter
from oracle.model_kinds import kind_of_model, present_kind
from oracle.serving import (
    SEED,
    TOLERANCE,
    kept_oracle,
    random_tokens,
    run_checked,
    small_config,
    small_engine,
)

CHUNK = 16
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@cache
def blocked_model(kind: str) -> ms.models.HybridLM:
    """With chunks of 16 tokens, whose inputs lie in three input blocks of 6."""
    with kind_of_model(kind):
        config = replace(small_config(CHUNK), mamba_head_dim=16, delta_value_dim=16)
        return ms.models.HybridLM(config, seed=SEED)


def blocked_engine(**changes: Any) -> ms.DynamicInferenceEngine:
    settings = {"block_size_tokens": CHUNK, "max_requests": 6, "num_mamba_slots": 8} | changes
    return small_engine(model=blocked_model(present_kind()), decode_by_replay=True, **settings)


def assert_greedy(prompt: Sequence[int], result: ms.RequestResult) -> None:
    """The answer is that of the recurrence."""
    tokens, log_probs = kept_oracle(blocked_model(present_kind())).generate_greedy(
        list(prompt), len(result.tokens)
    )
    assert result.tokens == list(map(int, tokens))
    assert result.log_probs == pytest.approx(list(map(float, log_probs)), abs=TOLERANCE)


class PageWatch:
    """Asserts of each step that each input has an input block, and no input block two owners."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._context = engine.context
        self.input_blocks = PoolSizes.of(engine.config, engine.context.spec).input_blocks
        self._num_drafts = engine.config.num_speculative_tokens
        self.most = self.num_released = 0
        engine.context.observers.append(self)

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: ms.StepInputs) -> None:
        assert inputs.replay is not None
        owned = [block for request in self._context.requests for block in request.allocation.input_blocks]
        blocks = [block for request in self._context.requests for block in request.allocation.path.blocks]
        assert len(set(owned)) == len(owned)
        assert set(owned).isdisjoint(blocks)
        self.most = max(self.most, len(owned))
        for row, scheduled in enumerate(batch):
            count = (scheduled.stop - 1) % CHUNK + 1 if scheduled.decoding else scheduled.stop % CHUNK
            needed = self.input_blocks.num_for_tokens(count)
            own = scheduled.allocation.input_blocks
            assert inputs.replay.input_blocks[row, :needed].tolist() == own[:needed]
            most = count + 1 + self._num_drafts  # of an unread step, or of drafts that were rejected
            assert needed <= len(own) <= self.input_blocks.num_for_tokens(min(CHUNK, most))

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        for scheduled in batch:
            if scheduled.decoding and scheduled.stop % CHUNK == 0:
                assert not scheduled.allocation.input_blocks, "input blocks outlive the grid point"
                self.num_released += 1


@pytest.mark.parametrize("kind", ["mix of all", "Mamba-2", "delta net"])
def test_input_blocks_come_with_the_tokens_and_go_at_the_grid_point(kind: str) -> None:
    with kind_of_model(kind):
        engine = blocked_engine()
        watch = PageWatch(engine)
        assert watch.input_blocks == InputBlocks(6, 3)
        prompts = [random_tokens(length, seed=length) for length in (5, 16, 31, 40)]
        params = ms.SamplingParams(max_tokens=40, return_log_probs=True)
        asked = {engine.add_request(prompt, params): prompt for prompt in prompts}
        for request_id, result in run_checked(engine).items():
            assert_greedy(asked[request_id], result)
        assert watch.num_released >= 8
        assert 1 < watch.most <= 4 * watch.input_blocks.per_chunk
        assert engine.context.prefix_cache.kv_blocks.num_held == 0


@dear()
@given(
    kind=st.sampled_from(["mix of all", "Mamba-2", "delta net"]),
    blocks=st.integers(7, 12),
    shared=st.booleans(),
    caching=st.booleans(),
    drafts=st.integers(0, 4),
    fails=st.integers(0, 9),
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=2, max_size=8),
    seed=st.integers(0, 3),
)
def test_no_input_block_is_lost_where_memory_is_short_and_steps_fail(
    kind: str,
    blocks: int,
    shared: bool,
    caching: bool,
    drafts: int,
    fails: int,
    lengths: list[tuple[int, int]],
    seed: int,
) -> None:
    """Requests wait, pause, are preempted, cancelled and undone; every answer is the recurrence's."""
    with kind_of_model(kind):
        settings: dict[str, Any] = {"num_kv_blocks": blocks, "enable_prefix_caching": caching}
        if drafts:
            settings |= {"make_drafter": MixedDrafter, "num_speculative_tokens": drafts}
        if shared and caching:
            settings |= {"num_kv_blocks": None, "num_mamba_slots": None}
            settings["total_gb"] = least_gb(settings) * 1.02
        engine = blocked_engine(max_sequence_length=96, poisoned=True, **settings)
        PageWatch(engine)
        calls, run = 0, engine.core.step_runner.run_model

        def failing(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if fails and calls % (fails + 3) == 0:
                raise OSError("of the test")
            return run(*arguments)

        engine.core.step_runner.run_model = failing
        asked, results = {}, {}
        for index, (length, answer) in enumerate(lengths):
            prompt = random_tokens(length, seed=seed + index % 3)
            params = ms.SamplingParams(max_tokens=answer, return_log_probs=True)
            asked[engine.add_request(prompt, params)] = prompt
        cancelled = min(asked) if seed == 1 else -1
        while engine.has_unfinished_requests():
            try:
                results |= {result.request_id: result for result in engine.step().finished}
            except OSError:
                assert fails
            engine.check_integrity()
            if calls > 5 and cancelled in asked and cancelled not in results:
                engine.cancel(cancelled)
                del asked[cancelled]
        for request_id, prompt in asked.items():
            assert_greedy(prompt, results[request_id])
        assert engine.context.prefix_cache.kv_blocks.num_held == 0
        assert not any(request.allocation for request in engine.context.requests)


def least_gb(settings: dict[str, Any]) -> float:
    """What one memory for states, KV and input blocks needs at least; the error says it."""
    with pytest.raises(ValueError, match="total_gb is") as caught:
        blocked_engine(max_sequence_length=96, **settings, total_gb=1e-9)
    return float(str(caught.value).split("at least ")[1].split()[0])


def test_a_request_that_finds_no_input_block_is_preempted_and_goes_on() -> None:
    """All requests come to their chunks' ends together."""
    engine = blocked_engine(num_kv_blocks=7, max_requests=6, max_sequence_length=96)
    watch = PageWatch(engine)
    prompts = [random_tokens(16, seed=seed) for seed in range(6)]
    params = ms.SamplingParams(max_tokens=30, return_log_probs=True)
    asked = {engine.add_request(prompt, params): prompt for prompt in prompts}
    results: dict[int, ms.RequestResult] = {}
    paused = 0
    while engine.has_unfinished_requests():
        results |= {result.request_id: result for result in engine.step().finished}
        paused = max(paused, engine.stats().num_paused)
        engine.check_integrity()
    assert paused > 0
    assert watch.most < 6 * watch.input_blocks.per_chunk
    for request_id, prompt in asked.items():
        assert_greedy(prompt, results[request_id])


def test_input_blocks_lie_apart() -> None:
    engine = blocked_engine()
    memory, spec = engine.context.memory, engine.context.spec
    in_blocks = [pool for name, pool in memory.input_pool.items() if name not in memory.shapes_in_rows]
    assert len(in_blocks) == 2
    for number, pool in enumerate(in_blocks):
        pool[:, 3] = number + 1
    assert all(pool[:, 3].eq(number + 1).all() for number, pool in enumerate(in_blocks))
    others = [block for block in range(memory.kv_cache.shape[2]) if block != 3]
    assert not memory.kv_cache[:, :, others].any()
    size = sum(pool[:, 3].numel() for pool in in_blocks)
    assert int((memory.kv_cache[:, :, 3] != 0).sum()) == size
    assert size * spec.kv_dtype.itemsize <= spec.kv_block_bytes(CHUNK)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.usefixtures("one_fla_configuration")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("kind", ["Mamba-2", pytest.param("delta net", marks=pytest.mark.long)])
def test_input_blocks_change_no_bit_of_an_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of a GPU."""
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda device, dtype: GpuKernelSet)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())  # which fla-core's stages enter
    with kind_of_model(kind):
        config = replace(small_config(CHUNK, torch.float16), mamba_head_dim=16, delta_value_dim=16)
        model = ms.models.HybridLM(config, seed=SEED)
    of_model = type(model).state_spec
    prompts = [random_tokens(length, seed=length) for length in (3, 13, 20)]
    params = ms.SamplingParams(max_tokens=8, return_log_probs=True)
    found = []
    for in_blocks in (True, False):
        monkeypatch.setattr(
            type(model), "state_spec", lambda self, at=in_blocks: replace(of_model(self), strided_blocks=at)
        )
        engine = small_engine(model=model, decode_by_replay=True, block_size_tokens=CHUNK)
        num_input_blocks = PoolSizes.of(engine.config, model.state_spec()).input_blocks.per_chunk
        assert (num_input_blocks >= 3) == in_blocks
        found.append([(r.tokens, r.log_probs) for r in engine.generate(prompts, params)])
    assert found[0] == found[1]


# ---- sizes


def spec_of(states: Sequence[StateTensor], layers: int, kv_heads: int, head_dim: int) -> HybridStateSpec:
    return HybridStateSpec(
        tuple(states), layers, kv_heads, head_dim, BFLOAT16, 1000, torch.device("cpu"), supports_replay=True,
        strided_blocks=True,
    )  # fmt: skip


NEMOTRON_H_8B = spec_of(mamba2_states(24, 128, 64, 8, 128, 4, BFLOAT16, FLOAT32, 128), 4, 8, 128)
GRANITE_4_H_SMALL = spec_of(mamba2_states(36, 128, 64, 1, 128, 4, BFLOAT16, FLOAT32, 256), 4, 8, 128)
QWEN3_5_4B = spec_of(gated_delta_net_states(24, 16, 128, 32, 128, 4, BFLOAT16, FLOAT32), 8, 4, 256)


def settings_of(spec: HybridStateSpec, **changes: Any) -> ms.InferenceConfig:
    settings = {"num_kv_blocks": 1000, "num_mamba_slots": 10, "max_tokens_per_step": 4096} | changes
    return ms.InferenceConfig(decode_by_replay=True, max_requests=256, **settings)


def share_of_a_state(spec: HybridStateSpec, input_blocks: InputBlocks) -> float:
    """Bytes of a request's inputs, on average over a chunk, beside those of its live state."""
    config, chunk = settings_of(spec), spec.chunk_tokens(256)
    rows = input_bytes(input_shapes(config, spec, bool(input_blocks.tokens))) / config.max_requests
    average = sum(map(input_blocks.num_for_tokens, range(1, chunk + 1))) / chunk
    return (rows + average * spec.kv_block_bytes(256)) / spec.slot_bytes


@pytest.mark.parametrize(
    ("spec", "input_blocks", "before", "after"),
    [
        pytest.param(NEMOTRON_H_8B, InputBlocks(9, 15), 0.60, 0.37, id="Nemotron-H-8B"),
        pytest.param(QWEN3_5_4B, InputBlocks(16, 4), 0.80, 0.60, id="Qwen3.5-4B"),
        pytest.param(GRANITE_4_H_SMALL, InputBlocks(7, 37), 1.08, 0.60, id="Granite-4-H-small"),
    ],
)
def test_inputs_take_half_the_memory(
    spec: HybridStateSpec, input_blocks: InputBlocks, before: float, after: float
) -> None:
    found = PoolSizes.of(settings_of(spec), spec)
    assert found.input_blocks == input_blocks
    assert found.num_kv_blocks == 1000 + input_blocks.num_for_requests(256)
    assert share_of_a_state(spec, InputBlocks()) == pytest.approx(before, abs=0.01)
    assert share_of_a_state(spec, input_blocks) < after


def test_input_blocks_of_many_requests_are_few() -> None:
    input_blocks = InputBlocks(9, 15)
    assert [input_blocks.num_for_tokens(count) for count in (0, 1, 9, 10, 128)] == [0, 1, 1, 2, 15]
    assert input_blocks.num_for_requests(1) == 15
    assert input_blocks.num_for_requests(2) == 30
    assert input_blocks.num_for_requests(256) / (256 * 15) == pytest.approx(0.61, abs=0.01)
    assert InputBlocks().num_for_tokens(7) == InputBlocks().num_for_requests(9) == 0


@pytest.mark.parametrize(("blocks", "added"), [(4095, 2326), (4096, 3840), (4196, 3740), (9000, 2326)])
def test_requests_whose_kv_fits_find_input_blocks_at_the_same_time(blocks: int, added: int) -> None:
    """256 requests of 16 blocks and 15 input blocks: blocks beyond 4,096 are of evictable prefixes."""
    found = PoolSizes.of(settings_of(NEMOTRON_H_8B, num_kv_blocks=blocks), NEMOTRON_H_8B)
    assert found.num_kv_blocks == blocks + added


def test_as_many_blocks_as_requests_need_are_enough() -> None:
    engine = blocked_engine(max_sequence_length=48, num_kv_blocks=6 * 3)
    for seed in range(6):
        engine.add_request(random_tokens(16, seed=seed), ms.SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.stats().num_paused == 0


@pytest.mark.parametrize("changes", [{"strided_blocks": False}, {"num_attention_layers": 0}])
def test_without_input_blocks_each_row_has_its_memory(changes: dict[str, Any]) -> None:
    spec = replace(NEMOTRON_H_8B, **changes)
    found = PoolSizes.of(settings_of(spec), spec)
    assert found.input_blocks == InputBlocks()
    assert found.num_kv_blocks == 1000
    shapes = input_shapes(settings_of(spec), spec, bool(found.input_blocks.tokens))
    assert shapes["ssm_x"][0] == (24, 256, 128, 128, 64)


def test_total_gb_buys_more_units_than_with_inputs_of_whole_chunks() -> None:
    spec = NEMOTRON_H_8B
    config = settings_of(spec, num_kv_blocks=None, num_mamba_slots=None, total_gb=60.0)
    sizes = PoolSizes.of(config, spec)
    assert sizes.division is not None
    assert sizes.division.num_kv_units * sizes.division.shape.blocks >= 15 + math.ceil(
        config.max_sequence_length / 256
    )
    rows = input_bytes(input_shapes(config, spec)) - input_bytes(
        input_shapes(config, spec, bool(sizes.input_blocks.tokens))
    )
    assert rows > 13 << 30
    assert sizes.division.total_bytes(blocked_sizes(spec)) > 58 << 30


def blocked_sizes(spec: HybridStateSpec) -> Any:
    from mambaslots.inference.contexts.cache.memory import UnitSizes

    return UnitSizes(spec.slot_bytes, spec.kv_block_bytes(256))


def test_the_memory_line_says_input_blocks() -> None:
    summary = blocked_engine().context.memory.summary()
    assert "and a KV block for each" in summary
