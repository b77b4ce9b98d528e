"""Norms, activations, gates, rotations and the head's product beside plain torch in float64.

The reference is checked in float64 to 1e-12. The GPU's functions compute in float32 and round once: their
error is at most the unit roundoff of the dtype, and float32's noise of a sum. Triton's interpreter cuts bits
off where a GPU rounds bfloat16, and is checked in float32 only.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from mambaslots.inference.kernels.kernel_set import KernelSet
from torch import Tensor

EPS = 1e-5
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
FLOAT32_NOISE = 2e-6
SHAPES = [(1, 1), (3, 40), (2, 5, 256), (33, 1500), (2, 4096)]

Function = Callable[..., Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    return str(request.param)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def normed(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """The definition, row by row."""
    rows = [
        row / (row.dot(row) / len(row) + EPS) ** 0.5 * (weight + offset) for row in x.reshape(-1, x.shape[-1])
    ]
    return torch.stack(rows).view(x.shape)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of channels as a complex number, times another one."""
    half = cos.shape[-1] // 2
    out = x.clone()
    numbers = torch.complex(x[..., :half], x[..., half : 2 * half])
    numbers = numbers * torch.complex(cos, sin)[:, None, :half]
    out[..., :half], out[..., half : 2 * half] = numbers.real, numbers.imag
    return out


def check(found: Tensor, expected: Tensor, dtype: torch.dtype, device: str) -> None:
    """`found` is `expected`, a float64 result of the same inputs, rounded once."""
    assert found.dtype == dtype
    assert found.is_contiguous()
    noise = 1e-12 if dtype == torch.float64 else FLOAT32_NOISE
    relative = noise + UNIT_ROUNDOFF.get(dtype, 0.0)
    torch.testing.assert_close(found.to(device).double(), expected, rtol=relative, atol=noise)


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)


def kinds(device: str) -> list[tuple[Any, torch.dtype]]:
    return [(KernelSet, torch.float64), *((GpuKernelSet, dtype) for dtype in dtypes_of(device))]


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(device: str, shape: tuple[int, ...], offset: float) -> None:
    for kernels, dtype in kinds(device):
        x, residual = (drawn(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
        weight = drawn(shape[-1], seed=2, dtype=dtype, device=device)
        found = kernels.rms_norm(x, weight, EPS, offset=offset)
        check(found, normed(x.double(), weight.double(), offset), dtype, device)
        total, found = kernels.add_rms_norm(residual, x, weight, EPS, offset=offset)
        check(total, residual.double() + x.double(), dtype, device)
        check(found, normed(total.double(), weight.double(), offset), dtype, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_activations(device: str, shape: tuple[int, ...]) -> None:
    for kernels, dtype in kinds(device):
        x, gate = (drawn(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
        wide_x, wide_gate = x.double(), gate.double()
        sigmoid = 1 / (1 + (-wide_gate).exp())
        check(kernels.relu_squared(x), wide_x.clamp(min=0) ** 2, dtype, device)
        check(kernels.silu_mul(gate, x), wide_gate * sigmoid * wide_x, dtype, device)
        check(kernels.sigmoid_mul(x, gate), wide_x * sigmoid, dtype, device)


def test_gates_that_are_slices_of_a_projection(device: str) -> None:
    """A chunk of columns, and every head's second half."""
    for kernels, dtype in kinds(device):
        projected = drawn(7, 3, 2 * 64, dtype=dtype, device=device)
        x, gate = projected[..., :64], projected[..., 64:]
        expected = kernels.sigmoid_mul(x.contiguous(), gate.contiguous())
        assert torch.equal(kernels.sigmoid_mul(x, gate), expected)
        wider = drawn(
            7, 3 * 2 * 64 + 32, dtype=dtype, device=device
        )  # heads, and keys and values beside them
        gate = torch.unflatten(wider[:, 32:], -1, (3, 2 * 64))[..., 64:]
        expected = kernels.sigmoid_mul(x.contiguous(), gate.contiguous())
        assert torch.equal(kernels.sigmoid_mul(x.contiguous(), gate), expected)
        assert torch.equal(kernels.sigmoid_mul(x, gate), expected)
        columns = projected.flatten(1).chunk(2, dim=-1)
        expected = kernels.silu_mul(*(part.contiguous() for part in columns))
        assert torch.equal(kernels.silu_mul(*columns), expected)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(16, 4, 256, 64), (3, 1, 40, 40), (9, 2, 64, 2)]
)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_norm_and_rotation_of_queries_and_keys(
    device: str, heads: int, kv_heads: int, dim: int, rotary: int, offset: float | None
) -> None:
    """Queries beside their gates, keys beside values; without norms where there is no offset."""
    tokens = 5
    for kernels, dtype in kinds(device):
        query = drawn(tokens, heads, 2 * dim, dtype=dtype, device=device)[..., :dim]
        key = drawn(tokens, 2 * kv_heads, dim, seed=1, dtype=dtype, device=device)[:, :kv_heads]
        angles = drawn(tokens, rotary // 2, seed=2, device=device).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = [drawn(dim, seed=seed, dtype=dtype, device=device) for seed in (3, 4)]
        if offset is None:
            found = kernels.qk_norm_rotary(query, key, cos, sin)
        else:
            found = kernels.qk_norm_rotary(query, key, cos, sin, *weights, EPS, offset=offset)
        for x, weight, out in zip((query, key), weights, found, strict=True):
            wide = x.double() if offset is None else normed(x.double(), weight.double(), offset)
            check(out, turned(wide, cos.double(), sin.double()), dtype, device)


def test_a_row_has_the_same_bits_in_every_batch(device: str) -> None:
    """The first of one row, of three and of 300."""
    for dtype in dtypes_of(device):
        x, y = (drawn(300, 4, 64, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
        weight, angles = (drawn(64, seed=seed, dtype=dtype, device=device) for seed in (2, 3))
        angles = angles.expand(300, 64)
        functions: list[Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = [
            lambda x, y, weight=weight: (GpuKernelSet.rms_norm(x, weight, EPS),),  # type: ignore[misc]
            lambda x, y, weight=weight: GpuKernelSet.add_rms_norm(x, y, weight, EPS),  # type: ignore[misc]
            lambda x, y: (GpuKernelSet.silu_mul(x, y), GpuKernelSet.sigmoid_mul(x, y)),
            lambda x, y: (GpuKernelSet.relu_squared(x),),
            lambda x, y, angles=angles, weight=weight: GpuKernelSet.qk_norm_rotary(  # type: ignore[misc]
                x, y, angles[: len(x)].cos(), angles[: len(x)].sin(), weight, weight, EPS
            ),
        ]
        for function in functions:
            for rows in (1, 3) if device == "cpu" else (1, 3, 300):
                for alone, beside in zip(function(x[:1], y[:1]), function(x[:rows], y[:rows]), strict=True):
                    assert torch.equal(alone[0], beside[0])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_logits_are_never_rounded_to_the_dtype_of_the_model(device: str, rows: int) -> None:
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for kernels, dtype in [(KernelSet, torch.float64)] + [(GpuKernelSet, dtype) for dtype in dtypes]:
        hidden, weight = (
            drawn(rows, 64, dtype=dtype, device=device),
            drawn(96, 64, dtype=dtype, device=device),
        )
        expected = hidden.double() @ weight.double().T
        logits = kernels.head_product(hidden, weight)
        assert logits.dtype == KernelSet.compute_dtype(dtype)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(kernels.head_product(hidden[None], weight)[0], logits)


def test_nothing_is_computed_below_float32(device: str) -> None:
    """Values whose squares, and sums of squares, are beyond float16."""
    x = torch.full((2, 4), 1000.0, dtype=torch.float16, device=device)
    one = torch.ones_like(x[0])
    for kernels in (KernelSet, GpuKernelSet):
        torch.testing.assert_close(kernels.rms_norm(x, one, EPS), torch.ones_like(x))
        torch.testing.assert_close(kernels.add_rms_norm(x, x, one, EPS)[1], torch.ones_like(x))


def test_columns_that_do_not_lie_side_by_side(device: str) -> None:
    """Every second column of a wider tensor, and a transposed one."""
    for dtype in dtypes_of(device):
        wide, weight = drawn(6, 12, dtype=dtype, device=device), drawn(6, dtype=dtype, device=device)
        for x in (wide[:, ::2], wide[:, :6].T):
            dense = x.contiguous()
            for function in (
                lambda x, weight=weight: GpuKernelSet.rms_norm(x, weight, EPS),
                lambda x, weight=weight: GpuKernelSet.add_rms_norm(x, x, weight, EPS)[1],
                lambda x: GpuKernelSet.silu_mul(x, x),
                GpuKernelSet.relu_squared,
            ):
                torch.testing.assert_close(function(x), function(dense))


def test_no_rows(device: str) -> None:
    none, weight = torch.zeros(0, 8, device=device), torch.ones(8, device=device)
    for kernels in (KernelSet, GpuKernelSet):
        assert kernels.rms_norm(none, weight, EPS).shape == (0, 8)
        assert kernels.add_rms_norm(none, none, weight, EPS)[1].shape == (0, 8)
        assert kernels.relu_squared(none).shape == (0, 8)
        assert kernels.silu_mul(none, none).shape == kernels.sigmoid_mul(none, none).shape == (0, 8)
        heads = none[:, None]
        assert kernels.qk_norm_rotary(heads, heads, none, none, weight, weight)[0].shape == (0, 1, 8)
