"""Outputs of chunks against the recurrence from the states that enter them, token by token in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.ssd_stages import chunk_scan
from oracle.budget import costly
from oracle.scan_rows import Row
from oracle.ssd import DEVICES, Batch, Layer, kernel_device, poisoned_allocations, randn, relative_error
from oracle.traffic import traffic_of

few = settings(costly(), derandomize=True)


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


class Case:
    """Chunks of `lengths` tokens; NaN in all that is no token's, above the diagonals and in padding."""

    def __init__(self, layer, lengths, chunk_size, dt_scale=1.0):
        self.layer, self.lengths, self.chunk_size = layer, lengths, chunk_size
        self.batch = Batch(layer, [Row(0, 0, sum(lengths))], chunk_size, (0, 0, 2))
        self.dt = self.batch.dt * dt_scale
        chunks = len(lengths)
        self.entering = randn(chunks, layer.H, layer.P, layer.N, seed=4).float()
        self.chunk_dt, self.log_decays = torch.full((2, layer.H, chunks, chunk_size), torch.nan)
        self.CB = torch.full((chunks, layer.G, chunk_size, chunk_size), torch.nan)
        cuts = [0]
        for chunk, length in enumerate(lengths):
            tokens = slice(cuts[-1], cuts[-1] + length)
            dt = self.dt[tokens].double()
            self.chunk_dt[:, chunk, :length] = dt.T
            self.log_decays[:, chunk, :length] = (dt * layer.A.double()).cumsum(0).T
            products = torch.einsum(
                "mgn,kgn->gmk", self.batch.C[tokens].double(), self.batch.B[tokens].double()
            )
            above = torch.ones(length, length, dtype=torch.bool).triu(1)
            self.CB[chunk, :, :length, :length] = products.masked_fill(above, torch.nan)
            cuts.append(tokens.stop)
        self.cuts = torch.tensor(cuts, dtype=torch.int32)

    def run(self, device, operands=torch.float32, **options):
        with poisoned_allocations():
            y = chunk_scan(
                self.batch.x.to(device), self.chunk_dt.to(device), self.log_decays.to(device),
                self.batch.C.to(device), self.CB.to(device), self.layer.D.to(device),
                self.entering.to(device, operands), self.cuts.to(device), **options,
            ).cpu()  # fmt: skip
        assert y.dtype == self.layer.dtype
        assert y[sum(self.lengths) :].isnan().all()  # never written
        return y

    def check(self, device, tolerance=1e-5, **options):
        y = self.run(device, **options)
        first = 0
        for chunk, length in enumerate(self.lengths):
            part = slice(first, first + length)
            x, B, C = self.batch.x[part], self.batch.B[part], self.batch.C[part]
            expected, _ = self.layer.run(x, self.dt[part], B, C, self.entering[chunk])
            assert relative_error(y[part], expected) <= tolerance
            first += length


@few
@given(st.lists(st.integers(0, 32), min_size=1, max_size=4))
def test_chunks_of_any_length(device, lengths):
    Case(Layer(H=2), lengths, 32).check(device)


@pytest.mark.parametrize("chunk_size", [8, 48, 128, 256])
def test_any_chunk_size(device, chunk_size):
    Case(Layer(H=2, G=1), [chunk_size, 1, chunk_size - 1], chunk_size).check(device)


@pytest.mark.parametrize("layer", [Layer(H=2, P=80, G=1, N=33), Layer(H=2, P=1, N=1), Layer(H=3, P=65, G=3)])
def test_sizes_that_fill_no_block(device, layer):
    Case(layer, [20, 3], 32).check(device)


# To bfloat16 the interpreter cuts float32, where a GPU rounds.
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-11)])
def test_narrow_inputs_and_wide_states_are_multiplied_in_float32(device, dtype, rounding):
    """Nothing but the output is rounded."""
    Case(Layer(H=2, dtype=dtype), [32, 5], 32).check(device, rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layer", "chunk_size"), [((2, 8, 1, 12), 32), ((1, 64, 1, 128), 128)])
def test_narrow_states_are_multiplied_on_tensor_cores(device, dtype, layer, chunk_size):
    """An output has three roundings: of the state that enters, of the scores and of itself."""
    case = Case(Layer(*layer, dtype=dtype), [chunk_size, 5], chunk_size)
    case.check(device, 3 * torch.finfo(dtype).eps / 2, operands=dtype)


def test_decays_that_leave_nothing_overflow_nowhere(device):
    """Sums of -3,000 within a chunk: their differences are good to 1e-4, their exponentials mostly 0."""
    Case(Layer(H=2), [32, 7], 32, dt_scale=200.0).check(device, tolerance=1e-3)


def test_an_empty_chunk_reads_and_writes_nothing():
    case = Case(Layer(H=2), [0, 0], 32)
    tensors = [case.CB, case.entering, case.chunk_dt, case.log_decays]
    for tensor in tensors:
        with traffic_of(tensor) as traffic:
            case.run("cpu")
        assert (traffic.loaded, traffic.stored) == (0, 0)


def test_strides_that_cannot_be_read_are_refused():
    case = Case(Layer(H=2), [5], 16)
    case.batch.x = case.batch.x.mT.contiguous().mT
    with pytest.raises(ValueError, match="accepted: a last stride of 1"):
        case.run("cpu")
