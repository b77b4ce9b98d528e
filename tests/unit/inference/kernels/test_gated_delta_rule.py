"""The plain-torch gated delta rule against the recurrence in float64 numpy, and against fla and transformers.

`test_gated_delta_rule_gpu.py` compares the Triton path with both.
"""

import inspect
import math
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.gated_delta import Batch, Layer, decode_inputs, error
from oracle.scan_rows import Row, drawn_rows, poisoned_pool, rows_of
from torch import Tensor

repeatable = settings(derandomize=True)
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-5}
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2**-8}
"""How far the one rounding of an output to its dtype moves it, beyond the tolerance."""
EXACT = Layer(dtype=torch.float64)


def scan(batch, pool):
    """o and the pool after; `pool` stays."""
    pool = pool.clone()
    return batch.scan(KernelSet.gated_delta_rule_scan, pool), pool


class TestScan:
    @repeatable
    @given(drawn_rows(4), st.tuples(*[st.integers(0, 3)] * 3), st.sampled_from([1, 3, 16]))
    @example([(0, 0, True, "elsewhere", False), (0, 0, False, "elsewhere", False)], (0, 0, 0), 16)
    @example([(3, 0, True, "in place", False), (16, 32, True, "in place", True)], (2, 3, 1), 16)
    def test_any_layout_is_the_recurrence(self, drawn, padding, chunk_size):
        rows = rows_of(drawn, chunk_size)
        before = poisoned_pool(EXACT, rows, 4 * len(rows))
        batch = Batch(EXACT, rows, chunk_size, padding)
        o, pool = scan(batch, before)
        batch.check(before, pool, o, 1e-11)

    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", list(TOLERANCES))
    @pytest.mark.parametrize("chunk_size", [1, 16, 64, 100])
    def test_dtypes_and_chunk_sizes(self, chunk_size, dtype):
        """Low precision is computed in float32. The states of 300 tokens stay close."""
        layer = Layer(dtype=dtype, Dk=16, Dv=16)
        rows = [Row(0, 7, 300, 0, 1, {200 // chunk_size * chunk_size: 2}), Row(1, 0, 2 * chunk_size, -1, 3)]
        batch, before = Batch(layer, rows, chunk_size), layer.pool(4)
        o, pool = scan(batch, before)
        assert o.dtype == dtype
        batch.check(before, pool, o, TOLERANCES[dtype] + ROUNDING[dtype], TOLERANCES[dtype])

    @pytest.mark.parametrize("Hk", [1, 2, 6])
    @pytest.mark.parametrize("doubled", [False, True])
    def test_value_heads_of_one_key_head_and_doubled_beta(self, Hk, doubled):
        layer = Layer(Hk=Hk, Hv=6, Dk=5, Dv=3, dtype=torch.float64, doubled=doubled)
        rows = [Row(0, 3, 50, 0, 1)]
        batch, before = Batch(layer, rows, 16), layer.pool(2)
        o, pool = scan(batch, before)
        batch.check(before, pool, o, 1e-10)

    @pytest.mark.parametrize("decay", [0.0, 30.0, 3e4])
    def test_no_decay_and_decays_that_forget_everything(self, decay):
        layer = Layer(decay=decay)
        rows = [Row(0, 0, 100, 0, 1)]
        batch, before = Batch(layer, rows, 64), layer.pool(2)
        o, pool = scan(batch, before)
        batch.check(before, pool, o, TOLERANCES[torch.float32])

    @pytest.mark.parametrize("dtype", list(TOLERANCES))
    @repeatable
    @given(data=st.data())
    def test_cuts_on_the_chunk_grid_give_bit_identical_states(self, dtype, data):
        """Alone and uncut, or in several calls through the pool, in company that differs by call."""
        layer = Layer(
            dtype=dtype, Dk=data.draw(st.sampled_from([5, 16])), Dv=data.draw(st.sampled_from([3, 32]))
        )
        start, chunks = data.draw(st.integers(0, 20)), data.draw(st.integers(2, 6))
        first = (start // 16 + 1) * 16
        ends = [first + 16 * k for k in range(chunks)]
        end = ends[-1] + data.draw(st.integers(1, 16))
        cuts = sorted(data.draw(st.sets(st.sampled_from(ends), max_size=3)))
        company = data.draw(st.integers(0, 50))
        initial = layer.pool(20)
        checkpoints = {position: 4 + k for k, position in enumerate(ends)}
        o_whole, whole = scan(Batch(layer, [Row(0, start, end - start, 0, 1, checkpoints)], 16), initial)

        pool, outputs, source, begin = initial, [], 0, start
        for cut in [*cuts, end]:
            inside = {p: slot for p, slot in checkpoints.items() if begin < p <= cut}
            rows = [Row(0, begin, cut - begin, source, 1, inside), Row(1, 7, company, 3, 2)]
            o, pool = scan(Batch(layer, rows, 16), pool)
            outputs.append(o[: cut - begin])
            source, begin = 1, cut
        assert torch.equal(pool[1], whole[1])
        assert torch.equal(pool[4 : 4 + chunks], whole[4 : 4 + chunks])
        assert torch.equal(torch.cat(outputs), o_whole)

    def test_a_row_of_nans_does_not_reach_its_neighbours(self):
        rows = [Row(0, 0, 5, 0, 3), Row(1, 0, 7, 1, 4), Row(2, 0, 20, 2, 5)]
        batch, before = Batch(EXACT, rows, 16), EXACT.pool(6)
        clean, pool = scan(batch, before)
        for name in ("q", "k", "v", "g", "beta"):
            batch.inputs[name][5:12] = math.nan
        poisoned, poisoned_pool = scan(batch, before)
        assert torch.equal(poisoned[:5], clean[:5])
        assert torch.equal(poisoned[12:], clean[12:])
        assert torch.equal(poisoned_pool[[3, 5]], pool[[3, 5]])

    def test_all_sources_are_read_before_any_destination_is_written(self):
        apart = scan(Batch(EXACT, [Row(0, 0, 3, 0, 2), Row(1, 0, 20, 1, 3)], 16), EXACT.pool(4))[1]
        crossed = scan(Batch(EXACT, [Row(0, 0, 3, 0, 1), Row(1, 0, 20, 1, 0)], 16), EXACT.pool(4))[1]
        assert torch.equal(crossed[[1, 0]], apart[[2, 3]])

    def test_a_checkpoint_may_replace_its_rows_source(self):
        """The row's destination is written last, as the GPU's kernels do."""
        rows = [
            Row(0, 5, 40, source=0, checkpoints={32: 0}),
            Row(1, 16, 40, source=1, destination=2, checkpoints={32: 1}),
        ]
        batch, before = Batch(EXACT, rows, 16), EXACT.pool(3)
        o, pool = scan(batch, before)
        batch.check(before, pool, o, 1e-11)
        in_place = scan(Batch(EXACT, [Row(1, 16, 40, 1, 1, {32: 1})], 16), before)[1]
        assert torch.equal(in_place[1], scan(Batch(EXACT, [Row(1, 16, 40, 1, 2)], 16), before)[1][2])

    def test_a_key_of_zeros_changes_no_state(self):
        batch, before = Batch(EXACT, [Row(0, 0, 1, 0, 1)], 16), EXACT.pool(2)
        batch.inputs["k"].zero_()
        batch.inputs["g"].zero_()
        _, pool = scan(batch, before)
        assert torch.equal(pool[1], pool[0])


def layout(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Sources and destinations: in place, elsewhere, nowhere, from zeros, and padding behind."""
    free = iter(range(rows, 1000))
    sources, destinations = [], []
    for row in range(rows):
        padding = row == rows - 1
        source = -1 if padding or row % 3 == 2 else row
        into = [-1 if padding or (row + token) % 2 else next(free) for token in range(tokens)]
        if source >= 0 and row % 2:
            into[row % tokens] = source
        sources.append(source)
        destinations.append(into)
    return torch.tensor(sources), torch.tensor(destinations).view(rows, tokens)


class TestUpdate:
    @pytest.mark.parametrize("dtype", list(TOLERANCES))
    @pytest.mark.parametrize("tokens", [1, 2, 5])
    def test_the_recurrence(self, tokens, dtype):
        layer = Layer(dtype=dtype)
        sources, destinations = layout(6, tokens)
        inputs = decode_inputs(layer, 6, tokens)
        for tensor in inputs.values():
            tensor[-1] = math.nan  # padding
        pool = layer.pool(40)
        before = pool.clone()
        o = KernelSet.gated_delta_rule_update(
            **inputs, states=pool, sources=sources, destinations=destinations
        )
        assert o.dtype == dtype
        written = set()
        for row in range(5):
            initial = None if sources[row] < 0 else before[sources[row]]
            expected, states = layer.run({name: part[row] for name, part in inputs.items()}, initial)
            assert error(o[row], expected) <= TOLERANCES[dtype] + ROUNDING[dtype]
            for token, slot in enumerate(destinations[row].tolist()):
                if slot >= 0:
                    assert error(pool[slot], states[token + 1]) <= TOLERANCES[dtype]
                    written.add(slot)
        untouched = [slot for slot in range(40) if slot not in written]
        assert torch.equal(pool[untouched], before[untouched])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_tokens_in_one_call_or_several_change_no_bit(self, dtype):
        layer = Layer(dtype=dtype)
        inputs = decode_inputs(layer, 3, 4)
        at_once, one_by_one = layer.pool(20), layer.pool(20)
        sources, destinations = torch.tensor([0, 1, -1]), torch.arange(4, 16).view(3, 4)
        o = KernelSet.gated_delta_rule_update(
            **inputs, states=at_once, sources=sources, destinations=destinations
        )
        for token in range(4):
            part = {name: tensor[:, token : token + 1] for name, tensor in inputs.items()}
            into = destinations[:, token : token + 1]
            alone = KernelSet.gated_delta_rule_update(
                **part, states=one_by_one, sources=sources, destinations=into
            )
            assert torch.equal(alone[:, 0], o[:, token])
            sources = into[:, 0]
        assert torch.equal(one_by_one, at_once)

    def test_a_scan_of_the_same_tokens(self):
        """Prefill, then decode, against one prefill."""
        whole = scan(Batch(EXACT, [Row(0, 0, 40, 0, 1)], 16), EXACT.pool(3))
        o, pool = scan(Batch(EXACT, [Row(0, 0, 35, 0, 1)], 16), EXACT.pool(3))
        inputs = {name: tensor[None, 35:40] for name, tensor in EXACT.tokens(0).items()}
        decoded = KernelSet.gated_delta_rule_update(
            **inputs, states=pool, sources=torch.tensor([1]), destinations=torch.tensor([[-1, -1, -1, -1, 1]])
        )
        torch.testing.assert_close(torch.cat([o, decoded[0]]), whole[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(pool[1], whole[1][1], rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def naive():
    """fla's own plain-torch recurrence and chunks; importing fla on a CPU warns."""
    pytest.importorskip("fla", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)


@pytest.fixture(scope="module")
def qwen():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", exc_type=ImportError)


class TestOthers:
    """One sequence of 100 tokens from a carried state, in float32, by others' functions."""

    layer = Layer(Dk=16, Dv=24, jumps=False)

    @pytest.fixture
    def ours(self):
        return scan(Batch(self.layer, [Row(0, 0, 100, 0, 1)], 64), self.layer.pool(2))

    def arguments(self, repeated: bool) -> dict[str, Tensor]:
        """[1, T, Hv, ...] each; q and k normalised and repeated to the value heads."""
        inputs = {name: tensor[None, :100] for name, tensor in self.layer.tokens(0).items()}
        if repeated:
            for name in ("q", "k"):
                x = inputs[name].repeat_interleave(self.layer.Hv // self.layer.Hk, dim=2)
                inputs[name] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return inputs

    def check(self, ours, theirs) -> None:
        o, state = theirs
        assert error(ours[0], o[0].double()) <= 1e-5
        assert error(ours[1][1], state[0].double()) <= 1e-5

    def test_fla(self, ours, naive):
        options = {"initial_state": self.layer.pool(1), "output_final_state": True}
        self.check(ours, naive.naive_recurrent_gated_delta_rule(**self.arguments(True), **options))
        self.check(ours, naive.naive_chunk_gated_delta_rule(**self.arguments(True), **options))

    def test_transformers(self, ours, qwen):
        inputs = self.arguments(False)
        renamed = {"query": inputs["q"], "key": inputs["k"], "value": inputs["v"]}
        options = {"initial_state": self.layer.pool(1), "output_final_state": True}
        for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
            # transformers calls fla's function instead where fla is installed.
            theirs = inspect.unwrap(function)(
                **renamed, g=inputs["g"], beta=inputs["beta"], use_qk_l2norm_in_kernel=True, **options
            )
            self.check(ours, theirs)
