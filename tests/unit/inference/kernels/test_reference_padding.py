"""The plain-torch kernels on several tokens a decode row, and on padded inputs: padding changes nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ConvRows, ScanRows
from oracle.steps import prefill_chunks
from torch import Tensor

# torch rounds the last elements of a tensor in another way where they fill no vector of the CPU: CONV does.
H, P, G, N, CONV, KERNEL, CHUNK = 4, 3, 2, 5, 16, 4, 8
KEY_HEADS, DELTA = 2, (4, 6, 3)  # of the gated delta rule: a state's value heads, Dk and Dv
repeatable = settings(derandomize=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rule_inputs(*shape: int) -> tuple[Tensor, ...]:
    """q, k, v, g and beta of the gated delta rule, for tokens of this shape."""
    heads, key_dim, value_dim = DELTA
    q, k = (randn(*shape, KEY_HEADS, key_dim, seed=seed) for seed in (30, 31))
    gates = randn(2, *shape, heads, seed=32)
    return q, k, randn(*shape, heads, value_dim, seed=33), -gates[0].exp(), gates[1].sigmoid()


class Decode:
    """Inputs of a decode step, `tokens` a row."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.raw = randn(rows, tokens, CONV, seed=1)
        self.x, self.B, self.C = (randn(rows, tokens, *s, seed=7 + s[1]) for s in ((H, P), (G, N), (G, N)))
        self.dt = randn(rows, tokens, H, seed=3).exp()
        self.weight, self.bias = randn(CONV, KERNEL, seed=4), randn(CONV, seed=5)
        self.A, self.D = -randn(H, seed=6).exp(), randn(H, seed=7)
        self.windows = randn(20, CONV, KERNEL + 1, seed=8)  # two places wider than one window
        self.states = randn(20, H, P, N, seed=9)
        self.rule = rule_inputs(rows, tokens)
        self.delta_states = randn(20, *DELTA, seed=10)

    def run(self, sources: Tensor, destinations: Tensor, rows=slice(None), tokens=slice(None)):
        conv = KernelSet.causal_conv1d_update(
            self.raw[rows, tokens], self.weight, self.bias, self.windows, sources, destinations
        )
        y = KernelSet.selective_state_update(
            self.x[rows, tokens], self.dt[rows, tokens], self.A, self.B[rows, tokens],
            self.C[rows, tokens], self.D, self.states, sources, destinations,
        )  # fmt: skip
        rule = (part[rows, tokens] for part in self.rule)
        o = KernelSet.gated_delta_rule_update(*rule, self.delta_states, sources, destinations)
        return conv, y, o


class TestSeveralTokensADecodeRow:
    @repeatable
    @given(tokens=st.integers(1, 4), data=st.data())
    def test_they_are_the_tokens_one_by_one(self, tokens, data):
        """With a state stored after any of them, some rows in place, some from zeros."""
        sources = index(*data.draw(st.permutations([0, 1, -1])))
        slots = data.draw(st.permutations(range(3, 20)))[: 3 * tokens]
        keep = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        wanted = index(*(slot if kept else -1 for slot, kept in zip(slots, keep, strict=True)))
        destinations = wanted.view(3, tokens)
        if data.draw(st.booleans()):
            destinations[0, -1] = sources[0]  # in place
        at_once, one_by_one = Decode(3, tokens), Decode(3, tokens)
        conv, y, o = at_once.run(sources, destinations)

        for pool in (one_by_one.windows, one_by_one.states, one_by_one.delta_states):
            state = pool[sources].clone()
            state[sources < 0] = 0
            pool[17:] = state  # rows of their own, beside those under test
        for t in range(tokens):
            alone = one_by_one.run(index(17, 18, 19), index(17, 18, 19)[:, None], tokens=slice(t, t + 1))
            torch.testing.assert_close(alone[0][:, 0], conv[:, t], rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(alone[1][:, 0], y[:, t], rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(alone[2][:, 0], o[:, t], rtol=1e-13, atol=1e-13)
            for row, slot in enumerate(destinations[:, t].tolist()):
                if slot >= 0 and slot < 17:
                    window = one_by_one.windows[17 + row, :, : KERNEL - 1]
                    assert torch.equal(at_once.windows[slot, :, : KERNEL - 1], window)
                    assert torch.equal(at_once.states[slot], one_by_one.states[17 + row])
                    assert torch.equal(at_once.delta_states[slot], one_by_one.delta_states[17 + row])

    def test_only_named_slots_change_and_a_window_fills_only_its_own_places(self):
        step, fresh = Decode(2, 3), Decode(2, 3)
        step.run(index(0, -1), index(3, -1, 5, -1, -1, 0).view(2, 3))
        others = [slot for slot in range(20) if slot not in (0, 3, 5)]
        assert torch.equal(step.states[others], fresh.states[others])
        assert torch.equal(step.delta_states[others], fresh.delta_states[others])
        assert torch.equal(step.windows[others], fresh.windows[others])
        assert torch.equal(step.windows[..., KERNEL - 1 :], fresh.windows[..., KERNEL - 1 :])

    def test_padding_rows_write_nothing(self):
        step, fresh = Decode(3, 2), Decode(3, 2)
        for tensor in (step.raw, step.x, step.dt, *step.rule):
            tensor[1:] = math.nan
        conv, y, o = step.run(index(2, -1, -1), index(2, 4, -1, -1, -1, -1).view(3, 2))
        expected = fresh.run(index(2), index(2, 4)[None], rows=slice(0, 1))
        torch.testing.assert_close(conv[:1], expected[0], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(y[:1], expected[1], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(o[:1], expected[2], rtol=1e-14, atol=1e-14)
        assert torch.equal(step.windows, fresh.windows)
        torch.testing.assert_close(step.states, fresh.states, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(step.delta_states, fresh.delta_states, rtol=1e-14, atol=1e-14)


class Prefill:
    """Inputs of prefill rows after `starts` tokens, behind them `padding` (rows, tokens, chunks, entries)."""

    def __init__(self, starts, lengths, padding=(0, 0, 0, 0)) -> None:
        rows, tokens, chunks, entries = padding
        real = sum(lengths)
        total = real + tokens
        grid = prefill_chunks(starts, lengths, CHUNK)
        self.grid = grid
        self.raw, self.x, self.B, self.C, self.dt = (
            randn(100, *shape, seed=20 + i)[:total].clone()
            for i, shape in enumerate([(CONV,), (H, P), (G, N), (G, N), (H,)])
        )
        self.dt = self.dt.exp()
        self.rule = tuple(part[:total].clone() for part in rule_inputs(100))
        for packed in (self.raw, self.x, self.B, self.C, self.dt, *self.rule):
            packed[real:] = math.nan
        self.weight, self.bias = randn(CONV, KERNEL, seed=4), randn(CONV, seed=5)
        self.A, self.D = -randn(H, seed=6).exp(), randn(H, seed=7)
        self.windows, self.states = randn(40, CONV, KERNEL - 1, seed=8), randn(40, H, P, N, seed=9)
        self.delta_states = randn(40, *DELTA, seed=10)

        n = len(starts)
        none = [-1] * rows
        self.sources = index(*(row if start else -1 for row, start in enumerate(starts)), *none)
        self.destinations = index(*(10 + row for row in range(n)), *none)
        self.query_start_loc = index(*grid.query_start_loc.tolist(), *[real] * rows)
        self.token_rows = index(*grid.token_rows.tolist(), *[-1] * tokens)
        count = len(grid.seq_idx)
        self.cu = torch.cat([grid.cu_chunk_seqlens, grid.cu_chunk_seqlens[-1:].expand(chunks)])
        self.seq_idx = torch.cat([grid.seq_idx, torch.zeros(chunks, dtype=torch.int32)])
        self.row_starts = torch.cat([grid.row_chunk_starts, grid.row_chunk_starts[-1:].expand(rows)])
        inner = [i for i in range(count) if i + 1 < count and grid.seq_idx[i] == grid.seq_idx[i + 1]]
        stored = [20 + i if i in inner else -1 for i in range(count)]
        self.chunk_destinations = index(*stored, *[-1] * chunks)
        self.cp_rows = index(*(int(grid.seq_idx[i]) for i in inner), *[-1] * entries)
        self.cp_ends = index(*(int(grid.cu_chunk_seqlens[i + 1]) for i in inner), *[0] * entries)
        self.cp_destinations = index(*(20 + i for i in inner), *[-1] * entries)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        conv = KernelSet.causal_conv1d_prefill(
            self.raw, self.weight, self.bias, self.windows,
            ConvRows(
                self.sources, self.destinations, self.query_start_loc, self.token_rows,
                self.cp_rows, self.cp_ends, self.cp_destinations,
            ),
        )  # fmt: skip
        rows = ScanRows(
            self.sources, self.destinations, CHUNK, self.cu, self.seq_idx, self.row_starts,
            self.chunk_destinations,
        )  # fmt: skip
        y = KernelSet.ssd_chunk_scan(self.x, self.dt, self.A, self.B, self.C, self.D, self.states, rows)
        o = KernelSet.gated_delta_rule_scan(*self.rule, self.delta_states, rows)
        return conv, y, o


class TestPaddedPrefill:
    @repeatable
    @given(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=3),
        st.tuples(*[st.integers(0, 4)] * 4),
    )
    def test_padding_of_every_kind_changes_no_bit(self, rows, padding):
        starts, lengths = zip(*rows, strict=True)
        plain, padded = Prefill(starts, lengths), Prefill(starts, lengths, padding)
        for expected, got in zip(plain.run(), padded.run(), strict=True):
            assert got.shape[0] == sum(lengths) + padding[1]
            assert torch.equal(got[: sum(lengths)], expected)
        assert torch.equal(padded.windows, plain.windows)
        assert torch.equal(padded.states, plain.states)
        assert torch.equal(padded.delta_states, plain.delta_states)

    def test_nothing_but_padding_is_a_step_that_does_nothing(self):
        step = Prefill([], [], (3, 5, 2, 2))
        pools = (step.windows, step.states, step.delta_states)
        before = [pool.clone() for pool in pools]
        step.run()
        for pool, unchanged in zip(pools, before, strict=True):
            assert torch.equal(pool, unchanged)

    def test_a_row_without_tokens_passes_its_state_on(self):
        step = Prefill([3, 5], [0, 9])
        step.run()
        assert torch.equal(step.states[10], step.states[0])
        assert torch.equal(step.delta_states[10], step.delta_states[0])
        assert torch.equal(step.windows[10], step.windows[0])


class TestPaddedAttention:
    BLOCK, KV_HEADS, HEADS, DIM = 4, 2, 4, 6

    @pytest.fixture
    def cache(self) -> Tensor:
        """Ten blocks; the last, where no request's tokens are, holds no numbers."""
        cache = randn(2, 10, self.BLOCK, self.KV_HEADS, self.DIM, seed=1)
        cache[:, 9] = math.nan
        return cache

    def test_positions_of_minus_one_are_not_written(self, cache):
        before = cache.clone()
        keys, values = randn(4, 2, 6, seed=2), randn(4, 2, 6, seed=3)
        KernelSet.write_kv(cache, keys, values, index(0, 3, 0), index(-1, 5, -1))
        assert torch.equal(cache[0, 1, 1], keys[3])
        cache[:, 1, 1] = before[:, 1, 1]
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)
