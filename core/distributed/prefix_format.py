"""What two engines must have in common for the prefixes of one to be of use to the other."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard, Part
from ..validation import INT32_MAX, integer, shown

FORMAT_VERSION = 1
WeightsVersion = str | int | bytes
_DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_PARTS = tuple(field.name for field in fields(ModelShard))


class TransferError(ValueError):
    """An export that is damaged or does not fit here; nothing was changed by the call that raised."""


@dataclass(frozen=True, kw_only=True)
class PrefixFormat:
    """The whole model's shapes, and what else the meaning of its states and KV depends on.

    Attributes:
        format_version: of the bytes.
        weights_version: the engine's; two models of one shape can be told apart by nothing else.
        block_size_tokens, ssd_chunk_size, vocab_size: lengths in tokens; token ids.
        conv_dtype, ssm_dtype, kv_dtype: of the stored numbers.
        head_dim: of the attention layers' keys and values.
        mamba_head_dim, mamba_state_dim: P and N of the SSM state [heads, P, N].
        conv_width: positions of the convolution's window.
        mamba_layers, mamba_heads, mamba_groups, attention_layers, kv_heads: of all ranks together.
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
    def of(cls, engine: DynamicInferenceEngine) -> "PrefixFormat":
        """An engine's; ValueError where it has not said what its exports must be told apart by."""
        version, spec = engine.weights_version, engine.context.spec
        if type(version) not in (str, int, bytes):
            raise ValueError(
                f"engine.weights_version is {shown(version)}; accepted: a str, int or bytes that names the "
                "model's weights, because prefixes of other weights of the same shape must be refused"
            )
        shard = shard_of(engine)
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
            block_size_tokens=engine.context.block_size_tokens,
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
        """TransferError that names whatever differs from an engine's own format."""
        pairs = {field.name: (getattr(self, field.name), getattr(own, field.name)) for field in fields(self)}
        differences = [
            f"{name} is {shown(theirs)}; accepted: {shown(ours)}, as here"
            for name, (theirs, ours) in pairs.items()
            if type(theirs) is not type(ours) or theirs != ours
        ]
        if differences:
            raise TransferError("the export does not fit: " + "; and ".join(differences))

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.dtype):
                values[name] = str(value).removeprefix("torch.")
        version = self.weights_version
        text = version.hex() if isinstance(version, bytes) else version
        return values | {"weights_version": [type(version).__name__, text]}

    @classmethod
    def from_json(cls, value: object) -> "PrefixFormat":
        """ValueError for what `to_json` does not give."""
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
    if version != FORMAT_VERSION:
        raise TransferError(f"format_version is {shown(version)}; accepted: {FORMAT_VERSION}")


def shard_of(engine: DynamicInferenceEngine) -> ModelShard:
    """The part of the model that an engine's rank holds; ValueError where its model does not say."""
    spec = engine.context.spec
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
    parts: dict[str, Part] = {name: getattr(shard, name) for name in _PARTS}
    return {name: [part.start, part.stop, part.total] for name, part in parts.items()}


def shard_from_json(value: object) -> ModelShard:
    """ValueError for what `shard_to_json` does not give."""
    found = json_object("shard", value, set(_PARTS))
    for name, part in found.items():
        if not isinstance(part, list) or len(part) != 3:
            raise ValueError(f"shard.{name} is {shown(part)}; accepted: [start, stop, total]")
    return ModelShard(**{name: Part(*found[name]) for name in _PARTS})


def json_object(name: str, value: object, keys: set[str]) -> Mapping[str, Any]:
    """`value` as an object with exactly these keys, or a ValueError."""
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
