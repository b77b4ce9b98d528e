"""Cutting and joining parts of an export against direct slicing of the whole."""

from dataclasses import replace
from itertools import product

import mambaslots as ms
import pytest
import torch
from mambaslots.distributed.transfer.format import TransferError
from mambaslots.distributed.transfer.shard import PrefixShard, join, sources_for
from mambaslots.model_shard import ModelShard
from oracle.transfers import conv_of, random_export, shard_of_rank

PATTERN = "MM*M-*MM-M*"
SIZES = [*product((1, 2, 4, 8), (1, 2, 3)), (1, 11)]


def config_of(groups: int, kv_heads: int) -> ms.models.HybridConfig:
    return ms.models.HybridConfig.tiny(
        pattern=PATTERN, mamba_num_heads=8, mamba_head_dim=2, mamba_num_groups=groups, mamba_state_dim=3,
        num_attention_heads=8, num_kv_heads=kv_heads, head_dim=2, mlp_hidden_size=8, ssd_chunk_size=4,
    )  # fmt: skip


def ranks_of(config: ms.models.HybridConfig, tp: int, pp: int) -> list[ModelShard]:
    return [shard_of_rank(config, (t, tp), (p, pp)) for p in range(pp) for t in range(tp)]


def sliced(whole: PrefixShard, config: ms.models.HybridConfig, tp: int, pp: int) -> list[list[torch.Tensor]]:
    """Of each rank ssm, conv and kv by what a rank computes: its heads, and the groups and KV they use."""
    result = []
    P, N, H, G = (
        config.mamba_head_dim,
        config.mamba_state_dim,
        config.mamba_num_heads,
        config.mamba_num_groups,
    )
    for stage, rank in product(range(pp), range(tp)):
        here = [
            i
            for i in range(len(PATTERN))
            if len(PATTERN) * stage // pp <= i < len(PATTERN) * (stage + 1) // pp
        ]
        mamba, attention = (
            [
                [i for i, kind in enumerate(PATTERN) if kind == wanted].index(i)
                for i in here
                if PATTERN[i] == wanted
            ]
            for wanted in "M*"
        )
        heads = [h for h in range(H) if h * tp // H == rank]
        groups = sorted({h * G // H for h in heads})
        kv_heads = sorted({q * config.num_kv_heads // 8 for q in range(8) if q * tp // 8 == rank})
        channels = [h * P + i for h in heads for i in range(P)]
        channels += [H * P + g * N + i for g in groups for i in range(N)]
        channels += [H * P + G * N + g * N + i for g in groups for i in range(N)]
        conv = conv_of(whole)[mamba][:, :, channels]
        ssm = whole.tensors["ssm"][mamba][:, :, heads]
        result.append([ssm, conv, whole.tensors["kv"][attention][:, :, :, :, kv_heads]])
    return result


@pytest.mark.sampled(groups=(1, 4))
@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 2), (2, 4)])
def test_every_split_rejoins_to_every_other(groups: int, kv_heads: int) -> None:
    config = config_of(groups, kv_heads)
    whole = random_export(config)
    expected = {size: sliced(whole, config, *size) for size in SIZES}
    for size in SIZES:
        pieces = [whole.cut(shard) for shard in ranks_of(config, *size)]
        for other in SIZES:
            for shard, (ssm, conv, kv) in zip(ranks_of(config, *other), expected[other], strict=True):
                joined = join(pieces, shard)
                joined.check()
                assert torch.equal(joined.tensors["ssm"], ssm)
                assert torch.equal(conv_of(joined), conv)
                assert torch.equal(joined.tensors["kv"], kv)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("other", [(1, 1), (2, 1), (4, 3), (8, 1)])
def test_what_is_taken_is_taken_once_and_suffices(size: tuple[int, int], other: tuple[int, int]) -> None:
    config = config_of(2, 2)
    whole = random_export(config)
    held = ranks_of(config, *size)
    pieces = [whole.cut(shard) for shard in held]
    for wanted in ranks_of(config, *other):
        taken = sources_for(held, wanted)
        assert taken
        moved = [pieces[index].cut(part) for index, part in taken.items()]
        joined = join(moved, wanted)
        for name, tensor in joined.tensors.items():
            assert sum(piece.tensors[name].numel() for piece in moved) == tensor.numel()
            assert torch.equal(tensor, whole.cut(wanted).tensors[name])


def test_pieces_that_overlap_in_part_join() -> None:
    config = config_of(4, 4)
    whole = random_export(config)
    half, quarter = ranks_of(config, 2, 1), ranks_of(config, 4, 1)
    pieces = [whole.cut(shard) for shard in (quarter[0], half[0], quarter[2], quarter[3])]
    joined = join(pieces, whole.shard)
    for name, tensor in whole.tensors.items():
        assert torch.equal(joined.tensors[name], tensor)


def test_a_missing_piece_is_named() -> None:
    config = config_of(2, 2)
    whole = random_export(config)
    pieces = [whole.cut(shard) for shard in ranks_of(config, 4, 1)]
    with pytest.raises(TransferError, match=r"lacks mamba_heads\[2\] of mamba_layers\[0\]"):
        join([pieces[0], *pieces[2:]], whole.shard)
    with pytest.raises(TransferError, match="pieces is empty"):
        join([], whole.shard)


def test_pieces_of_two_exports_do_not_join() -> None:
    config = config_of(2, 2)
    one, other = random_export(config, 0), random_export(config, 1)
    first, second = ranks_of(config, 2, 1)
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one.cut(first), other.cut(second)], one.shard)
    later = replace(one, format=replace(one.format, weights_version="weights 2"))
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one.cut(first), later.cut(second)], one.shard)


def test_a_piece_that_suffices_hides_no_other_export() -> None:
    one, other = random_export(config_of(2, 2), 0), random_export(config_of(2, 2), 1)
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one, other], one.shard)
    assert join([one, one.cut(one.shard)], one.shard) is one


def test_parts_of_another_model_have_nothing_in_common() -> None:
    whole = random_export(config_of(2, 2))
    with pytest.raises(TransferError, match="different wholes"):
        whole.cut(shard_of_rank(config_of(4, 2)))
