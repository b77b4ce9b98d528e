"""The parameters of a `HybridLM`: drawn, saved, read back, and cut into one rank's part."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..files import CONFIG, ModelFolderError, check_regular, read_object, replacing
from ..layers.weight_part import WeightPart
from ..parallel_groups import ParallelGroups
from ..validation import shown
from .hybrid_config import HybridConfig


class RandomWeights:
    """Draws parameters, in order, from one generator, in float64; `name` says which weights these are."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.name = f"seed {seed}"
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        numbers = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device=self._device)
        return numbers * std

    def constant(self, name: str, values: Tensor) -> Tensor:
        return values


@dataclass
class ModelWeights:
    """Makes parameters in the order of the model, each whole; a rank keeps what it asks for."""

    config: HybridConfig
    source: "WeightSource"
    device: torch.device
    groups: ParallelGroups
    prefix: str = ""

    def constant(self, name: str, values: Tensor, rows: Iterable[range] | None = None) -> nn.Parameter:
        """A parameter that begins as `values`."""
        whole = self.source.constant(self.prefix + name, values)
        return self._parameter(name, _part(whole, 0, rows))

    def full(self, name: str, size: int, value: float, rows: Iterable[range] | None = None) -> nn.Parameter:
        values = torch.full((size,), value, dtype=torch.float64, device="cpu")
        return self.constant(name, values, rows)

    def normal(
        self, name: str, *shape: int, std: float,
        rows: Iterable[range] | None = None, columns: Iterable[range] | None = None,
    ) -> nn.Parameter:  # fmt: skip
        """Normal numbers of this shape. Only `rows` and `columns` are kept."""
        whole = self.source.normal(self.prefix + name, shape, std)
        return self._parameter(name, _part(_part(whole, 0, rows), 1, columns))

    def linear(
        self, name: str, out_features: int, in_features: int, gain: float = 1.0,
        rows: Iterable[range] | None = None, columns: Iterable[range] | None = None,
    ) -> nn.Parameter:  # fmt: skip
        """[out, in]; outputs are `gain` times as large as inputs."""
        std = gain * in_features**-0.5
        return self.normal(name, out_features, in_features, std=std, rows=rows, columns=columns)

    def _parameter(self, name: str, values: Tensor) -> nn.Parameter:
        dtype = self.config.compute_dtype if name in _WIDE else self.config.dtype
        return nn.Parameter(values.to(self.device, dtype), requires_grad=False)


def _part(whole: Tensor, dim: int, ranges: Iterable[range] | None) -> Tensor:
    """These indices of a dimension; None for all."""
    part = None if ranges is None else WeightPart(dim, tuple(ranges), whole.shape[dim])
    return whole if part is None or part.size == part.total else part.take(whole)


MODEL_TYPE = "mambaslots_hybrid_lm"
WEIGHTS = "model.safetensors"
_WIDE = ("dt_bias", "A_log", "D")  # parameters that are kept in float32 or wider
# What other libraries write into a config, and what says nothing about the shape.
_IGNORED = {
    "model_type", "architectures", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def read_config(folder: Path, dtype: torch.dtype | None) -> HybridConfig:
    """The shape in `config.json`, with `dtype` for its own; ModelFolderError where it is no `HybridLM`'s."""
    path = folder / CONFIG
    content = read_object(path)
    if content.get("model_type") != MODEL_TYPE:
        model_type = content.get("model_type")
        raise ModelFolderError(f"model_type of {path} is {model_type!r}; accepted: {MODEL_TYPE!r}")
    names = {field.name: field.default is MISSING for field in fields(HybridConfig)}
    if unknown_names := sorted(content.keys() - names.keys() - _IGNORED):
        raise ModelFolderError(f"{path} has {', '.join(unknown_names)}; accepted: {', '.join(names)}")
    if missing_names := [name for name, required in names.items() if required and name not in content]:
        raise ModelFolderError(f"{path} has no {', '.join(missing_names)}")
    values = {name: value for name, value in content.items() if name in names}
    stored_dtype = values.get("dtype", "float32")
    if not isinstance(stored_dtype, str) or stored_dtype not in _DTYPES:
        raise ModelFolderError(f"dtype of {path} is {shown(stored_dtype)}; accepted: {', '.join(_DTYPES)}")
    values["dtype"] = dtype or _DTYPES[stored_dtype]
    try:
        return HybridConfig(**values)
    except ValueError as error:
        raise ModelFolderError(f"{path}: {error}") from error


def write(folder: Path, config: HybridConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write both files; both are complete before one is replaced, and the config is replaced last."""
    folder.mkdir(parents=True, exist_ok=True)
    wide = torch.promote_types(dtype, torch.float32)
    tensors = {
        name: weight.detach().to("cpu", wide if name.rpartition(".")[2] in _WIDE else dtype).contiguous()
        for name, weight in weights.items()
    }
    values: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(config)}
    values["dtype"] = str(dtype).removeprefix("torch.")
    content = {"model_type": MODEL_TYPE, **values}
    with replacing(folder / CONFIG) as config_draft, replacing(folder / WEIGHTS) as weights_draft:
        save_file(tensors, weights_draft, metadata={"format": "pt"})
        config_draft.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


class SavedWeights:
    """The parameters in `model.safetensors` of a folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        check_regular(self._path)
        try:
            with self._path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            self._file = cast(Any, safe_open(self._path, framework="pt", backend="pread"))
            self._unread = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{self._path} is truncated or corrupt: {error}") from error
        self.name = f"weights {digest[:16]}"

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        return self._take(name, shape)

    def constant(self, name: str, values: Tensor) -> Tensor:
        return self._take(name, tuple(values.shape))

    def check_all_taken(self) -> None:
        """Raise a ModelFolderError where the file has tensors that the model did not ask for."""
        if self._unread:
            names = ", ".join(sorted(self._unread))
            raise ModelFolderError(f"{self._path} has weights that the model has not: {names}")

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._unread:
            raise ModelFolderError(f"{self._path} has no {name}")
        self._unread.remove(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{self._path} is truncated or corrupt: {error}") from error
        if tuple(tensor.shape) != shape:
            message = f"{name} of {self._path} has the shape {list(tensor.shape)}; accepted: {list(shape)}"
            raise ModelFolderError(message)
        if tensor.dtype not in _DTYPES.values():
            message = f"{name} of {self._path} has the dtype {tensor.dtype}; accepted: {', '.join(_DTYPES)}"
            raise ModelFolderError(message)
        return tensor


type WeightSource = RandomWeights | SavedWeights
"""Where whole parameters come from: a generator, or the file of a saved model."""
