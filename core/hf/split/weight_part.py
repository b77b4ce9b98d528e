"""The rows or columns of a weight that one rank keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel_groups import ParallelGroups, Part


@dataclass(frozen=True)
class WeightPart:
    """Indices of one dimension of a weight.

    Attributes:
        dim: the dimension.
        ranges: consecutive indices, one range behind another in the part.
        total: indices that the whole weight has.
    """

    dim: int
    ranges: tuple[range, ...]
    total: int

    @property
    def size(self) -> int:
        """How many indices the part has."""
        return sum(map(len, self.ranges))

    def slices(self, dims: int) -> list[tuple[slice, ...]]:
        """The index of each range in a whole weight of `dims` dimensions."""
        before = (slice(None),) * self.dim
        behind = (slice(None),) * (dims - self.dim - 1)
        return [(*before, slice(span.start, span.stop), *behind) for span in self.ranges]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a weight of the shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """A new tensor with the part of `whole`."""
        return torch.cat([whole[index] for index in self.slices(whole.dim())], dim=self.dim)


def part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's equal part of `total` heads, groups or channels; see `Part.of_rank`."""
    return Part.of_rank(total, groups.tensor_rank, groups.tensor_size)


def uneven_part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's part of `total` experts; the parts of two ranks differ by one expert at most."""
    rank, size = groups.tensor_rank, groups.tensor_size
    return Part(total * rank // size, total * (rank + 1) // size, total)


def vocabulary_part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's rows of the head: `total / size` rounded up, and fewer on the last ranks."""
    rows = -(-total // groups.tensor_size)
    start = min(total, rows * groups.tensor_rank)
    return Part(start, min(total, start + rows), total)


def span(part: Part, width: int, offset: int = 0) -> range:
    """The channels of a part's units, which are `width` wide and begin at `offset`."""
    return range(offset + part.start * width, offset + part.stop * width)


def shifted(ranges: Sequence[range], offset: int) -> list[range]:
    """The same ranges, `offset` further behind."""
    return [range(each.start + offset, each.stop + offset) for each in ranges]
