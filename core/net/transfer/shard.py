"""The states and KV of a forest of prefixes, for some layers and heads of a model; cut and joined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...parallel_groups import Part
from .forest import PrefixForest
from .format import PrefixFormat, TransferError
from .parts import KV, Shard, TensorPart


@dataclass(frozen=True, eq=False)
class PrefixShard:
    """One part of an export. Nothing writes its tensors once it is made; `cut` returns views of them.

    Attributes:
        format: of the whole model.
        forest: the prefixes, the same in every part.
        shard: which part of each tensor this is.
        split: the sizes of the tensor group and of the pipeline group that made the export.
        tensors: those of `format`, on the CPU. Each is [layers, rows, units, *shape of a unit]. The rows of
            "kv" are the blocks, in the order of the nodes; those of the others are the states, in the order
            of `forest.states`.
    """

    format: PrefixFormat
    forest: PrefixForest
    shard: Shard
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
        self.format.check_shard(self.shard)
        shapes = shapes_of(self.format, self.forest, self.shard)
        if self.tensors.keys() != shapes.keys():
            raise TransferError(f"tensors are {sorted(self.tensors)}; accepted: {sorted(shapes)}")
        for name, tensor in self.tensors.items():
            shape, dtype = shapes[name], self.format.tensors[name].dtype
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise TransferError(
                    f"{name} is of shape {tuple(tensor.shape)} and {tensor.dtype}; accepted: {shape} and "
                    f"{dtype}"
                )

    def cut(self, shard: Shard) -> "PrefixShard":
        """What this part and `shard` have in common of each tensor, possibly nothing, as views."""
        common = {name: _common(part, shard[name]) for name, part in self.shard.items()}
        tensors = {name: t[_where(self.shard[name], common[name])] for name, t in self.tensors.items()}
        return replace(self, shard=common, tensors=tensors)


def join(pieces: Sequence[PrefixShard], shard: Shard) -> PrefixShard:
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
        name: torch.empty(shape, dtype=first.format.tensors[name].dtype, device="cpu")
        for name, shape in shapes_of(first.format, first.forest, shard).items()
    }
    for index, part in sources.items():
        piece = pieces[index].cut(part)
        for name, tensor in piece.tensors.items():
            tensors[name][_where(shard[name], piece.shard[name])] = tensor
    return replace(first, shard=shard, tensors=tensors)


def sources_for(holders: Sequence[Shard], shard: Shard) -> dict[int, Shard]:
    """Which holder gives which part, so that the parts together are `shard`.

    What several holders hold comes from the first of them; only where two holders overlap in part may
    something come twice. At least one holder gives a part, though it may be empty: the forest is needed even
    where no tensor is.

    Args:
        holders: what each holder has, of the same tensors as `shard`.
        shard: what is needed.

    Returns:
        Index into `holders` -> the part to take from this holder.

    Raises:
        TransferError: the holders together lack something of `shard`.
    """
    covered = {
        name: np.zeros((part.layers.total, part.units.total), dtype=bool) for name, part in shard.items()
    }
    sources: dict[int, Shard] = {}
    for index, holder in enumerate(holders):
        common, adds_something = {}, False
        for name, part in shard.items():
            common[name] = _common(holder[name], part)
            cells = covered[name][common[name].slices]
            if cells.all():  # true of no cells, too
                common[name] = common[name].without_units()
            else:
                cells[:] = True
                adds_something = True
        if adds_something or (not sources and index == len(holders) - 1):
            sources[index] = common
    for name, part in shard.items():
        cells = covered[name][part.slices]
        if not cells.all():
            layer, unit = np.argwhere(~cells)[0].tolist()
            raise TransferError(
                f"the export lacks unit {unit + part.units.start} of layer {layer + part.layers.start} of "
                f"{name}; accepted: parts that together hold {part}"
            )
    return sources


def shapes_of(form: PrefixFormat, forest: PrefixForest, shard: Shard) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the part `shard`; see `PrefixShard`."""
    shapes = {}
    for name, tensor in form.tensors.items():
        num_rows = len(forest) if name == KV else len(forest.states)
        shapes[name] = shard[name].layers.count, num_rows, shard[name].units.count, *tensor.shape
    return shapes


def _where(whole: TensorPart, part: TensorPart) -> tuple[slice, slice, slice]:
    """The index of `part`'s numbers within a tensor of the part `whole`, which contains `part`."""
    layers, units = (
        slice(inner.start - outer.start, inner.stop - outer.start)
        for outer, inner in zip(whole, part, strict=True)
    )
    return layers, slice(None), units


def _common(one: TensorPart, other: TensorPart) -> TensorPart:
    return TensorPart(_overlap(one.layers, other.layers), _overlap(one.units, other.units))


def _overlap(one: Part, other: Part) -> Part:
    """What both hold; where nothing, an empty part within the bounds of `one`."""
    if one.total != other.total:
        raise TransferError(f"{one} and {other} are parts of different wholes; accepted: of the same total")
    start = min(max(one.start, other.start), one.stop)
    return Part(start, max(start, min(one.stop, other.stop)), one.total)
