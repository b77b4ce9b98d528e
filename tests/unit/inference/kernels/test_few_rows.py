"""Products of up to eight rows beside float64, and beside the bits of the same rows among more on a GPU.

Triton's interpreter multiplies bfloat16 wrongly, and is given float16.
"""

import pytest
import torch
import torch.nn.functional as F
from mambaslots.inference.engines.invariance.switches import SWITCHES, read_switch, write_switches
from mambaslots.inference.kernels import few_rows
from mambaslots.inference.kernels.few_rows import FewRowsProducts
from torch import Tensor


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    return str(request.param)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the rows and weights of each product that the kernel makes."""
    sizes, product = list[tuple[int, ...]](), few_rows.product

    def noted(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        sizes.append((*rows.shape, *weight.shape))
        return product(rows, weight, dtype)

    monkeypatch.setattr(few_rows, "product", noted)
    return sizes


def drawn(*shape: int, device: str, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("num_rows", [1, 5, 8])
@pytest.mark.parametrize(("size", "outputs"), [(32, 1), (96, 48), (512, 35), (1280, 16)])
def test_rows_times_weights(device, made, num_rows, size, outputs):
    wide, weight = drawn(num_rows, size + 8, device=device), drawn(outputs, size, device=device)
    rows = wide[:, :size]  # with a distance that is not their length
    expected = rows.double() @ weight.double().T
    with torch.inference_mode(), FewRowsProducts():
        found = [F.linear(rows, weight), F.linear(rows[None].contiguous(), weight)[0], rows @ weight.T]
        found.append(torch.mm(rows, weight.T, out_dtype=torch.float32))
    assert made == [(num_rows, size, size, outputs)] * len(found)
    for result in found:
        error = 2**-10 if result.dtype == torch.float16 else 2**-18
        torch.testing.assert_close(result.double(), expected, rtol=error, atol=size**0.5 * 2**-18)


def test_an_operator_that_is_no_product_runs_as_without(made):
    """`rms_norm` has a kernel of its own on a GPU, and is made of others elsewhere."""
    x = drawn(4, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    expected = F.rms_norm(x, (64,)), x.softmax(-1), torch.einsum("ij,kj->ik", x, x)
    with FewRowsProducts():
        found = F.rms_norm(x, (64,)), x.softmax(-1), torch.einsum("ij,kj->ik", x, x)
    assert all(map(torch.equal, found, expected))
    assert not made


def test_what_it_does_not_take_is_torchs(made):
    rows, weight = drawn(8, 64, device="cpu"), drawn(16, 64, device="cpu")
    cases = [
        (drawn(9, 64, device="cpu"), weight.T),
        (rows.float(), weight.float().T),
        (rows[:, :40], weight[:, :40].T),
        (rows, drawn(64, 16, device="cpu")),  # not transposed
        (drawn(64, 8, device="cpu").T, weight.T),
        (rows[:0], weight.T),
        (rows, weight[:0].T),
        (rows[:, :0], weight[:, :0].T),
    ]
    for left, right in cases:
        expected = left @ right
        with FewRowsProducts():
            assert torch.equal(left @ right, expected)
    with FewRowsProducts():
        F.linear(rows, weight, torch.zeros(16, dtype=rows.dtype))  # with a bias
    assert made == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "outputs"),
    [(9216, 2560), (2560, 18432), (2560, 8192), (4096, 2560), (2560, 64), (2560, 248320), (21504, 4096),
     (4096, 21504), (4096, 18560), (8192, 4096), (4096, 6144), (4096, 131072)],
)  # fmt: skip
def test_rows_have_the_bits_that_they_have_among_more(made, dtype, size, outputs):
    """Those of Qwen3.5-4B and Nemotron-H-8B."""
    before = {name: read_switch(name) for name in SWITCHES}
    write_switches(SWITCHES)
    try:
        weight = torch.randn(outputs, size, device="cuda", dtype=dtype) * size**-0.5
        rows = torch.randn(256, size, device="cuda", dtype=dtype)
        kinds = [dict[str, torch.dtype](), {"out_dtype": torch.float32}]
        for expected, kind in [(torch.mm(rows, weight.T, **kind), kind) for kind in kinds]:
            for num_rows in (1, 8):
                with FewRowsProducts():
                    few = torch.mm(rows[:num_rows], weight.T, **kind)
                assert torch.equal(few, expected[:num_rows])
        assert len(made) == 4
    finally:
        write_switches(before)
