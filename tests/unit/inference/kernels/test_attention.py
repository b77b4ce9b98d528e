"""Attention on a GPU: torch with static shapes against the reference, and the choice of flash_attn.

flash_attn itself has not been run: what stands in for it has its names and signatures, and checks its rules.
"""

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import attention_flash, attention_torch
from mambaslots.inference.kernels import reference as ref
from torch import Tensor

SIZES = (4, 2, 8)
"""Heads, KV heads and head dim of most tests."""
repeatable = settings(derandomize=True)


class Batch:
    """Rows of (tokens before, new tokens) in blocks scattered over a cache; NaN where nothing was written."""

    def __init__(
        self, rows: list[tuple[int, int]], block: int, dtype: torch.dtype, device: str = "cpu",
        padding: tuple[int, int, int] = (0, 0, 0), sizes: tuple[int, int, int] = SIZES,
    ) -> None:  # fmt: skip
        """`padding`: rows, tokens and columns of the block table; `sizes`: heads, KV heads and head dim."""
        heads, kv_heads, head_dim = sizes
        generator = torch.Generator().manual_seed(sum(a + b for a, b in rows))

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        lengths = [before + new for before, new in rows]
        counts = [-(-length // block) for length in lengths]
        free = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        self.spare = free.pop()
        cache = torch.full((2, sum(counts) + 1, block, kv_heads, head_dim), math.nan, dtype=dtype)
        table = torch.zeros(len(rows) + padding[0], max(counts, default=0) + padding[2], dtype=torch.int64)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = [free.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(blocks, dtype=torch.int64)
            for position in range(length):
                cache[:, blocks[position // block], position % block] = randn(2, kv_heads, head_dim)
        news = [new for _, new in rows]
        starts = [sum(news[:row]) for row in range(len(rows) + 1)]
        self.tokens = sum(news)
        query = torch.cat([
            randn(self.tokens, heads, head_dim), torch.full((padding[1], heads, head_dim), math.nan)
        ])  # fmt: skip
        self.max_query_tokens = max(news, default=0)
        self.cache, self.table, self.query = cache.to(device), table.to(device), query.to(device, dtype)
        self.starts = torch.tensor([*starts, *[starts[-1]] * padding[0]], device=device)
        self.lengths = torch.tensor([*lengths, *[0] * padding[0]], device=device)

    def prefill(self, function: Any, max_query_tokens: int | None = None, **options: Any) -> Tensor:
        longest = self.max_query_tokens if max_query_tokens is None else max_query_tokens
        out: Tensor = function(
            self.query, self.cache, self.table, self.starts, self.lengths, longest, **options
        )
        assert out.shape == self.query.shape
        return out[: self.tokens]

    def decode(self, function: Any, **options: Any) -> Tensor:
        """One query a row: as many rows as queries."""
        out: Tensor = function(self.query, self.cache, self.table, self.lengths, **options)
        return out[: self.tokens]

    def naive(self, scale: float | None) -> Tensor:
        """Query by query and head by head, in float64."""
        _, heads, head_dim = self.query.shape
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        out = torch.zeros(self.tokens, heads, head_dim, dtype=torch.float64)
        block, kv_heads = self.cache.shape[2:4]
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        for row, table in enumerate(self.table.tolist()):
            for token in range(starts[row], starts[row + 1]):
                position = lengths[row] - (starts[row + 1] - token)
                places = [(table[at // block], at % block) for at in range(position + 1)]
                for head in range(heads):
                    kv_head = head * kv_heads // heads
                    keys, values = (
                        torch.stack([part[where][kv_head] for where in places]).cpu().double()
                        for part in self.cache
                    )
                    scores = keys @ self.query[token, head].cpu().double() * scale
                    out[token, head] = scores.softmax(0) @ values
        return out


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """So that few tokens take many tiles, segments and groups."""
    monkeypatch.setattr(attention_torch, "_TILE_TOKENS", 4)
    monkeypatch.setattr(attention_torch, "_SEGMENT_TOKENS", 8)
    monkeypatch.setattr(attention_torch, "_SCRATCH_BYTES", 10_000)


@pytest.mark.usefixtures("small_tiles")
class TestStaticShapes:
    @repeatable
    @given(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 14)), min_size=1, max_size=4),
        st.sampled_from([1, 4, 5, 16]),
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 4)),
    )
    def test_prefill_is_the_references_in_whatever_padding(self, rows, block, padding):
        plain, padded = Batch(rows, block, torch.float64), Batch(rows, block, torch.float64, "cpu", padding)
        expected = plain.prefill(ref.paged_attention_prefill)
        for longest in (padded.max_query_tokens, padded.max_query_tokens + padding[1], 100):
            out = padded.prefill(attention_torch.paged_attention_prefill, longest)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)

    @repeatable
    @given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 3), st.integers(0, 4))
    def test_decode_is_the_references_in_whatever_padding(self, before, rows, columns):
        batch = [(n, 1) for n in before]
        expected = Batch(batch, 4, torch.float64).decode(ref.paged_attention_decode)
        padded = Batch(batch, 4, torch.float64, "cpu", (rows, rows, columns))
        out = padded.decode(attention_torch.paged_attention_decode)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_computed_in_float32_or_wider(self, device, dtype):
        batch = Batch([(17, 9), (0, 1), (5, 14)], 4, dtype, device)
        exact = Batch([(17, 9), (0, 1), (5, 14)], 4, dtype)
        exact.query, exact.cache = exact.query.double(), exact.cache.double()
        out = batch.prefill(attention_torch.paged_attention_prefill)
        assert out.dtype == torch.float32
        expected = exact.prefill(ref.paged_attention_prefill)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)

    def test_no_operation_reads_a_value_back(self):
        """Where shapes depend on values a graph cannot be captured."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.name()
                assert not any(word in name for word in ("_local_scalar", "nonzero", "item", "masked_select"))
                return func(*args, **(kwargs or {}))

        batch = Batch([(17, 9), (0, 1)], 4, torch.float32, "cpu", (2, 3, 1))
        with Watch():
            batch.prefill(attention_torch.paged_attention_prefill)
            attention_torch.paged_attention_decode(
                batch.query[: len(batch.table)], batch.cache, batch.table, batch.lengths
            )

    def test_padding_rows_and_tokens_give_zeros(self):
        batch = Batch([(17, 9)], 4, torch.float32, "cpu", (2, 3, 1))
        out = attention_torch.paged_attention_prefill(
            batch.query, batch.cache, batch.table, batch.starts, batch.lengths, 9
        )
        assert out[9:].count_nonzero() == 0


class TestHeads:
    """Heads of 64 to 256 numbers; each has its own KV, several share one, or all share one."""

    ROWS = ((9, 3), (0, 5), (4, 1))

    @pytest.mark.sampled
    @pytest.mark.parametrize("kernels", [ref, attention_torch], ids=["reference", "torch"])
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
    @pytest.mark.parametrize("scale", [None, 0.03])
    def test_every_kernel_is_the_definition(self, device, kernels, head_dim, heads, scale):
        batch = Batch(list(self.ROWS), 4, torch.float32, device, sizes=(*heads, head_dim))
        expected = batch.naive(scale)
        out = batch.prefill(kernels.paged_attention_prefill, scale=scale)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)

        decodes = Batch([(9, 1), (4, 1)], 4, torch.float32, device, sizes=(*heads, head_dim))
        out = decodes.decode(kernels.paged_attention_decode, scale=scale)
        torch.testing.assert_close(out.cpu().double(), decodes.naive(scale), rtol=1e-5, atol=1e-5)

        drafts = Batch([(9, 3), (2, 3)], 4, torch.float32, device, sizes=(*heads, head_dim))
        positions = torch.tensor([[9, 10, 11], [2, 3, 4]], device=device)
        out = kernels.paged_attention_verify(
            drafts.query.unflatten(0, (2, 3)), drafts.cache, drafts.table, drafts.lengths, positions,
            scale=scale,
        )  # fmt: skip
        expected = drafts.naive(scale)
        torch.testing.assert_close(out.flatten(0, 1).cpu().double(), expected, rtol=1e-5, atol=1e-5)


class FlashAttn(SimpleNamespace):
    """Has flash_attn's names and signatures (2.8), and checks what it demands; computes by the reference."""

    calls = 0

    def _check(self, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor) -> None:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert k.shape == v.shape
        assert k.shape[1] % 256 == 0
        assert block_table.dtype == torch.int32
        assert q.stride(-1) == k.stride(-1) == block_table.stride(-1) == 1
        self.calls += 1

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        self._check(q, k_cache, v_cache, block_table)
        assert cache_seqlens.dtype == torch.int32
        assert (k, v) == (None, None)
        assert causal or q.shape[1] == 1
        cache = torch.stack([k_cache, v_cache])
        out = ref.paged_attention_decode(
            q[:, 0], cache, block_table.long(), cache_seqlens.long(), scale=softmax_scale
        )
        return out.to(q.dtype)[:, None]

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        self._check(q, k, v, block_table)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.shape == cu_seqlens_k.shape == (block_table.shape[0] + 1,)
        assert causal
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        assert cu_seqlens_k.diff().max() <= max_seqlen_k
        cache = torch.stack([k, v])
        starts, lengths = cu_seqlens_q.long(), cu_seqlens_k.diff().long()
        out = ref.paged_attention_prefill(
            q, cache, block_table.long(), starts, lengths, max_seqlen_q, scale=softmax_scale
        )
        return out.to(q.dtype)


class TestFlashAttn:
    @pytest.fixture
    def flash(self, monkeypatch) -> FlashAttn:
        module = FlashAttn()
        monkeypatch.setattr(attention_flash, "_installed_flash_attn", lambda: module)
        return module

    def test_both_calls_where_it_fits(self, flash):
        batch = Batch([(300, 9), (0, 1), (3, 0)], 256, torch.bfloat16)
        out = batch.prefill(attention_flash.paged_attention_prefill)
        expected = batch.prefill(ref.paged_attention_prefill)
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
        decodes = Batch([(300, 1), (2, 1)], 256, torch.bfloat16)
        out = decodes.decode(attention_flash.paged_attention_decode)
        expected = decodes.decode(ref.paged_attention_decode)
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
        assert flash.calls == 2

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    def test_a_scale_and_the_widths_that_it_takes(self, flash, head_dim):
        batch = Batch([(20, 3)], 256, torch.bfloat16, sizes=(4, 1, head_dim))
        out = batch.prefill(attention_flash.paged_attention_prefill, scale=0.03)
        torch.testing.assert_close(out.double(), batch.naive(0.03), rtol=1e-2, atol=1e-2)
        positions = torch.tensor([[20, 21, 22]])
        out = attention_flash.paged_attention_verify(
            batch.query[None], batch.cache, batch.table, batch.lengths, positions, scale=0.03
        )
        torch.testing.assert_close(out[0].double(), batch.naive(0.03), rtol=1e-2, atol=1e-2)
        assert flash.calls == 2

    def test_queries_in_float32_are_rounded_to_the_cache(self, flash):
        batch = Batch([(20, 3)], 256, torch.bfloat16)
        batch.query = batch.query.float()
        assert batch.prefill(attention_flash.paged_attention_prefill).dtype == torch.bfloat16
        assert flash.calls == 1

    @pytest.mark.parametrize(
        ("dtype", "block"), [(torch.float32, 256), (torch.float64, 256), (torch.bfloat16, 128)]
    )
    def test_torch_where_it_does_not_fit(self, flash, dtype, block):
        batch = Batch([(20, 3)], block, dtype)
        out = batch.prefill(attention_flash.paged_attention_prefill)
        torch.testing.assert_close(out, batch.prefill(ref.paged_attention_prefill), rtol=1e-4, atol=1e-4)
        batch.query = batch.query[:1]
        batch.tokens = 1
        batch.decode(attention_flash.paged_attention_decode)
        assert flash.calls == 0

    def test_torch_where_it_is_not_installed(self):
        assert attention_flash.flash_attn_for(torch.zeros(2, 1, 256, 2, 8, dtype=torch.bfloat16)) is None

    def test_the_module_imports_it_only_when_asked(self):
        module = "mambaslots.inference.kernels.attention_flash"
        code = f"import sys, {module}; sys.exit('flash_attn' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
