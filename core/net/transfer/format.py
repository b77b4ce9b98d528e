"""What the prefixes of one engine must have in common with another engine, to be of use there."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...validation import INT32_MAX, integer, integers, shown
from .cache_access import CacheAccess
from .parts import KV, Shard, TensorPart, json_object, segments_of, shard_of

FORMAT_VERSION = 3
WeightsVersion = str | int | bytes
_DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_STATE_DTYPES = _DTYPES | {"int8": torch.int8}


class TransferError(ValueError):
    """An export is damaged, or does not fit this engine; the call that raised has changed nothing."""


@dataclass(frozen=True)
class TensorFormat:
    """One tensor of an export, of the whole model.

    Attributes:
        num_layers: the layers that have the tensor.
        num_units: the heads, groups or channels of a layer.
        shape: of one unit of one state, or of one KV block: [2, block size, head dim].
        dtype: as stored.
        grid: `StateTensor.grid`; 1 for KV.
    """

    num_layers: int
    num_units: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: int = 1

    @classmethod
    def of(
        cls, part: TensorPart, shape: tuple[int, ...], dtype: torch.dtype, grid: int = 1
    ) -> "TensorFormat":
        """The format of the tensor that `part` is of."""
        return cls(part.layers.total, part.units.total, shape, dtype, grid)

    def to_json(self) -> dict[str, Any]:
        """The fields as values that JSON knows; `from_json` reads them."""
        return vars(self) | {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, name: str, value: object) -> "TensorFormat":
        """The format that `to_json` made `value` of; ValueError, which says `name`, for anything else."""
        found = json_object(name, value, {field.name for field in fields(cls)})
        dtype, accepted = found["dtype"], _DTYPES if name == KV else _STATE_DTYPES
        if not isinstance(dtype, str) or dtype not in accepted:
            raise ValueError(f"{name}.dtype is {shown(dtype)}; accepted: one of {', '.join(accepted)}")
        return cls(
            num_layers=integer(f"{name}.num_layers", found["num_layers"], 0, INT32_MAX),
            num_units=integer(f"{name}.num_units", found["num_units"], 0, INT32_MAX),
            shape=tuple(integers(f"{name}.shape", found["shape"], 1, INT32_MAX)),
            dtype=accepted[dtype],
            grid=integer(f"{name}.grid", found["grid"], 1, INT32_MAX),
        )


@dataclass(frozen=True, kw_only=True)
class PrefixFormat:
    """The tensors of the whole model, and what else the meaning of its states and KV depends on.

    Attributes:
        format_version: the version of the encoding as bytes.
        weights_version: what the exporting engine calls its weights; nothing else tells two models of one
            shape apart.
        block_size_tokens: tokens of a KV block.
        vocab_size: token ids are below it.
        tensors: by name: "kv", and "conv.0" for the first segment of the state tensor "conv". States travel
            as they are stored: one in int8 has int8 numbers under its own name, and bfloat16 "ssm_scales.0".
            So an engine with another `durable_state_dtype` refuses them.
    """

    format_version: int = FORMAT_VERSION
    weights_version: WeightsVersion
    block_size_tokens: int
    vocab_size: int
    tensors: Mapping[str, TensorFormat]

    @classmethod
    def of(cls, access: CacheAccess) -> "PrefixFormat":
        """The format of an engine's cache.

        Raises:
            ValueError: the engine's `weights_version` is no str, int or bytes; or the model does not say
                which part of it this rank holds, or says so wrongly.
        """
        version, spec = access.weights_version, access.spec
        if type(version) not in (str, int, bytes):
            raise ValueError(
                f"engine.weights_version is {shown(version)}; accepted: a str, int or bytes that names the "
                "model's weights, because prefixes of other weights of the same shape must be refused"
            )
        shard, kv_shape = shard_of(spec), (2, access.block_size_tokens, spec.head_dim)
        tensors = {KV: TensorFormat.of(shard[KV], kv_shape, spec.kv_dtype)}
        for tensor in spec.states:
            for name, segment in segments_of(tensor).items():
                shape = segment.width, *tensor.shape[1:]
                tensors[name] = TensorFormat.of(shard[name], shape, tensor.dtype, tensor.grid)
        return cls(
            weights_version=version,  # type: ignore[arg-type]
            block_size_tokens=access.block_size_tokens,
            vocab_size=spec.vocab_size,
            tensors=tensors,
        )

    def check_fits(self, own: "PrefixFormat") -> None:
        """Raises a TransferError that names everything in which this format differs from `own`."""
        theirs, ours = self._values(), own._values()
        differences = [
            f"{name} is {shown(value)}; accepted: {shown(ours[name])}, as here"
            for name, value in theirs.items()
            if name in ours and (type(value) is not type(ours[name]) or value != ours[name])
        ]
        if differences:
            raise TransferError("the export does not fit: " + "; and ".join(differences))

    def _values(self) -> dict[str, object]:
        """What `check_fits` compares; the names of tensors stand for the tensors that only one side has."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["tensors"] = sorted(self.tensors)
        for name, tensor in self.tensors.items():
            values |= {f"{name}.{field}": value for field, value in vars(tensor).items()}
        return values

    def check_shard(self, shard: Shard) -> None:
        """TransferError unless `shard` is a part of a model of this format."""
        if shard.keys() != self.tensors.keys():
            raise TransferError(f"shard is of {sorted(shard)}; accepted: {sorted(self.tensors)}")
        for name, tensor in self.tensors.items():
            for axis, part, total in zip(
                TensorPart._fields, shard[name], (tensor.num_layers, tensor.num_units), strict=True
            ):
                if part.total != total:
                    raise TransferError(
                        f"shard.{name} is of {part.total} {axis}; accepted: {total}, as the format says"
                    )

    def to_json(self) -> dict[str, Any]:
        """The fields as values that JSON knows; `from_json` reads them."""
        version = self.weights_version
        text = version.hex() if isinstance(version, bytes) else version
        return vars(self) | {
            "weights_version": [type(version).__name__, text],
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, value: object) -> "PrefixFormat":
        """The format that `to_json` made `value` of; ValueError for anything else."""
        if isinstance(value, dict) and "format_version" in value:
            check_version(value["format_version"])  # first: another version has other fields
        found = json_object("format", value, {field.name for field in fields(cls)})
        tensors = found["tensors"]
        if not isinstance(tensors, dict):
            raise ValueError(f"tensors is {shown(tensors)}; accepted: an object of formats")
        return cls(
            weights_version=_weights_version(found["weights_version"]),
            block_size_tokens=integer("block_size_tokens", found["block_size_tokens"], 1, INT32_MAX),
            vocab_size=integer("vocab_size", found["vocab_size"], 1, INT32_MAX),
            tensors={name: TensorFormat.from_json(name, tensor) for name, tensor in tensors.items()},
        )


def check_version(version: object) -> None:
    """TransferError unless an export's bytes are of the version that this code reads."""
    if version != FORMAT_VERSION:
        raise TransferError(f"format_version is {shown(version)}; accepted: {FORMAT_VERSION}")


def _weights_version(value: object) -> WeightsVersion:
    if isinstance(value, list) and len(value) == 2:
        kind, text = value
        if kind == "bytes" and isinstance(text, str):
            return bytes.fromhex(text)
        if (kind == "str" and type(text) is str) or (kind == "int" and type(text) is int):
            return text
    raise ValueError(f"weights_version is {shown(value)}; accepted: a str, int or bytes")
