"""Configurations that make no sense are refused, naming the argument, the value and what is accepted."""

import math
import pickle
from dataclasses import fields, replace

import mambaslots as ms
import pytest
from oracle.serving import small_model

VALID: dict[str, object] = {"block_size_tokens": 8, "num_kv_blocks": 16, "num_mamba_slots": 4}


def config(**overrides: object) -> ms.InferenceConfig:
    return ms.InferenceConfig(**(VALID | overrides))  # type: ignore[arg-type]


def test_a_configuration_has_at_most_twenty_fields() -> None:
    assert len(fields(ms.InferenceConfig)) <= 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens is 0; accepted: an integer from 1"),
        ({"block_size_tokens": 8.0}, "block_size_tokens is 8.0"),
        ({"max_requests": True}, "max_requests is True"),
        ({"max_requests": 5000}, "max_tokens_per_step is 2048; accepted: at least max_requests"),
        ({"num_kv_blocks": None}, "num_kv_blocks is None; accepted: an integer from 1 on, or total_gb"),
        ({"num_mamba_slots": None}, "num_mamba_slots is None; accepted: an integer from 1 on, or"),
        ({"total_gb": 1.0}, "total_gb is 1.0 and num_kv_blocks is 16; accepted: total_gb alone"),
        ({"num_kv_blocks": -1}, "num_kv_blocks is -1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks is 0; accepted: an integer from 1 on"),
        ({"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": math.nan}, "total_gb is nan"),
        ({"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": math.inf}, "total_gb is inf"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; accepted: True or False"),
        ({"free_memory": True}, "free_memory is True; accepted: one of 'keep', 'zero'"),
        ({"salt_key": "short"}, "salt_key is 5 bytes; accepted: bytes or a str of at least 16 bytes"),
        ({"eviction_policy": "fifo"}, "'fifo'; accepted: one of 'value', 'lru'"),
        (
            {"block_size_tokens": 4096, "max_tokens_per_step": 8192},
            r"block_size_tokens is 4096; accepted: less than max_sequence_length \(4096\)",
        ),
        (
            {"max_tokens_per_step": 40, "block_size_tokens": 64},
            "max_tokens_per_step is 40; accepted: at least block_size_tokens",
        ),
        ({"checkpoint_plan": "tail"}, "checkpoint_plan is 'tail'"),
        ({"checkpoint_plan": ms.CheckpointPlan(prefill_interval=12)}, "prefill_interval is 12"),
        ({"checkpoint_plan": ms.CheckpointPlan(decode=12)}, "decode is 12"),
    ],
)
def test_a_bad_configuration_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; accepted: greater than 0, at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop_token_ids": (3, "x")}, r"stop_token_ids\[1\] is 'x'"),
        ({"return_log_probs": 1}, "return_log_probs is 1"),
    ],
)
def test_bad_sampling_parameters_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ms.SamplingParams(**arguments)  # type: ignore[arg-type]


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="decode is 'sometimes'"):
        ms.CheckpointPlan(decode="sometimes")  # type: ignore[arg-type]


def test_zero_slots_with_prefix_caching_are_refused_and_without_it_fine() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"num_mamba_slots is 0; accepted: an integer from 1 .*=False$"):
        config(num_mamba_slots=0)
    ms.DynamicInferenceEngine(model, config(num_mamba_slots=0, enable_prefix_caching=False))


@pytest.mark.parametrize("seed", [-1, 2**63, None, 1.0])
def test_bad_seeds_of_an_engine_are_refused(seed: object) -> None:
    with pytest.raises(
        ValueError, match=rf"seed is {seed}; accepted: an integer from 0 to 9223372036854775807"
    ):
        ms.DynamicInferenceEngine(small_model(), config(), seed=seed)  # type: ignore[arg-type]


def test_the_state_bytes_of_nemotron_h_8b_are_those_of_the_table() -> None:
    """Nemotron-H-8B: 24 layers, 128 x 64 x 128 fp32, conv 10240 x 3 bf16: 97 MiB."""
    import torch

    spec = ms.HybridStateSpec(
        states=ms.mamba2_states(24, 128, 64, 8, 128, 4, torch.bfloat16, torch.float32, 128),
        num_attention_layers=4, num_kv_heads=8, head_dim=128, kv_dtype=torch.bfloat16, vocab_size=131072,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert round(spec.state_bytes / 2**20) == 97
    assert spec.kv_block_bytes(256) == 4 * 2**20


def test_a_key_is_not_shown() -> None:
    config = ms.InferenceConfig(num_kv_blocks=16, num_mamba_slots=1, salt_key="do not show me, please")
    assert "show" not in repr(config)


def test_settings_can_be_replaced_and_pickled() -> None:
    config = ms.InferenceConfig(total_gb=1.0, max_tokens_per_step=512)
    assert replace(config, max_requests=3) == ms.InferenceConfig(
        total_gb=1.0, max_tokens_per_step=512, max_requests=3
    )
    params = ms.SamplingParams(max_tokens=7)
    assert pickle.loads(pickle.dumps(params)) == params
