"""The parameters of one rank's part of a `HybridLM`."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel_groups import ParallelGroups, Part
from .hybrid_config import HybridConfig


class WeightSource(Protocol):
    """Where whole parameters come from: a generator, or the file of a saved model."""

    @property
    def name(self) -> str:
        """Says which weights these are; ranks compare it."""

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """The parameter `name`; normal numbers where the source draws them."""

    def constant(self, name: str, values: Tensor) -> Tensor:
        """The parameter `name`; `values` where the source draws nothing for it."""


class RandomWeights:
    """Draws parameters, in order, from one generator, in float64; torch's global generator is not used."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.name = f"seed {seed}"
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device=self._device)
        return drawn * std

    def constant(self, name: str, values: Tensor) -> Tensor:
        return values


class ModelWeights:
    """Makes parameters, in the order of the model.

    A parameter is made whole, so that it does not depend on how the model is split. A rank keeps the rows and
    columns that it asks for.

    Attributes:
        prefix: stands before the names of parameters.
    """

    def __init__(
        self, config: HybridConfig, source: WeightSource, device: torch.device, groups: ParallelGroups
    ) -> None:
        self.groups = groups
        self.shard = config.shard(groups)
        self.prefix = ""
        self._config = config
        self._source = source
        self._device = device

    def part_of(self, total: int) -> range:
        """This rank's equal part of `total` heads, channels or rows."""
        return Part.of_rank(total, self.groups.tensor_rank, self.groups.tensor_size).indices

    def vocabulary_rows(self) -> range:
        """This rank's equal part of the vocabulary, rounded up: the last rows may be padding."""
        size = self.groups.tensor_size
        return self.part_of(-(-self._config.vocab_size // size) * size)

    def constant(
        self, name: str, values: Tensor, rows: Sequence[int] | None = None, wide: bool = False
    ) -> nn.Parameter:
        """A parameter that begins as `values`; `wide` stores it in float32 or wider."""
        whole = self._source.constant(self.prefix + name, values)
        return self._parameter(_part(whole, 0, rows), wide)

    def full(
        self, name: str, size: int, value: float, rows: Sequence[int] | None = None, wide: bool = False
    ) -> nn.Parameter:
        values = torch.full((size,), value, dtype=torch.float64, device="cpu")
        return self.constant(name, values, rows, wide)

    def ones(self, name: str, size: int, rows: Sequence[int] | None = None) -> nn.Parameter:
        return self.full(name, size, 1.0, rows)

    def normal(
        self,
        name: str,
        *shape: int,
        std: float,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> nn.Parameter:
        """Normal numbers of this shape. Only `rows` and `columns` are kept; rows beyond the end are zeros."""
        whole = self._source.normal(self.prefix + name, shape, std)
        return self._parameter(_part(_part(whole, 0, rows), 1, columns))

    def linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        gain: float = 1.0,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> nn.Parameter:
        """[out, in]; outputs are `gain` times as large as inputs."""
        std = gain * in_features**-0.5
        return self.normal(name, out_features, in_features, std=std, rows=rows, columns=columns)

    def _parameter(self, values: Tensor, wide: bool = False) -> nn.Parameter:
        dtype = self._config.compute_dtype if wide else self._config.dtype
        return nn.Parameter(values.to(self._device, dtype), requires_grad=False)


def channels(units: Iterable[int], width: int, offset: int = 0) -> list[int]:
    """The channels of heads or groups that are `width` wide and begin at `offset`."""
    return [offset + unit * width + channel for unit in units for channel in range(width)]


def _part(whole: Tensor, dim: int, indices: Sequence[int] | None) -> Tensor:
    """These indices of a dimension; zeros for those beyond its end."""
    if indices is None or len(indices) >= whole.shape[dim]:
        return whole
    inside = [index for index in indices if index < whole.shape[dim]]
    part = whole.index_select(dim, torch.tensor(inside, dtype=torch.int64, device=whole.device))
    missing = len(indices) - len(inside)
    return F.pad(part, (0, 0) * (whole.dim() - 1 - dim) + (0, missing)) if missing else part
