"""The rows or columns of weights that one rank keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model_parts import Part
from ..parallel_groups import ParallelGroups
from ..validation import ceil_div


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


def checked_part(name: str, total: int, groups: ParallelGroups, *, shared: bool = False) -> Part:
    """`part_of` what `name` counts; a ValueError where ranks cannot have equal parts.

    With `shared`, several ranks hold one unit where there are more ranks: 2 KV heads over 4 ranks.
    """
    size = groups.tensor_size
    if total % size and not (shared and size % total == 0):
        accepted = "a multiple or a divisor" if shared else "a multiple"
        raise ValueError(f"{name} is {total}; accepted: {accepted} of the {size} ranks of the tensor group")
    return part_of(total, groups)


def vocabulary_part_of(total: int, groups: ParallelGroups) -> Part:
    """This rank's rows of the head: `total / size` rounded up, and fewer on the last ranks."""
    rows = ceil_div(total, groups.tensor_size)
    start = min(total, rows * groups.tensor_rank)
    return Part(start, min(total, start + rows), total)


def span(part: Part, width: int, offset: int = 0) -> range:
    """The channels of a part's units, which are `width` wide and begin at `offset`."""
    return range(offset + part.start * width, offset + part.stop * width)


def shifted(ranges: Sequence[range], offset: int) -> list[range]:
    """The same ranges, moved by `offset`."""
    return [range(channels.start + offset, channels.stop + offset) for channels in ranges]


def mamba2_channels(
    heads: Part, head_dim: int, groups: Part, state_dim: int
) -> tuple[range, list[range], list[range]]:
    """Channels of a Mamba-2 mixer: x; what is convolved: x, B and C; and all that one projection gives.

    The projection gives the gate, what is convolved, and the time steps. Example: 2 heads of 4 channels, one
    group with a state size of 3: 8 channels, 8 + 3 + 3 and 8 + 14 + 2.
    """
    inner, keys = heads.total * head_dim, groups.total * state_dim
    x = span(heads, head_dim)
    convolved = [x, span(groups, state_dim, inner), span(groups, state_dim, inner + keys)]
    return x, convolved, [x, *shifted(convolved, inner), span(heads, 1, 2 * (inner + keys))]


def delta_net_channels(keys: Part, key_dim: int, heads: Part, value_dim: int) -> list[range]:
    """What a gated delta net convolves: q, k and v."""
    q, v, width = span(keys, key_dim), span(heads, value_dim), keys.total * key_dim
    return [q, *shifted([q], width), *shifted([v], 2 * width)]
