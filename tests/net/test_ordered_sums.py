"""Sums over tensor ranks in rank order: right, the same bits on all ranks and whatever the number of rows."""

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.engines.invariance import forwards, products
from mambaslots.inference.engines.invariance.mode import BatchInvariance
from oracle.distributed_world import SPLITS, World, splits
from oracle.serving import random_tokens, serve_checked, small_config, small_engine, small_model_over


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


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_a_split_model_answers_as_with_any_sum(world: World, split: str) -> None:
    group = world.groups(*SPLITS[split]).tensor
    answers = []
    for ordered in (False, True):
        groups = ms.ParallelGroups(group, ordered_sums=ordered)
        engine = small_engine(model=small_model_over(groups, world.device))
        answers.append(serve_checked(engine, [random_tokens(40, 1)], 16)[0].tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("split", splits("tp 2", "pp 2"))
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's bits are not checked but here")
def test_what_one_rank_refuses_all_refuse(world: World, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_size, pipeline_size = SPLITS[split]
    own = world.groups(tensor_size, pipeline_size)
    groups = ms.ParallelGroups(own.tensor, own.pipeline, ordered_sums=True)
    model = ms.models.HybridLM(small_config(16, torch.bfloat16, "M-*-"), 3, groups=groups)
    config = ms.InferenceConfig(
        block_size_tokens=16, max_requests=4, max_tokens_per_step=64, max_sequence_length=256,
        num_kv_blocks=64,
        num_mamba_slots=8, num_cuda_graphs=16,
    )  # fmt: skip
    invariance = BatchInvariance(model, model.state_spec(), config)
    monkeypatch.setattr(products, "product_difference", lambda *_: None)
    invariance._check(model)
    assert invariance.products
    monkeypatch.setattr(forwards, "forward_difference", lambda *_: None)
    for reasons, expected in (
        ((None, None), None),
        ((None, "rank 1 has none"), "rank 1 has none"),
        (("a rank has none", "both have none"), "a rank has none"),
    ):
        here = reasons[world.rank]
        monkeypatch.setattr(products, "why_not_in_few_rows", lambda _, here=here: here)
        invariance._check(model)
        assert invariance.min_decode_tokens == (32 if expected else 8)
        assert invariance.why_not_few_rows == expected
    refused = "among 512 rows" if world.rank == 1 else None
    monkeypatch.setattr(products, "product_difference", lambda *_: refused)
    with pytest.raises(ValueError, match="among 512 rows"):
        invariance._check(model)
