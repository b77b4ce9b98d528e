"""The states and KV of a forest of prefixes, for some layers and heads of a model; cut and joined."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_shard import ModelShard, Part
from .forest import PrefixForest
from .format import PrefixFormat, TransferError


class _Split(NamedTuple):
    """How one tensor of an export is split over ranks.

    Attributes:
        layers: the field of ModelShard that splits dim 0.
        units: the field of ModelShard, heads or groups, that splits dim `dim`.
        dim: see `units`.
    """

    layers: str
    units: str
    dim: int


SPLITS = {
    "ssm": _Split("mamba_layers", "mamba_heads", 2),
    "conv_x": _Split("mamba_layers", "mamba_heads", 2),
    "conv_B": _Split("mamba_layers", "mamba_groups", 2),
    "conv_C": _Split("mamba_layers", "mamba_groups", 2),
    "kv": _Split("attention_layers", "kv_heads", 4),
}
# Every (layers, units) that splits a tensor: a part of an export is a rectangle in each of these grids.
_GRIDS = sorted({(split.layers, split.units) for split in SPLITS.values()})


@dataclass(frozen=True, eq=False)
class PrefixShard:
    """One part of an export. Nothing writes its tensors once it is made; `cut` returns views of them.

    Attributes:
        format: of the whole model.
        forest: the prefixes, the same in every part.
        shard: the layers, heads and groups that this part holds.
        split: the sizes of the tensor group and of the pipeline group that made the export.
        tensors: on the CPU; states are in the order of `forest.states`, blocks in the order of the nodes:
            ssm [Mamba layers, states, heads, head dim, state dim];
            conv_x [Mamba layers, states, heads, head dim, window];
            conv_B, conv_C [Mamba layers, states, groups, state dim, window];
            kv [attention layers, 2, blocks, block size, KV heads, head dim].
    """

    format: PrefixFormat
    forest: PrefixForest
    shard: ModelShard
    split: tuple[int, int]
    tensors: Mapping[str, Tensor]

    def check(self) -> None:
        """TransferError unless format, forest, shard and tensors are consistent.

        Costs O(blocks); reads no state and no KV.
        """
        self.forest.check(self.format.vocab_size)
        if self.forest.block_size_tokens != self.format.block_size_tokens:
            raise TransferError(
                f"block_size_tokens is {self.forest.block_size_tokens}; accepted: "
                f"{self.format.block_size_tokens}, as the format says"
            )
        check_totals(self.format, self.shard)
        if self.tensors.keys() != SPLITS.keys():
            raise TransferError(f"tensors are {sorted(self.tensors)}; accepted: {sorted(SPLITS)}")
        for name, tensor in self.tensors.items():
            shape, dtype = shape_of(name, self.format, self.forest, self.shard), dtype_of(name, self.format)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise TransferError(
                    f"{name} is of shape {tuple(tensor.shape)} and {tensor.dtype}; accepted: {shape} and "
                    f"{dtype}"
                )

    def cut(self, shard: ModelShard) -> "PrefixShard":
        """The layers, heads and groups that this part and `shard` have in common, possibly none, as views."""
        common = _common(self.shard, shard)
        tensors = {name: tensor[_where(name, self.shard, common)] for name, tensor in self.tensors.items()}
        return replace(self, shard=common, tensors=tensors)


def join(pieces: Sequence[PrefixShard], shard: ModelShard) -> PrefixShard:
    """Put the part `shard` together from pieces of one export.

    Pieces may overlap, and hold more than `shard`. The result's tensors are new, unless one piece is of
    exactly this shard. Pieces of two exports of the same prefixes cannot be told apart.

    Raises:
        TransferError: the pieces lack something of `shard`, or hold different prefixes.
    """
    if not pieces:
        raise TransferError("pieces is empty; accepted: at least one part of an export")
    first = pieces[0]
    for index, piece in enumerate(pieces):
        if piece.format != first.format or piece.forest.digest != first.forest.digest:
            raise TransferError(
                f"pieces[{index}] is of another export than pieces[0]; accepted: parts of one"
            )
    whole = next((piece for piece in pieces if piece.shard == shard), None)
    if whole is not None:
        return whole
    sources = sources_for([piece.shard for piece in pieces], shard)
    tensors = {
        name: torch.empty(
            shape_of(name, first.format, first.forest, shard),
            dtype=dtype_of(name, first.format),
            device="cpu",
        )
        for name in SPLITS
    }
    for index, part in sources.items():
        piece = pieces[index].cut(part)
        for name, tensor in piece.tensors.items():
            tensors[name][_where(name, shard, piece.shard)] = tensor
    return replace(first, shard=shard, tensors=tensors)


def sources_for(holders: Sequence[ModelShard], shard: ModelShard) -> dict[int, ModelShard]:
    """Which holder gives which part, so that the parts together are `shard`.

    What several holders hold comes from the first of them; only where two holders overlap in part may
    something come twice. At least one holder gives a part, though it may be empty: the forest is needed even
    where no tensor is.

    Args:
        holders: what each holder has.
        shard: what is needed.

    Returns:
        Index into `holders` -> the part to take from this holder.

    Raises:
        TransferError: the holders together lack something of `shard`.
    """
    covered = {
        grid: torch.zeros([getattr(shard, axis).total for axis in grid], dtype=torch.bool, device="cpu")
        for grid in _GRIDS
    }
    sources: dict[int, ModelShard] = {}
    for index, holder in enumerate(holders):
        common, adds_something = _common(holder, shard), False
        for layers, units in _GRIDS:
            cells = covered[layers, units][_slice(common, layers), _slice(common, units)]
            if bool(cells.all()):  # true of no cells, too
                common = replace(common, **{units: _nothing(getattr(common, units))})
            else:
                cells.fill_(True)
                adds_something = True
        if adds_something or (not sources and index == len(holders) - 1):
            sources[index] = common
    for layers, units in _GRIDS:
        cells = covered[layers, units][_slice(shard, layers), _slice(shard, units)]
        if not bool(cells.all()):
            layer, unit = (~cells).nonzero()[0].tolist()
            raise TransferError(
                f"the export lacks {units}[{unit + getattr(shard, units).start}] of {layers}"
                f"[{layer + getattr(shard, layers).start}]; accepted: parts that together hold {shard}"
            )
    return sources


def check_totals(form: PrefixFormat, shard: ModelShard) -> None:
    """TransferError unless `shard` is a part of a model of this format."""
    for name in {name for grid in _GRIDS for name in grid}:
        total = getattr(shard, name).total
        if total != getattr(form, name):
            raise TransferError(
                f"shard.{name} is of {total}; accepted: {getattr(form, name)}, as the format says"
            )


def shape_of(name: str, form: PrefixFormat, forest: PrefixForest, shard: ModelShard) -> tuple[int, ...]:
    """The shape of tensor `name` of the part `shard`; see `PrefixShard`."""
    split = SPLITS[name]
    layers, units = getattr(shard, split.layers).count, getattr(shard, split.units).count
    if name == "kv":
        return layers, 2, len(forest), form.block_size_tokens, units, form.head_dim
    rows = form.mamba_head_dim if split.units == "mamba_heads" else form.mamba_state_dim
    columns = form.mamba_state_dim if name == "ssm" else form.conv_width
    return layers, len(forest.states), units, rows, columns


def dtype_of(name: str, form: PrefixFormat) -> torch.dtype:
    """The dtype of tensor `name`."""
    return {"kv": form.kv_dtype, "ssm": form.ssm_dtype}.get(name, form.conv_dtype)


def _where(name: str, whole: ModelShard, part: ModelShard) -> tuple[slice, ...]:
    """The index of `part`'s numbers within tensor `name` of the part `whole`, which contains `part`."""
    split = SPLITS[name]
    index = [slice(None)] * (split.dim + 1)
    for dim, field in ((0, split.layers), (split.dim, split.units)):
        outer: Part = getattr(whole, field)
        inner: Part = getattr(part, field)
        index[dim] = slice(inner.start - outer.start, inner.stop - outer.start)
    return tuple(index)


def _slice(shard: ModelShard, field: str) -> slice:
    part: Part = getattr(shard, field)
    return slice(part.start, part.stop)


def _nothing(part: Part) -> Part:
    return Part(part.start, part.start, part.total)


def _common(one: ModelShard, other: ModelShard) -> ModelShard:
    fields: Iterable[str] = {name for grid in _GRIDS for name in grid}
    return ModelShard(**{name: _overlap(getattr(one, name), getattr(other, name)) for name in fields})


def _overlap(one: Part, other: Part) -> Part:
    """What both hold; where nothing, an empty part within the bounds of `one`."""
    if one.total != other.total:
        raise TransferError(f"{one} and {other} are parts of different wholes; accepted: of the same total")
    start = min(max(one.start, other.start), one.stop)
    return Part(start, max(start, min(one.stop, other.stop)), one.total)
