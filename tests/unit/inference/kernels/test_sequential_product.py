"""Products that add over K in order: right, and the same bits whatever the number of rows."""

import pytest
import torch
import torch.nn.functional as F
from mambaslots.inference.kernels.products import matmul
from oracle.dots_in_order import dots_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES))


def operands(rows: int, inner: int, outer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, inner, generator=generator).to(DEVICE, dtype)
    return x, (torch.randn(outer, inner, generator=generator) * inner**-0.5).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 32, 16), (65, 200, 130), (3, 7, 5)])
def test_against_float64(dtype, rows, inner, outer):
    x, weight = operands(rows, inner, outer, dtype)
    bias = torch.linspace(-1, 1, outer).to(DEVICE, dtype)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for given in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
        out = matmul(x, weight.t(), given)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, **close)
    logits = matmul(x, weight.t(), out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=1e-5)


@pytest.fixture
def _in_order():
    with dots_in_order():
        yield


@pytest.mark.usefixtures("_in_order")
@DTYPES
def test_rows_have_the_same_bits_alone_and_anywhere(dtype):
    x, weight = operands(150, 160, 70, dtype)
    whole = matmul(x, weight.t())
    for count in (1, 2, 31, 32, 64, 65, 149):
        assert torch.equal(matmul(x[:count], weight.t()), whole[:count])
    for row in (0, 63, 64, 149):
        assert torch.equal(matmul(x[row : row + 1], weight.t())[0], whole[row])
    order = torch.arange(150, device=DEVICE).roll(37)
    assert torch.equal(matmul(x[order], weight.t()), whole[order])


def test_any_strides_and_no_rows():
    x, weight = operands(40, 48, 24, torch.float32)
    wide = torch.randn(40, 100, device=DEVICE)
    wide[:, 3:51] = x
    assert torch.equal(matmul(wide[:, 3:51], weight.t()), matmul(x, weight.t().contiguous()))
    assert matmul(x[:0], weight.t()).shape == (0, 24)


def test_dtypes_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"a is torch\.float32 and b is torch\.bfloat16; accepted: bfloat16, fl"
    ):
        matmul(torch.zeros(2, 2), torch.zeros(2, 2).bfloat16())
