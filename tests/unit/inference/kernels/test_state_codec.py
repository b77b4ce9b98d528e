"""Encoded states: the reference against numpy in float64, kernels against the reference, special values.

On the CPU the kernels run in Triton's interpreter; the same cases on CUDA under the gpu mark.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.request_states import StatePool, coded_tensors
from mambaslots.inference.kernels import state_codec
from mambaslots.inference.kernels.reference import torch_state_copy as reference
from mambaslots.inference.kernels.reference.torch_state_copy import SMALLEST, dequantise, quantise
from mambaslots.inference.kernels.state_copy import decode_states, encode_states
from mambaslots.inference.kernels.state_pools import CodedTensor
from mambaslots.state_spec import durable_tensors, gated_delta_net_states, mamba2_states, short_conv_states
from oracle.ssd import DEVICES, kernel_device
from oracle.synchronisation import no_synchronisation
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Positive numbers to the next bfloat16, 8 significant bits, by arithmetic alone."""
    quantum = 2.0 ** (np.floor(np.log2(values)) - 7)
    return np.ceil(values / quantum) * quantum


shapes = st.lists(st.integers(1, 5), min_size=2, max_size=3)


@given(shapes, st.integers(0, 1000), st.integers(-100, 100), st.data())
def test_an_entry_is_off_by_half_a_scale_at_most(shape, seed, exponent, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    values = np.random.default_rng(seed).standard_t(2, shape).astype(np.float32) * np.float32(2.0**exponent)
    numbers, scales = quantise(torch.from_numpy(values), axis)
    decoded = dequantise(numbers, scales, axis).double().numpy()
    exact = values.astype(np.float64)
    largest = np.abs(exact).max(axis)
    expected = rounded_up(largest / 127)
    found = scales.double().numpy()
    # The reference multiplies in float32, which may pass a number of 8 bits by the last bit.
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)
    assert (found * 127 * (1 + 2.0**-22) >= largest).all()
    assert (found <= largest / 127 * (1 + 2.0**-7) * (1 + 2.0**-22)).all()
    assert (np.abs(decoded - exact) <= np.expand_dims(found, axis) * 0.5 * (1 + 2.0**-15)).all()
    assert numbers.abs().max() <= 127


def test_what_becomes_of_special_values():
    values = torch.tensor(
        [
            [0.0, -0.0, 0.0, -0.0],
            [1.0, NAN, -2.0, 0.0],
            [1.0, INF, -2.0, 0.0],
            [-INF, 1.0, 3e38, 0.0],
            [1e-45, -1e-44, 0.0, 0.0],
            [SMALLEST, -SMALLEST / 2, 0.0, -0.0],
            [3.4e38, -3.4e38, 1e38, 0.0],
            [127.0, -127.0, 0.5, 1.5],
        ]
    )
    decoded = dequantise(*quantise(values, 1), 1)
    assert torch.equal(bits(decoded[0]), bits(torch.zeros(4)))  # no -0.0
    assert decoded[1:4].isnan().all()  # nothing that a model went wrong on looks right
    assert torch.equal(decoded[4], torch.zeros(4))
    torch.testing.assert_close(decoded[5], values[5], rtol=0, atol=SMALLEST / 250)
    torch.testing.assert_close(decoded[6], values[6], rtol=0.01, atol=0)
    assert decoded[7].tolist() == [127.0, -127.0, 0.0, 2.0]  # ties to even


def test_a_group_keeps_its_own_precision():
    """A large entry costs others of its group their bits, and no other group's."""
    values = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    values[1, 2, 3] = 1e6
    decoded = dequantise(*quantise(values, 1), 1)
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 3] = False
    difference = (decoded - values).abs().amax(1)
    assert difference[others].max() < values.abs().amax(1)[others].max() / 250
    assert decoded[1, :, 3].tolist() == pytest.approx([0.0, 0.0, 1e6, 0.0], rel=0.01)


def test_bfloat16_rounds_to_the_nearest_and_keeps_signs():
    values = torch.tensor([[0.0, -0.0, NAN, INF, -INF, 1.00390625, 1.01171875, 1e-40]])
    tensor = CodedTensor(values.view(1, 1, 8).clone(), torch.zeros(1, 1, 8, dtype=torch.bfloat16))
    encode_states([tensor], [0], [0])
    tensor.states.fill_(7.0)
    decode_states([tensor], [0], [0])
    found = tensor.states[0, 0]
    assert found[2].isnan()
    expected = torch.tensor([0.0, -0.0, 7.0, INF, -INF, 1.0, 1.015625])
    found[2] = 7.0
    assert torch.equal(bits(found[:7]), bits(expected))


STATES = {
    "Mamba-2": lambda dtype: mamba2_states(2, 3, 5, 1, 6, 4, dtype, dtype, 4),
    "delta net": lambda dtype: gated_delta_net_states(2, 1, 6, 3, 5, 4, dtype, dtype),
    "short convolution": lambda dtype: short_conv_states(2, 7, 3, dtype),
    "large heads": lambda dtype: mamba2_states(1, 2, 64, 1, 256, 4, dtype, dtype, 4),
}


def coded(kind: str, dtype: torch.dtype, durable: str, device: torch.device, seed: int) -> list[CodedTensor]:
    """Tensors of two pools with random states, and garbage where nothing is stored yet."""
    states = STATES[kind](dtype)
    live = StatePool(states, 3, 2, device)
    store = StatePool(durable_tensors(states, durable), 0, 6, device)
    store.memory.fill_(0x5A)
    generator = torch.Generator().manual_seed(seed)
    for tensor in live.tensors:
        random = torch.randn(tensor.shape, generator=generator) * 3
        tensor.copy_(random.to(device, tensor.dtype))
    return coded_tensors(live, store)


@pytest.fixture(params=DEVICES)
def device(request):
    return kernel_device(request.param)


@pytest.mark.sampled
@pytest.mark.parametrize("durable", ["int8", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STATES)
def test_kernels_write_what_the_reference_writes(kind, dtype, durable, device):
    states = STATES[kind](dtype)
    if durable_tensors(states, durable) == states:
        return  # stored as they are
    reads = torch.tensor([4, 0, 2], device=device)
    writes = torch.tensor([2, 5, 0], device=device)
    theirs, ours = (coded(kind, dtype, durable, device, seed=1) for _ in range(2))
    for tensor in theirs:
        if tensor.scales is not None:
            tensor.states[:, 4, 0, 0, 0] = NAN
            tensor.states[:, 0, 1] = 0.0
    for tensor, other in zip(theirs, ours, strict=True):
        other.states.copy_(tensor.states)
        reference.code_tensor(tensor, reads, writes, encodes=True)
        state_codec.code_tensor(other, reads, writes, encodes=True)
        compare(other.numbers, tensor.numbers)
        if tensor.scales is not None:
            compare(other.scales, tensor.scales)
        other.numbers.copy_(tensor.numbers)
        tensor.states.fill_(5.0), other.states.fill_(5.0)
        back, to = torch.tensor([2, 0], device=device), torch.tensor([1, 3], device=device)
        reference.code_tensor(tensor, back, to, encodes=False)
        state_codec.code_tensor(other, back, to, encodes=False)
        compare(other.states, tensor.states)
        assert (tensor.states[:, 0] == 5.0).all(), "a slot that no pair names"


def compare(found: Tensor, expected: Tensor) -> None:
    """Equal bits; to bfloat16 Triton's interpreter cuts off, where compiled kernels and torch round."""
    if expected.dtype == torch.bfloat16 and not expected.is_cuda:
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-38, equal_nan=True)
        return
    same = torch.where(expected != expected, found != found, found == expected)
    assert same.all()


def test_pairs_are_checked():
    tensors = coded("Mamba-2", torch.float32, "int8", torch.device("cpu"), 0)
    for call, sources, destinations, message in (
        (encode_states, [0, 1], [0], "destinations has 1"),
        (encode_states, [5], [0], "sources is"),
        (encode_states, [0], [6], "destinations is"),
        (decode_states, [6], [0], "sources is"),
        (decode_states, [0], [5], "destinations is"),
    ):
        with pytest.raises(ValueError, match=message):
            call(tensors, sources, destinations)
    encode_states(tensors, [], [])
    encode_states([], [0], [0])


@pytest.mark.gpu
def test_neither_way_synchronises():
    tensors = coded("Mamba-2", torch.float32, "int8", torch.device("cuda"), 0)
    encode_states(tensors, [0, 1], [3, 4]), decode_states(tensors, [3], [0])
    with no_synchronisation():
        encode_states(tensors, [0, 1], [3, 4])
        decode_states(tensors, [3], [0])
