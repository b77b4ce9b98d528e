"""In a poisoned engine, memory that may not be read is NaN before every forward, and all answers stay."""

from dataclasses import replace

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle import drafters
from oracle.ema_lm import EmaLM
from oracle.memory_poison import free_memory
from oracle.model_kinds import WITH_ATTENTION
from oracle.serving import (
    assert_answers,
    random_tokens,
    run_checked,
    serve_checked,
    small_config,
    small_engine,
    small_model,
)
from oracle.step_memory import StepMemory
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kind")


class Watched:
    """A model that looks at the pools before it computes."""

    def __init__(self) -> None:
        self.model = small_model()
        self.poisoned: list[tuple[int, int]] = []
        self.num_begun = 0

    def state_spec(self) -> ms.HybridStateSpec:
        return self.model.state_spec()

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        pool = inputs.state_pool
        slots = {
            slot
            for slot in range(len(pool.memory))
            if all(states[:, slot].isnan().all() for states in pool.tensors)
        }
        blocks = {b for b in range(inputs.kv_cache.shape[2]) if inputs.kv_cache[:, :, b].isnan().all()}
        step = StepMemory.from_inputs(inputs)
        assert not slots & set(step.sources)
        assert set(inputs.state_destinations.tolist()) - {-1} <= slots | set(step.sources)
        rows = inputs.kv_cache.flatten(2, 3)
        assert rows[:, :, list(step.reads)].isfinite().all()
        size = inputs.kv_cache.shape[3]
        held = {block * size + row for each in step.rows for block in each.blocks for row in range(size)}
        unwritten = rows[:, :, sorted(held - set(step.reads))]
        begun = unwritten == torch.finfo(rows.dtype).max
        assert (unwritten.isnan() | begun).all()
        self.num_begun += int(begun[0, 0, :, 0, 0].sum())
        self.poisoned.append((len(slots), len(blocks)))
        return self.model(inputs)


@pytest.mark.parametrize("kind", WITH_ATTENTION, indirect=True)
def test_everything_free_is_nan_and_nothing_else(kind: str) -> None:
    model = Watched()
    engine = small_engine(model=model, poisoned=True, num_kv_blocks=32, num_mamba_slots=8)
    prompts = [random_tokens(length, seed=length) for length in (20, 33)]
    for prompt, result in zip(prompts, engine.generate(prompts, _params()), strict=True):
        assert_answers(prompt, result)
    slots, blocks = model.poisoned[0]
    assert (slots, blocks) == (4 + 8, 32)  # nothing is computed yet
    assert model.poisoned[-1][0] < 4 + 8
    assert model.poisoned[-1][1] == 32 - 3 - 5  # 24 and 36 tokens are computed
    model.poisoned.clear()
    engine.reset_prefix_cache()
    engine.generate(prompts, _params())
    assert model.poisoned[0] == (4 + 8, 32)  # what was freed, and what was taken again
    assert model.num_begun >= 2 * 5 * 3  # each decode appends to a block that is begun
    stats = engine.context.cache_stats()
    free_slots, free_blocks = free_memory(engine.context)
    assert len(free_slots) == stats.num_free_slots == 4 + 8 - stats.num_committed_slots
    assert len(free_blocks) == stats.num_free_kv_blocks == 32 - stats.num_cached_kv_blocks
    assert stats.num_committed_slots
    assert stats.num_cached_kv_blocks


def _params() -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=5, return_log_probs=True)


@pytest.mark.sampled(mode=("", "mixed", "in place", "async", "replay, mixed", "encoded, mixed"))
@pytest.mark.parametrize("mode", ["", *drafters.MODES])
def test_answers_do_not_depend_on_free_memory(mode: str) -> None:
    """Repeats, extensions and forks with few slots and blocks, so that many are evicted and paused."""
    settings: dict[str, object] = dict(drafters.MODES[mode]) if mode else {}
    engine = small_engine(
        poisoned=True, num_kv_blocks=14, num_mamba_slots=3, max_tokens_per_step=24, **settings
    )
    stem = random_tokens(30, seed=1)
    prompts = [stem, stem[:17] + random_tokens(9, seed=2), stem + random_tokens(20, seed=3), stem]
    serve_checked(engine, prompts, length=9)
    serve_checked(engine, prompts[:1], length=9)
    assert engine.context.cache_stats().num_states_evicted


def test_requests_outlive_resets_suspension_and_failed_steps() -> None:
    engine = small_engine(poisoned=True)
    prompt = random_tokens(20, seed=5)
    request = engine.add_request(prompt, _params())
    engine.step()
    engine.reset_prefix_cache()
    engine.step()
    assert_answers(prompt, run_checked(engine)[request])
    serve_checked(engine, [prompt])
    engine.suspend()
    engine.resume()
    serve_checked(engine, [prompt])


class ReadsBeyond(EmaLM):
    """Weighs what lies beyond a row by 0."""

    def masked(self, values: Tensor, seen: Tensor) -> Tensor:
        return values


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_a_model_that_reads_free_memory_fails_loudly_and_only_then(is_async: bool) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6]]  # the first fills its block
    settings: dict[str, object] = {"model": ReadsBeyond(), "block_size_tokens": 8, "num_kv_blocks": 16}
    plain = small_engine(**settings).generate(prompts, _params())
    assert [len(result.tokens) for result in plain] == [5, 5]
    engine = small_engine(poisoned=True, async_scheduling=is_async, **settings)
    with pytest.raises(RuntimeError, match=r"requests \[1\] are NaN or infinite, and free memory holds NaN"):
        engine.generate(prompts, _params())
    engine.check_integrity()
    assert engine.core.step_runner.unread_step is None
    kept = small_engine(poisoned=True, **settings | {"model": EmaLM()}).generate(prompts, _params())
    assert [result.tokens for result in kept] == [result.tokens for result in plain]


def test_host_memory_without_a_copy_is_nan() -> None:
    slot_bytes = small_model().state_spec().slot_bytes
    engine = small_engine(
        poisoned=True, num_mamba_slots=1, max_requests=1,
        host_cache_gb=6 * slot_bytes / (1 << 30),
    )  # fmt: skip
    tier = engine.context.prefix_cache.tiers
    assert tier is not None
    assert isinstance(tier.copies, HostCopies)
    for _ in range(2):
        for seed in range(5):
            serve_checked(engine, [random_tokens(20, seed)])
    assert engine.stats().cache.tiers.num_states_fetched
    rows = tier.copies.memory
    held = sorted(set(range(len(rows))) - set(tier.host.free_slots))
    assert held
    assert not rows[held].eq(0xFF).all(dim=1).any()
    engine.reset_prefix_cache()
    serve_checked(engine, [random_tokens(20, seed=9)])
    assert len(tier.host.free_slots) >= len(rows) - 1  # but for the state that the request's own one left for
    assert rows[tier.host.free_slots].eq(0xFF).all()


def test_it_is_off_unless_asked_for() -> None:
    engine = small_engine()
    serve_checked(engine, [random_tokens(20, seed=6)])
    memory = engine.context.memory
    assert not any(t.isnan().any() for t in (*memory.state_pool.tensors, memory.kv_cache))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [None, 16])
@pytest.mark.parametrize(
    ("dtype", "block"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 256)]
)
def test_on_a_gpu_it_precedes_the_forward_and_the_replay_of_a_graph(
    graphs: int | None, dtype: torch.dtype, block: int
) -> None:
    """Heads of 64 numbers are those of FlashAttention-3, which reads whole blocks."""

    def serve(poison: bool) -> list[list[int]]:
        config = replace(small_config(16, dtype), head_dim=64)
        engine = small_engine(
            model=ms.models.HybridLM(config, seed=3).to("cuda"), block_size_tokens=block,
            max_tokens_per_step=256, max_sequence_length=512, num_cuda_graphs=graphs,
            poisoned=poison,
        )  # fmt: skip
        prompts = [random_tokens(length, seed=length) for length in (20, 40, 7)]
        return [result.tokens for _ in range(2) for result in engine.generate(prompts, _params())]

    assert serve(poison=True) == serve(poison=False)
