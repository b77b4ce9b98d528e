"""The sizes of an engine that nobody gives fit the memory."""

import json
import re
from pathlib import Path

import mambaslots as ms
import pytest
import torch
from mambaslots import devices
from mambaslots.engine_sizes import context_length, largest_fitting_config
from mambaslots.inference.contexts.pool_sizes import PoolSizes

MODEL = Path(__file__).parents[2] / "models" / "tiny-code"


@pytest.mark.parametrize("gb", [0.01, 0.05, 0.2, 1.0, 8.0])
@pytest.mark.parametrize("context", [None, 600, 262_144])
def test_chosen_sizes_fit_the_memory_and_half_of_it_caches(gb: float, context: int | None) -> None:
    spec = ms.load(MODEL).model.state_spec()
    config = largest_fitting_config(spec, context, total_gb=gb)
    assert PoolSizes.of(config, spec).num_kv_blocks >= -(
        -config.max_sequence_length // config.block_size_tokens
    )
    asked = context or 8192
    assert config.max_sequence_length <= asked
    assert 1 <= config.max_requests <= 32
    if gb >= 8.0:  # 262,144 tokens of KV and 32 states of this model take less than 4 GB
        assert (config.max_requests, config.max_sequence_length) == (32, asked)
    if config.max_requests < 32:
        assert config.max_sequence_length <= min(asked, 8192)


def test_sizes_that_are_given_are_kept_or_refused() -> None:
    spec = ms.load(MODEL).model.state_spec()
    kept = largest_fitting_config(spec, 4096, total_gb=1.0, max_requests=5, max_sequence_length=777)
    assert (kept.max_requests, kept.max_sequence_length) == (5, 777)
    with pytest.raises(ValueError, match=r"total_gb is 0.001; accepted: at least"):
        largest_fitting_config(spec, 4096, total_gb=0.001, max_requests=64, max_sequence_length=4096)


def test_a_start_says_how_many_conversations_there_is_room_for(caplog: pytest.LogCaptureFixture) -> None:
    spec = ms.load(MODEL).model.state_spec()
    with caplog.at_level("INFO"):
        config = largest_fitting_config(spec, 4096, total_gb=1.0, max_requests=3)
    said = (
        r"3 requests at once, a context of 4,096 tokens, room for about (\d+) conversations of 4,096 tokens"
    )
    (room,) = re.findall(said, caplog.text)
    num_blocks = 4096 // config.block_size_tokens
    conversation = num_blocks * spec.kv_block_bytes(config.block_size_tokens) + 2 * spec.slot_bytes
    assert 0.8 * 2**30 < int(room) * conversation <= 2**30


def test_memory_of_a_cpu_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_available_ram", lambda: 6 << 30)
    assert devices.available_gb(torch.device("cpu")) == 3.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.available_gb(torch.device("cpu")) == 0.75
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(devices, "_available_ram", lambda: 200 << 30)
    assert devices.available_gb(torch.device("cpu")) == 16.0


@pytest.mark.parametrize(
    ("limit", "stat", "free"),
    [
        ("max", "inactive_file 5000\n", None),
        ("10000", "anon 1000\nactive_file 2000\ninactive_file 5000\n", 8000),  # the kernel takes it back
        ("10000", "anon 1000\n", 3000),
        ("10000", None, 3000),
        ("10000", "inactive_file 9000\n", 10_000),  # read after memory.current, which was less
        (None, None, None),
    ],
    ids=["no limit", "page cache", "no page cache", "no statistics", "more than is used", "no group"],
)
def test_memory_of_a_control_group(
    tmp_path: Path, limit: str | None, stat: str | None, free: int | None
) -> None:
    files = {"memory.max": limit, "memory.current": limit and "7000", "memory.stat": stat}
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    assert devices._group_ram(tmp_path) == free


def test_a_configuration_without_sizes_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_available_ram", lambda: 1 << 30)
    engine = ms.DynamicInferenceEngine(ms.load(MODEL).model, ms.InferenceConfig())
    assert engine.config.total_gb == engine.context.config.total_gb == 0.5
    prompt = [7] * 600
    for resumed in (0, 512):
        (result,) = engine.generate([prompt], ms.SamplingParams(max_tokens=3))
        assert result.num_resumed_tokens == resumed


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({}, None),
    ],
)
def test_the_context_of_a_checkpoint(tmp_path: Path, config: dict[str, object], length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == length
