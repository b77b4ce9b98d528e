"""The ranks of a test under torchrun, split in Megatron's ways."""

from functools import cache

import torch
import torch.distributed as dist
from mambaslots.parallel_groups import ParallelGroups


class World:
    """This rank among all that run the test.

    `device`: where its tensors belong, a GPU of its own or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @cache  # noqa: B019: one a session; groups are made by all ranks together
    def groups(self, tensor_size: int = 1, pipeline_size: int = 1) -> ParallelGroups:
        """All ranks as `size / (tensor_size x pipeline_size)` replicas of a model split this way.

        Consecutive ranks hold the same layers, as in Megatron.
        """
        replica = tensor_size * pipeline_size
        tensor = pipeline = None
        for first in range(0, self.size, replica):
            ranks = torch.arange(first, first + replica).view(pipeline_size, tensor_size)
            for members in ranks.tolist():
                group = dist.new_group(members)
                tensor = group if self.rank in members else tensor
            for members in ranks.T.tolist():
                group = dist.new_group(members)
                pipeline = group if self.rank in members else pipeline
        return ParallelGroups(tensor, pipeline)

    def gathered(self, value: object) -> list[object]:
        """`value` of each rank, in order, on all of them."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
