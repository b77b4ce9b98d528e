"""The ranks of a test under torchrun, split in Megatron's ways, and small models split over them."""

import os
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import mambaslots as ms
import pytest
import torch
import torch.distributed as dist
from mambaslots import ParallelGroups
from oracle.model_kinds import OF_TRANSFORMERS, present_kind
from oracle.serving import SEED, small_config, small_model_over

SPLITS = {"tp 2": (2, 1), "tp 4": (4, 1), "pp 2": (1, 2), "tp 2, pp 2": (2, 2)}
"""The sizes of the tensor group and of the pipeline group.

With tp 4 two ranks each hold the same KV head, the same B and C, and the same key head of a delta net. With
pp 2 the second stage of the Mamba-2 model has no attention.
"""


def splits(*names: str) -> list[Any]:
    """Parameters, each for the world that is one such replica; in a world of ranks, those for it.

    Thousands of tests are products of these: those for other worlds took half the time of a rank's start.
    """
    sizes = {name: SPLITS[name][0] * SPLITS[name][1] for name in names or SPLITS}
    here = [name for name, size in sizes.items() if size == int(os.environ.get("WORLD_SIZE", size))]
    sizes = {name: sizes[name] for name in here} or sizes
    return [pytest.param(name, marks=pytest.mark.ranks(size)) for name, size in sizes.items()]


TIMEOUT = timedelta(seconds=120)
"""Limit of one collective, in every process group of the tests."""


class World:
    """This rank among all that run the test; `device`: where its tensors belong."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @cached_property
    def orders(self) -> dist.ProcessGroup:
        """All ranks over gloo, also on GPUs: there, who waits in nccl holds up the stream of all threads."""
        return dist.new_group(backend="gloo", timeout=TIMEOUT)

    @cache  # noqa: B019 - one a session; groups are made by all ranks together
    def groups(self, tensor_size: int = 1, pipeline_size: int = 1) -> ParallelGroups:
        """All ranks as replicas, of `tensor_size` x `pipeline_size` ranks, of a model split this way.

        Consecutive ranks hold the same layers, as in Megatron.
        """
        replica = tensor_size * pipeline_size
        tensor = pipeline = None
        for first in range(0, self.size, replica):
            ranks = torch.arange(first, first + replica).view(pipeline_size, tensor_size)
            for members in ranks.tolist():
                group = dist.new_group(members, timeout=TIMEOUT)
                tensor = group if self.rank in members else tensor
            for members in ranks.T.tolist():
                group = dist.new_group(members, timeout=TIMEOUT)
                pipeline = group if self.rank in members else pipeline
        return ParallelGroups(tensor, pipeline)

    def model(
        self,
        split: str | None,
        pattern: str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Any:
        """`small_model`, or one of other layers, split over the ranks; None: all of it on each."""
        if pattern is None and present_kind() in OF_TRANSFORMERS:
            return self._small_model(split, present_kind())
        return self._model(split, small_config(dtype=dtype, pattern=pattern))

    @cache  # noqa: B019
    def _small_model(self, split: str | None, kind: str) -> Any:
        assert kind == present_kind()
        return small_model_over(None if split is None else self.groups(*SPLITS[split]), self.device)

    @cache  # noqa: B019
    def _model(self, split: str | None, config: ms.models.HybridConfig) -> ms.models.HybridLM:
        groups = None if split is None else self.groups(*SPLITS[split])
        return ms.models.HybridLM(config, SEED, groups=groups).to(self.device)

    def gathered(self, value: object) -> list[Any]:
        """`value` of each rank, in order, on all of them."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
