"""What the prefixes of one engine must have in common with another engine, to be of use there."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...model_shard import ModelShard, Part
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX, integer, shown
from .cache_access import CacheAccess

FORMAT_VERSION = 2
WeightsVersion = str | int | bytes
_DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_PARTS = tuple(field.name for field in fields(ModelShard))


class TransferError(ValueError):
    """An export is damaged, or does not fit this engine; the call that raised has changed nothing."""


@dataclass(frozen=True, kw_only=True)
class PrefixFormat:
    """The shapes of the whole model, and what else the meaning of its states and KV depends on.

    Attributes:
        format_version: the version of the encoding as bytes.
        weights_version: what the exporting engine calls its weights; nothing else tells two models of one
            shape apart.
        block_size_tokens: tokens of a KV block.
        ssd_chunk_size: tokens of an SSD chunk.
        vocab_size: token ids are below it.
        conv_dtype, ssm_dtype, kv_dtype: the dtypes of conv windows, SSM states and KV.
        head_dim: the size of a key, and of a value, of one attention head.
        mamba_head_dim, mamba_state_dim: P and N of a layer's SSM state [heads, P, N].
        conv_width: positions of a conv window.
        mamba_layers, mamba_heads, mamba_groups, attention_layers, kv_heads: how many the whole model has.
    """

    format_version: int = FORMAT_VERSION
    weights_version: WeightsVersion
    block_size_tokens: int
    ssd_chunk_size: int
    vocab_size: int
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    mamba_head_dim: int
    mamba_state_dim: int
    conv_width: int
    mamba_layers: int
    mamba_heads: int
    mamba_groups: int
    attention_layers: int
    kv_heads: int

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
        shard = shard_of(spec)
        heads, groups = shard.mamba_heads, shard.mamba_groups
        if len(spec.ssm_states_shape) != 3 or spec.ssm_states_shape[0] != heads.count:
            raise ValueError(
                f"ssm_states_shape is {spec.ssm_states_shape}; accepted: ({heads.count} heads, head dim, "
                "state dim)"
            )
        _, head_dim, state_dim = spec.ssm_states_shape
        channels = heads.count * head_dim + 2 * groups.count * state_dim
        if len(spec.conv_states_shape) != 2 or spec.conv_states_shape[0] != channels:
            raise ValueError(
                f"conv_states_shape is {spec.conv_states_shape}; accepted: ({channels} channels, x, B and C "
                "of this rank's heads and groups, positions)"
            )
        return cls(
            weights_version=version,  # type: ignore[arg-type]
            block_size_tokens=access.block_size_tokens,
            ssd_chunk_size=spec.ssd_chunk_size,
            vocab_size=spec.vocab_size,
            conv_dtype=spec.conv_states_dtype,
            ssm_dtype=spec.ssm_states_dtype,
            kv_dtype=spec.kv_dtype,
            head_dim=spec.head_dim,
            mamba_head_dim=head_dim,
            mamba_state_dim=state_dim,
            conv_width=spec.conv_states_shape[1],
            **{name: getattr(shard, name).total for name in _PARTS},
        )

    def check_fits(self, own: "PrefixFormat") -> None:
        """Raises a TransferError that names every field in which this format differs from `own`."""
        pairs = {field.name: (getattr(self, field.name), getattr(own, field.name)) for field in fields(self)}
        differences = [
            f"{name} is {shown(theirs)}; accepted: {shown(ours)}, as here"
            for name, (theirs, ours) in pairs.items()
            if type(theirs) is not type(ours) or theirs != ours
        ]
        if differences:
            raise TransferError("the export does not fit: " + "; and ".join(differences))

    def to_json(self) -> dict[str, Any]:
        """The fields as values that JSON knows; `from_json` reads them."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.dtype):
                values[name] = str(value).removeprefix("torch.")
        version = self.weights_version
        text = version.hex() if isinstance(version, bytes) else version
        return values | {"weights_version": [type(version).__name__, text]}

    @classmethod
    def from_json(cls, value: object) -> "PrefixFormat":
        """The format that `to_json` made `value` of; ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        found = json_object("format", value, names)
        check_version(found["format_version"])
        result: dict[str, Any] = {}
        for name in names - {"weights_version"}:
            if name.endswith("_dtype"):
                text = found[name]
                if not isinstance(text, str) or text not in _DTYPES:
                    raise ValueError(f"{name} is {shown(text)}; accepted: one of {', '.join(_DTYPES)}")
                result[name] = _DTYPES[text]
            else:
                result[name] = integer(name, found[name], 0 if name in _PARTS else 1, INT32_MAX)
        return cls(weights_version=_weights_version(found["weights_version"]), **result)


def check_version(version: object) -> None:
    """TransferError unless an export's bytes are of the version that this code reads."""
    if version != FORMAT_VERSION:
        raise TransferError(f"format_version is {shown(version)}; accepted: {FORMAT_VERSION}")


def shard_of(spec: HybridStateSpec) -> ModelShard:
    """The part of the model that this rank holds; ValueError where the model does not say which part."""
    if spec.shard is None:
        raise ValueError("state_spec().shard is None; accepted: a ModelShard, to know which heads are which")
    layers = spec.shard.mamba_layers.count, spec.shard.attention_layers.count, spec.shard.kv_heads.count
    if layers != (spec.num_mamba_layers, spec.num_attention_layers, spec.num_kv_heads):
        raise ValueError(
            f"state_spec().shard is {spec.shard}; accepted: one of {spec.num_mamba_layers} Mamba and "
            f"{spec.num_attention_layers} attention layers and {spec.num_kv_heads} KV heads"
        )
    return spec.shard


def shard_to_json(shard: ModelShard) -> dict[str, list[int]]:
    """Each part as [start, stop, total]; `shard_from_json` reads it."""
    parts: dict[str, Part] = {name: getattr(shard, name) for name in _PARTS}
    return {name: [part.start, part.stop, part.total] for name, part in parts.items()}


def shard_from_json(value: object) -> ModelShard:
    """The shard that `shard_to_json` made `value` of; ValueError for anything else."""
    found = json_object("shard", value, set(_PARTS))
    for name, part in found.items():
        if not isinstance(part, list) or len(part) != 3:
            raise ValueError(f"shard.{name} is {shown(part)}; accepted: [start, stop, total]")
    return ModelShard(**{name: Part(*found[name]) for name in _PARTS})


def json_object(name: str, value: object, keys: set[str]) -> Mapping[str, Any]:
    """`value`, which must be a JSON object with exactly these keys, else ValueError."""
    if not isinstance(value, dict) or value.keys() != keys:
        found = sorted(map(str, value)) if isinstance(value, dict) else shown(value)
        raise ValueError(f"{name} is {found}; accepted: an object of {', '.join(sorted(keys))}")
    return value


def _weights_version(value: object) -> WeightsVersion:
    if isinstance(value, list) and len(value) == 2:
        kind, text = value
        if kind == "bytes" and isinstance(text, str):
            return bytes.fromhex(text)
        if (kind == "str" and type(text) is str) or (kind == "int" and type(text) is int):
            return text
    raise ValueError(f"weights_version is {shown(value)}; accepted: a str, int or bytes")
