"""Decode by replay: the bits of one prefill's scan, and the recurrence token by token in float64."""

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import ssd_replay as module
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.mixer_inputs import SsdInputs
from mambaslots.inference.kernels.ssd import ssd_chunk_scan
from mambaslots.inference.kernels.ssd_replay import group_heads_per_program, keep_ssd_inputs, ssd_replay
from mambaslots.inference.kernels.step_rows import ReplayRows, TailRows
from oracle.budget import example_or_dear
from oracle.inputs_in_blocks import in_blocks
from oracle.scan_rows import Row
from oracle.ssd import DEVICES, Batch, Layer, kernel_device, poisoned_allocations, relative_error, same_bits
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of

few = settings(example_or_dear(), derandomize=True)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


@cache
def drawn(layer, seed):
    return layer.tokens(seed, 600)


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
        self.dt_inputs = nans(slots, 2, layer.H, chunk_size)

    @property
    def inputs(self):
        return SsdInputs(self.x_inputs, self.B_inputs, self.dt_inputs)

    def tokens_of(self, row, longest):
        new = [part[row.start : row.start + row.length].clone() for part in drawn(self.layer, row.seed)]
        if row.rejected:
            for part, other in zip(new, drawn(self.layer, row.seed + 100), strict=True):
                part[-row.rejected :] = other[: row.rejected]
        return [
            torch.cat([part, part.new_full((longest - len(part), *part.shape[1:]), torch.nan)])
            for part in new
        ]

    def step(self, rows, longest=None, run=ssd_replay):
        """y of the rows' tokens, a tensor each, on the CPU; x, B and C are parts of one tensor."""
        layer = self.layer
        longest = longest or max(row.length for row in rows)
        x, dt, B, C = (
            torch.stack(part) for part in zip(*(self.tokens_of(r, longest) for r in rows), strict=True)
        )
        parts = [x.flatten(2), B.flatten(2), C.flatten(2)]
        packed = torch.cat(parts, dim=2).to(self.device).split([part.shape[2] for part in parts], dim=2)
        x, B, C = (part.unflatten(2, like.shape[2:]) for part, like in zip(packed, (x, B, C), strict=True))

        def indices(name, dtype):
            return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=self.device)

        with poisoned_allocations():
            y = run(
                x, dt.to(self.device), layer.A.to(self.device), B, C, layer.D.to(self.device), self.states,
                self.inputs,
                ReplayRows(
                    indices("slot", torch.int64), indices("start", torch.int32),
                    indices("length", torch.int32), indices("source", torch.int64),
                    indices("destination", torch.int64), self.chunk_size,
                ),
            ).cpu()  # fmt: skip
        assert y.dtype == layer.dtype
        return [found[: row.length] for found, row in zip(y, rows, strict=True)]

    def keep(self, rows, run=keep_ssd_inputs):
        """Keep the tails of prefill rows, which lie behind each other in one tensor."""
        layer = self.layer
        parts = [drawn(layer, row.seed) for row in rows]
        x, dt, B, _ = (
            torch.cat([p[row.start : row.start + row.length] for p, row in zip(tensors, rows, strict=True)])
            for tensors in zip(*parts, strict=True)
        )
        both = torch.cat([x.flatten(1), B.flatten(1)], dim=1).to(self.device)
        x, B = (
            part.unflatten(1, like.shape[1:])
            for part, like in zip(
                both.split([layer.H * layer.P, layer.G * layer.N], dim=1), (x, B), strict=True
            )
        )
        ends = torch.tensor([0] + [row.length for row in rows]).cumsum(0)
        tails = [
            int(first) + max(0, (row.start + row.length) // self.chunk_size * self.chunk_size - row.start)
            for first, row in zip(ends, rows, strict=False)
        ]
        run(
            x, dt.to(self.device), layer.A.to(self.device), B, self.inputs,
            TailRows(
                torch.tensor([row.slot for row in rows], device=self.device),
                torch.tensor(tails, device=self.device), ends.to(self.device, torch.int32),
            ), self.chunk_size,
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
        row = Tokens(seed, position, length, slot, source, other if completes else -1, rejected=rejected)
        found = replay.step([*company, row], longest=1 + drafts)[-1]
        accepted = length - rejected
        assert torch.equal(found[:accepted], y[position : position + accepted]), (position, length, rejected)
        position += accepted
        step += 1
        if completes:
            assert same_bits(replay.states[other].cpu(), at_grid[position // chunk]), position
            source, other = other, (source if source >= 0 else other + 1)
    return source


class TestBits:
    """Rows and states of replays against those of one prefill from the sequence's start."""

    @pytest.mark.sampled(dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_of_scan_rows_do_not_depend_on_what_follows(self, device, dtype):
        layer = Layer(H=1, G=1, dtype=dtype)
        whole, states = prefill(layer, 1, 70, 32, device)
        for length in (1, 31, 32, 33, 69):
            rows, prefix = prefill(layer, 1, length, 32, device)
            assert torch.equal(rows, whole[:length])
            assert same_bits(prefix, states[: len(prefix)])

    @pytest.mark.sampled(dtype=1, drafts=(3,))
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("drafts", [0, 3])
    def test_bits_of_every_row_are_those_of_one_prefill(self, device, dtype, drafts):
        """Token by token, and with drafts, of which some are rejected and overwritten."""
        layer = Layer(H=1, G=1, dtype=dtype)
        whole = prefill(layer, 1, 36, 16, device)
        decode(Replay(layer, 16, device), 1, 2, 0, 36, drafts, (-1, 3), whole)

    @pytest.mark.parametrize(
        ("block_tokens", "drafts"), [(8, 0), (5, 3), pytest.param(1, 2, marks=pytest.mark.long)]
    )
    def test_bits_of_inputs_in_blocks(self, device, block_tokens, drafts):
        """Of any number of tokens, also one that does not divide the chunk."""
        layer = Layer(dtype=torch.float16)
        whole = y, states = prefill(layer, 3, 37, 16, device)
        replay = Replay(layer, 16, device)
        replay.keep([Tokens(3, 0, 21, 1)], run=in_blocks(keep_ssd_inputs, block_tokens))
        replay.states[2] = states[1].to(device)
        replay.step = partial(replay.step, run=in_blocks(ssd_replay, block_tokens))
        decode(replay, 3, 1, 21, len(y), drafts, (2, 5), whole)

    @few
    @given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 3), st.sampled_from(DTYPES))
    @example(17, 5, 2, torch.bfloat16)
    @example(32, 1, 0, torch.float16)
    def test_bits_after_a_prefill_of_any_length(self, device, start, length, drafts, dtype):
        layer = Layer(H=1, G=1, dtype=dtype)
        y, states = prefill(layer, 3, start + length, 16, device)
        replay = Replay(layer, 16, device)
        replay.keep([Tokens(3, 0, start, 1)])
        source = -1
        if start >= 16:
            source = 2
            replay.states[source] = states[start // 16].to(device)
        decode(replay, 3, 1, start, start + length, drafts, (source, 5), (y, states))

    @pytest.mark.sampled(dtype=1)
    @pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 1), (torch.float16, 2)])
    def test_bits_in_a_batch_of_rows_at_different_places(self, monkeypatch, device, dtype, heads):
        """Beside padding rows, whose slot is -1 and whose inputs are NaN; one or two heads a program."""
        monkeypatch.setattr(module, "group_heads_per_program", lambda *sizes: heads)
        layer = Layer(dtype=dtype)
        rows = [
            Tokens(1, 15, 1, 0, -1, 0),  # completes its first chunk
            Tokens(2, 21, 3, 1, 1),
            Tokens(0, 0, 0, -1),
            Tokens(3, 32, 2, 2, 2),  # begins a chunk
            Tokens(4, 47, 1, 3, 3, 3),  # completes its third chunk, in place
            Tokens(0, 0, 0, -1),
        ]
        replay = Replay(layer, 16, device)
        whole = [prefill(layer, row.seed, row.start + row.length, 16, device) for row in rows]
        replay.keep([Tokens(row.seed, 0, row.start, row.slot) for row in rows if row.slot >= 0])
        for row, (_, states) in zip(rows, whole, strict=True):
            if row.source >= 0:
                replay.states[row.source] = states[row.start // 16].to(device)
        untouched = replay.states[4:].clone()
        found = replay.step(rows, longest=4)
        for row, y, (expected, states) in zip(rows, found, whole, strict=True):
            assert torch.equal(y, expected[row.start :])
            if row.destination >= 0:
                assert same_bits(replay.states[row.destination].cpu(), states[-1])
        assert same_bits(replay.states[4:], untouched)

    @pytest.mark.sampled(dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_of_kept_inputs_are_those_that_replays_store(self, device, dtype):
        """Rows that start on and off the grid, end on it, and are shorter than a chunk."""
        layer = Layer(H=1, G=1, dtype=dtype)
        rows = [Tokens(1, 0, 21, 0), Tokens(2, 16, 32, 1), Tokens(3, 32, 7, 2), Tokens(4, 0, 5, -1)]
        kept, stored = Replay(layer, 16, device), Replay(layer, 16, device)
        kept.keep(rows)
        for start, row in ((16, rows[0]), (32, rows[2])):
            for position in range(start, row.start + row.length):
                stored.step([Tokens(row.seed, position, 1, row.slot)])
        for found, expected in zip(kept.inputs, stored.inputs, strict=True):
            assert same_bits(found, expected)
        assert kept.x_inputs[1].isnan().all()  # an empty tail

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("sizes", "chunk_size"), [((128, 64, 8, 128), 128), ((48, 64, 1, 128), 256)])
    def test_bits_at_the_sizes_of_models(self, sizes, chunk_size, dtype):
        """Nemotron-H-8B's and Granite-4-H's layers: one token, drafts, and 64 tokens, at many places."""
        device = kernel_device("cuda")
        layer = Layer(*sizes, dtype=dtype)
        length = 2 * chunk_size + 77
        whole, states = prefill(layer, 1, length, chunk_size, device)
        for tokens in (1, 4, 64):
            ends = [*range(tokens, length, 53), chunk_size, 2 * chunk_size, length]
            rows = []
            for end in ends:
                count = min(tokens, 1 + (end - 1) % chunk_size)
                source = (end - count) // chunk_size
                completed = len(states) + len(rows) if end % chunk_size == 0 else -1
                rows.append(Tokens(1, end - count, count, len(rows), source, completed))
            replay = Replay(layer, chunk_size, device, len(rows), len(states) + len(rows))
            replay.states[: len(states)] = states.to(device)
            for row in rows:
                replay.keep([Tokens(1, 0, row.start, row.slot)])
            found = replay.step(rows, longest=tokens)
            for row, y in zip(rows, found, strict=True):
                end = row.start + row.length
                assert torch.equal(y, whole[row.start : end]), (tokens, row)
                if row.destination >= 0:
                    assert same_bits(replay.states[row.destination].cpu(), states[end // chunk_size])

    @pytest.mark.gpu
    def test_bits_of_a_captured_graph_that_follows_its_indices(self):
        """No launch synchronises, and none depends on where rows are."""
        device = kernel_device("cuda")
        layer = Layer(H=8, P=64, G=2, N=128, dtype=torch.bfloat16)
        x, dt, B, C = (part[:4].to(device) for part in drawn(layer, 1))
        x, dt, B, C = (part.unflatten(0, (4, 1)) for part in (x, dt, B, C))
        A, D, pool = layer.A.to(device), layer.D.to(device), layer.pool(8).to(device)
        replay = Replay(layer, 64, device)
        replay.keep([Tokens(seed, 0, 63, seed - 1) for seed in (1, 2, 3, 4)])
        inputs = replay.inputs
        own = torch.arange(4, device=device)
        indices = [own.clone(), own.int(), torch.ones_like(own).int(), own.clone(), own - 5]
        plans = [
            ([0, 1, 2, 3], [70, 127, 64, 81], [1, 1, 1, 1], [0, 1, -1, 3], [-1, 4, -1, -1]),
            ([3, -1, -1, 0], [127, 0, 0, 100], [1, 0, 0, 1], [5, -1, -1, -1], [5, -1, -1, -1]),
        ]

        def launch(states, kept):
            return ssd_replay(x, dt, A, B, C, D, states, SsdInputs(*kept), ReplayRows(*indices, 64))

        def follow(plan):
            for index, values in zip(indices, plan, strict=True):
                index.copy_(torch.tensor(values))

        captured, kept = pool.clone(), [part.clone() for part in inputs]
        follow(plans[0])
        launch(pool.clone(), [part.clone() for part in inputs])
        torch.cuda.synchronize()
        with no_synchronisation():
            launch(pool.clone(), [part.clone() for part in inputs])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = launch(captured, kept)
        for plan in plans:
            follow(plan)
            captured.copy_(pool)
            for part, fresh in zip(kept, inputs, strict=True):
                part.copy_(fresh)
            graph.replay()
            after, stored = pool.clone(), [part.clone() for part in inputs]
            expected = launch(after, stored)
            real = indices[0] >= 0
            assert torch.equal(y[real], expected[real])
            assert same_bits(captured, after)
            assert all(same_bits(*both) for both in zip(kept, stored, strict=True))


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_reference_is_the_recurrence(self, dtype):
        layer = Layer(dtype=dtype)
        check_recurrence(layer, torch.device("cpu"), KernelSet.ssd_replay, KernelSet.keep_ssd_inputs, 1e-5)

    @pytest.mark.sampled(dtype=1, sizes=1)
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
    @pytest.mark.parametrize("sizes", [(2, 80, 1, 33), (3, 20, 3, 140)])
    def test_the_kernels_are_the_recurrence(self, device, dtype, sizes):
        layer = Layer(*sizes, dtype=dtype)
        check_recurrence(layer, device, ssd_replay, keep_ssd_inputs, 4 * torch.finfo(dtype).eps)


def check_recurrence(layer, device, run, keep, tolerance, chunk_size=16):
    """Tokens 21 to 35 after a prefill of 20, two and one a step, against a loop in float64."""
    x, dt, B, C = layer.tokens(5, 36)
    expected, states = layer.run(x, dt, B, C)
    replay = Replay(layer, chunk_size, device)
    replay.states[2] = states[16].to(device)
    replay.keep([Tokens(5, 0, 20, 3)], run=keep)
    position, source = 20, 2
    for count in (2, 2, 2, 2, 2, 1, 1, 2, 1):
        end = position + count
        row = Tokens(5, position, count, 3, source, 2 if end % 16 == 0 else -1)
        found = replay.step([row], run=run)[0]
        assert relative_error(found, expected[position:end]) <= tolerance
        if end % 16 == 0:
            assert relative_error(replay.states[2], states[end]) <= tolerance
        position = end
    assert position == 35


def test_a_program_serves_more_heads_the_more_rows_there_are():
    assert [group_heads_per_program(rows, 128, 16) for rows in (1, 8, 32, 128)] == [1, 1, 4, 16]
    assert [group_heads_per_program(rows, 48, 48) for rows in (1, 32, 1024)] == [1, 1, 16]


def test_padding_reads_and_writes_nothing(device):
    layer = Layer(dtype=torch.float16)
    replay = Replay(layer, 16, device)
    before = [tensor.clone() for tensor in (replay.states, *replay.inputs)]
    replay.step([Tokens(1, 0, 0, -1), Tokens(1, 0, 0, -1)], longest=2)
    for after, was in zip((replay.states, *replay.inputs), before, strict=True):
        assert same_bits(after, was)


def test_the_state_is_read_once_a_step_and_the_inputs_once():
    layer = Layer(dtype=torch.float16)
    replay = Replay(layer, 16, torch.device("cpu"))
    replay.states[0] = 0
    replay.keep([Tokens(1, 0, 25, 1)])
    row = Tokens(1, 25, 1, 1, 0)
    with traffic_of(replay.states) as states, traffic_of(replay.x_inputs) as inputs:
        replay.step([row])
    assert (states.loaded, states.stored) == (replay.states[0].numel() * 4, 0)
    token = layer.H * layer.P * 2
    assert (inputs.loaded, inputs.stored) == (9 * token, token)


def test_strides_that_cannot_be_read_are_refused():
    layer = Layer(dtype=torch.float16)
    for name in ("states", "x_inputs", "B_inputs", "dt_inputs"):
        replay = Replay(layer, 16, torch.device("cpu"))
        setattr(replay, name, torch.stack([getattr(replay, name)] * 2, dim=-1)[..., 0])
        with pytest.raises(ValueError, match="accepted: contiguous slots of any stride"):
            replay.step([Tokens(1, 0, 1, 1)])
        if name != "states":
            with pytest.raises(ValueError, match="accepted: contiguous slots of any stride"):
                replay.keep([Tokens(1, 0, 5, 1)])
