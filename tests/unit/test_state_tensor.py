"""How durable slots store declared state tensors."""

import math
from dataclasses import replace

import mambaslots as ms
import pytest
import torch
from mambaslots.state_spec import (
    SlotLayout,
    StateTensor,
    durable_tensors,
    gated_delta_net_states,
    mamba2_states,
    short_conv_states,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEMOTRON_8B = mamba2_states(24, 128, 64, 8, 128, 4, BF16, FP32, 256)


def stored(states: tuple[StateTensor, ...], dtype: str | None) -> dict[str, tuple[object, ...]]:
    return {tensor.name: (tensor.dtype, *tensor.shape) for tensor in durable_tensors(states, dtype)}


def test_matrices_have_a_scale_for_each_head_and_index() -> None:
    assert stored(mamba2_states(2, 3, 5, 1, 6, 4, FP32, FP32, 4), "int8") == {
        "conv": (BF16, 3 * 5 + 2 * 6, 3),
        "ssm": (torch.int8, 3, 5, 6),
        "ssm_scales": (BF16, 3, 6),
    }
    delta = stored(gated_delta_net_states(2, 1, 6, 3, 5, 4, BF16, BF16), "int8")
    assert delta["delta"] == (torch.int8, 3, 6, 5)
    assert delta["delta_scales"] == (BF16, 3, 6)
    assert stored(short_conv_states(2, 7, 3, FP32), "int8") == {"short_conv": (BF16, 7, 2)}


def test_no_number_takes_more_bytes_and_none_is_rounded_for_nothing() -> None:
    assert stored(mamba2_states(2, 3, 5, 1, 6, 4, FP16, FP16, 4), "bfloat16")["conv"][0] == FP16
    for states in (short_conv_states(2, 7, 3, BF16), mamba2_states(2, 3, 5, 1, 6, 4, BF16, BF16, 4)):
        assert durable_tensors(states, "bfloat16") == states  # as they are: one pool serves both
    own = (StateTensor("sums", 2, (8,), FP32), StateTensor("rounded", 2, (8,), FP32, coarsest="bfloat16"))
    assert [tensor.dtype for tensor in durable_tensors(own, "int8")] == [FP32, BF16]
    assert durable_tensors(own, None) == own


def test_a_slot_of_nemotron_h_8b_takes_less_than_two_sevenths_of_its_bytes() -> None:
    live, encoded = (
        SlotLayout.of(durable_tensors(NEMOTRON_8B, dtype)).slot_bytes for dtype in (None, "int8")
    )
    assert round(live / 2**20) == 97
    assert live / encoded >= 3.5
    by_hand = 24 * (128 * 64 * 128 + 128 * 128 * 2 + 10240 * 3 * 2)
    assert encoded == sum(
        math.ceil(part / 128) * 128 for part in (24 * 128 * 64 * 128, 24 * 128 * 128 * 2, 24 * 10240 * 3 * 2)
    )
    assert encoded - by_hand < 3 * 128


def test_parts_of_a_split_model_are_parts_of_the_encoded_tensors() -> None:
    for tensor in durable_tensors(NEMOTRON_8B, "int8"):
        assert tensor.parts.layers.count == 24
        assert sum(segment.size for segment in tensor.parts.segments) == tensor.shape[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coarsest": "int4"}, "coarsest is 'int4'; accepted: one of 'exact', 'bfloat16', 'int8'"),
        ({"coarsest": "int8"}, "scale_axis is None"),
        ({"coarsest": "int8", "scale_axis": 0}, "scale_axis is 0; accepted: "),
        ({"coarsest": "int8", "scale_axis": 2}, "scale_axis is 2; accepted: "),
        ({"coarsest": "bfloat16", "scale_axis": 1}, "scale_axis is 1; accepted: None unless"),
    ],
)
def test_bad_declarations_are_refused(fields: dict[str, object], message: str) -> None:
    tensor = StateTensor("own", 2, (3, 4), FP32)
    with pytest.raises(ValueError, match=message):
        replace(tensor, **fields)  # type: ignore[arg-type]
    replace(tensor, coarsest="int8", scale_axis=1)


def test_a_setting_that_changes_nothing_keeps_one_pool() -> None:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(pattern="C-", dtype=BF16))
    config = ms.InferenceConfig(
        block_size_tokens=16, max_sequence_length=64, max_tokens_per_step=64, num_kv_blocks=8,
        num_mamba_slots=4,
        durable_state_dtype="int8",
    )  # fmt: skip
    memory = ms.DynamicInferenceEngine(model, config).context.memory
    assert memory.durable_pool is memory.state_pool
