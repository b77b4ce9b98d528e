"""Which part of each tensor of an export one rank holds."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...parallel_groups import Part
from ...state_spec import HybridStateSpec, StateSegment, StateTensor
from ...validation import shown

KV = "kv"
"""The name of the tensor of keys and values. Those of states have a dot: see `segments_of`."""


class TensorPart(NamedTuple):
    """Some layers of a tensor, and some units of these layers: heads, groups or channels."""

    layers: Part
    units: Part

    @property
    def slices(self) -> tuple[slice, slice]:
        """The part's layers and units, of those of the whole model."""
        return slice(self.layers.start, self.layers.stop), slice(self.units.start, self.units.stop)

    def without_units(self) -> "TensorPart":
        """The same layers and no unit."""
        return self._replace(units=Part(self.units.start, self.units.start, self.units.total))


Shard = Mapping[str, TensorPart]
"""The name of each tensor -> the part that a rank holds of it."""


def segments_of(tensor: StateTensor) -> dict[str, StateSegment]:
    """The segments of a state tensor by their names in an export: "conv.0" is the first of "conv"."""
    return {f"{tensor.name}.{index}": segment for index, segment in enumerate(tensor.parts.segments)}


def shard_of(spec: HybridStateSpec) -> Shard:
    """The part of the model that this rank holds; ValueError where a split model does not say which part."""
    undeclared = [f"states[{i}].split" for i, tensor in enumerate(spec.states) if tensor.split is None]
    undeclared += ["shard"] if spec.shard is None else []
    if spec.groups.is_split and undeclared:
        raise ValueError(
            f"{', '.join(undeclared)} of state_spec() is None; accepted: the part of each tensor that this "
            f"rank holds, because {spec.groups.size} ranks hold the model"
        )
    counts = spec.num_attention_layers, spec.num_kv_heads
    kv = TensorPart(*(Part(0, count, count) for count in counts))
    if spec.shard is not None:
        kv = TensorPart(spec.shard.attention_layers, spec.shard.kv_heads)
        if (kv.layers.count, kv.units.count) != counts:
            raise ValueError(
                f"state_spec().shard is {spec.shard}; accepted: one of {counts[0]} attention layers and "
                f"{counts[1]} KV heads"
            )
    shard = {KV: kv}
    for tensor in spec.states:
        for name, segment in segments_of(tensor).items():
            shard[name] = TensorPart(tensor.parts.layers, segment.part)
    return shard


def shard_to_json(shard: Shard) -> dict[str, list[list[int]]]:
    """Each part as [start, stop, total] of its layers and of its units; `shard_from_json` reads it."""
    return {name: [[axis.start, axis.stop, axis.total] for axis in part] for name, part in shard.items()}


def shard_from_json(value: object) -> Shard:
    """The shard that `shard_to_json` made `value` of; ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"shard is {shown(value)}; accepted: an object of parts")
    return {name: _part_from_json(f"shard.{name}", part) for name, part in value.items()}


def _part_from_json(name: str, value: object) -> TensorPart:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(not isinstance(axis, list) or len(axis) != 3 for axis in value)
    ):
        raise ValueError(f"{name} is {shown(value)}; accepted: [start, stop, total] of layers and of units")
    layers, units = value
    return TensorPart(Part(*layers), Part(*units))


def json_object(name: str, value: object, keys: set[str]) -> Mapping[str, Any]:
    """`value`, which must be a JSON object with exactly these keys, else ValueError."""
    if not isinstance(value, dict) or value.keys() != keys:
        found = sorted(map(str, value)) if isinstance(value, dict) else shown(value)
        raise ValueError(f"{name} is {found}; accepted: an object of {', '.join(sorted(keys))}")
    return value
