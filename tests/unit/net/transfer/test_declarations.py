"""Transfers of whatever a model declares: which tensors an export has, and what reaches the other pools."""

from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.model_parts import ModelShard, Part, StateSegment, StateSplit
from mambaslots.net import decode_prefixes, encode_prefixes, export_prefixes, import_prefixes
from mambaslots.net.transfer.exports import CacheAccess
from mambaslots.net.transfer.format import PrefixFormat, TensorFormat, TensorPart, TransferError, shard_of
from mambaslots.state_spec import StateTensor
from oracle.budget import costly
from oracle.serving import random_tokens
from oracle.transfers import Declared, engine_of, maps_of

F16, F32, F64 = torch.float16, torch.float32, torch.float64


class Silent:
    """A model that declares states, computes nothing, and always says token 0."""

    def __init__(self, spec: ms.HybridStateSpec) -> None:
        self.spec = spec

    def state_spec(self) -> ms.HybridStateSpec:
        return self.spec

    def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
        return torch.zeros(len(inputs.logit_tokens), self.spec.vocab_size)


def engine_with(spec: ms.HybridStateSpec) -> ms.DynamicInferenceEngine:
    return engine_of(Silent(spec))  # type: ignore[arg-type]


def warm_engine(spec: ms.HybridStateSpec) -> ms.DynamicInferenceEngine:
    """With prefixes cached, and random numbers in all pools."""
    engine = engine_with(spec)
    params = ms.SamplingParams(max_tokens=1)
    for length, seed in ((40, 1), (30, 1), (20, 2)):
        engine.generate([random_tokens(length, seed)], params)
    for tensor in (*engine.context.memory.state_pool.tensors, engine.context.memory.kv_cache):
        tensor.copy_(torch.randn(tensor.shape))
    return engine


def cached(engine: ms.DynamicInferenceEngine) -> dict[tuple[str, int], torch.Tensor]:
    """(Tensor, hash) -> the numbers of each cached block and state, straight from the pools."""
    memory, kv = engine.context.memory, engine.context.prefix_cache.kv_blocks
    slots = engine.context.prefix_cache.slots.cached_states
    found = {}
    for key, block in kv.tree.block_of_hash.items():
        found["kv", key] = memory.kv_cache[:, :, block]
    for key, block in slots.state_block_of_hash.items():
        for tensor in memory.state_pool.states:
            found[tensor.name, key] = memory.state_pool.durable(tensor.name)[:, slots.slot_of(block)]
    return found


def format_of(spec: ms.HybridStateSpec) -> PrefixFormat:
    return CacheAccess(engine_with(spec), "format_of").format()


KV = TensorFormat(1, 2, (2, 8, 2), "float16")


@pytest.mark.parametrize(
    ("pattern", "tensors"),
    [
        (
            "MM*",
            {
                "conv.0": TensorFormat(2, 4, (2, 3), "float16"),  # x
                "conv.1": TensorFormat(2, 2, (3, 3), "float16"),  # B
                "conv.2": TensorFormat(2, 2, (3, 3), "float16"),  # C
                "ssm.0": TensorFormat(2, 4, (1, 2, 3), "float32", grid=4),
            },
        ),
        (
            "*G",
            {
                "gdn_conv.0": TensorFormat(1, 2, (2, 2), "float16"),  # q
                "gdn_conv.1": TensorFormat(1, 2, (2, 2), "float16"),  # k
                "gdn_conv.2": TensorFormat(1, 4, (3, 2), "float16"),  # v
                "delta.0": TensorFormat(1, 4, (1, 2, 3), "float32", grid=8),
            },
        ),
        ("C*CC", {"short_conv.0": TensorFormat(3, 8, (1, 2), "float16")}),
    ],
)
def test_the_tensors_of_each_kind(pattern: str, tensors: dict[str, TensorFormat]) -> None:
    form = format_of(Declared(pattern, heads=4, dtype=F16).spec())
    assert form.tensors == {"kv": KV, **tensors}
    for pp in (1, 2):  # every rank says the same
        for tensor in range(4):
            spec = Declared(pattern, heads=4, dtype=F16).spec((tensor, 4), (pp - 1, pp))
            assert format_of(spec) == form


def spec_of(*states: StateTensor, **changes: Any) -> ms.HybridStateSpec:
    return replace(Declared("*").spec(), states=states, **changes)


def test_what_declares_no_split_is_whole_on_one_rank() -> None:
    states = StateTensor("sums", 3, (5, 2), F32), StateTensor("mean", 2, (), F64)
    assert shard_of(spec_of(*states, shard=None)) == {
        "kv": TensorPart(Part(0, 1, 1), Part(0, 2, 2)),
        "sums.0": TensorPart(Part(0, 3, 3), Part(0, 5, 5)),
        "mean.0": TensorPart(Part(0, 2, 2), Part(0, 1, 1)),
    }


class ThreeRanks(ms.ParallelGroups):
    """Says so, and has no process group."""

    @property
    def tensor_size(self) -> int:
        return 3


def test_what_declares_no_split_is_refused_on_several_ranks() -> None:
    whole = Part(0, 1, 1)
    said = StateTensor("said", 1, (1,), F32, split=StateSplit(whole, (StateSegment(whole),)))
    unsaid = StateTensor("unsaid", 1, (1,), F32)
    spec = spec_of(said, unsaid, groups=ThreeRanks())
    with pytest.raises(ValueError, match=r"^states\[1\].split of state_spec\(\) is None; .* 3 ranks hold"):
        shard_of(spec)
    with pytest.raises(ValueError, match=r"^states\[1\].split, shard of state_spec\(\) is None"):
        shard_of(replace(spec, shard=None))
    with pytest.raises(ValueError, match=r"^shard of state_spec\(\) is None"):
        shard_of(replace(spec, states=(said,), shard=None))
    assert shard_of(replace(spec, states=(said,))).keys() == {"kv", "said.0"}


@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (1, 1)])
def test_a_shard_of_other_sizes_than_the_kv(layers: int, heads: int) -> None:
    shard = ModelShard(attention_layers=Part(0, layers, 4), kv_heads=Part(0, heads, 4))
    with pytest.raises(ValueError, match=r"shard is .*; accepted: one of 1 attention layers and 2 KV heads"):
        export_prefixes(engine_with(spec_of(shard=shard)))


@st.composite
def any_states(draw: st.DrawFn) -> tuple[StateTensor, ...]:
    """Of one rank, some of a model that is split, and of shapes that no kind of layer has."""
    states = []
    for name in draw(st.sets(st.sampled_from(["kv", "a", "b", "tokens", "states"]), max_size=3)):
        layers = draw(st.integers(0, 2))
        inner = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        dtype, grid = draw(st.sampled_from([F16, F32, F64])), draw(st.sampled_from([1, 2, 4, 8]))
        segments = tuple(
            StateSegment(Part(start, start + count, start + count + more), width)
            for start, count, more, width in draw(
                st.lists(st.tuples(*[st.integers(0, 2)] * 3, st.integers(1, 3)), max_size=3)
            )
        )
        size = sum(segment.size for segment in segments)
        if size:
            split = StateSplit(Part(1, 1 + layers, 4), segments)
            states.append(StateTensor(name, layers, (size, *inner), dtype, grid, split))
        else:
            states.append(StateTensor(name, layers, inner, dtype, grid))
    return tuple(states)


@costly()
@given(any_states(), st.booleans())
def test_any_states_arrive_to_the_bit(states: tuple[StateTensor, ...], attention: bool) -> None:
    spec = replace(Declared("*" if attention else "-").spec(), states=states)
    source, target = warm_engine(spec), engine_with(spec)
    report = import_prefixes(target, encode_prefixes(export_prefixes(source)))
    target.context.check_integrity()
    there, here = cached(source), cached(target)
    assert here.keys() <= there.keys()
    assert len([key for name, key in here if name == "kv"]) == report.imported.blocks > 0
    assert report.imported.states > 0
    for key, tensor in here.items():
        assert torch.equal(tensor, there[key])


SUMS = StateTensor("sums", 2, (6, 2), F32, 4)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            replace(SUMS, name="means"),
            r"tensors is \['kv', 'means.0'\]; accepted: \['kv', 'sums.0'\], as here",
        ),
        (replace(SUMS, num_layers=3), r"sums.0.num_layers is 3; accepted: 2, as here"),
        (replace(SUMS, shape=(5, 2)), r"sums.0.num_units is 5; accepted: 6, as here"),
        (replace(SUMS, shape=(6, 3)), r"sums.0.shape is \(1, 3\); accepted: \(1, 2\), as here"),
        (replace(SUMS, shape=(6,)), r"sums.0.shape is \(1,\); accepted: \(1, 2\), as here"),
        (replace(SUMS, dtype=F64), r"sums.0.dtype is 'float64'; accepted: 'float32', as here"),
        (replace(SUMS, grid=2), r"sums.0.grid is 2; accepted: 4, as here"),
        (
            replace(SUMS, split=StateSplit(Part(0, 2, 2), (StateSegment(Part(0, 3, 3), 2),))),
            r"sums.0.num_units is 3; accepted: 6, as here; and sums.0.shape is \(2, 2\)",
        ),
        (
            replace(SUMS, split=StateSplit(Part(0, 2, 2), (StateSegment(Part(0, 3, 3)),) * 2)),
            r"tensors is \['kv', 'sums.0', 'sums.1'\]; accepted: \['kv', 'sums.0'\], as here",
        ),
    ],
)
def test_states_of_another_declaration_are_refused(other: StateTensor, text: str) -> None:
    data, target = encode_prefixes(export_prefixes(warm_engine(spec_of(other)))), engine_with(spec_of(SUMS))
    before = maps_of(target)
    with pytest.raises(TransferError, match="the export does not fit: .*" + text):
        import_prefixes(target, data)
    assert maps_of(target) == before


def test_the_order_in_which_tensors_are_declared_means_nothing() -> None:
    other = StateTensor("other", 1, (3,), F16)
    source, target = warm_engine(spec_of(SUMS, other)), engine_with(spec_of(other, SUMS))
    export = decode_prefixes(encode_prefixes(export_prefixes(source)))
    assert import_prefixes(target, export).imported.states > 0
    there, here = cached(source), cached(target)
    assert all(torch.equal(tensor, there[key]) for key, tensor in here.items())
