"""What the ranks of one replica tell each other, so that all of them do a thing or none does."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import HybridStateSpec
from ..parallel_groups import ParallelGroups

_HERE = -1  # torch.cuda.device(-1) leaves the device as it is


def replica_rank(groups: ParallelGroups) -> int:
    """This rank among those of its replica: stages in order, of each the ranks of the tensor group."""
    return groups.pipeline_rank * groups.tensor_size + groups.tensor_rank


def replica_size(groups: ParallelGroups) -> int:
    return groups.pipeline_size * groups.tensor_size


def gathered(spec: HybridStateSpec, value: Any) -> list[Any]:
    """`value` (small, picklable) of each rank of the replica, in order, on all of them; synchronises."""
    values = [value]
    with torch.cuda.device(spec.device if spec.device.type == "cuda" else _HERE):  # nccl sends from there
        for group in (spec.groups.tensor, spec.groups.pipeline):
            if group is not None and dist.get_world_size(group) > 1:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, values, group=group)
                values = [item for part in parts for item in part]
    return values


def failures(reasons: Sequence[str]) -> str:
    """The ranks that failed and why, in one text; empty where none did. A rank without a reason did not."""
    if len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"rank {rank} of the replica: {reason}" for rank, reason in enumerate(reasons) if reason)


def described(error: BaseException) -> str:
    return str(error) or type(error).__name__
