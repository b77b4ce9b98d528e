"""What one rank keeps of a module of transformers."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...parallel_groups import ParallelGroups
from .weight_part import WeightPart


class ModuleSplit:
    """The parts of a module's weights, and the module's attributes that say how wide it is.

    Args:
        module: a whole module.
        groups: the ranks.

    Attributes:
        parts: by the name of a parameter or buffer within the module; None where another rank keeps it.
        sizes: the new values of the module's attributes.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups) -> None:
        self.module: Any = module
        self.groups = groups
        self.parts: dict[str, WeightPart | None] = {}
        self.sizes: dict[str, Any] = {}

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
