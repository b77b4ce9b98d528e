"""Decode by replay: the bits of one prefill's scan, and the recurrence token by token in float64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import reference
from mambaslots.inference.kernels.ssd_inputs import keep_ssd_inputs
from mambaslots.inference.kernels.ssd_replay import ssd_replay
from mambaslots.inference.kernels.ssd_scan import ssd_chunk_scan
from oracle.budget import dear
from oracle.scan_rows import Row
from oracle.ssd import DEVICES, Batch, Layer, kernel_device, poisoned_allocations, relative_error, same_bits

few = settings(dear(), derandomize=True)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


def prefill(layer, seed, length, chunk_size, device):
    """y of a sequence's start in one scan, and the states at its grid points: zeros, then one a chunk."""
    ends = range(chunk_size, length + 1, chunk_size)
    pool = torch.full((len(ends) + 1, layer.H, layer.P, layer.N), torch.nan, device=device)
    row = Row(seed, 0, length, checkpoints={end: 1 + i for i, end in enumerate(ends)})
    with poisoned_allocations():
        y = Batch(layer, [row], chunk_size).scan(ssd_chunk_scan, pool)
    pool[0] = 0
    return y, pool.cpu()


@dataclass(frozen=True)
class Tokens:
    """A row of a replay: tokens [start, start + length) of sequence `seed`, or padding where slot is -1.

    rejected: how many of them are other tokens than the sequence's.
    """

    seed: int
    start: int
    length: int
    slot: int
    source: int = -1
    destination: int = -1
    rejected: int = 0


class Replay:
    """Inputs of running requests, NaN at first, and one pool of states."""

    def __init__(self, layer, chunk_size, device, slots=4, states=8):
        self.layer, self.chunk_size, self.device = layer, chunk_size, device
        kept = slots, chunk_size

        def nans(*shape, dtype=torch.float32):
            return torch.full(shape, torch.nan, dtype=dtype, device=device)

        self.states = nans(states, layer.H, layer.P, layer.N)
        self.x_inputs = nans(*kept, layer.H, layer.P, dtype=layer.dtype)
        self.B_inputs = nans(*kept, layer.G, layer.N, dtype=layer.dtype)
        self.gates = nans(slots, 2, layer.H, chunk_size)

    @property
    def inputs(self):
        return self.x_inputs, self.B_inputs, self.gates

    def tokens_of(self, row, longest):
        parts = self.layer.tokens(row.seed, row.start + row.length)
        new = [part[row.start :].clone() for part in parts]
        if row.rejected:
            others = self.layer.tokens(row.seed + 100, row.rejected)
            for part, other in zip(new, others, strict=True):
                part[-row.rejected :] = other
        return [
            torch.cat([part, part.new_full((longest - len(part), *part.shape[1:]), torch.nan)]) for part in new
        ]

    def step(self, rows, longest=None, run=ssd_replay):
        """y of the rows' tokens, a tensor each, on the CPU; x, B and C are parts of one tensor."""
        layer = self.layer
        longest = longest or max(row.length for row in rows)
        x, dt, B, C = (torch.stack(part) for part in zip(*(self.tokens_of(r, longest) for r in rows), strict=True))
        parts = [x.flatten(2), B.flatten(2), C.flatten(2)]
        packed = torch.cat(parts, dim=2).to(self.device).split([part.shape[2] for part in parts], dim=2)
        x, B, C = (part.unflatten(2, like.shape[2:]) for part, like in zip(packed, (x, B, C), strict=True))

        def indices(name, dtype):
            return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=self.device)

        with poisoned_allocations():
            y = run(
                x, dt.to(self.device), layer.A.to(self.device), B, C, layer.D.to(self.device), self.states,
                *self.inputs, indices("slot", torch.int64), indices("start", torch.int32),
                indices("length", torch.int32), indices("source", torch.int64),
                indices("destination", torch.int64), self.chunk_size,
            ).cpu()  # fmt: skip
        assert y.dtype == layer.dtype
        return [found[: row.length] for found, row in zip(y, rows, strict=True)]

    def keep(self, rows, run=keep_ssd_inputs):
        """Keep the tails of prefill rows, which lie behind each other in one tensor."""
        layer = self.layer
        parts = [layer.tokens(row.seed, row.start + row.length) for row in rows]
        x, dt, B, _ = (
            torch.cat([part[row.start :] for part, row in zip(tensors, rows, strict=True)])
            for tensors in zip(*parts, strict=True)
        )
        both = torch.cat([x.flatten(1), B.flatten(1)], dim=1).to(self.device)
        x, B = (
            part.unflatten(1, like.shape[1:])
            for part, like in zip(both.split([x[0].numel(), B[0].numel()], dim=1), (x, B), strict=True)
        )
        ends = torch.tensor([0] + [row.length for row in rows]).cumsum(0)
        tails = [
            int(first) + max(0, (row.start + row.length) // self.chunk_size * self.chunk_size - row.start)
            for first, row in zip(ends, rows, strict=False)
        ]
        run(
            x, dt.to(self.device), layer.A.to(self.device), B, *self.inputs,
            torch.tensor([row.slot for row in rows], device=self.device),
            torch.tensor(tails, device=self.device), ends.to(self.device, torch.int32), self.chunk_size,
        )  # fmt: skip


def decode(replay, seed, slot, start, end, drafts, states, whole, company=()):
    """Decode tokens [start, end) in steps of 1 + up to `drafts`, some of them rejected; check every bit.

    states: two indices of the pool; the first holds the state at the chunk's start, or is -1.
    """
    source, other = states
    y, at_grid = whole
    chunk, position, step = replay.chunk_size, start, 0
    while position < end:
        to_end = chunk - position % chunk
        length = min(1 + (step * 7 + seed) % (drafts + 1), to_end, end - position)
        rejected = min((step + seed) % 3, length - 1)
        if length == to_end and length > 1:
            length, rejected = length - 1, min(rejected, length - 2)  # drafts never complete a chunk
        completes = length == to_end
        row = Tokens(
            seed, position, length, slot, source, other if completes else -1, rejected=rejected
        )
        found = replay.step([*company, row], longest=1 + drafts)[-1]
        accepted = length - rejected
        assert torch.equal(found[:accepted], y[position : position + accepted]), (position, length, rejected)
        position += accepted
        step += 1
        if completes:
            assert same_bits(replay.states[other].cpu(), at_grid[position // chunk]), position
            source, other = other, (source if source >= 0 else other + 1)
    return source


SIZES = [(Layer(H=4, P=8, G=2, N=12), 16), (Layer(H=2, P=40, G=1, N=20), 48)]


class TestBits:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("drafts", [0, 3])
    def test_bits_of_every_row_are_those_of_one_prefill(self, device, dtype, drafts):
        layer = Layer(dtype=dtype)
        whole = prefill(layer, 1, 40, 16, device)
        decode(Replay(layer, 16, device), 1, 2, 0, 40, drafts, (-1, 3), whole)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_of_scan_rows_do_not_depend_on_what_follows(self, device, dtype):
        layer = Layer(H=2, dtype=dtype)
        whole, states = prefill(layer, 1, 70, 32, device)
        for length in (1, 5, 31, 32, 33, 64, 69):
            rows, prefix = prefill(layer, 1, length, 32, device)
            assert torch.equal(rows, whole[:length])
            assert same_bits(prefix, states[: len(prefix)])


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_reference_is_the_recurrence(self, dtype):
        layer = Layer(dtype=dtype)
        replay = Replay(layer, 16, torch.device("cpu"))
        x, dt, B, C = layer.tokens(5, 40)
        expected, states = layer.run(x, dt, B, C)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-6
        for position in range(40):
            last = position % 16 == 15
            source = -1 if position < 16 else 0
            row = Tokens(5, position, 1, 1, source, 0 if last else -1)
            found = replay.step([row], run=reference.ssd_replay)[0]
            assert relative_error(found[0], expected[position]) <= tolerance
            if last:
                assert relative_error(replay.states[0], states[position + 1]) <= tolerance
