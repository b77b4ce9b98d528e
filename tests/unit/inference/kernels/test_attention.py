"""Attention against its definition in float64, and the choice of a backend.

What stands in for FlashAttention-3 has the operator's own schema, and checks what the kernels demand.
`test_attention_gpu.py` runs the kernels.
"""

import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import attention, attention_segments
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import AttentionRows
from mambaslots.inference.kernels.write_kv import write_kv
from oracle.attention_batch import AttentionBatch, Padding
from oracle.fresh_process import run_code
from torch import Tensor

repeatable = settings(derandomize=True)
CUDA = torch.device("cuda")
UNIT = 2.0**-8
"""The largest relative error of rounding to bfloat16."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    rejection = attention.flash_rejection  # tests replace it
    yield
    rejection.cache_clear()


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """So that few tokens take many tiles, segments and groups."""
    monkeypatch.setattr(attention, "_TILE_TOKENS", 4)
    monkeypatch.setattr(attention, "_SEGMENT_TOKENS", 8)
    monkeypatch.setattr(attention, "_SCRATCH_BYTES", 10_000)


def by_torch(query: Tensor, cache: Tensor, rows: AttentionRows, *, scale: float | None = None) -> Tensor:
    return attention.torch_attention(query, cache, rows, scale)


KERNELS = pytest.mark.parametrize("kernel", [KernelSet.paged_attention, by_torch], ids=["reference", "torch"])


@st.composite
def batches(draw: st.DrawFn, **options: Any) -> AttentionBatch:
    """Decodes of one token or with drafts, prefills with or without a prefix, padding of each kind."""
    width = draw(st.sampled_from([1, 1, 2, 4]))
    decodes = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, width)), max_size=4))
    least = 0 if decodes else 1
    prefills = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 14)), min_size=least, max_size=4))
    if not decodes and not any(new for _, new in prefills):
        prefills[0] = (prefills[0][0], 1)
    padding = Padding(
        draw(st.integers(0, 2)) if decodes else 0,
        draw(st.integers(0, 2)) if prefills else 0,
        draw(st.integers(0, 9)) if prefills else 0,
        draw(st.integers(0, 3)),
    )
    block = draw(st.sampled_from([1, 4, 5, 16]))
    return AttentionBatch(decodes, prefills, decode_tokens=width, padding=padding, block=block, **options)


@pytest.mark.usefixtures("small_tiles")
class TestDefinition:
    @KERNELS
    @repeatable
    @given(batch=batches())
    def test_every_mix_of_rows_in_whatever_padding(self, kernel, batch):
        out = batch.real_tokens(kernel(batch.query, batch.cache, batch.rows))
        torch.testing.assert_close(out, batch.exact(), rtol=0, atol=1e-13)

    @pytest.mark.sampled
    @KERNELS
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
    @pytest.mark.parametrize("scale", [None, 0.03])
    def test_heads_of_64_to_256_numbers_that_share_their_kv_or_not(
        self, device, kernel, head_dim, heads, scale
    ):
        batch = AttentionBatch(
            [(9, 3), (4, 1)], [(9, 3), (0, 5), (4, 1)], decode_tokens=3, dtype=torch.float32, device=device,
            sizes=(*heads, head_dim),
        )  # fmt: skip
        out = batch.real_tokens(kernel(batch.query, batch.cache, batch.rows, scale=scale))
        torch.testing.assert_close(out, batch.exact(scale), rtol=1e-5, atol=1e-5)

    @KERNELS
    @pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_computed_in_float32_and_rounded_once_to_the_dtype_of_the_query(
        self, device, kernel, query_dtype
    ):
        batch = AttentionBatch(
            [(9, 1), (0, 1)], [(17, 9), (0, 1), (5, 14)], dtype=torch.bfloat16, device=device,
            query_dtype=query_dtype,
        )  # fmt: skip
        out = batch.real_tokens(kernel(batch.query, batch.cache, batch.rows))
        unit = torch.finfo(query_dtype).eps
        products = device == "cuda" and kernel is by_torch and query_dtype == torch.bfloat16
        tolerance = UNIT if products else max(unit / 2, 1e-5)  # weights of 16 bits on a GPU
        torch.testing.assert_close(out, batch.exact(), rtol=tolerance, atol=max(1e-5, tolerance * products))


class TestTorchOperations:
    def test_no_operation_reads_a_value_back(self):
        """Where shapes depend on values a graph cannot be captured."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.name()
                assert not any(word in name for word in ("_local_scalar", "nonzero", "item", "masked_select"))
                return func(*args, **(kwargs or {}))

        batch = AttentionBatch(
            [(3, 2), (6, 1)],
            [(17, 9), (0, 1)],
            decode_tokens=2,
            dtype=torch.float32,
            padding=Padding(2, 2, 3, 1),
        )
        with Watch():
            by_torch(batch.query, batch.cache, batch.rows)

    def test_padding_rows_and_padding_tokens_of_prefills_give_zeros(self):
        batch = AttentionBatch(
            [(8, 1)], [(17, 9)], dtype=torch.float32, padding=Padding(decodes=2, prefills=2, tokens=3)
        )
        out = by_torch(batch.query.nan_to_num(), batch.cache, batch.rows)
        assert out[1:3].count_nonzero() == out[12:].count_nonzero() == 0


FLASH_SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,"
    "Tensor? q_v = None,Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,"
    "int? max_seqlen_q = None,int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,"
    "Tensor? leftpad_k = None,Tensor? rotary_cos = None,Tensor? rotary_sin = None,"
    "Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,"
    "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0,Tensor? sinks = None) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""Of `torch.ops.flash_attn_3.fwd` in tokenspeed-fa3 3.0.0.post20260810."""


class Flash:
    """Computes what FlashAttention-3 does: rows of a page that were never written are multiplied by 0."""

    def __init__(self) -> None:
        self.splits: list[int] = []

    def fwd(
        self, q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, *_,
    ):  # fmt: skip
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        for index in (cu_seqlens_q, seqused_q, seqused_k, page_table):
            assert index.dtype == torch.int32
            assert index.is_contiguous()
        assert cu_seqlens_q.shape == (len(page_table) + 1,)
        assert seqused_q.shape == seqused_k.shape == (len(page_table),)
        assert (seqused_q <= cu_seqlens_q.diff()).all()
        assert (seqused_q <= max_seqlen_q).all()
        result = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        result.fill_(math.nan)
        log_sums = torch.full((q.shape[1], len(q)), math.nan)
        starts = cu_seqlens_q.tolist()
        for row, (new, length) in enumerate(zip(seqused_q.tolist(), seqused_k.tolist(), strict=True)):
            pages = page_table[row, : -(-length // k.shape[1])]
            keys, values = (x[pages].flatten(0, 1).double().transpose(0, 1) for x in (k, v))
            mine = slice(starts[row], starts[row] + new)
            query = q[mine].double().unflatten(1, (k.shape[2], -1)).permute(1, 2, 0, 3)
            scores = query @ keys[:, None].mT * (softmax_scale or q.shape[2] ** -0.5)
            seen = torch.arange(keys.shape[1]) <= length - new + torch.arange(new)[:, None]
            if is_causal:
                scores = scores.masked_fill(~seen, -math.inf)
            weights = scores.softmax(-1)
            result[mine] = (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
            log_sums[:, mine] = scores.logsumexp(-1).flatten(0, 1).float()
        self.splits.append(num_splits)
        return result, log_sums, *q.new_empty(2, 0).unbind()


@pytest.fixture
def hopper(monkeypatch) -> None:
    """The choice of a backend sees a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def flash(monkeypatch, hopper) -> Iterator[Flash]:
    """The operator, under its schema, on the CPU; the package seems to be installed."""
    stand_in = Flash()
    library = torch.library.Library("mambaslots_tests", "DEF")
    library.define(FLASH_SCHEMA)
    library.impl("fwd", stand_in.fwd, "CPU")
    operators = SimpleNamespace(fwd=torch.ops.mambaslots_tests.fwd)
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    monkeypatch.setitem(sys.modules, attention.MODULE, ModuleType(attention.MODULE))
    yield stand_in
    library._destroy()


MIXES = {
    "decodes": {"decodes": [(300, 1), (0, 1), (5, 1)], "padding": Padding(decodes=2, columns=1)},
    "drafts with padding": {"decodes": [(9, 3), (3, 1), (7, 2)], "decode_tokens": 3},
    "prefills": {"prefills": [(0, 9), (300, 4), (8, 0)], "padding": Padding(prefills=1, tokens=3)},
    "all": {
        "decodes": [(9, 2), (14, 1)], "prefills": [(0, 9), (16, 4)], "decode_tokens": 2,
        "padding": Padding(2, 1, 3, 2),
    },
}  # fmt: skip
NARROW: dict[str, Any] = {"dtype": torch.bfloat16, "unwritten": 0.0}
mixes = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


class TestFlashAttention:
    @pytest.mark.sampled
    @mixes
    @pytest.mark.parametrize("block", [1, 16, 256])
    @pytest.mark.parametrize("scale", [None, 0.03])
    def test_all_rows_of_a_step_are_one_call(self, flash, mix, block, scale):
        batch = AttentionBatch(**mix, **NARROW, block=block, sizes=(4, 2, 64))
        out = attention.flash_attention(batch.query, batch.cache, batch.rows, scale)
        torch.testing.assert_close(batch.real_tokens(out), batch.exact(scale), rtol=UNIT, atol=0)
        assert flash.splits == [0]

    def test_queries_in_float32_are_rounded_to_the_cache(self, flash):
        batch = AttentionBatch([(20, 1)], [(3, 9)], **NARROW, query_dtype=torch.float32)
        out = attention.flash_attention(batch.query, batch.cache, batch.rows, None)
        assert out.dtype == torch.float32
        torch.testing.assert_close(batch.real_tokens(out), batch.exact(), rtol=UNIT, atol=0)

    @pytest.mark.parametrize("block", [4, 16])
    def test_nan_in_the_kv_of_an_invalid_request_reaches_no_other(self, flash, block):
        """All blocks were a request's whose KV is NaN; then two others get them, a step after a step."""
        if torch.cuda.is_available():
            pytest.skip("the interpreter runs where there is no GPU")
        batch = AttentionBatch([], [(0, 7), (0, 18)], **NARROW, block=block)
        rows, flat = batch.rows, batch.cache.flatten(1, 2)
        at = torch.arange(18)
        places = (rows.block_table.long() * block).repeat_interleave(block, 1)[:, :18] + at % block
        keys, values = flat[:, places].transpose(1, 0).unbind(1)
        batch.cache.fill_(math.nan)
        for cut in ([0, 5], [5, 7]), ([0, 9], [9, 18]):
            row = int(cut[1][1] == 18)
            for first, stop in cut:
                tokens = torch.arange(first, stop)
                write_kv(batch.cache, keys[row], values[row], tokens, places[row, first:stop])
        out = attention.flash_attention(batch.query, batch.cache, rows, None)
        torch.testing.assert_close(batch.real_tokens(out), batch.exact(), rtol=UNIT, atol=0)

    @mixes
    def test_with_batch_invariance_long_rows_are_cut_at_fixed_positions(self, flash, monkeypatch, mix):
        """Triton's interpreter cuts numbers off where it rounds to bfloat16."""
        monkeypatch.setattr(attention_segments, "SEGMENTS", attention_segments.Segments(128, 0, 128))
        batch = AttentionBatch(**mix, **NARROW, block=16, sizes=(4, 2, 64))
        rows = batch.rows._replace(batch_invariant=True)
        out = attention.flash_attention(batch.query, batch.cache, rows, 0.03)
        error = (batch.real_tokens(out) - batch.exact(0.03)).abs()
        assert (error <= 3 * batch.rounding_error(UNIT, 0.03)).all()
        is_long = rows.block_table.shape[1] > 128 // 16
        assert (len(flash.splits) > 1 or len(batch.rows.block_table) == 5) == is_long
        assert set(flash.splits) == {1}

    def test_with_batch_invariance_short_rows_and_other_block_sizes_are_one_call(self, flash):
        for block, tokens in ((256, attention_segments.SEGMENTS.short), (48, 5000)):
            batch = AttentionBatch([(tokens - 1, 1)], **NARROW, block=block)
            rows = batch.rows._replace(batch_invariant=True)
            out = attention.flash_attention(batch.query, batch.cache, rows, None)
            torch.testing.assert_close(batch.real_tokens(out), batch.exact(), rtol=UNIT, atol=0)
        assert flash.splits == [1, 1]


@pytest.mark.usefixtures("hopper")
class TestChoice:
    def described(self, dtype=torch.bfloat16, head_dim=128, device=CUDA) -> str:
        return attention.describe(device, dtype, head_dim)

    @pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_flash_attention_where_it_fits(self, flash, dtype, head_dim):
        assert self.described(dtype, head_dim) == "attention: FlashAttention-3"
        assert not attention.flash_rejection(CUDA, dtype, head_dim)

    def test_what_flash_attention_does_not_take(self, flash, monkeypatch):
        assert self.described(torch.float32) == (
            "attention: torch operations in float32; FlashAttention-3 needs KV in bfloat16 or float16, this "
            "is float32"
        )
        for head_dim in (20, 264):
            said = (
                f"FlashAttention-3 needs heads of at most 256 numbers, a multiple of 8, these have {head_dim}"
            )
            assert said in self.described(head_dim=head_dim)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        attention.flash_rejection.cache_clear()
        assert self.described() == (
            "attention: torch operations in bfloat16; FlashAttention-3 needs compute capability 9.0, this "
            "GPU has 8.0"
        )

    def test_a_package_that_is_not_installed_is_named_with_its_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, attention.MODULE, None)
        said = self.described()
        assert "; FlashAttention-3 cannot be imported (ModuleNotFoundError(" in said
        assert said.endswith(": pip install 'mambaslots[gpu]'")

    @pytest.mark.parametrize(
        "error",
        [ImportError("libcudart.so.13: cannot open\nmore"), OSError("undefined symbol"), RuntimeError()],
    )
    def test_a_package_that_cannot_be_imported_is_reported(self, monkeypatch, error):
        def broken(name: str) -> None:
            raise error

        monkeypatch.setattr(attention.importlib, "import_module", broken)
        assert f"; FlashAttention-3 cannot be imported ({error!r}): pip" in self.described()

    def test_a_package_without_its_operator_is_reported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, attention.MODULE, ModuleType(attention.MODULE))
        assert "FlashAttention-3 cannot be imported (AttributeError(" in self.described()

    def test_kernels_on_a_cpu_are_torch_operations(self):
        batch = AttentionBatch([(20, 1)], **NARROW)
        out = attention.paged_attention(batch.query, batch.cache, batch.rows)
        torch.testing.assert_close(batch.real_tokens(out), batch.exact(), rtol=UNIT, atol=0)


def test_the_kernels_import_the_package_only_when_asked():
    module = "mambaslots.inference.kernels.attention"
    code = f"import sys, {module}; sys.exit('flash_attn_interface' in sys.modules)"
    assert run_code(code).returncode == 0
