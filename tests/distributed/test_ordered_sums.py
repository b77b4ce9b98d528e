"""Sums over tensor ranks in rank order: right, the same bits on all ranks and whatever the number of rows."""

import mambaslots as ms
import pytest
import torch
from oracle.distributed_world import SPLITS, World, splits


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_bits(world: World, split: str, dtype: torch.dtype) -> None:
    group = world.groups(*SPLITS[split]).tensor
    groups = ms.ParallelGroups(group, ordered_sums=True)
    parts = [
        torch.randn(600, 48, generator=torch.Generator().manual_seed(rank)).to(world.device, dtype)
        for rank in range(groups.tensor_size)
    ]
    mine = parts[groups.tensor_rank]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part  # one after another, rounded each time
    whole = mine.clone()
    assert groups.sum_partials(whole) is whole
    assert torch.equal(whole, expected)
    for rows in (1, 2, 31, 32, 257, 599):
        assert torch.equal(groups.sum_partials(mine[:rows].clone()), expected[:rows])
        assert torch.equal(groups.sum_partials(mine[-rows:].clone()), expected[-rows:])
    columns = mine.repeat(1, 2)[:, 5:53]  # not contiguous
    assert torch.equal(groups.sum_partials(columns), expected.repeat(1, 2)[:, 5:53])
    assert all(torch.equal(whole.cpu(), other) for other in world.gathered(whole.cpu()))


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_a_split_model_answers_as_with_any_sum(world: World, split: str) -> None:
    from oracle.serving import random_tokens, small_config, small_engine

    group = world.groups(*SPLITS[split]).tensor
    answers = []
    for ordered in (False, True):
        groups = ms.ParallelGroups(group, ordered_sums=ordered)
        model = ms.models.HybridLM(small_config(), 3, groups=groups).to(world.device)
        answers.append(small_engine(model=model).generate([random_tokens(40, 1)])[0].tokens)
    assert answers[0] == answers[1]
