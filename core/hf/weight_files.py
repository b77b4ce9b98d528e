"""The tensors of a folder's safetensors files, read one at a time; block-scaled FP8 as if never quantised."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import CONFIG, ModelFolderError, read_object, section
from ..layers.weight_part import WeightPart
from ..validation import INT32_MAX, ceil_div, ints_within

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SUFFIX = ".safetensors"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_SCALE = "_scale_inv"
_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_STEP_ELEMENTS = 2**22


class WeightFiles(ExitStack):
    """The safetensors files of a folder. Nothing is read but their headers until `read` is called.

    With `blocks`, a weight of dtype float8_e4m3fn [..., rows, columns] has its blocks' scales in a tensor
    with "_scale_inv" after its name, [..., ceil(rows / block rows), ceil(columns / block columns)]. `read`
    multiplies by them. A ModelFolderError names what is missing, truncated, corrupt or does not fit.
    """

    def __init__(self, folder: Path, blocks: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._files: dict[str, tuple[Path, Any]] = {}
        self._blocks = blocks
        self._scaled: set[str] = set()
        self.activation_scales: tuple[str, ...] = ()
        try:
            self._open(folder)
            self.names = tuple(self._files)
            if blocks is not None:
                self._find_scales(blocks)
        except BaseException:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of the values: float32 for elements that are stored with scales."""
        return torch.float32 if name in self._scaled else self._stored_dtype(name)

    def read(
        self, name: str, device: torch.device, dtype: torch.dtype, part: WeightPart | None = None
    ) -> Tensor:
        """A new tensor on `device`, of `part` alone if there is one; floating point becomes `dtype`."""
        if name not in self._scaled or self._blocks is None:
            return self._read(name, device, dtype, part)
        weight = self._read(name, device, None)
        scale = self._read(name + _SCALE, device, None)
        whole = dequantize(weight, scale, self._blocks, dtype)
        return whole if part is None else part.take(whole)

    def _read(
        self, name: str, device: torch.device, dtype: torch.dtype | None, part: WeightPart | None = None
    ) -> Tensor:
        path, file = self._files[name]
        try:
            shape = torch.Size(self.shape(name))
            stored_dtype = self._stored_dtype(name)
            target = dtype if stored_dtype.is_floating_point else None
            if part is None and (target in (None, stored_dtype) or shape.numel() < _STEP_ELEMENTS):
                return file.get_tensor(name).to(device, target)  # type: ignore[no-any-return]
            # Of a map, pages that a part does not need are not read; what was read goes back at once.
            with safe_open(path, framework="pt") as mapped:
                if part is None:
                    return mapped.get_tensor(name).to(device, target)  # type: ignore[no-any-return]
                file_view = mapped.get_slice(name)
                result = torch.empty(part.shape(shape), dtype=target or stored_dtype, device=device)
                views = torch.split(result, list(map(len, part.ranges)), dim=part.dim)
                for view, index in zip(views, part.slices(len(shape)), strict=True):
                    view.copy_(file_view[index])
                return result
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{path}: {name} cannot be read: {error}") from error

    def _stored_dtype(self, name: str) -> torch.dtype:
        code = self._slice(name).get_dtype()
        if code not in _DTYPES:
            raise ModelFolderError(f"{name} has the dtype {code}; accepted: {', '.join(_DTYPES)}")
        return _DTYPES[code]

    def _slice(self, name: str) -> Any:
        return self._files[name][1].get_slice(name)

    def _find_scales(self, blocks: tuple[int, int]) -> None:
        scales = {name for name in self.names if name.endswith(_SCALE)}
        activation_scales = {name for name in self.names if name.endswith(_ACTIVATION_SCALES)}
        self.activation_scales = tuple(sorted(activation_scales))
        self.names = tuple(name for name in self.names if name not in scales | activation_scales)
        self._scaled = {name for name in self.names if name + _SCALE in scales}
        for name in self.names:
            dtype = self._stored_dtype(name)
            if dtype == torch.float8_e4m3fn and name not in self._scaled:
                raise ModelFolderError(f"{name} is stored in float8_e4m3fn, and {name + _SCALE} is missing")
            if dtype != torch.float8_e4m3fn and name in self._scaled:
                message = f"{name} is stored in {dtype} with {name + _SCALE}; accepted: torch.float8_e4m3fn"
                raise ModelFolderError(message)
        for name in scales:
            weight = name.removesuffix(_SCALE)
            if weight not in self._scaled:
                raise ModelFolderError(f"{name} has no weight: {weight} is missing")
            *outer_sizes, rows, columns = self.shape(weight) if len(self.shape(weight)) > 1 else (1, 0, 0)
            accepted = (*outer_sizes, ceil_div(rows, blocks[0]), ceil_div(columns, blocks[1]))
            if self.shape(name) != accepted or self._stored_dtype(name) not in _SCALE_DTYPES:
                raise ModelFolderError(
                    f"{name} is {self._stored_dtype(name)}, {self.shape(name)}; accepted for {weight}, "
                    f"{self.shape(weight)}: floating point, {accepted}"
                )

    def _open(self, folder: Path) -> None:
        index = _weight_map(folder) if (folder / _INDEX).is_file() else None
        if index is None and not (folder / _WHOLE).is_file():
            raise ModelFolderError(_no_safetensors(folder))
        file_names = [_WHOLE] if index is None else sorted(set(index.values()))
        for file_name in file_names:
            path = folder / file_name
            if not path.is_file():
                raise ModelFolderError(f"{folder / _INDEX} names {file_name}, which is missing")
            try:
                # `pread` leaves no pages of the file in this process; a map counts them as its memory.
                file = self.enter_context(safe_open(path, framework="pt", backend="pread"))
            except (SafetensorError, OSError) as error:
                raise ModelFolderError(f"{path} is truncated or no safetensors file: {error}") from error
            for name in file.offset_keys():
                if index is None or index.get(name, file_name) == file_name:
                    self._files[name] = path, file
        for name, file_name in (index or {}).items():
            if name not in self._files:
                raise ModelFolderError(f"{folder / _INDEX} names {name}, which {file_name} has not")


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says; only names of files within the folder are accepted."""
    path = folder / _INDEX
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelFolderError(f"{path} has no weight_map; accepted: an object, tensor to file")
    for name, file in files.items():
        if not isinstance(file, str) or file != Path(file).name or "\\" in file or not file.endswith(_SUFFIX):
            raise ModelFolderError(
                f"{path}: weight_map has {file!r} for {name}; accepted: the name of a .safetensors file in "
                "the folder"
            )
    return files


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has weights only as {pickles[0]}, a pickle file, which can run any code when it is "
            "read. Where you trust it, convert it once: transformers.AutoModelForCausalLM.from_pretrained("
            "folder).save_pretrained(new_folder), and load new_folder"
        )
    return f"{folder} has neither {_WHOLE} nor {_INDEX}"


def weight_block_size(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale in block-scaled FP8; None if nothing is quantised."""
    file = folder / CONFIG
    quantization = section(file, config, "quantization_config")
    quantization = quantization or section(file, section(file, config, "text_config"), "quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ModelFolderError(f"{folder} is quantised by {method!r}; accepted: no quantisation, or 'fp8'")
    blocks = quantization.get("weight_block_size")
    if quantization.get("expert_dtype", "fp8") != "fp8":
        raise ModelFolderError(f"{folder} has experts in {quantization['expert_dtype']!r}; accepted: 'fp8'")
    if not (isinstance(blocks, list) and len(blocks) == 2 and ints_within(blocks, 1, INT32_MAX)):
        raise ModelFolderError(f"{folder}: weight_block_size is {blocks!r}; accepted: two positive integers")
    return blocks[0], blocks[1]


def dequantize(weight: Tensor, scale: Tensor, blocks: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`weight` [..., rows, columns] times the scale of each element's block, in at least float32."""
    columns = weight.shape[-1]
    compute_dtype = torch.promote_types(dtype, torch.float32)
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    rows_at_once = max(1, _STEP_ELEMENTS // max(1, columns) // blocks[0]) * blocks[0]
    for elements, scales, out in zip(
        weight.reshape(-1, *weight.shape[-2:]),
        scale.reshape(-1, *scale.shape[-2:]).to(compute_dtype),
        result.view(-1, *weight.shape[-2:]),
        strict=True,
    ):
        for first in range(0, len(elements), rows_at_once):
            chunk = elements[first : first + rows_at_once]
            chunk_scales = scales[first // blocks[0] : ceil_div(first + len(chunk), blocks[0])]
            row_scales = chunk_scales.repeat_interleave(blocks[0], 0)[: len(chunk)]
            factors = row_scales.repeat_interleave(blocks[1], 1)[:, :columns]
            out[first : first + rows_at_once] = factors.mul_(chunk.to(compute_dtype))
    return result
