"""The convolution of decode by replay: bit for bit the prefill of the same tokens, whatever the rings hold.

In Triton's interpreter, and on CUDA under the gpu mark; the torch reference beside it.
"""

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import conv, conv_replay
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ConvRows, ReplayRows
from oracle.budget import costly
from oracle.replays import Move, Request, decode_steps
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations, same_bits
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of
from torch import Tensor

few = settings(costly(), derandomize=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONGEST = 80


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


@pytest.fixture(params=["triton", "reference"])
def kernels(request):
    return Kernels() if request.param == "triton" else KernelSet


def replay_rows(input_rows: Tensor, starts: Tensor, lengths: Tensor, destinations: Tensor) -> ReplayRows:
    """A convolution reads no state at a grid point."""
    return ReplayRows(input_rows, starts, lengths, torch.full_like(input_rows, -1), destinations, 1)


class Kernels(ModuleType):
    """The Triton functions under the names of a kernel set."""

    def __init__(self) -> None:
        super().__init__("triton")
        self.causal_conv1d_prefill = conv.causal_conv1d_prefill
        self.causal_conv1d_replay = conv_replay.causal_conv1d_replay
        self.keep_conv_inputs = conv_replay.keep_conv_inputs


@dataclass(frozen=True)
class Layer:
    """`conv_dim` is a multiple of 32: a CPU's SiLU rounds the last few numbers another way."""

    taps: int = 4
    dtype: torch.dtype = torch.float32
    has_bias: bool = True
    activation: bool = True
    conv_dim: int = 32
    chunk: int = 8

    def normal(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @cached_property
    def weight(self) -> Tensor:
        return self.normal(self.conv_dim, self.taps, seed=1)

    @cached_property
    def bias(self) -> Tensor | None:
        return self.normal(self.conv_dim, seed=2) if self.has_bias else None

    def tokens(self, request: int) -> Tensor:
        return self.normal(LONGEST, self.conv_dim, seed=10 + request)

    def parameters(self, device) -> tuple[Tensor, Tensor | None]:
        return self.weight.to(device), None if self.bias is None else self.bias.to(device)


class Walk:
    """Requests through prefill and decode by replay, every invalid number being NaN before each call."""

    def __init__(self, layer: Layer, kernels, device, requests: list[Request], drafts: int) -> None:
        self.layer, self.kernels, self.device, self.requests = layer, kernels, device, requests
        self.ring, self.width = layer.taps + drafts, layer.taps - 1
        self.tokens = [layer.tokens(index) for index in range(len(requests))]
        # One uncut prefill of each request, with a checkpoint at every grid point.
        self.points = list(range(layer.chunk, LONGEST + 1, layer.chunk))
        self.outputs, self.windows = zip(*map(self.uncut, self.tokens), strict=True)
        self.rings = torch.full((len(requests) + 2, self.ring, layer.conv_dim), torch.nan).to(layer.dtype)
        self.ring_slots = torch.randperm(len(requests) + 2, generator=torch.Generator().manual_seed(0))

    def index(self, values, dtype=torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def uncut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = len(self.points)
        windows = torch.zeros(
            count, self.layer.conv_dim, self.width, dtype=self.layer.dtype, device=self.device
        )
        out = self.kernels.causal_conv1d_prefill(
            x.to(self.device), *self.layer.parameters(self.device), windows,
            ConvRows(
                self.index([-1]), self.index([-1]), self.index([0, LONGEST], torch.int32),
                self.index([0] * LONGEST), self.index([0] * count), self.index(self.points),
                self.index(list(range(count))),
            ), activation=self.layer.activation,
        )  # fmt: skip
        return out.cpu(), windows.cpu()

    def prefill(self) -> None:
        """Keep the inputs of one packed step of all prompts behind where they resume, and a padding row."""
        starts = [request.resumed for request in self.requests]
        lengths = [request.prompt - request.resumed for request in self.requests]
        cuts = torch.tensor([0, *lengths, 0]).cumsum(0).tolist()
        parts = zip(self.tokens, self.requests, strict=True)
        packed = torch.cat([x[request.resumed : request.prompt] for x, request in parts])
        padding = torch.full((3, self.layer.conv_dim), torch.nan).to(self.layer.dtype)
        pool = torch.full((len(starts), self.layer.conv_dim, self.width), torch.nan).to(self.layer.dtype)
        for row, start in enumerate(starts):
            if start:
                pool[row] = self.windows[row][start // self.layer.chunk - 1]
        before, rings = self.rings.clone(), self.rings.to(self.device)
        self.kernels.keep_conv_inputs(
            torch.cat([packed, padding]).to(self.device), pool.to(self.device), rings,
            self.index([*self.ring_slots[: len(starts)].tolist(), -1]), self.index([*starts, 0], torch.int32),
            self.index([row if start else -1 for row, start in enumerate(starts)] + [-1]),
            self.index(cuts, torch.int32),
        )  # fmt: skip
        self.rings = rings.cpu()
        expected = before
        for row, request in enumerate(self.requests):
            for position in range(max(0, request.prompt - self.width), request.prompt):
                expected[self.ring_slots[row], position % self.ring] = self.tokens[row][position]
        assert same_bits(self.rings, expected)

    def decode(self, moves: list[Move], tokens: int) -> None:
        rows, layer = len(moves), self.layer
        x = torch.full((rows, tokens, layer.conv_dim), torch.nan).to(layer.dtype)
        slots, destinations = [-1] * rows, [-1] * rows
        rings = torch.full_like(self.rings, torch.nan)
        for row, move in enumerate(moves):
            if move.request >= 0:
                own = self.tokens[move.request][move.start : move.start + move.accepted]
                x[row, : move.accepted] = own
                rejected = move.length - move.accepted
                x[row, move.accepted : move.length] = layer.normal(rejected, layer.conv_dim, seed=move.start)
                slots[row] = int(self.ring_slots[move.request])
                for position in range(max(0, move.start - self.width), move.start):
                    place = slots[row], position % self.ring
                    rings[place] = self.rings[place]
                if (move.start + move.length) % layer.chunk == 0:
                    destinations[row] = row
        before = rings.clone()
        pool = torch.full((rows + 1, layer.conv_dim, self.width + 1), 7.0, dtype=layer.dtype)
        rings, pool_there = rings.to(self.device), pool.to(self.device)
        wide = torch.full((rows, tokens, layer.conv_dim + 8), torch.nan, dtype=layer.dtype)
        wide[..., 4:-4] = x
        with poisoned_allocations():
            out = self.kernels.causal_conv1d_replay(
                wide.to(self.device)[..., 4:-4], *layer.parameters(self.device), pool_there, rings,
                replay_rows(
                    self.index(slots), self.index([move.start for move in moves], torch.int32),
                    self.index([move.length for move in moves], torch.int32), self.index(destinations),
                ), activation=layer.activation,
            ).cpu()  # fmt: skip
        assert out.dtype == layer.dtype
        for row, move in enumerate(moves):
            if move.request >= 0:
                expected = self.outputs[move.request][move.start : move.start + move.accepted]
                assert same_bits(out[row, : move.accepted], expected)
                for token in range(move.length):
                    before[slots[row], (move.start + token) % self.ring] = x[row, token]
                if destinations[row] >= 0:
                    pool[row, :, : self.width] = self.windows[move.request][move.start // layer.chunk]
        assert same_bits(rings.cpu(), before)
        assert same_bits(pool_there.cpu(), pool)
        self.rings = torch.where(rings.cpu().isnan(), self.rings, rings.cpu())

    def run(self, tokens: int, seed: int) -> None:
        self.prefill()
        for moves in decode_steps(self.requests, self.layer.chunk, tokens, seed):
            self.decode(moves, tokens)


COMPANY = [
    Request(0, 0, 12), Request(0, 1, 10), Request(8, 8, 26), Request(8, 9, 18), Request(16, 30, 33),
    Request(24, 31, 42), Request(0, 2, 9),
]  # fmt: skip
"""Requests that start at 0, at a grid point and beside it, with tails shorter than any window."""


@pytest.mark.sampled(taps=(4,), tokens=(1, 4), dtype=1)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_bits_of_a_prefill_in_any_company(device, kernels, taps, dtype, tokens):
    Walk(Layer(taps=taps, dtype=dtype), kernels, device, COMPANY, tokens - 1).run(tokens, seed=taps)


@pytest.mark.sampled(dtype=1, has_bias=(False,))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_bits_without_a_bias_or_silu(device, kernels, has_bias, activation, dtype):
    layer = Layer(dtype=dtype, has_bias=has_bias, activation=activation, conv_dim=conv_replay.CHANNELS + 32)
    Walk(layer, kernels, device, COMPANY[1:5], 1).run(2, seed=3)


@few
@given(data=st.data())
def test_bits_for_any_cuts(device, data):
    chunk = data.draw(st.sampled_from([4, 8, 16]))
    requests = []
    for _ in range(data.draw(st.integers(1, 3))):
        resumed = chunk * data.draw(st.integers(0, 3))
        prompt = resumed + data.draw(st.integers(0, chunk))
        requests.append(Request(resumed, prompt, prompt + data.draw(st.integers(0, 12))))
    layer = Layer(taps=data.draw(st.integers(2, 4)), dtype=data.draw(st.sampled_from(DTYPES)), chunk=chunk)
    tokens = data.draw(st.integers(1, 4))
    # A ring may be longer than its step needs.
    walk = Walk(layer, Kernels(), device, requests, tokens - 1 + data.draw(st.integers(0, 3)))
    walk.run(tokens, seed=data.draw(st.integers(0, 99)))


def test_the_sum_in_float64(device, kernels):
    """Not by way of the prefill: y = silu(bias + sum of weight[tap] x[p - 3 + tap])."""
    layer, start, tokens = Layer(), 9, 3
    x = layer.tokens(0)
    rings = torch.full((2, 6, layer.conv_dim), torch.nan)
    for position in range(start - 3, start):
        rings[1, position % 6] = x[position]
    index = {"dtype": torch.int64, "device": device}
    out = kernels.causal_conv1d_replay(
        x[start : start + tokens][None].to(device), *layer.parameters(device),
        torch.zeros(1, layer.conv_dim, 3, device=device), rings.to(device),
        replay_rows(*(torch.tensor([number], **index) for number in (1, start, tokens, -1))),
    )  # fmt: skip
    for token in range(tokens):
        y = layer.bias.double()
        for tap in range(4):
            y = y + layer.weight[:, tap].double() * x[start + token - 3 + tap].double()
        torch.testing.assert_close(out[0, token].cpu().double(), y * y.sigmoid(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("taps", [2, 4])
def test_moves_no_byte_too_many(taps):
    """The window's inputs are read once, the tokens stored once, and padding moves nothing."""
    layer = Layer(taps=taps, conv_dim=conv_replay.CHANNELS + 3)
    rings, pool = torch.zeros(4, taps + 1, layer.conv_dim), torch.zeros(4, layer.conv_dim, taps - 1)
    x = layer.normal(4, 2, layer.conv_dim, seed=5)
    with traffic_of(rings) as of_rings, traffic_of(pool) as of_pool:
        conv_replay.causal_conv1d_replay(
            x, layer.weight, layer.bias, pool, rings,
            replay_rows(
                torch.tensor([0, 3, -1, 1]), torch.tensor([9, 15, 0, 0]), torch.tensor([2, 1, 0, 1]),
                torch.tensor([-1, 2, -1, -1]),
            ),
        )  # fmt: skip
    token = layer.conv_dim * 4
    assert of_rings.loaded == 2 * (taps - 1) * token  # positions before 0 are not read
    assert of_rings.stored == 4 * token
    assert of_pool.loaded == 0
    assert of_pool.stored == (taps - 1) * token


def test_rings_in_pieces_are_refused():
    layer = Layer()
    indices = [torch.zeros(1, dtype=torch.int64)] * 4
    arguments = torch.zeros(1, 3, layer.conv_dim), layer.weight, None, torch.zeros(1, layer.conv_dim, 3)
    with pytest.raises(ValueError, match="accepted: contiguous slots of any stride"):
        conv_replay.causal_conv1d_replay(
            *arguments, torch.zeros(2, layer.conv_dim, 6).mT, replay_rows(*indices)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_at_full_size(dtype):
    """10,240 channels, chunks of 64, four tokens a step."""
    device = kernel_device("cuda")
    layer = Layer(dtype=dtype, conv_dim=10240, chunk=64)
    requests = [Request(0, 3, 70), Request(64, 66, 80), Request(0, 60, 75), Request(64, 64, 70)]
    Walk(layer, Kernels(), device, requests, 3).run(4, seed=1)
    Walk(layer, Kernels(), device, requests, 0).run(1, seed=2)


@pytest.mark.gpu
def test_bits_from_a_graph_without_synchronising():
    """Captured as padding only, launched with rows: grids and addresses do not depend on values."""
    device = kernel_device("cuda")
    layer = Layer(dtype=torch.bfloat16)
    x = layer.normal(3, 2, layer.conv_dim, seed=5).to(device)
    rings = layer.normal(4, 5, layer.conv_dim, seed=6).to(device)
    pool = torch.zeros(4, layer.conv_dim, 3, dtype=layer.dtype, device=device)
    packed, cuts = x.flatten(0, 1), torch.tensor([0, 2, 6, 6], dtype=torch.int32, device=device)

    def index(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    real = [
        index([2, -1, 0]),
        index([6, 0, 1], torch.int32),
        index([2, 0, 1], torch.int32),
        index([1, -1, -1]),
    ]
    static = [torch.full_like(tensor, -1) for tensor in real]

    def launch(rings: Tensor, pool: Tensor, at: list[Tensor]) -> Tensor:
        conv_replay.keep_conv_inputs(packed, pool, rings, at[0], at[1], at[3], cuts)
        return conv_replay.causal_conv1d_replay(x, *parameters, pool, rings, replay_rows(*at))

    parameters = layer.parameters(device)
    expected_rings, expected_pool = rings.clone(), pool.clone()
    launch(rings, pool, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(rings, pool, static)
    with no_synchronisation():
        for tensor, values in zip(static, real, strict=True):
            tensor.copy_(values)
        graph.replay()
        expected = launch(expected_rings, expected_pool, real)
    assert same_bits(out[[0]].cpu(), expected[[0]].cpu())
    assert same_bits(out[2, :1].cpu(), expected[2, :1].cpu())
    assert same_bits(rings.cpu(), expected_rings.cpu())
    assert same_bits(pool.cpu(), expected_pool.cpu())
