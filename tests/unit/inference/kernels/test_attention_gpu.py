"""Attention on a GPU, by FlashAttention-3 where it can serve, against the definition in float64.

The cache, queries and outputs have 16 bits. Weights of sums and outputs are rounded to them; products are
summed in float32.
"""

import math

import pytest
import torch
from mambaslots.inference.kernels import attention, attention_segments
from mambaslots.inference.kernels.write_kv import write_kv
from oracle.attention_batch import AttentionBatch, Padding
from oracle.synchronisation import no_synchronisation

pytestmark = pytest.mark.gpu
KINDS = [(torch.bfloat16, block) for block in (16, 32, 48, 64, 128, 256)]
KINDS += [(torch.float16, block) for block in (16, 256)]
FLOAT32 = 1e-5
"""Errors of sums and exponentials in float32, of outputs near 1."""
PADDING = Padding(decodes=2, prefills=1, tokens=5, columns=3)


@pytest.fixture
def flash() -> None:
    reason = attention.flash_rejection(torch.device("cuda"), torch.bfloat16, 128)
    if reason:
        pytest.skip(reason)


def check(batch: AttentionBatch, scale: float | None = None) -> torch.Tensor:
    out = attention.paged_attention(batch.query, batch.cache, batch.rows, scale=scale)
    assert_exact(batch, out, scale)
    return out


def assert_exact(batch: AttentionBatch, out: torch.Tensor, scale: float | None = None) -> None:
    error = (batch.real_tokens(out) - batch.exact(scale)).abs()
    unit = torch.finfo(out.dtype).eps / 2
    assert (error <= batch.rounding_error(unit, scale) + FLOAT32).all(), float(error.max())


@pytest.mark.usefixtures("flash")
class TestFlashAttention:
    """Rows never written hold zeros, as `write_kv` leaves them; blocks that no row holds are NaN."""

    @pytest.mark.parametrize(("dtype", "block"), KINDS)
    @pytest.mark.parametrize(
        "sizes",
        [
            (8, 2, 64),
            (8, 8, 64),
            (32, 8, 128),
            (6, 1, 128),
            (16, 2, 256),
            (4, 2, 32),
            (8, 2, 80),
            (4, 4, 192),
        ],
    )
    def test_decodes_and_prefills_with_resumed_prefixes(self, sizes, block, dtype):
        batch = AttentionBatch(
            [(0, 1), (299, 1), (1000, 1)], [(0, 200), (512, 77), (31, 1), (256, 256)], padding=PADDING,
            sizes=sizes, block=block, dtype=dtype, device="cuda", unwritten=0.0,
        )  # fmt: skip
        check(batch)
        check(batch, 0.03)

    @pytest.mark.parametrize("block", [16, 128, 256])
    @pytest.mark.parametrize("sizes", [(8, 2, 64), (32, 8, 128), (16, 2, 256)])
    def test_drafts_with_padding_behind_them(self, sizes, block):
        decodes = [(300, 4), (299, 2), (0, 1), (700, 3), (255, 4)]
        for prefills in ([], [(256, 60), (0, 130)]):
            batch = AttentionBatch(
                decodes, prefills, decode_tokens=4, padding=PADDING if prefills else Padding(decodes=3),
                sizes=sizes, block=block, dtype=torch.bfloat16, device="cuda", unwritten=0.0,
            )  # fmt: skip
            check(batch)

    @pytest.mark.parametrize("decodes", [[(3000, 1)] * 32, [(5000, 1)], [(40_000, 1), (7, 1)]])
    def test_long_decodes_are_cut_into_splits(self, decodes):
        batch = AttentionBatch(
            decodes, sizes=(32, 8, 128), block=256, dtype=torch.bfloat16, device="cuda", unwritten=0.0
        )
        check(batch)

    def test_a_graph_follows_its_indices(self):
        """Captured as padding only, launched with rows, without synchronising."""
        plans = [
            AttentionBatch(
                decodes, prefills, decode_tokens=2, padding=padding, sizes=(8, 2, 128), block=64,
                dtype=torch.bfloat16, device="cuda", unwritten=0.0,
            )
            for decodes, prefills, padding in (
                ([(300, 2), (9, 1)], [(64, 36)], Padding(2, 1, 64, 3)),
                ([(130, 1), (0, 1), (7, 2)], [(0, 33), (70, 50)], Padding(1, 0, 17, 6)),
            )
        ]  # fmt: skip
        first = plans[0]
        columns = max(plan.rows.block_table.shape[1] for plan in plans)
        blocks = max(plan.cache.shape[1] for plan in plans)
        table = torch.zeros(6, columns, dtype=torch.int32, device="cuda")
        static = first.rows._replace(
            block_table=table,
            **{name: torch.zeros_like(getattr(first.rows, name)) for name in TENSORS},
            max_query_tokens=200,
        )
        cache = first.cache.new_full((2, blocks, *first.cache.shape[2:]), math.nan)
        query = torch.zeros_like(first.query)
        attention.paged_attention(query, cache, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention.paged_attention(query, cache, static)
        for plan in plans:
            assert plan.query.shape == query.shape
            with no_synchronisation():
                cache[:, : plan.cache.shape[1]].copy_(plan.cache)
                query.copy_(plan.query)
                table.zero_()
                table[:, : plan.rows.block_table.shape[1]].copy_(plan.rows.block_table)
                for name in TENSORS:
                    getattr(static, name).copy_(getattr(plan.rows, name))
                graph.replay()
            assert_exact(plan, out)

    @pytest.mark.parametrize("block", [16, 64, 128, 256])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_nan_in_the_kv_of_an_invalid_request_reaches_no_other(self, head_dim, block):
        """A request whose KV is NaN leaves; another gets its blocks, and writes 5 tokens into each second."""
        generator = torch.Generator("cuda").manual_seed(0)
        cache = torch.full((2, 8, block, 2, head_dim), math.nan, dtype=torch.bfloat16, device="cuda")
        tokens = block + 5
        keys, values, query = torch.randn(3, 2 * tokens, 2, head_dim, generator=generator, device="cuda").to(
            torch.bfloat16
        )
        table = torch.tensor([[6, 3], [1, 4]], dtype=torch.int32, device="cuda")
        at = torch.arange(tokens, device="cuda")
        places = (table[:, at // block].long() * block + at % block).flatten()
        write_kv(cache, keys, values, torch.arange(2 * tokens, device="cuda"), places)
        assert cache[:, table.flatten().long()].isfinite().all()
        rows = prefill_rows(table, tokens)
        out = attention.paged_attention(query, cache, rows)
        for row in range(2):
            part = slice(row * tokens, (row + 1) * tokens)
            expected = torch.nn.functional.scaled_dot_product_attention(
                *(x[part].double().transpose(0, 1) for x in (query, keys, values)), is_causal=True
            ).transpose(0, 1)
            torch.testing.assert_close(out[part].double(), expected, rtol=2**-8, atol=2**-7)

    def test_with_batch_invariance_a_row_has_the_same_bits_alone_and_in_company(self, monkeypatch):
        monkeypatch.setattr(attention_segments, "num_segments", lambda *_: 1)
        sizes, block = (32, 8, 128), 256
        batch = AttentionBatch(
            [(999, 1), (3000, 1)], [(512, 100), (0, 300)], sizes=sizes, block=block, dtype=torch.bfloat16,
            device="cuda", unwritten=0.0,
        )  # fmt: skip
        batch.rows = batch.rows._replace(batch_invariant=True)
        together = check(batch)
        for row, part in ((0, slice(0, 1)), (1, slice(1, 2)), (2, slice(2, 102)), (3, slice(102, 402))):
            length = part.stop - part.start
            rows = prefill_rows(batch.rows.block_table[row : row + 1], length)
            rows = rows._replace(kv_lengths=batch.rows.kv_lengths[row : row + 1], batch_invariant=True)
            alone = attention.paged_attention(batch.query[part], batch.cache, rows)
            assert torch.equal(alone, together[part])


def prefill_rows(table: torch.Tensor, tokens: int) -> attention.AttentionRows:
    """Rows of `tokens` tokens each, from their sequences' first token on."""
    count = len(table)
    lengths = torch.full((count,), tokens, dtype=torch.int32, device=table.device)
    return attention.AttentionRows(
        block_table=table.contiguous(),
        kv_lengths=lengths,
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=table.device) * tokens,
        query_lengths=lengths,
        positions=torch.arange(tokens, device=table.device).repeat(count),
        num_decodes=0,
        decode_tokens=1,
        max_query_tokens=tokens,
    )


TENSORS = ("kv_lengths", "query_start_loc", "query_lengths", "positions")


class TestTorchOperations:
    """What a GPU without FlashAttention-3 runs, on memory that is NaN wherever nothing was written."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("sizes", [(8, 2, 64), (4, 4, 40), (16, 2, 256)])
    def test_16_bit_products_are_summed_in_float32(self, sizes, dtype):
        batch = AttentionBatch(
            [(300, 3), (999, 1), (0, 2)], [(0, 200), (512, 77)], decode_tokens=3, padding=PADDING,
            sizes=sizes, block=32, dtype=dtype, device="cuda",
        )  # fmt: skip
        for scale in (None, 0.03):
            out = attention.torch_attention(batch.query, batch.cache, batch.rows, scale)
            assert_exact(batch, out, scale)

    def test_float32_is_multiplied_as_it_is(self):
        batch = AttentionBatch(
            [(300, 1)], [(0, 200), (512, 77)], sizes=(8, 2, 64), block=32, dtype=torch.float32, device="cuda"
        )
        assert attention.flash_rejection(torch.device("cuda"), torch.float32, 64)
        out = attention.paged_attention(batch.query, batch.cache, batch.rows)
        assert_exact(batch, out)


def test_the_description_names_the_backend_and_what_a_better_one_lacks():
    device = torch.device("cuda")
    said = attention.describe(device, torch.bfloat16, 20)
    assert said.startswith("attention: torch operations in bfloat16; FlashAttention-3 needs ")
    if not attention.flash_rejection(device, torch.bfloat16, 128):
        assert attention.describe(device, torch.bfloat16, 128) == "attention: FlashAttention-3"
