"""A model split over ranks does, step by step, what the whole one does in one process."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mambaslots as ms
import numpy as np
import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.engines import cuda_graphs, step_runner
from oracle.budget import is_quick
from oracle.distributed_world import TIMEOUT, World, splits
from oracle.drafters import MODES
from oracle.recorded_graphs import fix_addresses
from oracle.serving import (
    SEED,
    TOLERANCE,
    expected_answer,
    random_tokens,
    run_checked,
    serve_checked,
    small_config,
    small_engine,
)

GIGABYTE = 2**30
every_split = pytest.mark.parametrize("split", splits())


def assert_same_step(split: ms.StepReport, whole: ms.StepReport) -> None:
    assert split.admitted == whole.admitted
    assert split.tokens.keys() == whole.tokens.keys()
    for request_id, tokens in split.tokens.items():
        other = whole.tokens[request_id]
        assert [token.token for token in tokens] == [token.token for token in other]
        log_probs = [[token.log_prob for token in one] for one in (tokens, other)]
        np.testing.assert_allclose(*log_probs, rtol=0, atol=TOLERANCE)
    hits = [
        [
            (r.num_resumed_tokens, r.computed_by_reason, r.num_recomputed_tokens, r.finish_reason)
            for r in one.finished
        ]
        for one in (split, whole)
    ]
    assert hits[0] == hits[1]


def engines_of(
    world: World, split: str, pattern: str | None = None, **settings: object
) -> list[ms.DynamicInferenceEngine]:
    """Of the split model, and on rank 0 of the whole one."""
    return [
        small_engine(model=world.model(name, pattern), **settings)
        for name in ((None, split) if world.rank == 0 else (split,))
    ][::-1]


class Traffic:
    """The same random requests, steps, cancels and resets for a split engine and, on rank 0, a whole one.

    Rank 0 compares both, and all ranks compare their steps at the end.
    """

    def __init__(self, world: World, engines: list[ms.DynamicInferenceEngine], seed: int) -> None:
        self.world, self.engines = world, engines
        self.random = np.random.default_rng(seed)
        self.texts = [random_tokens(70, seed) for seed in range(3)]
        self.open: list[int] = []
        self.steps: list[ms.StepReport] = []

    def run(self, requests: int, arrivals: float = 0.4) -> None:
        added = 0
        while added < requests or self.engines[0].has_unfinished_requests():
            if added < requests and self.random.random() < arrivals:
                self.add()
                added += 1
            elif self.open and self.random.random() < 0.05:
                request_id = self.open.pop(int(self.random.integers(len(self.open))))
                tokens = [engine.cancel(request_id).tokens for engine in self.engines]
                assert tokens == tokens[:1] * len(tokens)
            elif self.random.random() < 0.02:
                for engine in self.engines:
                    engine.reset_prefix_cache()
            else:
                self.step()
        for steps in self.world.gathered(self.steps):
            for one, other in zip(steps, self.steps, strict=True):
                assert_same_step(one, other)

    def add(self) -> None:
        text = self.texts[self.random.integers(len(self.texts))]
        prompt = text[: self.random.integers(1, len(text))] + random_tokens(
            int(self.random.integers(0, 9)), int(self.random.integers(4))
        )
        greedy = self.random.random() < 0.7
        params = ms.SamplingParams(
            max_tokens=int(self.random.integers(1, 20)),
            temperature=None if greedy else 1.2,
            seed=int(self.random.integers(100)),
            return_log_probs=True,
            skip_prompt_log_probs=self.random.random() < 0.9,
        )
        salt = None if self.random.random() < 0.8 else b"tenant"
        self.open += {engine.add_request(prompt, params, cache_salt=salt) for engine in self.engines}

    def step(self) -> None:
        split, *others = (engine.step() for engine in self.engines)
        for whole in others:
            assert_same_step(split, whole)
        stats = [engine.context.cache_stats() for engine in self.engines]
        assert stats == stats[:1] * len(stats)
        for engine in self.engines:
            engine.context.check_integrity()
        self.steps.append(split)
        for result in split.finished:
            self.open.remove(result.request_id)
            self.texts.append((self.texts[0][:20] + result.tokens)[:70])


@pytest.mark.sampled(mode=("in place", "async"), pools=2)
@pytest.mark.usefixtures("kind")
@every_split
@pytest.mark.parametrize("mode", ["plain", "mixed", "in place", "async"])
@pytest.mark.parametrize(
    "pools",
    [
        {},
        {"num_mamba_slots": 3, "num_kv_blocks": 16, "max_tokens_per_step": 13, "max_requests": 3},
        {"num_mamba_slots": 20, "eviction_policy": "lru"},
        {"enable_prefix_caching": False},
    ],
    ids=["wide", "tight", "lru", "no cache"],
)
def test_random_traffic(world: World, split: str, pools: dict[str, object], mode: str) -> None:
    settings = {"max_sequence_length": 112} | pools | MODES.get(mode, {})
    engines = engines_of(world, split, **settings)
    # Three slots keep few states: among a dozen requests, none may be asked for again.
    requests = (30 if pools.get("num_mamba_slots") == 3 else 12) // (1 + is_quick())
    Traffic(world, engines, seed=len(mode) + len(pools)).run(requests, arrivals=0.4)
    stats = world.gathered(engines[0].context.cache_stats())
    assert all(each == stats[0] for each in stats)
    assert bool(stats[0].num_resumed_tokens) == engines[0].config.enable_prefix_caching
    assert stats[0].num_states_evicted or pools.get("num_mamba_slots") != 3


@pytest.mark.usefixtures("kind")
@every_split
def test_scores_are_those_of_the_whole_model(world: World, split: str) -> None:
    context = random_tokens(26, seed=1)
    sequences = [context + random_tokens(length, seed=length) for length in (1, 9, 20)]
    engines = [
        small_engine(model=model, max_tokens_per_step=13) for model in (world.model(split), world.model(None))
    ]
    scored = [[*engine.score(sequences, 26), *engine.score(sequences)] for engine in engines]
    for one, other in zip(*scored, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=TOLERANCE)
        assert replace(one, log_probs=other.log_probs) == other
    assert [one.num_resumed_tokens for one in scored[0]] == [0, 24, 24, 0, 0, 0]
    for engine in engines:
        engine.check_integrity()
    stats = world.gathered(engines[0].stats())
    assert all(each == stats[0] for each in stats)


def states_of(prompt: list[int], model: ms.models.HybridLM) -> DynamicInferenceContext:
    engine = small_engine(model=model)
    engine.generate([prompt])
    return engine.context


@pytest.mark.usefixtures("kind")
@every_split
@pytest.mark.parametrize("pattern", [None, "GC*M"])
def test_each_rank_holds_its_slice_of_the_whole_model_s_states_and_kv(
    world: World, split: str, pattern: str | None
) -> None:
    prompt = random_tokens(45, seed=1)
    whole, part = (
        states_of(prompt, model) for model in (world.model(None, pattern), world.model(split, pattern))
    )
    for state in part.spec.states:
        segments, layers = state.parts.segments, list(state.parts.layers.indices)
        sizes = [segment.part.total * segment.width for segment in segments]
        pieces = whole.memory.state_pool[state.name][layers].split(sizes, dim=2)
        expected = [
            piece.unflatten(2, (segment.part.total, -1))[:, :, list(segment.part.indices)].flatten(2, 3)
            for piece, segment in zip(pieces, segments, strict=True)
        ]
        found = part.memory.state_pool[state.name]
        torch.testing.assert_close(found, torch.cat(expected, dim=2), rtol=0, atol=TOLERANCE)
    shard = part.spec.shard
    assert shard is not None
    layers, kv_heads = list(shard.attention_layers.indices), list(shard.kv_heads.indices)
    kv = whole.memory.kv_cache[layers][..., kv_heads, :]
    torch.testing.assert_close(part.memory.kv_cache, kv, rtol=0, atol=TOLERANCE)


@every_split
def test_a_saved_model_is_loaded_in_parts(world: World, split: str, tmp_path: Path) -> None:
    world.model(None, "GC*M-").save_pretrained(tmp_path)
    expected = world.model(split, "GC*M-")
    loaded = ms.load(tmp_path, world.device, groups=expected.groups).model
    assert isinstance(loaded, ms.models.HybridLM)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), weight), name
    with pytest.raises(ValueError, match=r"the model is split over .* ranks; accepted: a whole model"):
        loaded.save_pretrained(tmp_path)


# ---- pipeline stages


@pytest.mark.sampled(pattern=("MM**", "GM*C"))
@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", ["MM**", "**MM", "M-M*-*", "MMM*", "GM*C", "CCG*"])
def test_a_stage_without_states_or_attention_layers_makes_the_same_skips(world: World, pattern: str) -> None:
    engines = engines_of(world, "pp 2", pattern, num_mamba_slots=4, num_kv_blocks=24)
    Traffic(world, engines, seed=5).run(requests=12)


def budget(world: World, pattern: str, **overrides: object) -> DynamicInferenceContext:
    spec = world.model("pp 2", pattern).state_spec()
    settings = {"num_mamba_slots": None, "num_kv_blocks": None} | overrides
    config = ms.InferenceConfig(
        block_size_tokens=8, max_requests=4, max_tokens_per_step=64, max_sequence_length=112, **settings
    )  # type: ignore[arg-type]
    return DynamicInferenceContext(spec, config)


@pytest.mark.ranks(2)
def test_a_budget_that_buys_nothing_is_refused_by_all(world: World) -> None:
    with pytest.raises(ValueError, match="total_gb is"):
        budget(world, "MMM*", total_gb=1e-7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("caching", [True, False])
def test_a_budget_for_kv_of_no_bytes_buys_names_for_all_states(world: World, caching: bool) -> None:
    """No stage has attention: KV blocks name the prefixes of all requests and, four times, of all slots."""
    context = budget(world, "MGC-", total_gb=0.002, enable_prefix_caching=caching)
    slots = context.prefix_cache.slots.num_slots - 4 if caching else 0  # without those of idle rows
    assert context.memory.kv_cache.nbytes == 0
    assert context.prefix_cache.kv_blocks.total_count == min(4 * 14 + 4 * slots * 14, 4 * 14 + 2**20)
    bought = context.prefix_cache.kv_blocks.total_count, slots if caching else None
    sizes = {"num_kv_blocks": bought[0], "num_mamba_slots": bought[1], "enable_prefix_caching": caching}
    engines = engines_of(world, "pp 2", "MGC-", max_sequence_length=112, **sizes)
    Traffic(world, engines, seed=5).run(requests=8)


@pytest.mark.ranks(2)
def test_poorer_settings_of_one_rank_hold_for_all(world: World) -> None:
    context = budget(world, "M*-M", num_mamba_slots=10 + world.rank, num_kv_blocks=31 - world.rank)
    assert context.memory.state_pool.num_durable == 10
    assert context.prefix_cache.kv_blocks.total_count == 30


# ---- a rank that fails, or collects garbage, alone


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", splits("tp 2", "pp 2"))
def test_a_rank_whose_step_failed_makes_no_other_until_all_are_reset(world: World, split: str) -> None:
    engine, prompt = small_engine(model=world.model(split)), random_tokens(20, seed=1)
    engine.add_request(prompt)
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(step_runner, "SampledStep", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        else:
            engine.step()
    if world.rank == 1:
        engine.context.check_integrity()
        with pytest.raises(RuntimeError, match="a call failed on this rank"):
            engine.step()
    world.gathered(None)
    engine.reset()
    serve_checked(engine, [prompt])


@pytest.mark.ranks(2)
def test_too_few_kv_blocks_is_the_same_on_all_ranks_and_breaks_none(world: World) -> None:
    engine = small_engine(model=world.model("tp 2"), num_kv_blocks=6)
    prefix = random_tokens(40, seed=1)
    engine.warm(prefix)
    pinned = engine.pin(prefix)
    other = random_tokens(20, seed=2)
    engine.add_request(other)
    with pytest.raises(ms.KVBlockCapacityError):
        engine.step()
    engine.unpin(pinned)
    (result,) = run_checked(engine).values()
    assert len(result.tokens) == 16


@pytest.mark.ranks(2)
def test_a_capture_that_fails_on_one_rank_ends_graphs_on_all(world: World, monkeypatch) -> None:
    """Ranks that pad their steps to other shapes would not meet in the collectives."""
    if world.device.type == "cuda":
        pytest.skip("the graphs are stand-ins, on a CPU")

    class Captured:
        def __init__(self, model, inputs, pool) -> None:
            if world.rank == 1:
                raise RuntimeError("out of memory")
            self.replay, self.pool = lambda: model(inputs), None

    monkeypatch.setattr(cuda_graphs, "CapturedForward", Captured)
    engine = small_engine(model=world.model("tp 2"))
    fix_addresses(engine.context._buffer)
    buckets = cuda_graphs.GraphBuckets.of(engine.context)
    engine.core.step_runner.graphs = cuda_graphs.GraphRunner(engine.context.spec, buckets, 100)
    prompts = [random_tokens(length, seed=length) for length in (20, 37, 5)]
    why = "out of memory" if world.rank == 1 else "another rank could not"
    with pytest.warns(UserWarning, match=f"cannot be captured.*{why}"):
        serve_checked(engine, prompts)
    assert not engine.core.step_runner.graphs.shapes


@pytest.mark.ranks(2)
def test_a_stream_let_go_of_on_one_rank_alone_cancels_nothing(world: World) -> None:
    engine, prompts = small_engine(model=world.model("tp 2")), [random_tokens(20, seed) for seed in range(2)]
    kept = engine.stream(prompts[0], ms.SamplingParams(max_tokens=8))
    let_go = engine.stream(prompts[1], ms.SamplingParams(max_tokens=8))
    next(let_go)
    if world.rank == 1:
        del let_go
    assert [token.token for token in kept] == expected_answer(tuple(prompts[0]), 8)[0]
    closed = engine.stream(prompts[1], ms.SamplingParams(max_tokens=8))
    next(closed)
    closed.close()
    assert not engine.has_unfinished_requests()


@pytest.mark.ranks(2)
def test_a_setting_that_only_one_rank_has_is_refused_by_all(world: World) -> None:
    caching = world.rank == 0
    with pytest.raises(ValueError, match=r"enable_prefix_caching is \[True, False\]"):
        small_engine(model=world.model("tp 2"), enable_prefix_caching=caching)


# ---- collectives in which a rank waits for one that does not come

COLLECTIVES = {
    "sum": lambda groups, tensor: groups.sum_partials(tensor),
    "gathered columns": lambda groups, tensor: groups.gather_columns(tensor),
    "values of the last stage": lambda groups, tensor: groups.share_from_last_stage(tensor),
    "objects": lambda groups, tensor: groups.gather("one"),
    "least": lambda groups, tensor: groups.least(3, tensor.device),
    "a message": lambda groups, tensor: (
        groups.send_to_next_stage(tensor)
        if groups.is_first_stage
        else groups.receive_from_previous_stage(tensor)
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_that_waits_ends_at_an_abort_and_runs_in_renewed_groups(world: World, name: str) -> None:
    group = torch.distributed.new_group(timeout=TIMEOUT)
    is_of_stages = name in ("values of the last stage", "a message")
    groups = ms.ParallelGroups(pipeline=group) if is_of_stages else ms.ParallelGroups(group)
    waits = world.rank == int(is_of_stages and name != "values of the last stage")
    collective = partial(COLLECTIVES[name], groups, torch.ones(2, 3, device=world.device))
    collective()  # nccl connects the ranks
    if waits:
        threading.Timer(0.2, groups.abort, ["rank 7 failed"]).start()
        with pytest.raises(RuntimeError, match="rank 7 failed"):
            wait_for(collective, groups, world.device)
    else:
        groups.abort("rank 7 failed")
        with pytest.raises(RuntimeError, match="rank 7 failed"):
            collective()
    groups.renew(world.device)
    assert not groups.abort_reason
    collective()
    assert groups.gather(world.rank) == [0, 1]


def wait_for(collective: Callable[[], object], groups: ms.ParallelGroups, device: torch.device) -> None:
    """With nccl a collective that is aborted ends, and the next look at the groups raises."""
    collective()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    groups.check_not_aborted()


# ---- what cannot be split


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"mamba_num_heads": 6, "mamba_num_groups": 2}, "mamba_num_heads is 6"),
        ({"num_attention_heads": 2, "num_kv_heads": 2}, "num_attention_heads is 2"),
        ({"mlp_hidden_size": 30}, "mlp_hidden_size is 30"),
        ({"mamba_num_heads": 12, "mamba_num_groups": 3}, "mamba_num_groups is 3"),
        ({"num_attention_heads": 12, "num_kv_heads": 3}, "num_kv_heads is 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(world: World, sizes: dict[str, int], name: str) -> None:
    config = ms.models.HybridConfig.tiny(**sizes)
    with pytest.raises(ValueError, match=name):
        ms.models.HybridLM(config, groups=world.groups(4, 1))


@pytest.mark.ranks(4)
def test_a_pipeline_longer_than_the_model_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="pattern is 'M\\*M'"):
        ms.models.HybridLM(ms.models.HybridConfig.tiny(pattern="M*M"), groups=world.groups(1, 4))


@pytest.mark.ranks(4)
def test_a_vocabulary_that_does_not_divide_is_padded(world: World) -> None:
    config = small_config()
    config = type(config)(**{**vars(config), "vocab_size": 251})
    engines = [
        small_engine(model=ms.models.HybridLM(config, SEED, groups=groups).to(world.device))
        for groups in (world.groups(4, 1), None)
    ]
    prompts = [[token % 251 for token in random_tokens(30, seed)] for seed in range(3)]
    answers = [[result.tokens for result in engine.generate(prompts)] for engine in engines]
    assert answers[0] == answers[1]


@pytest.mark.ranks(2)
def test_groups_that_share_ranks_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"pipeline has the ranks \[0, 1\] in common"):
        ms.ParallelGroups(world.groups(2, 1).tensor, world.groups(1, 2).pipeline)


@pytest.mark.ranks(2)
def test_groups_for_tensors_of_another_device_are_refused(world: World) -> None:
    device = "cpu" if world.device.type == "cuda" else "cuda"
    group = torch.distributed.new_group(backend=f"{device}:gloo", timeout=TIMEOUT)
    model = ms.models.HybridLM(small_config(), SEED, groups=ms.ParallelGroups(group)).to(world.device)
    with pytest.raises(ValueError, match=f"tensor is a process group of {device}:gloo, and the model is on"):
        small_engine(model=model)


def test_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="tensor is 'all'"):
        ms.ParallelGroups(tensor="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups is 2"):
        ms.models.HybridLM(small_config(), groups=2)  # type: ignore[arg-type]
