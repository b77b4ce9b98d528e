"""A model split over ranks does, step by step, what the whole one does in one process."""

import mambaslots as ms
import numpy as np
import pytest
import torch
from oracle.distributed_world import World, splits
from oracle.drafters import MODES
from oracle.serving import SEED, TOLERANCE, random_tokens, small_config, small_engine

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
        [(r.resumed_tokens, r.computed_by_reason, r.recomputed_tokens, r.finish_reason) for r in one.finished]
        for one in (split, whole)
    ]
    assert hits[0] == hits[1]


class Traffic:
    """The same random requests, steps, cancels and resets for two engines."""

    def __init__(self, split: ms.DynamicInferenceEngine, whole: ms.DynamicInferenceEngine, seed: int) -> None:
        self.engines = split, whole
        self.random = np.random.default_rng(seed)
        self.texts = [random_tokens(70, seed) for seed in range(3)]
        self.open: list[int] = []

    def run(self, requests: int) -> None:
        split, _ = self.engines
        added = 0
        while added < requests or split.has_unfinished_requests:
            if added < requests and self.random.random() < 0.4:
                self.add()
                added += 1
            elif self.open and self.random.random() < 0.05:
                request_id = self.open.pop(int(self.random.integers(len(self.open))))
                results = [engine.cancel(request_id) for engine in self.engines]
                assert results[0].tokens == results[1].tokens
            elif self.random.random() < 0.02:
                for engine in self.engines:
                    engine.reset_prefix_cache()
            else:
                self.step()

    def add(self) -> None:
        text = self.texts[self.random.integers(len(self.texts))]
        prompt = text[: self.random.integers(1, len(text))] + random_tokens(
            int(self.random.integers(0, 9)), int(self.random.integers(4))
        )
        greedy = self.random.random() < 0.7
        params = ms.SamplingParams(
            num_tokens_to_generate=int(self.random.integers(1, 20)),
            temperature=None if greedy else 1.2,
            seed=int(self.random.integers(100)),
            return_log_probs=True,
            skip_prompt_log_probs=self.random.random() < 0.9,
        )
        salt = None if self.random.random() < 0.8 else b"tenant"
        self.open += {engine.add_request(prompt, params, cache_salt=salt) for engine in self.engines}

    def step(self) -> None:
        split, whole = (engine.step() for engine in self.engines)
        assert_same_step(split, whole)
        for engine in self.engines:
            engine.context.check_integrity()
        assert self.engines[0].context.cache_stats() == self.engines[1].context.cache_stats()
        for result in split.finished:
            self.open.remove(result.request_id)
            self.texts.append((self.texts[0][:20] + result.tokens)[:70])


@every_split
@pytest.mark.parametrize("mode", ["plain", "mixed", "in place"])
@pytest.mark.parametrize(
    "pools",
    [
        {},
        {"num_mamba_slots": 3, "num_kv_blocks": 16, "max_tokens": 13, "max_requests": 3},
        {"num_mamba_slots": 2, "num_kv_blocks": 14, "prefix_caching_eviction_policy": "ref_zero"},
        {"enable_prefix_caching": False},
    ],
    ids=["wide", "tight", "ref_zero", "no cache"],
)
def test_random_traffic(world: World, split: str, pools: dict[str, object], mode: str) -> None:
    settings = {"max_sequence_length": 112} | pools | MODES.get(mode, {})
    engines = [small_engine(model=model, **settings) for model in (world.model(split), world.model(None))]
    Traffic(*engines, seed=len(mode) + len(pools)).run(requests=12)
    stats = world.gathered(engines[0].context.cache_stats())
    assert all(each == stats[0] for each in stats)


def states_of(prompt: list[int], model: ms.models.HybridLM) -> ms.DynamicInferenceContext:
    engine = small_engine(model=model)
    engine.generate([prompt])
    return engine.context


@every_split
def test_each_rank_holds_its_slice_of_the_whole_model_s_states_and_kv(world: World, split: str) -> None:
    prompt = random_tokens(45, seed=1)
    whole, part = (states_of(prompt, model) for model in (world.model(None), world.model(split)))
    shard, config = part.spec.shard, small_config()
    assert shard is not None
    pick = {
        name: list(getattr(shard, name).indices)
        for name in ("mamba_layers", "mamba_heads", "mamba_groups", "attention_layers", "kv_heads")
    }
    ssm = whole.state_pool.ssm_states[pick["mamba_layers"]][:, :, pick["mamba_heads"]]
    torch.testing.assert_close(part.state_pool.ssm_states, ssm, rtol=0, atol=TOLERANCE)
    x, B, C = whole.state_pool.conv_states[pick["mamba_layers"]].split(
        [config.inner_dim, *[config.mamba_num_groups * config.mamba_state_dim] * 2], dim=2
    )
    conv = torch.cat(
        [
            each.unflatten(2, (units, -1))[:, :, pick[name]].flatten(2, 3)
            for each, units, name in (
                (x, config.mamba_num_heads, "mamba_heads"),
                (B, config.mamba_num_groups, "mamba_groups"),
                (C, config.mamba_num_groups, "mamba_groups"),
            )
        ],
        dim=2,
    )
    torch.testing.assert_close(part.state_pool.conv_states, conv, rtol=0, atol=TOLERANCE)
    kv = whole.kv_cache[pick["attention_layers"]][..., pick["kv_heads"], :]
    torch.testing.assert_close(part.kv_cache, kv, rtol=0, atol=TOLERANCE)


# ---- pipeline stages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", ["MM**", "**MM", "M-M*-*", "MMM*"])
def test_a_stage_without_mamba_or_attention_layers_makes_the_same_skips(world: World, pattern: str) -> None:
    engines = [
        small_engine(model=world.model(split, pattern), num_mamba_slots=4, num_kv_blocks=24)
        for split in ("pp 2", None)
    ]
    Traffic(*engines, seed=5).run(requests=12)


def budget(world: World, pattern: str, **overrides: object) -> ms.DynamicInferenceContext:
    spec = world.model("pp 2", pattern).state_spec()
    settings = {"num_mamba_slots": None, "num_kv_blocks": None} | overrides
    config = ms.InferenceConfig(
        block_size_tokens=8, max_requests=4, max_tokens=64, max_sequence_length=112, **settings
    )  # type: ignore[arg-type]
    return ms.DynamicInferenceContext(spec, config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", ["MM**", "MMM*", "M-M*-*", "**MM"])
def test_fault_15_pools_are_as_large_as_the_poorest_stage_can_afford(world: World, pattern: str) -> None:
    mamba, kv = 40_000 / GIGABYTE, 100_000 / GIGABYTE
    context = budget(world, pattern, prefix_caching_mamba_gb=mamba, buffer_size_gb=kv)
    spec = context.spec
    alone = [
        unit and int(size * GIGABYTE) // unit
        for size, unit in ((mamba, spec.state_bytes), (kv, spec.kv_block_bytes(8)))
    ]
    affordable = world.gathered(alone)
    slots, blocks = (min(rank[i] for rank in affordable if rank[i]) for i in range(2))
    assert context.state_pool.num_durable == slots
    assert context.kv_block_allocator.total_count == blocks
    assert len({rank[0] for rank in affordable}) > 1, "the stages could afford the same"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["prefix_caching_mamba_gb", "buffer_size_gb"])
def test_a_budget_that_buys_nothing_on_one_stage_is_refused_by_all(world: World, name: str) -> None:
    settings = {"prefix_caching_mamba_gb": 0.01, "buffer_size_gb": 0.01}
    with pytest.raises(ValueError, match=f"{name} is"):
        budget(world, "MMM*", **settings | {name: 1e-7})


@pytest.mark.ranks(2)
def test_poorer_settings_of_one_rank_hold_for_all(world: World) -> None:
    context = budget(world, "M*-M", num_mamba_slots=10 + world.rank, num_kv_blocks=31 - world.rank)
    assert context.state_pool.num_durable == 10
    assert context.kv_block_allocator.total_count == 30


# ---- a rank that fails


@pytest.mark.ranks(2)
def test_after_a_failed_forward_a_split_model_runs_no_other(world: World, monkeypatch) -> None:
    config = small_config()
    model = ms.models.HybridLM(config, SEED, groups=world.groups(2, 1)).to(world.device)
    engine = small_engine(model=model)
    request_id = engine.add_request(random_tokens(20, seed=1))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(model.layers[-1]), "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    with pytest.raises(RuntimeError, match="failed on this rank"):
        engine.step()
    engine.context.check_integrity()
    engine.cancel(request_id)


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


def test_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="tensor is 'all'"):
        ms.ParallelGroups(tensor="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups is 2"):
        ms.models.HybridLM(small_config(), groups=2)  # type: ignore[arg-type]
