"""Checkpoints in block-scaled FP8, read as if their weights had never been quantised.

The format is that of `quant_method` "fp8": a weight of dtype float8_e4m3fn, [..., rows, columns], stands
beside a tensor with "_scale_inv" behind its name, [..., ceil(rows / block rows), ceil(columns / block
columns)]. The value of an element is the element times the scale of its block. Other weights are stored as
they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..files import CONFIG, CheckpointError, read_optional_object, section
from .checkpoint import Checkpoint
from .split.weight_part import WeightPart

_SCALE = "_scale_inv"
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_STEP_ELEMENTS = 2**22


def block_size(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a block-scaled FP8 checkpoint; None if nothing is quantised.

    Args:
        folder: the checkpoint's.
        config: its `config.json`.

    Raises:
        CheckpointError: the checkpoint is quantised in another way, or a file does not say how.
    """
    file, export = folder / CONFIG, folder / "hf_quant_config.json"
    found = section(file, config, "quantization_config")
    found = found or section(file, section(file, config, "text_config"), "quantization_config")
    found = found or section(file, config, "compression_config")
    if not found and (exported := read_optional_object(export)):
        found = {"quant_method": "modelopt"} | section(export, exported, "quantization")
    if not found:
        return None
    method = found.get("quant_method")
    name = method or next((key for key in found if str(key).startswith("load_in_")), "without a quant_method")
    details = [str(found[key]) for key in ("quant_algo", "format") if found.get(key)]
    if method != "fp8":
        shown = " ".join([str(name), *details])
        raise CheckpointError(f"{folder} is quantised by {shown!r}; accepted: no quantisation, or 'fp8'")
    blocks = found.get("weight_block_size")
    if found.get("expert_dtype", "fp8") != "fp8":
        raise CheckpointError(f"{folder} has experts in {found['expert_dtype']!r}; accepted: 'fp8'")
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(_is_size(size) for size in blocks):
        raise CheckpointError(f"{folder}: weight_block_size is {blocks!r}; accepted: two positive integers")
    return blocks[0], blocks[1]


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


class Float8Checkpoint:
    """The tensors of `checkpoint` without scales: `read` multiplies a weight by the scales of its blocks.

    Args:
        checkpoint: the tensors as they are stored.
        blocks: rows and columns that share a scale.

    Raises:
        CheckpointError: a weight has no scales, scales have no weight, or their shapes do not fit.
    """

    def __init__(self, checkpoint: Checkpoint, blocks: tuple[int, int]) -> None:
        self._checkpoint, self._blocks = checkpoint, blocks
        stored = checkpoint.names
        scales = {name for name in stored if name.endswith(_SCALE)}
        activations = {name for name in stored if name.endswith(_ACTIVATION_SCALES)}
        self.activation_scales = tuple(sorted(activations))
        self._names = tuple(name for name in stored if name not in scales | activations)
        self._scaled = {name for name in self._names if name + _SCALE in scales}
        for name in self._names:
            is_float8 = checkpoint.dtype(name) == torch.float8_e4m3fn
            if is_float8 and name not in self._scaled:
                raise CheckpointError(f"{name} is stored in float8_e4m3fn, and {name + _SCALE} is missing")
            if name in self._scaled and not is_float8:
                dtype = checkpoint.dtype(name)
                raise CheckpointError(
                    f"{name} is stored in {dtype} beside {name + _SCALE}; accepted: torch.float8_e4m3fn"
                )
        for name in scales:
            self._check_scale(name)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._scaled else self._checkpoint.dtype(name)

    def read(
        self, name: str, device: torch.device, dtype: torch.dtype, part: WeightPart | None = None
    ) -> torch.Tensor:
        if name not in self._scaled:
            return self._checkpoint.read(name, device, dtype, part)
        weight = self._checkpoint.read(name, device, None)
        scale = self._checkpoint.read(name + _SCALE, device, None)
        whole = dequantize(weight, scale, self._blocks, dtype)
        return whole if part is None else part.take(whole)

    def _check_scale(self, name: str) -> None:
        weight = name.removesuffix(_SCALE)
        if weight not in self._scaled:
            raise CheckpointError(f"{name} has no weight: {weight} is missing")
        *before, rows, columns = self.shape(weight) if len(self.shape(weight)) > 1 else (1, 0, 0)
        accepted = (*before, -(-rows // self._blocks[0]), -(-columns // self._blocks[1]))
        if self.shape(name) != accepted or self._checkpoint.dtype(name) not in _SCALE_DTYPES:
            raise CheckpointError(
                f"{name} is {self._checkpoint.dtype(name)}, {self.shape(name)}; accepted for {weight}, "
                f"{self.shape(weight)}: floating point, {accepted}"
            )


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, blocks: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """`weight` times the scale of each element's block, computed in at least float32.

    Args:
        weight: [..., rows, columns].
        scale: [..., ceil(rows / blocks[0]), ceil(columns / blocks[1])].
        blocks: rows and columns of a block; the last blocks may be smaller.
        dtype: of the result.

    Returns:
        A new tensor of the shape of `weight`. What is allocated beside it is small.
    """
    columns, compute = weight.shape[-1], torch.promote_types(dtype, torch.float32)
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    rows_at_once = max(1, _STEP_ELEMENTS // max(1, columns) // blocks[0]) * blocks[0]
    for stored, scales, out in zip(
        weight.reshape(-1, *weight.shape[-2:]),
        scale.reshape(-1, *scale.shape[-2:]).to(compute),
        result.view(-1, *weight.shape[-2:]),
        strict=True,
    ):
        for first in range(0, len(stored), rows_at_once):
            part = stored[first : first + rows_at_once]
            scaled = scales[first // blocks[0] : -(-(first + len(part)) // blocks[0])]
            row_scales = scaled.repeat_interleave(blocks[0], 0)[: len(part)]
            factors = row_scales.repeat_interleave(blocks[1], 1)[:, :columns]
            out[first : first + rows_at_once] = factors.mul_(part.to(compute))
    return result
