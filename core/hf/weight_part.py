"""The rows or columns of weights that one rank keeps, and what that makes of a module of transformers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model_parts import Part
from ..parallel_groups import ParallelGroups


@dataclass(frozen=True)
class WeightPart:
    """Indices of one dimension `dim` of a weight, as consecutive ranges, of `total` in the whole weight."""

    dim: int
    ranges: tuple[range, ...]
    total: int

    @property
    def size(self) -> int:
        return sum(map(len, self.ranges))

    def slices(self, dims: int) -> list[tuple[slice, ...]]:
        """The index of each range in a whole weight of `dims` dimensions."""
        before = (slice(None),) * self.dim
        after = (slice(None),) * (dims - self.dim - 1)
        return [(*before, slice(span.start, span.stop), *after) for span in self.ranges]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a weight of the shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """A new tensor with the part of `whole`."""
        return torch.cat([whole[index] for index in self.slices(whole.dim())], dim=self.dim)


def set_weight(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's equal part of `total` heads, groups or channels; see `Part.of_rank`."""
    return Part.of_rank(total, groups.tensor_rank, groups.tensor_size)


def vocabulary_part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's rows of the head: `total / size` rounded up, and fewer on the last ranks."""
    rows = -(-total // groups.tensor_size)
    start = min(total, rows * groups.tensor_rank)
    return Part(start, min(total, start + rows), total)


def span(part: Part, width: int, offset: int = 0) -> range:
    """The channels of a part's units, which are `width` wide and begin at `offset`."""
    return range(offset + part.start * width, offset + part.stop * width)


def shifted(ranges: Sequence[range], offset: int) -> list[range]:
    """The same ranges, moved by `offset`."""
    return [range(each.start + offset, each.stop + offset) for each in ranges]


class ModuleSplit:
    """The parts of a module's weights by name (None: of another rank), and its attributes' new sizes."""

    def __init__(self, module: nn.Module, groups: ParallelGroups) -> None:
        self.module: Any = module
        self.groups = groups
        self.parts: dict[str, WeightPart | None] = {}
        self.sizes: dict[str, Any] = {}

    def part(self, name: str, total: int | None = None, *, shared: bool = False) -> Part:
        """This rank's equal part of what the attribute `name` counts, or of `total`; else a ValueError.

        With `shared`, several ranks hold one unit where there are more ranks.
        """
        total, size = getattr(self.module, name) if total is None else total, self.groups.tensor_size
        if total % size and not (shared and size % total == 0):
            raise ValueError(
                f"{name} of {type(self.module).__name__} is {total}; accepted: a multiple "
                f"{'or a divisor ' * shared}of the {size} ranks of the tensor group"
            )
        return part_of(total, self.groups)

    def rows(self, name: str, ranges: Iterable[range]) -> None:
        """A child computes these outputs of a projection or convolution."""
        ranges, child = tuple(ranges), getattr(self.module, name)
        for weight in ("weight", "bias"):
            if getattr(child, weight) is not None:
                self.tensor(f"{name}.{weight}", ranges)

    def columns(self, name: str, ranges: Iterable[range]) -> None:
        """A child reads these inputs; the ranks' outputs are summed, and the first rank adds the bias."""
        self.tensor(f"{name}.weight", ranges, dim=1)
        self.on_first_rank(name)

    def on_first_rank(self, name: str) -> None:
        """The first rank alone adds the bias of a child whose outputs are summed."""
        if getattr(self.module, name).bias is not None and self.groups.tensor_rank > 0:
            self.parts[f"{name}.bias"] = None

    def tensor(self, name: str, ranges: Iterable[range], dim: int = 0) -> None:
        """These indices of a parameter or buffer."""
        path, _, leaf = name.rpartition(".")
        whole = getattr(self.module.get_submodule(path), leaf)
        self.parts[name] = WeightPart(dim, tuple(ranges), whole.shape[dim])
