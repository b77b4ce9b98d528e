"""Time steps, gates and gated norms of both kernel sets against plain formulas in float64."""

import math
from contextlib import nullcontext

import pytest
import torch
from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ConvRows, ScanRows
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations, randn, relative_error, same_bits
from torch import Tensor

KERNELS = [pytest.param(KernelSet, id="reference"), pytest.param(GpuKernelSet, id="triton")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""How far one rounding moves a number. The interpreter cuts float32 to bfloat16, which is twice as far."""


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


@pytest.fixture(params=KERNELS)
def kernels(request):
    return request.param


def strided(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Random numbers in a slice of a wider projection."""
    *leading, last = shape
    wide = randn(*leading, 2 * last + 3, seed=seed).to(dtype).to(device)
    return wide[..., 3 : 3 + last]


def softplus(x: Tensor) -> Tensor:
    """In float64 through exp and log1p, which is exact for numbers below 700."""
    return torch.where(x > 0, x + torch.log1p((-x).exp()), torch.log1p(x.exp()))


def test_results_go_where_they_are_asked_for(device, kernels, monkeypatch):
    """The tensor that is passed is written as a whole, and returned."""
    if device.type == "cpu":  # fla-core's launchers enter the device of their tensors
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    x = randn(3, 1, 2, 16, seed=1).float().to(device)
    one = torch.ones(2, device=device)
    index, nowhere = torch.arange(3, device=device), torch.full((3, 1), -1, device=device)
    pool, windows = torch.zeros(3, 2, 16, 16, device=device), torch.zeros(3, 32, 3, device=device)
    weight = randn(32, 4, seed=2).float().to(device)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    state_args = x[:, 0, :, 0], -one, x[:, 0], x[:, 0], one, pool
    scan_rows = ScanRows(index, nowhere[:, 0], 16, starts, starts[:3], starts, nowhere[:, 0])
    conv_rows = ConvRows(index, nowhere[:, 0], starts, index, index[:0], index[:0], index[:0])
    calls = (
        (x, lambda out: kernels.selective_state_update(
            x, x[..., 0], -one, x, x, one, pool, index, nowhere, out=out
        )),
        (x[:, 0], lambda out: kernels.ssd_chunk_scan(
            x[:, 0], *state_args, scan_rows, out=out
        )),
        (x.flatten(2), lambda out: kernels.causal_conv1d_update(
            x.flatten(2), weight, None, windows, index, nowhere, out=out
        )),
        (x.flatten(1), lambda out: kernels.causal_conv1d_prefill(
            x.flatten(1), weight, None, windows, conv_rows, out=out
        )),
    )  # fmt: skip
    for like, call in calls:
        out = torch.full_like(like, torch.nan)
        assert call(out) is out
        assert same_bits(out, call(None))


class TestTimeSteps:
    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (5, 3), (37, 128), (2, 200)])
    def test_the_formula(self, device, kernels, dtype, tokens, heads):
        dt = strided(tokens, heads, dtype=dtype, device=device, seed=1)
        bias, A_log = randn(heads, seed=2).to(dtype), randn(heads, seed=3).float()
        with poisoned_allocations():
            steps, A = kernels.time_steps(dt, bias.to(device), A_log.to(device))
        assert (steps.dtype, A.dtype, steps.is_contiguous()) == (torch.float32, torch.float32, True)
        expected = softplus(dt.cpu().double() + bias.double())
        assert float((steps.cpu() / expected - 1).abs().max()) <= 2e-6
        assert relative_error(A, -A_log.double().exp()) <= 1e-6

    def test_every_magnitude_keeps_its_digits(self, device, kernels):
        """Heads that forget slowly have steps of 1e-6; each must be as exact as a step of 1."""
        dt = torch.linspace(-80, 80, 641, dtype=torch.float64).float()[:, None]
        nothing = torch.zeros(1, device=device)
        steps, _ = kernels.time_steps(dt.to(device), nothing, nothing)
        assert float((steps.cpu().double() / softplus(dt.double()) - 1).abs().max()) <= 1e-5

    def test_bounds(self, device, kernels):
        dt = randn(50, 3, seed=1).float()
        nothing = torch.zeros(3, device=device)
        steps, _ = kernels.time_steps(dt.to(device), nothing, nothing, 0.3, 0.9)
        assert relative_error(steps, softplus(dt.double()).clamp(0.3, 0.9)) <= 1e-6
        assert (steps.min().item(), steps.max().item()) == pytest.approx((0.3, 0.9))

    def test_the_reference_serves_float64(self):
        dt = randn(4, 3, seed=1)
        steps, A = KernelSet.time_steps(dt, dt[0], dt[1])
        torch.testing.assert_close(steps, softplus(dt + dt[0]), rtol=1e-14, atol=0)
        torch.testing.assert_close(A, -dt[1].exp(), rtol=1e-14, atol=0)


class TestDeltaGates:
    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("doubled", [False, True])
    @pytest.mark.parametrize("shape", [(1, 1), (37, 32), (3, 48), (5, 4, 3)])
    def test_the_formula(self, device, kernels, dtype, doubled, shape):
        a, b = (strided(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
        heads = math.prod(shape[1:])
        A_log, bias = randn(heads, seed=3).float(), randn(heads, seed=4).to(dtype)
        with poisoned_allocations():
            g, beta = kernels.delta_gates(a, b, A_log.to(device), bias.to(device), doubled=doubled)
        assert g.shape == beta.shape == (shape[0], heads)
        assert g.dtype == beta.dtype == torch.float32
        wide_a, wide_b = (x.cpu().double().flatten(1) for x in (a, b))
        expected = -A_log.double().exp() * softplus(wide_a + bias.double())
        assert relative_error(g, expected) <= 2e-6
        assert relative_error(beta, (1 + doubled) / (1 + (-wide_b).exp())) <= 1e-6


def norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


class TestGatedNorms:
    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("tokens", "groups", "width"), [(1, 1, 5), (7, 8, 16), (3, 3, 1000), (2, 1, 5120)]
    )
    def test_gate_then_norm_of_each_group(self, device, kernels, dtype, tokens, groups, width):
        x, gate = (strided(tokens, groups * width, dtype=dtype, device=device, seed=s) for s in (1, 2))
        weight = randn(groups * width, seed=3).to(dtype)
        with poisoned_allocations():
            found = kernels.gate_then_rms_norm(x, gate, weight.to(device), groups, 1e-3)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        gated = x.cpu().double() * silu(gate.cpu().double())
        expected = norm(gated.unflatten(1, (groups, -1)), 1e-3).flatten(1) * weight.double()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2.1 * UNIT[dtype], atol=1e-7)

    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("own_weights", [False, True])
    @pytest.mark.parametrize(("shape", "dim"), [((1, 1), 5), ((7, 32), 128), ((3, 5), 40), ((4, 3, 2), 16)])
    def test_norm_of_each_head_then_gate(self, device, kernels, dtype, own_weights, shape, dim):
        tokens, heads = shape[0], math.prod(shape[1:])
        x = strided(tokens, heads, dim, dtype=dtype, device=device, seed=1)
        gate = strided(*shape, dim, dtype=dtype, device=device, seed=2)
        weight = randn(*([heads] if own_weights else []), dim, seed=3).to(dtype)
        with poisoned_allocations():
            found = kernels.rms_norm_then_gate(x, gate, weight.to(device), 1e-3)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        gates = silu(gate.cpu().double()).reshape(x.shape)
        expected = norm(x.cpu().double(), 1e-3) * weight.double() * gates
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2.1 * UNIT[dtype], atol=1e-7)

    def test_gates_of_any_size(self, device, kernels):
        """silu of -200 is 0, not NaN: exp(200) is infinite in float32."""
        gate = torch.tensor([[-200.0, 200.0, 0.0, -1e4]], device=device)
        x = torch.ones(1, 1, 4, device=device)
        found = kernels.rms_norm_then_gate(x, gate[:, None], torch.ones(4, device=device), 0.0)
        assert found.flatten().tolist() == pytest.approx([0.0, 200.0, 0.0, 0.0], abs=1e-30)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_has_its_bits_in_any_company(self, device, kernels, dtype):
        x, gate = (strided(19, 96, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
        weight = randn(96, seed=3).to(dtype).to(device)
        together = kernels.gate_then_rms_norm(x, gate, weight, 3, 1e-5)
        alone = kernels.gate_then_rms_norm(x[7:8], gate[7:8], weight, 3, 1e-5)
        assert same_bits(together[7:8], alone)

    def test_channels_apart_are_refused(self, device):
        x = torch.zeros(3, 4, 8, device=device).mT
        with pytest.raises(ValueError, match=r"x has strides .* accepted: a last stride of 1"):
            GpuKernelSet.rms_norm_then_gate(x, x, x.new_zeros(4), 1e-5)

    def test_the_reference_serves_float64(self):
        x, gate, weight = randn(3, 8, seed=1), randn(3, 8, seed=2), randn(8, seed=3)
        found = KernelSet.gate_then_rms_norm(x, gate, weight, 2, 1e-5)
        expected = norm((x * silu(gate)).unflatten(1, (2, -1)), 1e-5).flatten(1) * weight
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
