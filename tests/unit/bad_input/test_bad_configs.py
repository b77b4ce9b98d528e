"""Settings that cannot be: each is refused by name."""

from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.model_parts import ModelShard, Part, StateSplit
from oracle import bad_values as bad
from oracle.bad_values import INT32_MAX, Bad, refuse, refuse_all
from oracle.serving import small_model
from oracle.state_tensors import conv_and_ssm

SPEC: dict[str, Any] = {
    "states": conv_and_ssm(2, (3, 4), (2, 3, 2), torch.float32, torch.float64),
    "num_attention_layers": 1, "num_kv_heads": 2, "head_dim": 4, "kv_dtype": torch.float32,
    "vocab_size": 256, "device": torch.device("cpu"),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "block_size_tokens": 8, "max_requests": 4, "max_tokens_per_step": 64, "max_sequence_length": 256,
    "num_kv_blocks": 16, "num_mamba_slots": 4,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "pattern": "M*-M", "mamba_num_heads": 4, "mamba_head_dim": 8,
    "mamba_num_groups": 2, "mamba_state_dim": 8, "conv_kernel": 4, "ssd_chunk_size": 4,
    "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_hidden_size": 32,
}  # fmt: skip

_count, _length = bad.integer(1, INT32_MAX), bad.integer(1, INT32_MAX)
SPEC_ARGUMENTS: dict[str, Bad] = {
    "num_attention_layers": bad.integer(0, INT32_MAX),
    "num_kv_heads": _count,
    "head_dim": _count,
    "vocab_size": _count,
    "kv_dtype": bad.dtype(),
    "device": bad.device(),
}
TENSOR: dict[str, Any] = {"name": "ssm", "num_layers": 2, "shape": (2, 3), "dtype": torch.float32, "grid": 4}
TENSOR_ARGUMENTS: dict[str, Bad] = {
    "name": bad.anything(str).also("", "two words", "1st"),
    "num_layers": bad.integer(0, INT32_MAX),
    "shape": bad.shape(1),
    "dtype": bad.dtype(),
    "grid": _length,
    "split": bad.anything(StateSplit, type(None)),
}
CONFIG_ARGUMENTS: dict[str, Bad] = {
    "block_size_tokens": _length,
    "max_requests": _count,
    "max_tokens_per_step": _length,
    "max_sequence_length": bad.integer(2, INT32_MAX),
    "num_kv_blocks": bad.integer(1, INT32_MAX, optional=True),
    "num_mamba_slots": bad.integer(1, INT32_MAX, optional=True),
    "enable_prefix_caching": bad.boolean(),
    "eviction_policy": bad.choice("lru", "value"),
    "free_memory": bad.choice("keep", "zero"),
    "decode_by_replay": bad.boolean(),
    "salt_key": bad.anything(bytes, str, type(None)).also("", b"", "short", b"x" * 15, bytearray(32)),
    "checkpoint_plan": bad.anything(ms.CheckpointPlan).also(ms.CheckpointPlan, "rolling"),
}
SAMPLING_ARGUMENTS: dict[str, Bad] = {
    "max_tokens": _count,
    "temperature": bad.real(0, optional=True),
    "top_k": bad.integer(0, optional=True),
    "top_p": bad.real(0, 1, optional=True).also(0, 0.0, -0.0),
    "seed": bad.integer(0, 2**63 - 1, optional=True),
    "stop_token_ids": bad.ids(0, good=(3,)),
    "return_log_probs": bad.boolean(),
    "num_top_log_probs": bad.integer(0, 20),
    "skip_prompt_log_probs": bad.boolean(),
    "prompt_log_probs_start": _count,
    "num_given_tokens": bad.integer(0, 15),  # less than the default of `max_tokens`
}
PLAN_ARGUMENTS: dict[str, Bad] = {
    "decode": bad.integer(1, INT32_MAX).also("Rolling", "on", np.array(["off", "off"])),
    "prefill_interval": bad.integer(1, INT32_MAX, optional=True),
    "marks": bad.ids(0, INT32_MAX, good=(8,)),
}
HYBRID_ARGUMENTS: dict[str, Bad] = {
    "conv_kernel": bad.integer(2, INT32_MAX),
    "rotary_base": bad.real(1),
    "norm_eps": bad.real(0),
    "dtype": bad.dtype(),
    "pattern": bad.anything(str).also("", "m", "MX", "M *", "\ud800"),
    "head_dim": _count.also(15),
    "mamba_num_heads": _count.also(3),
    "num_attention_heads": _count.also(3),
} | dict.fromkeys(
    ("vocab_size", "hidden_size", "mamba_head_dim", "mamba_state_dim", "ssd_chunk_size", "mlp_hidden_size"),
    _count,
)  # fmt: skip
# An unequal pair is refused under the name of the first of the two.
HYBRID_DIVISORS = {"mamba_num_groups": _count, "num_kv_heads": _count}

SETTINGS = [
    (cls, good, name, bad_values)
    for cls, good, arguments in (
        (ms.HybridStateSpec, SPEC, SPEC_ARGUMENTS),
        (ms.StateTensor, TENSOR, TENSOR_ARGUMENTS),
        (ms.InferenceConfig, CONFIG, CONFIG_ARGUMENTS),
        (ms.SamplingParams, {}, SAMPLING_ARGUMENTS),
        (ms.CheckpointPlan, {}, PLAN_ARGUMENTS),
        (ms.models.HybridConfig, HYBRID, HYBRID_ARGUMENTS | HYBRID_DIVISORS),
    )
    for name, bad_values in arguments.items()
]


@pytest.mark.parametrize(
    ("cls", "good", "name", "bad_values"), SETTINGS, ids=[f"{s[0].__name__}-{s[2]}" for s in SETTINGS]
)
def test_a_bad_setting_is_refused_by_name(cls: Any, good: dict[str, Any], name: str, bad_values: Bad) -> None:
    refuse_all(cls.__name__, bad_values, lambda value: cls(**good | {name: value}), name)


@pytest.mark.parametrize("cls", [ms.HybridStateSpec, ms.InferenceConfig, ms.models.HybridConfig])
def test_integers_of_any_type_are_kept_as_ints(cls: Any) -> None:
    """A numpy integer would wrap around, or raise, in the sums that follow."""
    good = {ms.HybridStateSpec: SPEC, ms.InferenceConfig: CONFIG, ms.models.HybridConfig: HYBRID}[cls]
    integers = {name: value for name, value in good.items() if type(value) is int}
    made = cls(**good | {name: np.int64(value) for name, value in integers.items()})
    assert {name: type(getattr(made, name)) for name in integers} == dict.fromkeys(integers, int)


def test_a_shard_is_made_of_parts() -> None:
    for name in ("attention_layers", "kv_heads"):
        parts = {"attention_layers": Part(0, 1, 2), "kv_heads": Part(0, 1, 2)} | {name: range(1)}
        with pytest.raises(ValueError, match=rf"{name} is range\(0, 1\); accepted: a Part"):
            ModelShard(**parts)


def test_a_spec_keeps_shapes_as_tuples_of_ints() -> None:
    tensor = ms.StateTensor(**TENSOR | {"shape": [np.int64(2), 3]})
    spec = ms.HybridStateSpec(**SPEC | {"device": "cpu", "states": list(SPEC["states"])})
    assert (tensor.shape, spec.device) == ((2, 3), torch.device("cpu"))
    assert hash(spec) == hash(ms.HybridStateSpec(**SPEC))


# ---- settings that do not go together


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"max_tokens_per_step": 3}, "max_tokens_per_step"),
        ({"max_tokens_per_step": 7}, "max_tokens_per_step"),
        ({"max_sequence_length": 8}, "block_size_tokens"),
        ({"num_kv_blocks": None}, "num_kv_blocks"),
        ({"num_kv_blocks": 0}, "num_kv_blocks"),
        ({"num_mamba_slots": 0}, "num_mamba_slots"),
        ({"num_mamba_slots": None}, "num_mamba_slots"),
        ({"total_gb": 1.0}, "total_gb"),
        ({"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": 1e300}, "total_gb"),
        ({"checkpoint_plan": ms.CheckpointPlan(decode=12)}, "decode"),
        ({"checkpoint_plan": ms.CheckpointPlan(prefill_interval=12)}, "prefill_interval"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: dict[str, Any], named: str) -> None:
    refuse("InferenceConfig", lambda: ms.InferenceConfig(**CONFIG | overrides), named)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": 0}, "total_gb"),
        ({"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": 5e-324}, "total_gb"),
        ({"block_size_tokens": 10}, "block_size_tokens"),
    ],
)
def test_sizes_that_no_context_can_have_are_refused(overrides: dict[str, Any], named: str) -> None:
    spec, config = ms.HybridStateSpec(**SPEC), ms.InferenceConfig(**CONFIG | overrides)
    refuse("DynamicInferenceContext", lambda: DynamicInferenceContext(spec, config), named)


@pytest.mark.parametrize(
    ("spec_overrides", "config_overrides", "named"),
    [
        ({"head_dim": INT32_MAX, "num_kv_heads": INT32_MAX}, {}, "num_kv_blocks"),
        ({"states": [ms.StateTensor("ssm", 1, (INT32_MAX,) * 3, torch.float32)]}, {}, "states"),
        ({"states": [ms.StateTensor("ssm", INT32_MAX, (INT32_MAX,), torch.float32)]}, {}, "states"),
    ],
)
def test_tensors_larger_than_any_memory_are_refused(
    spec_overrides: dict[str, Any], config_overrides: dict[str, Any], named: str
) -> None:
    spec = ms.HybridStateSpec(**SPEC | spec_overrides)
    config = ms.InferenceConfig(**CONFIG | config_overrides)
    refuse("DynamicInferenceContext", lambda: DynamicInferenceContext(spec, config), named)


def test_grids_that_no_chunk_suits_are_refused() -> None:
    states = [ms.StateTensor(f"grid{grid}", 1, (2,), torch.float32, grid) for grid in (64, 50, 1)]
    refuse("HybridStateSpec", lambda: ms.HybridStateSpec(**SPEC | {"states": states}), "states")
    spec = ms.HybridStateSpec(**SPEC | {"states": [states[0], states[2]]})
    assert (spec.chunk_size, spec.grid) == (64, 64)


def test_an_engine_is_made_of_a_model_and_a_config() -> None:
    model, config = small_model(), ms.InferenceConfig(**CONFIG)
    target = "DynamicInferenceEngine"
    refuse_all(target, bad.anything(), lambda value: ms.DynamicInferenceEngine(value, config), "model")
    refuse_all(target, bad.anything(), lambda value: ms.DynamicInferenceEngine(model, value), "config")


def test_a_model_is_made_of_a_config_and_a_seed() -> None:
    config = ms.models.HybridConfig(**HYBRID)
    refuse_all("HybridLM", bad.anything(), lambda value: ms.models.HybridLM(value), "config")
    refuse_all("HybridLM", bad.integer(0, 2**63 - 1), lambda value: ms.models.HybridLM(config, value), "seed")


# ---- a plan's calls

STEP = {"start": 0, "stop": 16, "prompt_tokens": 20, "block_size_tokens": 8, "branch_tokens": 8}


@pytest.mark.parametrize("name", STEP)
def test_boundaries_are_asked_for_with_integers(name: str) -> None:
    plan = ms.CheckpointPlan()
    minimum = 1 if name == "block_size_tokens" else 0
    refuse_all(
        "CheckpointPlan",
        bad.integer(minimum),
        lambda value: plan.boundaries(**STEP | {name: value}),
        name,
    )


def test_a_plans_other_calls_are_made_with_integers() -> None:
    plan, size = ms.CheckpointPlan(decode=8), bad.integer(1, INT32_MAX)
    refuse_all("CheckpointPlan", size, ms.CheckpointPlan.every_block, "block_size_tokens")
    refuse_all("CheckpointPlan", bad.integer(1), plan.check_block_size, "block_size_tokens")


def test_a_spec_is_asked_for_the_bytes_of_a_block_of_some_size() -> None:
    refuse_all(
        "HybridStateSpec", bad.integer(1), ms.HybridStateSpec(**SPEC).kv_block_bytes, "block_size_tokens"
    )
