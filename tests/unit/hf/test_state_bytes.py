"""The size of a state beside the KV of a token, from the configs of published models.

`configs/` has the fields that decide the sizes and the kinds of layer, and few others.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[3] / "tools"))
import state_sizes
from mambaslots.hf.architectures import read_config
from oracle.hf_models import CONFIGS, served_model, tiny_config

CONFIG_FILES = Path(__file__).parent / "configs"
PUBLISHED = {
    "Nemotron-H-8B": (102, 6_234),
    "Nemotron-3-Nano-30B-A3B": (49, 7_989),
    "Nemotron-3-Super-120B-A12B": (170, 20_780),
    "Qwen3-Next-80B-A3B": (77, 3_144),
    "Qwen3.5-35B-A3B": (64, 3_144),
    "Qwen3.5-4B": (52, 1_572),
}
"""MB of a state in float32, and the tokens whose KV in bfloat16 is as large."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_published_models(name: str) -> None:
    sizes = state_sizes.state_sizes(name, read_config(CONFIG_FILES / f"{name}.json"))
    assert sizes.dtype == torch.bfloat16
    assert sizes.num_equal_tokens is not None
    assert (round(sizes.state_bytes / 1e6), round(sizes.num_equal_tokens)) == PUBLISHED[name]


def test_nemotron_h_8b_by_hand() -> None:
    """24 Mamba-2 layers of 128 heads, and 4 of attention."""
    config = read_config(CONFIG_FILES / "Nemotron-H-8B.json")
    sizes = state_sizes.state_sizes("Nemotron-H-8B", config)
    ssm, window = 128 * 64 * 128 * 4, (128 * 64 + 2 * 8 * 128) * 3 * 2
    assert sizes.state_bytes == 24 * (ssm + window)
    assert sizes.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("case", CONFIGS)
def test_sizes_of_a_config_are_those_of_its_model(case: str) -> None:
    spec = served_model(case).state_spec()
    sizes = state_sizes.state_sizes(case, tiny_config(case), torch.float32)
    assert (sizes.state_bytes, sizes.kv_bytes_per_token) == (spec.state_bytes, spec.kv_block_bytes(1))


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "tiny-mamba2"
    tiny_config("mamba2").save_pretrained(folder)
    assert state_sizes.main([str(CONFIG_FILES / "Nemotron-H-8B.json"), str(folder)]) == 0
    _, nemotron, mamba2 = capsys.readouterr().out.splitlines()
    assert nemotron.split() == ["Nemotron-H-8B", "nemotron_h", "102.1", "16,384", "6,234"]
    assert mamba2.split()[0] == "tiny-mamba2"
    assert mamba2.endswith("no KV")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("{}", "cannot read"),
        ('{"model_type": "llama"}', "is 'llama'"),
        (None, "no file"),
    ],
)
def test_a_bad_config_is_named(
    text: str | None, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert state_sizes.main([str(file)]) == 1
    assert message in capsys.readouterr().err


def test_without_a_path_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert state_sizes.main([]) == 2
    assert "usage" in capsys.readouterr().err
