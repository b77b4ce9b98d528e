"""States and KV of a forest of prefixes, of some layers and heads of a model, and how they are re-split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..model_shard import ModelShard, Part
from .prefix_forest import PrefixForest
from .prefix_format import PrefixFormat, TransferError


class _Split(NamedTuple):
    """How one tensor is split: dim 0 by layers, another one by heads or groups. Names are ModelShard's."""

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
_GRIDS = sorted({(split.layers, split.units) for split in SPLITS.values()})


@dataclass(frozen=True, eq=False)
class PrefixShard:
    """One part of an export. Nothing here is written after it is made; `cut` gives views.

    Attributes:
        format: of the whole model.
        forest: the prefixes, the same in every part.
        shard: the layers, heads and groups that this part is about.
        split: how many ranks, of the tensor and of the pipeline group, took part in the export.
        tensors: on the CPU, states in the order of `forest.states`, blocks in that of its nodes:
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
        """TransferError unless forest, parts and tensors are consistent; O(blocks), reads no state or KV."""
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

    def cut(self, wanted: ModelShard) -> "PrefixShard":
        """What this part and `wanted` have in common, possibly nothing; tensors are views."""
        common = _common(self.shard, wanted)
        tensors = {name: tensor[_where(name, self.shard, common)] for name, tensor in self.tensors.items()}
        return replace(self, shard=common, tensors=tensors)


def join(pieces: Sequence[PrefixShard], wanted: ModelShard) -> PrefixShard:
    """The part `wanted`, put together from pieces of one export that may overlap and hold more.

    Tensors are new, unless one piece is just what is wanted. TransferError where the pieces lack something or
    are of different prefixes; those of two exports of the same prefixes cannot be told apart.
    """
    if not pieces:
        raise TransferError("pieces is empty; accepted: at least one part of an export")
    first = pieces[0]
    for index, piece in enumerate(pieces):
        if piece.format != first.format or piece.forest.digest != first.forest.digest:
            raise TransferError(
                f"pieces[{index}] is of another export than pieces[0]; accepted: parts of one"
            )
    whole = next((piece for piece in pieces if piece.shard == wanted), None)
    if whole is not None:
        return whole
    taken = sources_for([piece.shard for piece in pieces], wanted)
    tensors = {
        name: torch.empty(
            shape_of(name, first.format, first.forest, wanted), dtype=dtype_of(name, first.format)
        )
        for name in SPLITS
    }
    for index, part in taken.items():
        piece = pieces[index].cut(part)
        for name, tensor in piece.tensors.items():
            tensors[name][_where(name, wanted, piece.shard)] = tensor
    return replace(first, shard=wanted, tensors=tensors)


def sources_for(held: Sequence[ModelShard], wanted: ModelShard) -> dict[int, ModelShard]:
    """Of which holders to take what, so that together it is `wanted`: index into `held` -> the part to take.

    What several hold is taken from the first of them, unless they overlap in part only. There is always one
    holder, because the forest is needed even where no tensor is. TransferError where something is missing.
    """
    covered = {
        grid: torch.zeros(getattr(wanted, grid[0]).total, getattr(wanted, grid[1]).total, dtype=torch.bool)
        for grid in _GRIDS
    }
    taken: dict[int, ModelShard] = {}
    for index, holder in enumerate(held):
        common, useful = _common(holder, wanted), False
        for layers, units in _GRIDS:
            cells = covered[layers, units][_slice(common, layers), _slice(common, units)]
            if bool(cells.all()):  # nothing, or nothing new
                common = replace(common, **{units: _nothing(getattr(common, units))})
            else:
                cells.fill_(True)
                useful = True
        if useful or (not taken and index == len(held) - 1):
            taken[index] = common
    for layers, units in _GRIDS:
        cells = covered[layers, units][_slice(wanted, layers), _slice(wanted, units)]
        if not bool(cells.all()):
            layer, unit = (~cells).nonzero()[0].tolist()
            raise TransferError(
                f"the export lacks {units}[{unit + getattr(wanted, units).start}] of {layers}"
                f"[{layer + getattr(wanted, layers).start}]; accepted: parts that together hold {wanted}"
            )
    return taken


def check_totals(form: PrefixFormat, shard: ModelShard) -> None:
    for name in {name for grid in _GRIDS for name in grid}:
        total = getattr(shard, name).total
        if total != getattr(form, name):
            raise TransferError(
                f"shard.{name} is of {total}; accepted: {getattr(form, name)}, as the format says"
            )


def shape_of(name: str, form: PrefixFormat, forest: PrefixForest, shard: ModelShard) -> tuple[int, ...]:
    """Of a part's tensor; see `PrefixShard`."""
    split = SPLITS[name]
    layers, units = getattr(shard, split.layers).count, getattr(shard, split.units).count
    if name == "kv":
        return layers, 2, len(forest), form.block_size_tokens, units, form.head_dim
    rows = form.mamba_head_dim if split.units == "mamba_heads" else form.mamba_state_dim
    columns = form.mamba_state_dim if name == "ssm" else form.conv_width
    return layers, len(forest.states), units, rows, columns


def dtype_of(name: str, form: PrefixFormat) -> torch.dtype:
    return {"kv": form.kv_dtype, "ssm": form.ssm_dtype}.get(name, form.conv_dtype)


def _where(name: str, whole: ModelShard, part: ModelShard) -> tuple[slice, ...]:
    """The index of a part's numbers within the tensor of a larger one."""
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
    """Within `one`, empty where they have nothing in common."""
    if one.total != other.total:
        raise TransferError(f"{one} and {other} are parts of different wholes; accepted: of the same total")
    start = min(max(one.start, other.start), one.stop)
    return Part(start, max(start, min(one.stop, other.stop)), one.total)
