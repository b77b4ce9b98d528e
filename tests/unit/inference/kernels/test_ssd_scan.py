"""The SSD scan by slots against the recurrence, token by token in float64, and the torch reference."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import ssd as module
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.ssd import ssd_chunk_scan
from mambaslots.inference.kernels.step_rows import ScanRows
from oracle.budget import example_or_dear
from oracle.scan_rows import Row, drawn_rows, poisoned_pool, rows_of
from oracle.ssd import (
    DEVICES,
    Batch,
    Layer,
    kernel_device,
    poisoned_allocations,
    relative_error,
    same_bits,
)
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of

few = settings(example_or_dear(), derandomize=True)

NARROW = [torch.float16, torch.bfloat16]
"""Operands of 16 bits."""


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


def largest_rounding(dtype):
    """The largest relative error of one rounding; the interpreter cuts float32 to bfloat16."""
    cuts = dtype == torch.bfloat16 and not torch.cuda.is_available()
    return torch.finfo(dtype).eps / (1 if cuts else 2)


def scan(batch, pool, device, **options):
    """y and the pool after, on the CPU; `pool` stays."""
    pool = pool.to(device, copy=True)
    with poisoned_allocations():
        y = batch.scan(ssd_chunk_scan, pool, **options)
    return y, pool.cpu()


def scan_and_check(batch, pool, device, tolerance=1e-5, state_tolerance=None):
    y, after = scan(batch, pool, device)
    assert y.dtype == batch.layer.dtype
    batch.check(pool, after, y, tolerance, state_tolerance)
    return y, after


class TestValues:
    @few
    @given(drawn_rows(4), st.tuples(*[st.integers(0, 3)] * 3))
    @example([(0, 0, True, "elsewhere", False), (0, 0, False, "elsewhere", False)], (0, 0, 0))
    @example([(3, 0, True, "in place", False), (16, 32, True, "in place", True)], (2, 3, 1))
    def test_any_layout_is_the_recurrence_and_the_reference(self, device, drawn, padding):
        layer = Layer()
        rows = rows_of(drawn, 16)
        batch = Batch(layer, rows, 16, padding)
        before = poisoned_pool(layer, rows, 4 * len(rows))
        y, pool = scan_and_check(batch, before, device)

        reference_pool = before.clone()
        expected = batch.scan(KernelSet.ssd_chunk_scan, reference_pool)
        assert relative_error(y[: batch.tokens], expected[: batch.tokens]) <= 1e-5
        assert torch.equal(pool.isnan(), reference_pool.isnan())
        assert relative_error(pool.nan_to_num(), reference_pool.nan_to_num()) <= 1e-5

    @pytest.mark.sampled(chunk_size=(16,))
    @pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 256])
    def test_any_chunk_size_and_single_tokens(self, device, chunk_size):
        layer = Layer(H=2, G=1)
        rows = [
            Row(0, chunk_size - 1, 1, source=0, destination=1),
            Row(1, 2 * chunk_size - 1, 2, source=2, destination=3, checkpoints={2 * chunk_size: 4}),
            Row(2, 0, chunk_size + 1, destination=5, checkpoints={chunk_size: 6}),
            Row(3, 7, 1, source=8, destination=8),
        ]
        scan_and_check(Batch(layer, rows, chunk_size, (1, 1, 1)), poisoned_pool(layer, rows, 9), device)

    @pytest.mark.parametrize(
        "layer", [Layer(H=2, P=80, G=1, N=33), Layer(H=3, P=1, G=3, N=1), Layer(H=2, P=20, G=1, N=64)]
    )
    def test_sizes_that_fill_no_block(self, device, layer):
        rows = [Row(0, 3, 30, source=1, destination=2, checkpoints={16: 3})]
        scan_and_check(Batch(layer, rows, 16), poisoned_pool(layer, rows, 4), device)

    @pytest.mark.sampled(dtype=1, layer=1)
    @pytest.mark.parametrize("dtype", NARROW)
    @pytest.mark.parametrize("layer", [(4, 8, 2, 12), (2, 64, 1, 128)])
    def test_narrow_inputs_are_multiplied_as_they_are(self, device, dtype, layer):
        """Rounded once: a factor of the states; of an output also a state, the scores and itself."""
        layer, unit = Layer(*layer, dtype=dtype), largest_rounding(dtype)
        rows = [Row(0, 5, 40, 0, 1, {32: 2}), Row(1, 16, 1, 3, 3), Row(2, 0, 35, -1, 4, {16: 5})]
        pool = poisoned_pool(layer, rows, 6)
        scan_and_check(Batch(layer, rows, 16, (1, 1, 1)), pool, device, 4 * unit, unit)

    @pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-11)])
    def test_narrow_inputs_are_widened_for_products(self, device, monkeypatch, dtype, rounding):
        """Nothing but outputs is rounded; to bfloat16 the interpreter cuts float32, where a GPU rounds."""
        monkeypatch.setattr(module, "operand_dtype", lambda _: torch.float32)
        layer = Layer(dtype=dtype)
        rows = [Row(0, 5, 40, source=0, destination=1, checkpoints={32: 2})]
        pool = poisoned_pool(layer, rows, 3)
        scan_and_check(Batch(layer, rows, 16), pool, device, rounding, 1e-5)

    # The interpreter cuts float32 to bfloat16, where a GPU rounds.
    @pytest.mark.parametrize(("stored", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-12)])
    def test_a_narrow_pool_rounds_what_it_stores_and_nothing_else(self, device, stored, rounding):
        layer = Layer()
        rows = [Row(0, 5, 40, source=0, destination=1, checkpoints={32: 2}), Row(1, 0, 3, destination=3)]
        pool = poisoned_pool(layer, rows, 4, stored)
        scan_and_check(Batch(layer, rows, 16), pool, device, state_tolerance=rounding)


class TestBits:
    """The same inputs and cuts on the chunk grid: the same bits, in any company and in several calls."""

    @pytest.mark.sampled(dtype=(torch.float16,))
    @pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
    @few
    @given(st.integers(0, 20), st.integers(1, 50), st.integers(0, 2), st.booleans())
    @example(5, 50, 1, True)
    def test_a_cut_on_the_grid_changes_no_bits(self, device, dtype, start, length, at, in_place):
        layer = Layer(H=2, dtype=dtype)
        end = start + length
        cut = min(end, (start // 16 + 1 + at) * 16)
        pool = layer.pool(8)
        y, uncut = scan(Batch(layer, [Row(0, start, length, 0, 1, {cut: 2})], 16), pool, device)

        middle = 0 if in_place else 3
        other = Row(1, 3, 20, source=5, destination=6)
        first, pool = scan(Batch(layer, [other, Row(0, start, cut - start, 0, middle)], 16), pool, device)
        resumed = Batch(layer, [Row(0, cut, end - cut, middle, 4), other], 16, (1, 2, 3))
        second, final = scan(resumed, pool, device)
        assert same_bits(pool[middle], uncut[2] if cut % 16 == 0 else uncut[1])
        assert same_bits(final[4], uncut[1])
        assert same_bits(torch.cat([first[20:], second[: end - cut]]), y)

    @pytest.mark.gpu
    def test_more_tokens_and_chunks_than_31_bits_count(self, needs_gpu_memory):
        """Elements of x, y and states beyond 2**31 in one call, against two calls that stay below."""
        needs_gpu_memory(48)
        kernel_device("cuda")
        H, P, N, chunk, chunks = 128, 64, 128, 128, 2050
        tokens, half = chunks * chunk, chunks // 2 * chunk
        generator = torch.Generator("cuda").manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda")

        x, B, C = normal(tokens, H, P), normal(tokens, 1, N), normal(tokens, 1, N)
        dt, A, D = torch.rand(tokens, H, device="cuda") / 8, -torch.logspace(-2, 0.5, H).cuda(), normal(H)
        pool = normal(4, H, P, N)

        def scan_part(part, source, destination):
            count = (part.stop - part.start) // chunk
            slots = torch.tensor([[source], [destination]], device="cuda")
            cuts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * chunk
            return ssd_chunk_scan(
                x[part], dt[part], A, B[part], C[part], D, pool,
                ScanRows(
                    *slots, chunk, cuts, torch.zeros_like(cuts[1:]),
                    torch.tensor([0, count], dtype=torch.int32).cuda(),
                    torch.full((count,), -1, device="cuda"),
                ),
            )  # fmt: skip

        assert x.numel() > 2**31 < chunks * H * P * N
        y = scan_part(slice(0, tokens), 0, 1)
        assert torch.equal(scan_part(slice(0, half), 0, 2), y[:half])
        assert torch.equal(scan_part(slice(half, tokens), 2, 3), y[half:])
        assert same_bits(pool[1], pool[3])
        assert y.isfinite().all()

    @pytest.mark.sampled(dtype=1)
    @pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
    def test_a_row_has_the_same_bits_in_any_company(self, device, dtype):
        layer = Layer(dtype=dtype)
        row = Row(0, 7, 50, source=0, destination=1, checkpoints={32: 2})
        company = [Row(i, 5 * i, 11 * i, source=2 * i + 2, destination=2 * i + 3) for i in range(1, 4)]
        pool = layer.pool(12)
        alone, expected = scan(Batch(layer, [row], 16), pool, device)
        together, found = scan(Batch(layer, [*company, row], 16, (1, 1, 1)), pool, device)
        assert same_bits(found[1:3], expected[1:3])
        assert same_bits(together[66:116], alone)


class TestCost:
    def test_the_pool_is_read_once_a_cached_row_and_written_once_a_destination(self):
        layer = Layer()
        rows = [
            Row(0, 16, 48, source=0, destination=1, checkpoints={32: 2, 48: 3}),
            Row(1, 5, 1, source=4, destination=4),
            Row(2, 0, 40, destination=5, checkpoints={16: 6}),
            Row(3, 9, 20, source=7),
            Row(4, 9, 0, source=8, destination=9),
            Row(5, 9, 0, source=10, destination=10),
            Row(6, 0, 0),
        ]
        pool = poisoned_pool(layer, rows, 12)
        before = pool.clone()
        batch = Batch(layer, rows, 16, (3, 3, 3))
        with traffic_of(pool) as traffic:
            y = batch.scan(ssd_chunk_scan, pool)
        batch.check(before, pool, y)
        state = pool[0].numel() * pool.element_size()
        assert 4 * state <= traffic.loaded <= 1.05 * 4 * state
        assert 7 * state <= traffic.stored <= 1.05 * 7 * state

    @pytest.mark.gpu
    def test_no_synchronisation_and_a_graph_follows_its_indices(self):
        """A captured graph reads what its buffers hold when it is launched, padding included."""
        device = kernel_device("cuda")
        layer = Layer(P=64, N=128)
        plans = [
            Batch(layer, [Row(0, 0, 40, -1, 1), Row(1, 16, 24, 2, 3, {32: 4})], 16, (1, 3, 0)),
            Batch(layer, [Row(2, 0, 10, -1, 5), Row(3, 8, 20, 6, 6), Row(4, 8, 0, 7, 0)], 16, (0, 5, 34)),
        ]
        x, dt, B, C = buffers = [
            getattr(plans[0], name).to(device, copy=True) for name in ("x", "dt", "B", "C")
        ]
        rows = plans[0].scan_rows(device)
        A, D = layer.A.to(device), layer.D.to(device)
        pool = layer.pool(8).to(device)

        def launch():
            return ssd_chunk_scan(x, dt, A, B, C, D, pool, rows)

        launch()  # tunes and compiles
        torch.cuda.synchronize()
        with no_synchronisation():
            launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = launch()
        for plan in plans:
            for buffer, values in zip(buffers, (plan.x, plan.dt, plan.B, plan.C), strict=True):
                buffer.copy_(values)
            for index, values in zip(rows, plan.scan_rows(device), strict=True):
                if isinstance(index, torch.Tensor):
                    index.copy_(values)
            before = layer.pool(8, seed=9)
            pool.copy_(before)
            graph.replay()
            plan.check(before, pool, y.cpu())


def test_scores_of_float16_are_widened() -> None:
    assert module.operand_dtype(torch.float16) == torch.float32  # 65,504 is soon reached by a sum of products
    assert module.operand_dtype(torch.bfloat16) == torch.bfloat16
