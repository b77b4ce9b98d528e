"""Models of tiny random models of transformers, and models that are wrong on purpose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .hf_models import reference_model

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def save_model(case: str, folder: Path, shard_size: str = "10GB") -> dict[str, Tensor]:
    """Save the reference model of `case` as transformers does; returns what its files hold."""
    reference_model(case).save_pretrained(folder, max_shard_size=shard_size)
    return stored_tensors(folder)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` change the tensors of a model, and write them into one file."""
    tensors = stored_tensors(folder)
    change(tensors)
    for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WHOLE)


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def quantize(
    weight: Tensor, blocks: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Block-scaled FP8 of `weight` [..., rows, columns], and its value in float64, element by element.

    Returns: the FP8 elements, the scales, and the product of each element and the scale of its block.
    """
    rows, columns = weight.shape[-2:]
    scale_shape = (*weight.shape[:-2], -(-rows // blocks[0]), -(-columns // blocks[1]))
    scales = 0.001 + 0.01 * torch.rand(scale_shape, generator=generator)
    which_rows = torch.arange(rows) // blocks[0]
    which_columns = torch.arange(columns) // blocks[1]
    factors = scales.double()[..., which_rows, :][..., which_columns]
    stored = (weight.double() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scales, stored.double() * factors
