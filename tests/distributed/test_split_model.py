"""A model split over ranks serves what it serves whole."""

import mambaslots as ms
import pytest
import torch
from oracle.distributed_world import World


@pytest.mark.parametrize(("tensor_size", "pipeline_size"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_smoke(world: World, tensor_size: int, pipeline_size: int) -> None:
    if world.size % (tensor_size * pipeline_size):
        pytest.skip("more ranks than there are")
    groups = world.groups(tensor_size, pipeline_size)
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(dtype=torch.float64), groups=groups)
    assert world.gathered(model.shard.kv_heads.count)
