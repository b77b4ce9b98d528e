"""States of chunks with 16-bit operands against a loop over tokens in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.ssd_stages import ssd_states
from oracle.budget import costly
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
from oracle.traffic import traffic_of

few = settings(costly(), derandomize=True)

DTYPES = [torch.float16, torch.bfloat16]
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7}
"""The largest relative error of one rounding; the interpreter cuts float32 to bfloat16. A product of the
update has one rounded factor."""


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


def decays(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """dt and the sums of dt * A, [H, chunks, chunk size] float32."""
    layer, cuts = batch.layer, batch.cuts.tolist()
    dt = torch.zeros(layer.H, len(cuts) - 1, batch.chunk_size)
    for chunk, (start, end) in enumerate(pairwise(cuts)):
        dt[:, chunk, : end - start] = batch.dt[start:end].T
    return dt, (dt.double() * layer.A.double()[:, None, None]).cumsum(-1).float()


def run(
    batch: Batch, pool: torch.Tensor, device: torch.device, operands: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states that enter the chunks, and the pool after, on the CPU; `pool` stays."""
    after = pool.to(device, copy=True)
    dt, log_decays = decays(batch)
    with poisoned_allocations():
        entering = ssd_states(
            batch.x.to(device), batch.B.to(device), dt.to(device), log_decays.to(device), after,
            batch.scan_rows(device), operands,
        )  # fmt: skip
    return entering.cpu(), after.cpu()


def check(batch: Batch, pool: torch.Tensor, device: torch.device) -> None:
    entering, after = run(batch, pool, device)
    dtype = batch.layer.dtype
    assert entering.dtype == dtype
    written, token = set(), 0
    for index, row in enumerate(batch.rows):
        part = slice(token, token + row.length)
        initial = None if row.source == -1 else pool[row.source]
        _, states = batch.layer.run(batch.x[part], batch.dt[part], batch.B[part], batch.C[part], initial)
        first, end = batch.row_chunk_starts[index : index + 2].tolist()
        for chunk in range(first, end):
            expected = states[int(batch.cuts[chunk]) - token]
            assert relative_error(entering[chunk], expected) <= 2 * UNIT[dtype]
        ends = {**row.checkpoints, row.start + row.length: row.destination}
        for position, slot in [*row.checkpoints.items(), *ends.items()]:
            if slot >= 0:
                assert relative_error(after[slot], states[position - row.start]) <= UNIT[dtype]
                written.add(slot)
        token += row.length
    others = [slot for slot in range(len(pool)) if slot not in written]
    assert same_bits(after[others], pool[others])
    assert entering[batch.chunks :].isnan().all()  # never written


@few
@given(drawn_rows(4), st.tuples(*[st.integers(0, 3)] * 3))
@example([(3, 0, True, "in place", False), (16, 32, True, "in place", True)], (2, 3, 1))
def test_any_layout(device, drawn, padding):
    for dtype in DTYPES:
        layer = Layer(dtype=dtype)
        rows = rows_of(drawn, 16)
        check(Batch(layer, rows, 16, padding), poisoned_pool(layer, rows, 4 * len(rows)), device)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [8, 48, 128, 256])
def test_any_chunk_size(device, dtype, chunk_size):
    layer = Layer(H=2, G=1, dtype=dtype)
    rows = [
        Row(0, chunk_size - 1, 1, source=0, destination=1),
        Row(1, chunk_size - 3, chunk_size + 5, source=2, destination=3, checkpoints={chunk_size: 4}),
    ]
    check(Batch(layer, rows, chunk_size, (1, 1, 1)), poisoned_pool(layer, rows, 5), device)


@pytest.mark.parametrize("sizes", [(2, 80, 1, 33), (3, 1, 3, 1), (2, 20, 1, 80), (2, 64, 1, 128)])
def test_sizes_that_fill_no_block_and_several(device, sizes):
    H, P, G, N = sizes
    layer = Layer(H, P, G, N, dtype=torch.float16)
    rows = [Row(0, 3, 30, source=1, destination=2, checkpoints={16: 3})]
    check(Batch(layer, rows, 16), poisoned_pool(layer, rows, 4), device)


@pytest.mark.parametrize("sizes", [(4, 8, 2, 12), (2, 64, 1, 128)])
def test_a_checkpoint_may_replace_its_rows_source(device, sizes):
    """Of a row that goes nowhere and of one that goes elsewhere, in the middle and at the end."""
    layer = Layer(*sizes, dtype=torch.float16)
    rows = [
        Row(0, 5, 40, source=0, checkpoints={32: 0}),
        Row(1, 16, 40, source=1, destination=2, checkpoints={32: 1, 48: 3}),
        Row(2, 16, 32, source=4, checkpoints={48: 4}),
    ]
    check(Batch(layer, rows, 16, (1, 1, 1)), poisoned_pool(layer, rows, 5), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_float32_round_nothing(device, dtype):
    layer = Layer(2, 40, 1, 140, dtype=dtype)
    rows = [Row(0, 3, 30, source=1, destination=2, checkpoints={16: 3})]
    batch, pool = Batch(layer, rows, 16), poisoned_pool(layer, rows, 4)
    entering, after = run(batch, pool, device, torch.float32)
    assert entering.dtype == torch.float32
    _, states = layer.run(batch.x, batch.dt, batch.B, batch.C, pool[1])
    for found, expected in ((after[2], states[30]), (after[3], states[13]), (entering[2], states[29])):
        assert relative_error(found, expected) <= 1e-5


def test_a_row_without_chunks_moves_bits(device):
    layer = Layer(H=2, dtype=torch.float16)
    rows = [Row(0, 5, 0, source=0, destination=1), Row(1, 5, 0, source=2, destination=2)]
    pool = layer.pool(3)
    pool[0].view(torch.int32)[0, 0, 0] = -5  # NaN, of a payload that arithmetic would not keep
    _, after = run(Batch(layer, rows, 16), pool, device)
    assert same_bits(after, pool[[0, 0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cut_on_the_grid_and_company_change_no_bits(device, dtype):
    layer = Layer(H=2, dtype=dtype)
    pool = layer.pool(8)
    whole, uncut = run(Batch(layer, [Row(0, 5, 60, 0, 1, {32: 2})], 16), pool, device)
    first, pool = run(Batch(layer, [Row(1, 3, 20, 5, 6), Row(0, 5, 27, 0, 3)], 16), pool, device)
    second, pool = run(Batch(layer, [Row(0, 32, 33, 3, 4)], 16, (1, 2, 0)), pool, device)
    assert same_bits(pool[3], uncut[2])
    assert same_bits(pool[4], uncut[1])
    assert same_bits(torch.cat([first[2:4], second[:3]]), whole)


def test_the_pool_is_accessed_once_a_source_and_a_destination():
    layer = Layer(dtype=torch.float16)
    rows = [
        Row(0, 16, 48, source=0, destination=1, checkpoints={32: 2, 48: 3}),
        Row(1, 5, 1, source=4, destination=4),
        Row(2, 9, 0, source=5, destination=6),
        Row(3, 9, 0, source=7, destination=7),
        Row(4, 0, 20),
    ]
    batch, pool = Batch(layer, rows, 16, (2, 2, 2)), poisoned_pool(layer, rows, 8)
    dt, log_decays = decays(batch)
    with traffic_of(pool) as traffic:
        ssd_states(batch.x, batch.B, dt, log_decays, pool, batch.scan_rows("cpu"))
    state = pool[0].numel() * pool.element_size()
    assert traffic.loaded == 3 * state
    assert traffic.stored == 5 * state


def test_strides_that_cannot_be_read_are_refused():
    layer = Layer(dtype=torch.float16)
    batch = Batch(layer, [Row(0, 0, 5, destination=0)], 16)
    with pytest.raises(ValueError, match="accepted: contiguous slots of any stride"):
        run(batch, layer.pool(1).mT.contiguous().mT, torch.device("cpu"))
    batch.x = batch.x.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"x has strides .* accepted: a last stride of 1"):
        run(batch, layer.pool(1), torch.device("cpu"))
