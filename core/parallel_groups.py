"""The process groups that a model is split over, and what its ranks tell each other."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .cuda_device import on_device_of
from .validation import shown


@dataclass(frozen=True)
class ParallelGroups:
    """Megatron's two ways to split a model; None, or a group of one rank, does not split.

    Every rank of both groups makes the same calls in the same order. Collectives run on the groups' own
    backend: gloo for CPU tensors, nccl for CUDA ones, where they are launched and waited for by the stream.

    Attributes:
        tensor: the ranks that hold parts of the same layers, by heads.
        pipeline: the ranks, in order, that hold the same parts of consecutive layers.
    """

    tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, group in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if group is not None and not isinstance(group, ProcessGroup):
                raise ValueError(
                    f"{name} is {shown(group)}; accepted: a process group that this rank is in, or None"
                )
        if self.tensor is not None and self.pipeline is not None:
            both = set(dist.get_process_group_ranks(self.tensor))
            both &= set(dist.get_process_group_ranks(self.pipeline))
            if len(both) > 1:
                raise ValueError(
                    f"pipeline has the ranks {sorted(both)} in common with tensor; accepted: this rank alone"
                )

    @property
    def tensor_rank(self) -> int:
        return 0 if self.tensor is None else dist.get_rank(self.tensor)

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor is None else dist.get_world_size(self.tensor)

    @property
    def pipeline_rank(self) -> int:
        return 0 if self.pipeline is None else dist.get_rank(self.pipeline)

    @property
    def pipeline_size(self) -> int:
        return 1 if self.pipeline is None else dist.get_world_size(self.pipeline)

    @property
    def rank(self) -> int:
        """This rank among all of the model's, stage by stage."""
        return self.pipeline_rank * self.tensor_size + self.tensor_rank

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def is_split(self) -> bool:
        return self.size > 1

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    def sum_partials(self, partial: Tensor) -> Tensor:
        """The sum over the tensor group, the same bits on each rank; `partial` is overwritten."""
        if self.tensor_size > 1:
            dist.all_reduce(partial, group=self.tensor)
        return partial

    def gather_columns(self, columns: Tensor) -> Tensor:
        """[..., n] of each rank of the tensor group -> [..., ranks x n] on all of them."""
        if self.tensor_size == 1:
            return columns
        columns = columns.contiguous()
        parts = [torch.empty_like(columns) for _ in range(self.tensor_size)]
        dist.all_gather(parts, columns, group=self.tensor)
        return torch.cat(parts, dim=-1)

    def receive_from_previous_stage(self, hidden: Tensor) -> Tensor:
        """Fills `hidden` with what the stage before sends."""
        dist.recv(hidden, group=self.pipeline, group_src=self.pipeline_rank - 1)
        return hidden

    def send_to_next_stage(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), group=self.pipeline, group_dst=self.pipeline_rank + 1)

    def share_from_last_stage(self, values: Tensor) -> Tensor:
        """The last stage's `values`, on every stage; on the others overwrites what they pass."""
        if self.pipeline_size > 1:
            dist.broadcast(values, group=self.pipeline, group_src=self.pipeline_size - 1)
        return values

    def gather(self, value: Any, device: torch.device | None = None) -> list[Any]:
        """What each rank passes, a small value that pickles, in order of `rank`, on all; synchronises.

        `device`: the groups', from which nccl sends; None: the current one.
        """
        values = [value]
        with on_device_of(device):
            for group in self._split_groups():
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, values, group=group)
                values = [each for part in parts for each in part]
        return values

    def least(self, count: int, device: torch.device) -> int:
        """The smallest `count` (< 2**63) of all ranks of both groups; synchronises. `device`: the groups'."""
        if not self.is_split:
            return count
        smallest = torch.tensor([count], dtype=torch.int64, device=device)
        for group in self._split_groups():
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        return int(smallest)

    def _split_groups(self) -> list[ProcessGroup]:
        groups = self.tensor, self.pipeline
        return [group for group in groups if group is not None and dist.get_world_size(group) > 1]
