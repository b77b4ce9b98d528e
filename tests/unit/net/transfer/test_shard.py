"""Cutting and joining parts of an export against direct slicing of the whole."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.model_parts import Part
from mambaslots.net.transfer.format import PrefixFormat, Shard, TensorFormat, TensorPart, TransferError
from mambaslots.net.transfer.shard import PrefixShard, join, shapes_of, sources_for
from oracle.budget import thinned
from oracle.transfers import Declared, dense, random_export, random_forest

PATTERNS = {
    "Mamba-2": "MM*M-*MM-M*",
    "gated delta net": "GG*G-*GG-G*",
    "short convolution": "CC*C-*CC-C*",
    "mix": "MG*C-*GM-C*",
}
SIZES = [*product((1, 2, 8), (1, 2)), (4, 1), (4, 3), (1, 11)]
HEADS, QUERIES = 8, 8


def declared(pattern: str, groups: int = 2, kv_heads: int = 2) -> Declared:
    return Declared(pattern, HEADS, groups, kv_heads)


def channels(*segments: tuple[Iterable[int], int, int]) -> list[int]:
    """(units, units of the whole, width) of each segment -> the entries of the whole's first dimension."""
    found, start = [], 0
    for units, total, width in segments:
        found += [start + unit * width + i for unit in units for i in range(width)]
        start += total * width
    return found


def sliced(whole: PrefixShard, model: Declared, tp: int, pp: int) -> list[dict[str, torch.Tensor]]:
    """Of each rank states and KV by what a rank computes: its heads, and the groups and KV they use."""
    result, pattern, G = [], model.pattern, model.groups
    for stage, rank in product(range(pp), range(tp)):
        bounds = len(pattern) * stage // pp, len(pattern) * (stage + 1) // pp
        heads = [h for h in range(HEADS) if h * tp // HEADS == rank]
        groups = sorted({h * G // HEADS for h in heads})
        kv_heads = sorted(
            {q * model.kv_heads // QUERIES for q in range(QUERIES) if q * tp // QUERIES == rank}
        )
        lanes = [c for c in range(2 * HEADS) if c * tp // (2 * HEADS) == rank]
        rows = {
            "conv": ("M", channels((heads, HEADS, 2), (groups, G, 3), (groups, G, 3))),
            "ssm": ("M", heads),
            "gdn_conv": ("G", channels((groups, G, 2), (groups, G, 2), (heads, HEADS, 3))),
            "delta": ("G", heads),
            "short_conv": ("C", lanes),
            "kv": ("*", kv_heads),
        }
        here = {}
        for name, (letter, entries) in rows.items():
            if letter in pattern:
                layers = [pattern[:i].count(letter) for i in range(*bounds) if pattern[i] == letter]
                of_layers = dense(whole, name)[layers]
                here[name] = of_layers[:, :, :, :, entries] if name == "kv" else of_layers[:, :, entries]
        result.append(here)
    return result


@pytest.mark.sampled(groups=(4,))
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 2), (2, 4)])
def test_every_split_rejoins_to_every_other(kind: str, groups: int, kv_heads: int) -> None:
    model = declared(PATTERNS[kind], groups, kv_heads)
    whole = random_export(model.spec())
    expected = {size: sliced(whole, model, *size) for size in SIZES}
    for index, size in enumerate(SIZES):
        pieces = [whole.cut(shard) for shard in model.shards(*size)]
        for other in thinned(SIZES[index % 2 :] + SIZES[: index % 2], every=2):
            for shard, tensors in zip(model.shards(*other), expected[other], strict=True):
                joined = join(pieces, shard)
                joined.check()
                for name, tensor in tensors.items():
                    assert torch.equal(dense(joined, name), tensor)


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("other", [(1, 1), (2, 1), (4, 3), (8, 1)])
def test_what_is_taken_is_taken_once_and_suffices(size: tuple[int, int], other: tuple[int, int]) -> None:
    model = declared(PATTERNS["mix"])
    whole = random_export(model.spec())
    held = model.shards(*size)
    pieces = [whole.cut(shard) for shard in held]
    for wanted in model.shards(*other):
        taken = sources_for(held, wanted)
        assert taken
        moved = [pieces[index].cut(part) for index, part in taken.items()]
        joined = join(moved, wanted)
        for name, tensor in joined.tensors.items():
            assert sum(piece.tensors[name].numel() for piece in moved) == tensor.numel()
            assert torch.equal(tensor, whole.cut(wanted).tensors[name])


@st.composite
def parts(draw: st.DrawFn, layers: int, units: int) -> TensorPart:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in (layers, units)]
    return TensorPart(Part(*bounds[0], layers), Part(*bounds[1], units))


@st.composite
def formats(draw: st.DrawFn) -> PrefixFormat:
    """Of tensors that no kind of layer has."""
    sizes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    tensors = st.builds(
        TensorFormat, st.integers(0, 4), st.integers(0, 5), sizes, st.sampled_from(["float16", "float64"])
    )
    names = draw(st.sets(st.sampled_from(["kv", "a.0", "a.1", "b.0", "kv.0"]), min_size=1))
    return PrefixFormat(
        weights_version="1",
        block_size_tokens=4,
        vocab_size=256,
        tensors={name: draw(tensors) for name in names},
    )


@given(st.data())
def test_any_pieces_of_any_tensors_join_where_they_cover_what_is_wanted(data: st.DataObject) -> None:
    form, forest = data.draw(formats()), random_forest(1)

    def shard(name: str) -> Shard:
        return {
            key: data.draw(parts(tensor.num_layers, tensor.num_units), label=f"{name}: {key}")
            for key, tensor in form.tensors.items()
        }

    all_of_it = {
        name: TensorPart(Part(0, t.num_layers, t.num_layers), Part(0, t.num_units, t.num_units))
        for name, t in form.tensors.items()
    }
    tensors = {
        name: torch.randn(shape).to(form.tensors[name].torch_dtype)
        for name, shape in shapes_of(form, forest, all_of_it).items()
    }
    whole = PrefixShard(form, forest, all_of_it, tensors)
    pieces = [whole.cut(shard("piece")) for _ in range(data.draw(st.integers(1, 4)))]
    wanted = shard("wanted")

    def cells(of: Shard) -> set[tuple[str, int, int]]:
        return {(name, *at) for name, part in of.items() for at in product(*(axis.indices for axis in part))}

    if cells(wanted) <= set().union(*(cells(piece.shard) for piece in pieces)):
        joined = join(pieces, wanted)
        joined.check()
        assert joined.shard == wanted
        for name, (layers, units) in wanted.items():
            mine = tensors[name][list(layers.indices)][:, :, list(units.indices)]
            assert torch.equal(joined.tensors[name], mine)
    else:
        with pytest.raises(TransferError, match="the export lacks unit"):
            join(pieces, wanted)


def test_pieces_that_overlap_in_part_join() -> None:
    model = declared(PATTERNS["mix"], 4, 4)
    whole = random_export(model.spec())
    half, quarter = model.shards(2, 1), model.shards(4, 1)
    pieces = [whole.cut(shard) for shard in (quarter[0], half[0], quarter[2], quarter[3])]
    joined = join(pieces, whole.shard)
    for name, tensor in whole.tensors.items():
        assert torch.equal(joined.tensors[name], tensor)


@pytest.mark.parametrize(("letter", "name"), [("M", "conv.0"), ("G", r"gdn_conv.0"), ("C", "short_conv.0")])
def test_a_missing_piece_is_named(letter: str, name: str) -> None:
    model = Declared(f"{letter}{letter}", heads=8, groups=8)
    whole = random_export(model.spec())
    pieces = [whole.cut(shard) for shard in model.shards(4, 1)]
    first = 4 if letter == "C" else 2
    with pytest.raises(TransferError, match=rf"the export lacks unit {first} of layer 0 of {name}"):
        join([pieces[0], *pieces[2:]], whole.shard)
    with pytest.raises(TransferError, match="pieces is empty"):
        join([], whole.shard)


def test_pieces_of_two_exports_do_not_join() -> None:
    model = declared(PATTERNS["mix"])
    one, other = random_export(model.spec(), 0), random_export(model.spec(), 1)
    first, second = model.shards(2, 1)
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one.cut(first), other.cut(second)], one.shard)
    later = replace(one, format=msgspec.structs.replace(one.format, weights_version="'weights 2'"))
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one.cut(first), later.cut(second)], one.shard)


def test_a_piece_that_suffices_hides_no_other_export() -> None:
    spec = declared(PATTERNS["mix"]).spec()
    one, other = random_export(spec, 0), random_export(spec, 1)
    with pytest.raises(TransferError, match=r"pieces\[1\] is of another export"):
        join([one, other], one.shard)
    assert join([one, one.cut(one.shard)], one.shard) is one


def test_parts_of_another_model_have_nothing_in_common() -> None:
    whole = random_export(declared(PATTERNS["mix"]).spec())
    (other,) = declared(PATTERNS["mix"], groups=4).shards(1, 1)
    with pytest.raises(TransferError, match="different wholes"):
        whole.cut(other)
