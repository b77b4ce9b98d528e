"""The page for authors names every field there is; `test_docs.py` runs its blocks."""

import re
from dataclasses import fields
from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.step_inputs import Checkpoints, PrefillChunks, StepShape

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()


@pytest.mark.parametrize(
    "described",
    [ms.StepInputs, StepShape, PrefillChunks, Checkpoints, ms.HybridStateSpec],
    ids=lambda c: c.__name__,
)
def test_every_field_is_described(described: type) -> None:
    names = described._fields if issubclass(described, tuple) else [field.name for field in fields(described)]
    for name in (*names, "num_decodes", "num_prefills", "decode_destinations", "prefill_destinations"):
        assert re.search(rf"[`.]{name}[`\[]", PAGE), name


def test_every_kernel_it_names_exists_and_every_file() -> None:
    import torch

    kernels = ms.kernel_set(torch.device("cpu"), torch.float32)
    named = re.findall(r"`(\w+_\w+)`", PAGE.split("## Our kernels")[1])
    assert len(named) >= 11
    for name in named:
        assert hasattr(kernels, name), name
    for path in re.findall(r"`((?:core|examples)/[^`]*)`", PAGE):
        assert (Path(__file__).parents[3] / path).exists(), path
