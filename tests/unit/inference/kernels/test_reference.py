"""The plain-torch kernels against their definitions, written as loops over tokens."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ConvRows, ScanRows
from mambaslots.models.hybrid_config import HybridConfig
from mambaslots.models.mixers import rotary_angles
from oracle.steps import prefill_chunks
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 0.0, torch.float64: 0.0}
"""How far the one rounding of an output to its dtype moves it; outputs are computed in float32 or wider."""
repeatable = settings(derandomize=True)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class TestCausalConv:
    WIDTH = 3

    def setup_method(self) -> None:
        self.weight, self.bias = randn(5, self.WIDTH + 1, seed=1), randn(5, seed=2)
        self.pool = randn(12, 5, self.WIDTH, seed=3)

    def prefill(self, pool, rows, sources, destinations, checkpoints=(), dtype=torch.float64) -> Tensor:
        """`rows`: [n, 5] each; `checkpoints`: (row, tokens of that row before it, destination)."""
        starts = [0, *itertools.accumulate(len(row) for row in rows)]
        cp_rows, cp_tokens, cp_destinations = zip(*checkpoints, strict=True) if checkpoints else ((), (), ())
        return KernelSet.causal_conv1d_prefill(
            torch.cat(rows),
            self.weight.to(dtype),
            self.bias.to(dtype),
            pool,
            ConvRows(
                index(*sources),
                index(*destinations),
                index(*starts),
                prefill_chunks([0] * len(rows), [len(row) for row in rows], 8).token_rows,
                index(*cp_rows),
                index(*(starts[row] + tokens for row, tokens in zip(cp_rows, cp_tokens, strict=True))),
                index(*cp_destinations),
            ),
        )

    def naive(self, window: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for token in tokens:
            full = torch.cat([window, token[:, None]], dim=1)
            outputs.append(F.silu((full * self.weight).sum(1) + self.bias))
            window = full[:, 1:]
        return torch.stack(outputs) if outputs else tokens, window

    @repeatable
    @given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=5))
    @example([(1, True), (2, True), (0, True), (3, True), (0, False)])
    def test_packed_rows_of_any_length_continue_their_own_window(self, rows):
        self.setup_method()
        tokens = [randn(n, 5, seed=10 + i) for i, (n, _) in enumerate(rows)]
        sources = [i if carried else -1 for i, (_, carried) in enumerate(rows)]
        pool = self.pool.clone()
        out = self.prefill(pool, tokens, sources, [6 + i for i in range(len(rows))])
        for i, row_out in enumerate(out.split([n for n, _ in rows])):
            window = self.pool[i] if rows[i][1] else torch.zeros(5, self.WIDTH, dtype=torch.float64)
            expected, after = self.naive(window, tokens[i])
            torch.testing.assert_close(row_out, expected, rtol=0, atol=1e-14)
            assert torch.equal(pool[6 + i], after)
        assert torch.equal(pool[:6], self.pool[:6])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tokens_before", [1, 2, 3, 5])
    def test_a_checkpoint_holds_the_window_of_running_up_to_there(self, dtype, tokens_before):
        first, second = randn(4, 5, seed=4, dtype=dtype), randn(6, 5, seed=5, dtype=dtype)
        inside, up_to = self.pool.to(dtype), self.pool.to(dtype, copy=True)
        self.prefill(inside, [first, second], [0, 1], [0, 1], [(1, tokens_before, 7)], dtype=dtype)
        self.prefill(up_to, [second[:tokens_before]], [1], [7], dtype=dtype)
        assert torch.equal(inside[7], up_to[7])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_rows_are_a_prefill_of_one_token_bit_for_bit(self, dtype):
        tokens = randn(3, 5, seed=6, dtype=dtype)
        prefilled, updated = self.pool.to(dtype), self.pool.to(dtype, copy=True)
        expected = self.prefill(prefilled, list(tokens.split(1)), [4, -1, 2], [4, 8, 9], dtype=dtype)
        out = KernelSet.causal_conv1d_update(
            tokens[:, None], self.weight.to(dtype), self.bias.to(dtype), updated,
            index(4, -1, 2), index(4, 8, 9)[:, None],
        )  # fmt: skip
        assert out.dtype == dtype
        assert torch.equal(out[:, 0], expected)
        assert torch.equal(updated, prefilled)

    def test_zeros_do_not_come_from_the_pool_and_nothing_goes_to_minus_one(self):
        pool = torch.full_like(self.pool, math.nan)
        tokens = [randn(2, 5, seed=7)]
        assert self.prefill(pool, tokens, [-1], [-1]).isfinite().all()
        assert pool.isnan().all()
        nowhere = index(-1, -1)
        out = KernelSet.causal_conv1d_update(
            tokens[0][:, None], self.weight, self.bias, pool, nowhere, nowhere[:, None]
        )
        assert out.isfinite().all()
        assert pool.isnan().all()

    def test_all_sources_are_read_before_any_destination_is_written(self):
        tokens = [randn(1, 5, seed=8), randn(1, 5, seed=9)]
        apart, crossed = self.pool.clone(), self.pool.clone()
        expected = self.prefill(apart, tokens, [0, 1], [6, 7])
        assert torch.equal(self.prefill(crossed, tokens, [0, 1], [1, 0]), expected)
        assert torch.equal(crossed[[1, 0]], apart[[6, 7]])


class SSD:
    """Random packed SSD inputs of `lengths` tokens, and ways to run them."""

    H, P, G, N, C = 4, 6, 2, 5, 16

    def __init__(self, lengths, seed=0, dtype=torch.float64, P=6, N=5) -> None:
        total = sum(lengths)
        self.P, self.N, self.dtype = P, N, dtype
        self.lengths = lengths
        self.x = randn(total, self.H, P, seed=seed, dtype=dtype)
        self.dt = F.softplus(randn(total, self.H, seed=seed + 1) - 2).to(dtype)
        self.A = -torch.tensor([0.02, 0.1, 0.5, 1.0], dtype=KernelSet.compute_dtype(dtype))
        self.B = randn(total, self.G, N, seed=seed + 2, dtype=dtype)
        self.Cs = randn(total, self.G, N, seed=seed + 3, dtype=dtype)
        self.D = randn(self.H, seed=seed + 4, dtype=dtype)
        self.state_dtype = KernelSet.compute_dtype(dtype)

    def pool(self, slots: int, seed: int = 50) -> Tensor:
        return randn(slots, self.H, self.P, self.N, seed=seed, dtype=self.state_dtype)

    def scan(self, pool, token_slices, starts, sources, destinations, checkpoints=()) -> Tensor:
        """`checkpoints`: (row, absolute position, destination)."""
        lengths = [s.stop - s.start for s in token_slices]
        chunks = prefill_chunks(starts, lengths, self.C)
        ends = chunks.cu_chunk_seqlens.tolist()
        before = [0, *itertools.accumulate(lengths)]
        for row, position, destination in checkpoints:
            chunks.destinations[ends.index(before[row] + position - starts[row]) - 1] = destination

        def pick(t: Tensor) -> Tensor:
            return torch.cat([t[s] for s in token_slices])

        return KernelSet.ssd_chunk_scan(
            pick(self.x), pick(self.dt), self.A, pick(self.B), pick(self.Cs), self.D,
            pool,
            ScanRows(
                index(*sources), index(*destinations), self.C, chunks.cu_chunk_seqlens, chunks.seq_idx,
                chunks.row_chunk_starts, chunks.destinations,
            ),
        )  # fmt: skip

    def recurrence(self, state: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        h, outputs = state.double().clone(), []
        for t in range(tokens.start, tokens.stop):
            y = torch.zeros(self.H, self.P, dtype=torch.float64)
            for head in range(self.H):
                group = head // (self.H // self.G)
                dt = self.dt[t, head].double()
                h[head] = (
                    torch.exp(dt * self.A[head].double()) * h[head]
                    + dt * self.x[t, head].double()[:, None] * self.B[t, group].double()
                )
                y[head] = (
                    h[head] @ self.Cs[t, group].double() + self.D[head].double() * self.x[t, head].double()
                )
            outputs.append(y)
        return torch.stack(outputs) if outputs else torch.zeros(0, self.H, self.P, dtype=torch.float64), h

    def row_slices(self) -> list[slice]:
        return [
            slice(end - n, end)
            for end, n in zip(itertools.accumulate(self.lengths), self.lengths, strict=True)
        ]


class TestSSD:
    @repeatable
    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=4))
    @example([(0, 0, False), (3, 0, True), (40, 5, True), (0, 1, True)])
    def test_packed_rows_follow_the_recurrence_whatever_their_start_and_length(self, rows):
        ssd = SSD([n for n, _, _ in rows])
        before = ssd.pool(8)
        pool = before.clone()
        sources = [i if carried else -1 for i, (_, _, carried) in enumerate(rows)]
        out = ssd.scan(
            pool,
            ssd.row_slices(),
            [start for _, start, _ in rows],
            sources,
            [4 + i for i in range(len(rows))],
        )
        for i, tokens in enumerate(ssd.row_slices()):
            state = before[i] if rows[i][2] else torch.zeros_like(before[i])
            y, h = ssd.recurrence(state, tokens)
            torch.testing.assert_close(out[tokens], y, rtol=0, atol=1e-12)
            torch.testing.assert_close(pool[4 + i], h, rtol=0, atol=1e-12)
        assert torch.equal(pool[:4], before[:4])
        assert torch.equal(pool[4 + len(rows) :], before[4 + len(rows) :])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @repeatable
    @given(data=st.data())
    def test_cuts_on_the_chunk_grid_give_bit_identical_states(self, dtype, data):
        """Alone and uncut, or in several calls through the pool, in company that differs by call."""
        chunks = data.draw(st.integers(2, 12))
        start = data.draw(st.integers(0, 20))
        tail = data.draw(st.integers(1, 16))
        first = 16 - start % 16
        ends = [first + 16 * k for k in range(chunks)]
        length = ends[-1] + tail
        cuts = sorted(data.draw(st.sets(st.sampled_from(ends), max_size=3)))
        company = data.draw(st.integers(0, 50))
        P, N = data.draw(st.sampled_from([(6, 5), (16, 16), (8, 32)]))
        ssd = SSD([length, company], dtype=dtype, P=P, N=N)
        checkpoints = [(0, start + end, 4 + k) for k, end in enumerate(ends)]
        initial = ssd.pool(20)

        whole = initial.clone()
        y_whole = ssd.scan(whole, [slice(0, length)], [start], [0], [1], checkpoints)

        cut, outputs, source, begin = initial.clone(), [], 0, 0
        for end in [*cuts, length]:
            inside = [(0, start + e, 4 + k) for k, e in enumerate(ends) if begin < e < end]
            rows = [slice(begin, end), slice(length, length + company)]
            y = ssd.scan(cut, rows, [start + begin, 7], [source, 3], [1, 2], inside)
            outputs.append(y[: end - begin])
            for k, e in enumerate(ends):
                if e == end:
                    cut[4 + k] = cut[1]
            source, begin = 1, end
        assert torch.equal(cut[1], whole[1])
        assert torch.equal(cut[4:], whole[4:])
        torch.testing.assert_close(torch.cat(outputs), y_whole, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_checkpoint_is_bit_identical_to_running_up_to_there(self, threads):
        restore = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            ssd = SSD([5, 75], dtype=torch.float32)
            inside, up_to = ssd.pool(6), ssd.pool(6)
            ssd.scan(inside, ssd.row_slices(), [0, 9], [-1, 0], [1, 2], [(1, 32, 3), (1, 80, 4)])
            ssd.scan(up_to, [slice(5, 5 + 23)], [9], [0], [3])
            ssd.scan(up_to, [slice(5, 5 + 71)], [9], [0], [4])
        finally:
            torch.set_num_threads(restore)
        assert torch.equal(inside[3:5], up_to[3:5])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_low_precision_inputs_are_computed_in_float32_or_wider(self, dtype):
        ssd = SSD([50], dtype=dtype)
        pool = ssd.pool(2)
        y, h = ssd.recurrence(pool[0], slice(0, 50))
        out = ssd.scan(pool, [slice(0, 50)], [0], [0], [1])
        assert out.dtype == dtype
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(out.double(), y, rtol=ROUNDING[dtype], atol=tolerance)
        torch.testing.assert_close(pool[1].double(), h, rtol=0, atol=tolerance)

    def test_a_row_of_nans_does_not_reach_its_neighbours(self):
        ssd = SSD([5, 7, 20])
        clean = ssd.scan(ssd.pool(6), ssd.row_slices(), [0, 0, 0], [0, 1, 2], [3, 4, 5])
        ssd.x[5:12] = math.nan
        ssd.B[5:12] = math.nan
        out = ssd.scan(ssd.pool(6), ssd.row_slices(), [0, 0, 0], [0, 1, 2], [3, 4, 5])
        assert torch.equal(out[:5], clean[:5])
        assert torch.equal(out[12:], clean[12:])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_rows_follow_the_recurrence(self, dtype):
        ssd = SSD([3], dtype=dtype)
        before = ssd.pool(6)
        pool = before.clone()
        out = KernelSet.selective_state_update(
            ssd.x[:, None], ssd.dt[:, None], ssd.A, ssd.B[:, None], ssd.Cs[:, None], ssd.D, pool,
            index(0, -1, 2), index(0, 4, 5)[:, None],
        )[:, 0]  # fmt: skip
        tolerance = 1e-13 if dtype == torch.float64 else 1e-5
        for row, (source, destination) in enumerate([(0, 0), (-1, 4), (2, 5)]):
            state = before[source] if source >= 0 else torch.zeros_like(before[0])
            y, h = ssd.recurrence(state, slice(row, row + 1))
            torch.testing.assert_close(out[row].double(), y[0], rtol=ROUNDING[dtype], atol=tolerance)
            torch.testing.assert_close(pool[destination].double(), h, rtol=0, atol=tolerance)
        assert torch.equal(pool[1:4], before[1:4])

    def test_all_sources_are_read_before_any_destination_is_written(self):
        ssd = SSD([3, 20])
        apart, crossed = ssd.pool(4), ssd.pool(4)
        ssd.scan(apart, ssd.row_slices(), [0, 0], [0, 1], [2, 3])
        ssd.scan(crossed, ssd.row_slices(), [0, 0], [0, 1], [1, 0])
        assert torch.equal(crossed[[1, 0]], apart[[2, 3]])

    def test_a_checkpoint_may_replace_its_rows_source(self):
        """The row's destination is written last, as the GPU's kernels do."""
        ssd = SSD([40])
        apart, replaced, in_place = (ssd.pool(3) for _ in range(3))
        expected = ssd.scan(apart, ssd.row_slices(), [0], [0], [1], [(0, 32, 2)])
        assert torch.equal(ssd.scan(replaced, ssd.row_slices(), [0], [0], [-1], [(0, 32, 0)]), expected)
        assert torch.equal(replaced[0], apart[2])
        ssd.scan(in_place, ssd.row_slices(), [0], [0], [0], [(0, 32, 0)])
        assert torch.equal(in_place[0], apart[1])

    def test_nothing_is_stored_at_minus_one(self):
        ssd = SSD([20])
        pool = ssd.pool(3)
        ssd.scan(pool, ssd.row_slices(), [0], [-1], [-1])
        assert torch.equal(pool, ssd.pool(3))


class TestNormsAndRotary:
    def test_rms_norm_leaves_a_root_mean_square_of_its_weight(self):
        x, weight = randn(3, 8), randn(8, seed=1)
        expected = x / x.square().mean(-1, keepdim=True).sqrt() * weight
        torch.testing.assert_close(KernelSet.rms_norm(x, weight, 0.0), expected)

    def test_the_gated_norm_normalises_each_group_alone(self):
        x, gate, weight = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2)
        whole = KernelSet.gate_then_rms_norm(x, gate, weight, 2, 1e-5)
        for part in (slice(0, 4), slice(4, 8)):
            alone = KernelSet.rms_norm(x[:, part] * F.silu(gate[:, part]), weight[part], 1e-5)
            torch.testing.assert_close(whole[:, part], alone)

    def test_rotary_scores_depend_on_the_distance_only(self):
        q, k = randn(1, 2, 8), randn(1, 2, 8, seed=1)
        config = HybridConfig.tiny(torch.float64, head_dim=8, rotary_base=100.0)

        def rotated(x: Tensor, position: int) -> Tensor:
            return KernelSet.qk_norm_rotary(x, x, *rotary_angles(index(position), config))[0]

        def score(q_position: int, k_position: int) -> Tensor:
            turned = [rotated(x, at) for x, at in ((q, q_position), (k, k_position))]
            return (turned[0] * turned[1]).sum(-1)

        torch.testing.assert_close(score(0, 0), (q * k).sum(-1))
        torch.testing.assert_close(score(9, 5), score(104, 100))
        assert not torch.allclose(score(9, 5), score(9, 6))

    def test_angles_of_positions_up_to_a_million_are_products_in_float32(self):
        config = HybridConfig.tiny(torch.bfloat16, head_dim=20)
        positions = index(3, 999_999, 1_000_000, 0, 131_071)
        frequencies = torch.tensor([config.rotary_base ** (-i / 10) for i in range(10)]).float()
        angles = (positions.float()[:, None] * frequencies).double().repeat(1, 2)
        for found, expected in zip(
            rotary_angles(positions, config), (angles.cos(), angles.sin()), strict=True
        ):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)

    def test_nothing_is_computed_below_float32(self):
        x = randn(2, 4, dtype=torch.bfloat16)
        for narrow in (KernelSet.rms_norm(x, x[0], 1e-5), KernelSet.gate_then_rms_norm(x, x, x[0], 2, 1e-5)):
            assert narrow.dtype == torch.bfloat16  # rounded once, at the end
        assert KernelSet.compute_dtype(torch.float64) == torch.float64
