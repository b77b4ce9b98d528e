"""The gated delta rule of decode by replay: bit for bit the scan of the same tokens from the same state.

In Triton's interpreter, fla-core's stages included, and on CUDA under the gpu mark. The torch reference goes
token by token: it is compared with the recurrence in float64.
"""

import contextlib
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle.ssd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import conv_replay, delta_replay, delta_solve, gates
from mambaslots.inference.kernels.delta import delta_operands, gated_delta_rule_scan
from mambaslots.inference.kernels.dtypes_and_strides import compute_dtype
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.mixer_inputs import DeltaInputs, DeltaNet, RawTokens
from mambaslots.inference.kernels.reference.torch_delta import normalised
from mambaslots.inference.kernels.step_rows import ReplayRows, TailRows
from oracle.budget import dear, is_quick
from oracle.fla_stages import one_configuration
from oracle.fresh_process import printed_by
from oracle.gated_delta import INPUTS, LONGEST, Batch, Layer, error
from oracle.inputs_in_blocks import in_blocks
from oracle.replays import Move, Request, decode_steps
from oracle.scan_rows import Row
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations, same_bits
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of
from oracle.warpgroup_products import misled_products
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are masked out
few = settings(dear(), derandomize=True)
# The interpreter would multiply the bits of bfloat16 as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
KEPT = INPUTS[1:]
"""What a replay reads of earlier tokens: normalised k, v, g and beta; of 16-bit tokens new values and the
inverse, too."""


def row_of_numbers(chunk: int) -> Tensor:
    """[(chunk + 16) // 2, chunk]: the row of the inverse that each of its kept numbers is of."""
    blocks = [torch.arange(16 * r, 16 * r + 16) for r in range(chunk // 16) for _ in range(r + 1)]
    return torch.stack(blocks)[..., None].expand(-1, -1, 16).reshape(-1, chunk)


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


@pytest.fixture(autouse=True, scope="module")
def _one_configuration():
    with one_configuration():
        yield


def check_kept(kernels: Any, name: str, found: Tensor, expected: Tensor) -> None:
    """Bits, except of the reference's norms: torch's sums depend on shapes."""
    if kernels is KernelSet and name == "k":
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert same_bits(found, expected)


class Uncut:
    """One sequence in one prefill by the scan: all outputs, and the state at every grid point."""

    def __init__(self, layer: Layer, seed: int, chunk: int, length: int, device: torch.device) -> None:
        points = list(range(chunk, length + 1, chunk))
        pool = layer.pool(len(points), torch.float32).to(device)
        row = Row(seed, 0, length, checkpoints={point: slot for slot, point in enumerate(points)})
        batch = Batch(layer, [row], chunk)
        self.new_v = torch.empty(batch.inputs["v"].shape, dtype=layer.dtype, device=device)
        self.outputs = batch.scan(partial(gated_delta_rule_scan, new_v=self.new_v), pool)
        self.new_v = self.new_v.cpu()
        self.states = dict(zip(points, pool.cpu(), strict=True))


class Walk:
    """Requests through prefill and decode by replay, every invalid number being NaN before each call.

    The live state of request i is at slot i. Chunks are completed in place, or at other slots.
    """

    def __init__(
        self, layer: Layer, device: torch.device, requests: list[Request], chunk: int, length: int
    ) -> None:
        self.layer, self.device, self.requests, self.chunk = layer, device, requests, chunk
        self.tokens = [layer.tokens(index) for index in range(len(requests))]
        self.uncut = [Uncut(layer, index, chunk, length, device) for index in range(len(requests))]
        self.kept = [self.kept_of(tokens) for tokens in self.tokens]
        slots = len(requests) + 2
        self.inputs = {
            name: torch.full((slots, chunk, *self.tokens[0][name].shape[1:]), torch.nan).to(
                self.tokens[0][name].dtype
            )
            for name in KEPT
        }
        self.rows = row_of_numbers(chunk)
        self.inverses = torch.full((slots, layer.Hv, *self.rows.shape), torch.nan)
        self.new_v = torch.full_like(self.inputs["v"], torch.nan)
        self.slots = torch.randperm(slots, generator=torch.Generator().manual_seed(0)).tolist()

    def kept_of(self, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a request keeps of tokens: the scan's keys, which are normalised."""
        q, k, v = (tokens[name].to(self.device) for name in INPUTS[:3])
        keys = delta_operands(q, k, v)[1] if k.dtype in DTYPES else normalised(k)
        return tokens | {"k": keys.cpu()}

    def index(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def inverses_until(self, ends: dict[int, int]) -> Tensor:
        """The rows before each slot's end; the others are NaN."""
        valid = torch.full_like(self.inverses, torch.nan)
        for slot, end in ends.items():
            valid[slot] = torch.where(self.rows < end, self.inverses[slot], torch.nan)
        return valid

    def note_inverses(
        self, before: Tensor, after: Tensor, starts: dict[int, int], ends: dict[int, int]
    ) -> None:
        """Take over new rows; asserts that no other row changed."""
        for slot in range(len(before)):
            new = (self.rows >= starts.get(slot, 0)) & (self.rows < ends.get(slot, 0))
            assert same_bits(after[slot][:, ~new], before[slot][:, ~new])
            assert not after[slot][:, new].isnan().any()
            self.inverses[slot] = torch.where(new, after[slot], self.inverses[slot])

    def moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}

    def prefill(self, kernels: Any) -> None:
        """Keep the tails of one packed step of all prompts, with padding behind."""
        lengths = [request.prompt - request.resumed for request in self.requests]
        cuts = torch.tensor([0, *lengths, 0]).cumsum(0).tolist()
        tails = [
            end - request.prompt % self.chunk for end, request in zip(cuts[1:], self.requests, strict=False)
        ]
        packed = {}
        for name in KEPT:
            parts = [x[name][r.resumed : r.prompt] for x, r in zip(self.tokens, self.requests, strict=True)]
            packed[name] = torch.cat([*parts, parts[0].new_full((3, *parts[0].shape[1:]), torch.nan)])
        expected = {name: tensor.clone() for name, tensor in self.inputs.items()}
        for index, request in enumerate(self.requests):
            tail = request.prompt % self.chunk
            for name in KEPT:
                kept = self.kept[index][name][request.prompt - tail : request.prompt]
                expected[name][self.slots[index], :tail] = kept
        inputs = self.moved(self.inputs)
        solves = kernels is delta_replay and self.layer.dtype.itemsize == 2
        inverses = self.inverses.to(self.device, copy=True) if solves else None
        scanned = [
            uncut.new_v[r.resumed : r.prompt] for uncut, r in zip(self.uncut, self.requests, strict=True)
        ]
        scanned.append(scanned[0].new_full((3, *scanned[0].shape[1:]), torch.nan))
        new_v = self.new_v.to(self.device, copy=True) if solves else None
        kernels.keep_delta_inputs(
            **self.moved(packed), new_v=torch.cat(scanned).to(self.device) if solves else None,
            inputs=DeltaInputs(**inputs, new_v=new_v, inverses=inverses),
            rows=TailRows(
                self.index([*self.slots[: len(lengths)], -1]), self.index([*tails, 0]),
                self.index(cuts, torch.int32),
            ),
        )  # fmt: skip
        for name in KEPT:
            self.inputs[name] = inputs[name].cpu()
            check_kept(kernels, name, self.inputs[name], expected[name])
        if inverses is not None:
            ends = {
                self.slots[index]: request.prompt % self.chunk for index, request in enumerate(self.requests)
            }
            self.note_inverses(self.inverses, inverses.cpu(), {}, ends)
            for index, request in enumerate(self.requests):
                tail = request.prompt % self.chunk
                kept = self.uncut[index].new_v[request.prompt - tail : request.prompt]
                self.new_v[self.slots[index], :tail] = kept
            assert same_bits(new_v.cpu(), self.new_v)

    def decode(self, moves: list[Move], tokens: int, kernels: Any) -> tuple[Tensor, Tensor]:
        """The outputs and the pool after a step; asserts what was stored among the inputs."""
        rows = len(moves)
        step = {
            name: torch.full((rows, tokens, *x.shape[1:]), torch.nan).to(x.dtype)
            for name, x in self.tokens[0].items()
        }
        valid = {name: torch.full_like(tensor, torch.nan) for name, tensor in self.inputs.items()}
        pool = torch.full((2 * rows, *self.layer.pool(1).shape[1:]), torch.nan)
        slots, sources, destinations = [-1] * rows, [-1] * rows, [-1] * rows
        kept_of_step = {name: step[name].clone() for name in KEPT}
        for row, move in enumerate(moves):
            if move.request < 0:
                continue
            slots[row], first = self.slots[move.request], move.start % self.chunk
            point = move.start - first
            if point:
                sources[row] = row
                pool[row] = self.uncut[move.request].states[point]
            if first + move.length == self.chunk:
                destinations[row] = sources[row] if move.request % 2 else rows + row
            for name in INPUTS:
                own, other = self.tokens[move.request][name], self.tokens[0][name].flip(0)
                step[name][row, : move.accepted] = own[move.start : move.start + move.accepted]
                step[name][row, move.accepted : move.length] = other[: move.length - move.accepted]
            for name in KEPT:
                own, other = self.kept[move.request][name], self.kept[0][name].flip(0)
                kept_of_step[name][row, : move.accepted] = own[move.start : move.start + move.accepted]
                kept_of_step[name][row, move.accepted : move.length] = other[: move.length - move.accepted]
                valid[name][slots[row], :first] = self.inputs[name][slots[row], :first]
        expected = {name: tensor.clone() for name, tensor in valid.items()}
        for row, move in enumerate(moves):
            if move.request >= 0:
                part = slice(move.start % self.chunk, move.start % self.chunk + move.length)
                for name in KEPT:
                    expected[name][slots[row], part] = kept_of_step[name][row, : move.length]
        starts = {slots[row]: move.start % self.chunk for row, move in enumerate(moves) if move.request >= 0}
        ends = {slots[row]: starts[slots[row]] + move.length for row, move in enumerate(moves) if move.length}
        solves = kernels is delta_replay and self.layer.dtype.itemsize == 2
        valid_inverses = self.inverses_until(starts)
        inverses = valid_inverses.to(self.device, copy=True) if solves else None
        new_v = torch.full_like(self.new_v, torch.nan)
        for slot, first in starts.items():
            new_v[slot, :first] = self.new_v[slot, :first]
        new_v = new_v.to(self.device) if solves else None
        inputs, after = self.moved(valid), pool.to(self.device)
        wide = torch.cat([step[name].flatten(2) for name in INPUTS[:3]], dim=2).to(self.device)
        views = wide.split([step[name][0, 0].numel() for name in INPUTS[:3]], dim=2)
        views = [view.unflatten(2, step[name].shape[2:]) for view, name in zip(views, INPUTS, strict=False)]
        with poisoned_allocations():
            o = kernels.gated_delta_rule_replay(
                *views, step["g"].to(self.device), step["beta"].to(self.device), after,
                DeltaInputs(**inputs, new_v=new_v, inverses=inverses),
                ReplayRows(
                    self.index(slots), self.index([move.start for move in moves], torch.int32),
                    self.index([move.length for move in moves], torch.int32), self.index(sources),
                    self.index(destinations), self.chunk,
                ),
            )  # fmt: skip
        assert o.dtype == self.layer.dtype
        for name in KEPT:
            check_kept(kernels, name, inputs[name].cpu(), expected[name])
            self.inputs[name] = torch.where(expected[name].isnan(), self.inputs[name], expected[name])
        if inverses is not None:
            self.note_inverses(valid_inverses, inverses.cpu(), starts, ends)
            self.check_new_values(moves, new_v.cpu(), slots)
        after = after.cpu()
        untouched = [slot for slot in range(2 * rows) if slot not in destinations]
        assert same_bits(after[untouched], pool[untouched])
        self.completed = {row: after[slot] for row, slot in enumerate(destinations) if slot >= 0}
        return o.cpu(), after

    def check_new_values(self, moves: list[Move], found: Tensor, slots: list[int]) -> None:
        """The scan's, of all tokens of the chunk; rejected drafts' are any numbers."""
        for slot in set(range(len(found))) - set(slots):
            assert found[slot].isnan().all()
        for slot, move in zip(slots, moves, strict=True):
            if slot >= 0:
                first, end = move.start % self.chunk, move.start + move.accepted
                point = move.start - first
                assert same_bits(found[slot, : end - point], self.uncut[move.request].new_v[point:end])
                assert found[slot, first + move.length :].isnan().all()
                assert not found[slot, : first + move.length].isnan().any()
                self.new_v[slot] = found[slot]

    def check_bits(self, moves: list[Move], o: Tensor) -> None:
        for row, move in enumerate(moves):
            if move.request >= 0:
                uncut = self.uncut[move.request]
                assert same_bits(
                    o[row, : move.accepted], uncut.outputs[move.start : move.start + move.accepted]
                )
                if row in self.completed:
                    assert same_bits(self.completed[row], uncut.states[move.start + move.length])

    def run(self, tokens: int, seed: int) -> None:
        self.prefill(delta_replay)
        for moves in decode_steps(self.requests, self.chunk, tokens, seed):
            o, _ = self.decode(moves, tokens, delta_replay)
            self.check_bits(moves, o)


class TestBits:
    """Every token, and every state at a grid point, has the bits of one prefill of the whole sequence."""

    requests = (Request(0, 0, 5), Request(16, 27, 35), Request(0, 15, 18), Request(16, 16, 18))

    @pytest.mark.sampled(tokens=(3,), dtype=1)
    @pytest.mark.parametrize("tokens", [1, 3])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_of_a_prefill_in_any_company(self, device, dtype, tokens):
        requests = self.requests[1:3] if is_quick() else self.requests
        walk = Walk(Layer(Hk=1, Hv=2, dtype=dtype), device, list(requests), 16, 48)
        walk.run(tokens, seed=tokens)

    @pytest.mark.parametrize(
        ("block_tokens", "tokens", "dtype"),
        [
            pytest.param(16, 1, torch.float16, marks=pytest.mark.long),  # whole chunks: see the next test
            (7, 3, torch.float16),
            (5, 2, torch.float32),
        ],
    )
    def test_bits_of_inputs_in_blocks(self, monkeypatch, device, block_tokens, tokens, dtype):
        """Of any number of tokens, also one that does not divide the chunk."""
        for name in ("gated_delta_rule_replay", "keep_delta_inputs"):
            monkeypatch.setattr(delta_replay, name, in_blocks(getattr(delta_replay, name), block_tokens))
        walk = Walk(Layer(Hk=1, Hv=2, dtype=dtype), device, list(self.requests[1:3]), 16, 48)
        walk.run(tokens, seed=tokens)

    @pytest.mark.sampled
    @pytest.mark.parametrize("block_tokens", [16, 32, 9])
    @pytest.mark.parametrize("tokens", [1, 3])
    def test_input_blocks_of_long_chunks_change_no_bit(self, device, block_tokens, tokens):
        """Of four blocks; input blocks of whole blocks take another way than others."""
        generator, dtype, chunk = torch.Generator().manual_seed(block_tokens), torch.float16, 64

        def drawn(*shape, dtype=dtype):
            return (torch.rand(shape, generator=generator) / 4).to(device, dtype)

        step = [drawn(4, tokens, heads, 16) for heads in (1, 1, 2)]
        step += [-drawn(4, tokens, 2, dtype=torch.float32), drawn(4, tokens, 2, dtype=torch.float32)]
        kept = [drawn(5, chunk, heads, 16) for heads in (1, 2)]
        kept += [-drawn(5, chunk, 2, dtype=torch.float32), drawn(5, chunk, 2, dtype=torch.float32)]
        kept += [drawn(5, chunk, 2, 16), drawn(5, 2, (chunk + 16) // 2, chunk, dtype=torch.float32)]
        states = drawn(8, 2, 16, 16, dtype=torch.float32)
        numbers = [
            torch.tensor(values, device=device)
            for values in ([2, 0, -1, 4], [64, 95, 0, 127 - tokens + 1], [tokens, tokens, 0, tokens])
        ]
        ends = torch.tensor([0, 1, -1, 2], device=device), torch.tensor([-1, -1, -1, 5], device=device)
        found = []
        for run in (
            delta_replay.gated_delta_rule_replay,
            in_blocks(delta_replay.gated_delta_rule_replay, block_tokens),
        ):
            own = [x.clone() for x in (states, *kept)]
            pool, *inputs = own
            out = run(*step, pool, DeltaInputs(*inputs), ReplayRows(*numbers, *ends, chunk))
            found.append([out[[0, 1, 3]], *own])
        for one, other in zip(*found, strict=True):
            assert same_bits(one, other)

    @pytest.mark.long
    @pytest.mark.sampled(chunk=(32,), dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("chunk", [32, 64])
    def test_bits_for_other_chunks_and_sizes(self, device, dtype, chunk):
        """Heads of no power of two; the last tokens of a chunk and the first of the next."""
        layer = Layer(Hk=2, Hv=2, Dk=24, Dv=40, dtype=dtype)
        Walk(layer, device, [Request(chunk, 2 * chunk - 3, 2 * chunk + 1)], chunk, 3 * chunk).run(2, seed=1)

    @pytest.mark.long
    @few
    @given(data=st.data())
    def test_bits_for_any_cuts(self, device, data):
        requests = []
        for _ in range(data.draw(st.integers(1, 2))):
            resumed = 16 * data.draw(st.integers(0, 2))
            prompt = resumed + data.draw(st.integers(0, 16))
            requests.append(Request(resumed, prompt, prompt + data.draw(st.integers(0, 4))))
        layer = Layer(Hk=1, Hv=2, dtype=data.draw(st.sampled_from(DTYPES)))
        Walk(layer, device, requests, 16, 64).run(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 99)))

    @pytest.mark.gpu
    @pytest.mark.parametrize(("wide", "warps"), [(False, 1), (False, 2), (True, 4)])
    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("value_heads", [32, 48])
    def test_bits_at_full_size(self, monkeypatch, value_heads, tokens, wide, warps):
        """Qwen3.5's and Qwen3-Next's layers in bfloat16: chunks of 64 tokens; as many rows and as few."""
        shape = {"WIDE": wide, "num_warps": warps}
        monkeypatch.setattr(delta_solve, "solve_shape", lambda *_: dict(shape))
        device = kernel_device("cuda")
        layer = Layer(Hk=16, Hv=value_heads, Dk=128, Dv=128, dtype=torch.bfloat16)
        requests = [
            Request(0, 0, 20),
            Request(64, 100, 131),
            Request(128, 190, 200),
            Request(192, 192, 200),
            Request(0, 63, 70),
        ]
        Walk(layer, device, requests, 64, 256).run(tokens, seed=tokens)


class TestRecurrence:
    """Against the recurrence in float64 numpy, the Triton path and the reference."""

    @pytest.mark.sampled(dtype=(torch.float32,))
    @pytest.mark.parametrize(
        ("kernels", "dtype"),
        [
            *((delta_replay, dtype) for dtype in DTYPES),
            *((KernelSet, dtype) for dtype in (torch.float32, torch.float64)),
            *(
                pytest.param(KernelSet, dtype, marks=pytest.mark.long)
                for dtype in (torch.bfloat16, torch.float16)
            ),
        ],
        ids=lambda value: str(value).split(".")[-1].rstrip("py'<>"),
    )
    def test_outputs_states_and_what_is_kept(self, device, kernels, dtype):
        layer = Layer(Hk=1, Hv=2, dtype=dtype, jumps=False)
        # The uncut runs supply the states at grid points, in float32.
        scanned = layer if dtype in DTYPES else Layer(Hk=1, Hv=2, jumps=False)
        requests = list(TestBits.requests[1:3] if is_quick() else TestBits.requests)
        walk = Walk(scanned, device, requests, 16, 48)
        if scanned is not layer:
            walk.layer, walk.tokens = layer, [layer.tokens(index) for index in range(len(requests))]
            walk.inputs = {name: x.to(walk.tokens[0][name].dtype) for name, x in walk.inputs.items()}
        if kernels is KernelSet:
            walk.kept = [
                x | {"k": normalised(x["k"].to(compute_dtype(dtype))).to(dtype)} for x in walk.tokens
            ]
        tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[
            dtype
        ]
        state_tolerance = tolerance if dtype != torch.float64 else 1e-6  # the pool is float32
        walk.prefill(kernels)
        for moves in decode_steps(walk.requests, 16, 2, seed=5):
            o, _ = walk.decode(moves, 2, kernels)
            for row, move in enumerate(moves):
                if move.request < 0:
                    continue
                point = move.start // 16 * 16
                inputs = {
                    name: x[point : move.start + move.accepted]
                    for name, x in walk.tokens[move.request].items()
                }
                initial = walk.uncut[move.request].states[point] if point else None
                expected, states = layer.run(inputs, initial)
                assert error(o[row, : move.accepted], expected[move.start - point :]) <= tolerance
                if row in walk.completed:
                    assert error(walk.completed[row], states[-1]) <= state_tolerance


FUNCTIONS = conv_replay.causal_conv1d_replay, gates.delta_gates, delta_replay.gated_delta_rule_replay
TRITON = SimpleNamespace(**{function.__name__: function for function in FUNCTIONS})


class TestRawTokens:
    """What makes q, k, v, g and beta in the launch that keeps them has the bits of launches before it."""

    def check(
        self, kernels: Any, layer: Layer, device: torch.device, tokens: int, chunk: int, *, taps: int = 4,
        has_bias: bool = False, by_key_head: bool = False,
    ) -> None:  # fmt: skip
        """Rows at the start of a sequence, behind a grid point, without all tokens, and at a chunk's end."""
        generator = torch.Generator().manual_seed(tokens)

        def normal(*shape: int, dtype: torch.dtype = layer.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        def index(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        Hk, Hv, widths = layer.Hk, layer.Hv, [layer.Hk * layer.Dk] * 2 + [layer.Hv * layer.Dv]
        raw, channels = normal(5, tokens, sum(widths) + 8)[..., 4:-4], sum(widths)
        gates_of_heads = (Hk, Hv // Hk) if by_key_head else (Hv,)
        a, b = normal(5, tokens, *gates_of_heads, 2).unbind(-1)
        own = {
            "k": normal(6, chunk, Hk, layer.Dk), "v": normal(6, chunk, Hv, layer.Dv),
            "g": -normal(6, chunk, Hv, dtype=torch.float32).abs(),
            "beta": normal(6, chunk, Hv, dtype=torch.float32).sigmoid(),
        }  # fmt: skip
        solves = layer.dtype.itemsize == 2 and kernels is not KernelSet
        own |= {"new_v": normal(6, chunk, Hv, layer.Dv) if solves else None}
        shape = 6, Hv, (chunk + 16) // 2, chunk
        own |= {"inverses": normal(*shape, dtype=torch.float32) / 8 if solves else None}
        own |= {"states": normal(8, Hv, layer.Dk, layer.Dv, dtype=torch.float32)}
        own |= {"rings": normal(6, taps + tokens, channels), "windows": normal(8, channels, taps - 1)}
        last = chunk - tokens
        rows = ReplayRows(
            index(4, 0, -1, 2, 3), index(0, 1, 0, chunk + 3, 3 * chunk + last, dtype=torch.int32),
            index(tokens, tokens, 0, 1, tokens, dtype=torch.int32), index(-1, -1, -1, 5, 1),
            index(-1, -1, -1, -1, 1), chunk,
        )  # fmt: skip
        windows = index(-1, 0, -1, 6, 1)
        made = normal(channels, taps), normal(channels) if has_bias else None
        rates = normal(Hv, dtype=torch.float32), normal(Hv)
        found = []
        for fused in (False, True):
            pools = {name: x if x is None else x.clone() for name, x in own.items()}
            rings, pool, states = (pools.pop(name) for name in ("rings", "windows", "states"))
            x, g, beta, of_launch = raw, a, b, None
            if fused:
                sizes = (Hk, layer.Dk), (Hv, layer.Dv)
                of_launch = RawTokens(DeltaNet(*made, *rates, *sizes, layer.doubled), pool, rings, windows)
            else:
                of_conv = rows._replace(destinations=windows)
                x = kernels.causal_conv1d_replay(raw, *made, pool, rings, of_conv)
                flat = (part.flatten(0, 1) for part in (a, b))
                gates_of_step = kernels.delta_gates(*flat, *rates, doubled=layer.doubled)
                g, beta = (part.unflatten(0, (5, tokens)) for part in gates_of_step)
            parts = x.split(widths, dim=2)
            by_heads = zip(parts, (Hk, Hk, Hv), strict=True)
            q, k, v = (part.unflatten(2, (heads, -1)) for part, heads in by_heads)
            with poisoned_allocations():
                inputs = DeltaInputs(**pools)
                out = kernels.gated_delta_rule_replay(q, k, v, g, beta, states, inputs, rows, of_launch)
            out = torch.cat([out[[0, 1, 4]].flatten(0, 1), out[3, :1]])
            found.append({"out": out, "rings": rings, "windows": pool, "states": states} | pools)
        for name, expected in found[0].items():
            assert expected is None or same_bits(found[1][name], expected), name
        for name in ("rings", "windows", "k", "v", "g", "beta", "states"):
            assert not same_bits(found[1][name], own[name]), name

    @pytest.mark.sampled(tokens=(1, 3), dtype=1, by_key_head=(True,))
    @pytest.mark.parametrize("kernels", [TRITON, KernelSet], ids=["triton", "torch"])
    @pytest.mark.parametrize("tokens", [1, 3])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("by_key_head", [False, True])
    def test_bits_of_separate_launches(self, device, kernels, dtype, tokens, by_key_head):
        layer = Layer(Hk=2, Hv=4, Dk=16, Dv=24, dtype=dtype, doubled=by_key_head)
        self.check(kernels, layer, device, tokens, 16, has_bias=by_key_head, by_key_head=by_key_head)

    @pytest.mark.parametrize("kernels", [TRITON, KernelSet], ids=["triton", "torch"])
    @pytest.mark.parametrize(
        ("sizes", "taps"), [({"Hk": 33, "Hv": 33, "Dk": 8, "Dv": 8}, 3), ({"Dk": 48, "Dv": 12}, 5)], ids=str
    )
    def test_heads_and_kernels_of_other_sizes(self, device, kernels, sizes, taps):
        """Heads of more than a tile, and of no power of two; weights that are no 4 of a channel."""
        self.check(kernels, Layer(**sizes, dtype=torch.float16), device, 2, 16, taps=taps)

    def test_weights_in_pieces_are_refused(self):
        layer, token = Layer(), torch.zeros(1, 1, 4, 8)
        net = DeltaNet(torch.zeros(4, 80).T, None, torch.zeros(4), torch.zeros(4), (2, 8), (4, 12))
        kept = [torch.zeros(1, 16, *shape) for shape in ((2, 8), (4, 12), (4,), (4,))]
        raw = RawTokens(net, torch.zeros(1, 80, 3), torch.zeros(1, 4, 80), torch.tensor([-1]))
        indices = [torch.tensor([0])] * 5
        with pytest.raises(ValueError, match=r"weight has strides .* accepted: contiguous slots"):
            delta_replay.gated_delta_rule_replay(
                token[:, :, :2], token[:, :, :2], torch.zeros(1, 1, 4, 12), token[..., 0], token[..., 0],
                layer.pool(1), DeltaInputs(*kept), ReplayRows(*indices, 16), raw,
            )  # fmt: skip

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("value_heads", [32, 48])
    def test_bits_at_full_size(self, value_heads, tokens):
        """Qwen3.5's layers, and Qwen3-Next's, whose gates lie by key head."""
        layer = Layer(Hk=16, Hv=value_heads, Dk=128, Dv=128, dtype=torch.bfloat16)
        self.check(TRITON, layer, kernel_device("cuda"), tokens, 64, by_key_head=value_heads == 48)


class TestCost:
    def test_a_step_reads_a_state_once_and_writes_complete_chunks(self):
        layer = Layer(Hk=1, Hv=2, dtype=torch.float16)
        step = {name: x[None, :2].repeat(4, *[1] * x.dim()) for name, x in layer.tokens(0).items()}
        inputs = {name: torch.zeros(3, 16, *step[name].shape[2:]).to(step[name].dtype) for name in KEPT}
        values, pool = inputs["v"], layer.pool(4)
        inverses, new_v = torch.zeros(3, layer.Hv, 16, 16), torch.zeros_like(values)

        def index(*values: int) -> Tensor:
            return torch.tensor(values)

        traffic = (traffic_of(tensor) for tensor in (values, new_v, pool, inverses))
        with contextlib.ExitStack() as stack:
            of_values, of_new_v, of_pool, of_rows = (stack.enter_context(of) for of in traffic)
            delta_replay.gated_delta_rule_replay(
                **step, states=pool, inputs=DeltaInputs(**inputs, new_v=new_v, inverses=inverses),
                rows=ReplayRows(
                    index(0, 2, -1, 1), index(21, 31, 0, 0), index(2, 1, 0, 1), index(0, 1, -1, -1),
                    index(-1, 1, -1, -1), 16,
                ),
            )  # fmt: skip
        token, state = values[0, 0].numel() * 2, pool[0].numel() * 4
        assert (of_values.loaded, of_values.stored) == ((7 + 16 + 16 + 1) * token, 4 * token)
        assert (of_new_v.loaded, of_new_v.stored) == ((7 + 16 + 1) * token, 4 * token)
        # The second row completes its chunk: new values are computed again, and its state is decayed.
        assert (of_pool.loaded, of_pool.stored) == (4 * state, state)
        assert of_rows.stored == 4 * layer.Hv * 16 * 4

    @pytest.mark.parametrize("kernels", [delta_replay, KernelSet], ids=["triton", "torch"])
    def test_states_of_all_layers_by_one_launch_are_those_of_each_layer(self, device, kernels):
        """The second of three rows completes no chunk, the third is written over its source."""
        layer, layers, rows, tokens = Layer(Hk=1, Hv=2, dtype=torch.float16), 3, 3, 16
        steps = [
            {
                name: torch.stack([layer.tokens(5 * number + row)[name][:tokens] for row in range(rows)])
                for name in INPUTS
            }
            for number in range(layers)
        ]
        states = torch.stack([layer.pool(5) for _ in range(layers)]).normal_()
        kept = {
            name: torch.zeros(layers, rows, 16, *steps[0][name].shape[2:], dtype=steps[0][name].dtype)
            for name in KEPT
        }
        inverses = torch.zeros(layers, rows, layer.Hv, 16, 16)
        solves = kernels is delta_replay
        expected = states.clone().to(device)
        written_states = states.to(device, copy=True)
        kept = {name: pool.to(device, copy=True) for name, pool in kept.items()}
        if solves:
            kept |= {"new_v": torch.zeros_like(kept["v"]), "inverses": inverses.to(device)}
        pools = DeltaInputs(**kept)

        def index(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        at = ReplayRows(
            index(2, 0, 1), index(16, 0, 32, dtype=torch.int32), index(16, 5, 16, dtype=torch.int32),
            index(0, 1, 2), index(4, -1, 2), 16,
        )  # fmt: skip
        for number, step in enumerate(steps):
            own = DeltaInputs(**{name: pool[number] for name, pool in kept.items()})
            for of_layer, written in ((expected[number], at.destinations), (written_states[number], None)):
                kernels.gated_delta_rule_replay(
                    **{name: x.to(device) for name, x in step.items()}, states=of_layer, inputs=own,
                    rows=at._replace(destinations=written),
                )  # fmt: skip
        assert same_bits(written_states, states.to(device))
        kernels.complete_delta_chunks(written_states, pools, at)
        assert same_bits(written_states, expected)
        assert not same_bits(expected[:, [2, 4]], states[:, [2, 4]].to(device))

    def test_inputs_in_pieces_are_refused(self):
        layer = Layer()
        step = {name: x[None, :1] for name, x in layer.tokens(0).items()}
        inputs = DeltaInputs(**{name: torch.zeros(1, 16, *step[name].shape[2:]) for name in KEPT})
        inputs = inputs._replace(v=inputs.v.mT.contiguous().mT)
        rows = ReplayRows(*[torch.tensor([0])] * 5, 16)
        with pytest.raises(ValueError, match=r"v_inputs has strides .* accepted: contiguous slots"):
            delta_replay.gated_delta_rule_replay(**step, states=layer.pool(1), inputs=inputs, rows=rows)

    @pytest.mark.gpu
    def test_bits_from_a_graph_without_synchronising(self):
        """Captured as padding only, launched with rows: launches and addresses do not depend on values."""
        device = kernel_device("cuda")
        layer = Layer(Hk=2, Hv=4, Dk=64, Dv=64, dtype=torch.bfloat16)
        step = {name: x[6:12].unflatten(0, (3, 2)).to(device) for name, x in layer.tokens(0).items()}
        kept = {name: layer.tokens(1)[name][:64].unflatten(0, (4, 16)).to(device) for name in KEPT}
        kept["new_v"] = kept["v"].flip(1)
        kept["inverses"] = torch.eye(16, device=device).expand(4, layer.Hv, 16, 16)

        def index(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        indices = (
            index([2, -1, 0]), index([21, 0, 14], torch.int32), index([2, 0, 2], torch.int32),
            index([1, -1, 0]), index([-1, -1, 0]),
        )  # fmt: skip
        real = ReplayRows(*indices, 16)
        static = ReplayRows(*(torch.full_like(tensor, -1) for tensor in indices), 16)
        static.starts.zero_()
        tail = index([1, 3, 3]), index([0, 3, 3, 6], torch.int32)
        packed = {name: step[name].flatten(0, 1) for name in KEPT}

        def launch(pool: Tensor, inputs: dict[str, Tensor], at: ReplayRows) -> Tensor:
            pools, tails = DeltaInputs(**inputs), TailRows(at.input_rows, *tail)
            delta_replay.keep_delta_inputs(**packed, new_v=packed["v"].contiguous(), inputs=pools, rows=tails)
            return delta_replay.gated_delta_rule_replay(**step, states=pool, inputs=pools, rows=at)

        pools = [layer.pool(3, torch.float32).to(device) for _ in range(2)]
        inputs = [{name: tensor.clone() for name, tensor in kept.items()} for _ in range(2)]
        launch(pools[0], inputs[0], static)  # tunes and compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = launch(pools[0], inputs[0], static)
        with no_synchronisation():
            for tensor, values in zip(static[:5], indices, strict=True):
                tensor.copy_(values)
            graph.replay()
            expected = launch(pools[1], inputs[1], real)
        assert same_bits(o[[0, 2]].cpu(), expected[[0, 2]].cpu())
        assert same_bits(pools[0].cpu(), pools[1].cpu())
        assert not same_bits(pools[1].cpu(), layer.pool(3, torch.float32))
        for name in kept:
            assert same_bits(inputs[0][name].cpu(), inputs[1][name].cpu())


class TestMachineCode:
    """On a Hopper GPU, in a process without the interpreter."""

    @pytest.mark.long
    def test_products_read_shared_memory(self, tmp_path):
        """Of few numbers, keys of one tile: ptxas gave a product the address of an argument."""
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        tests = str(Path(oracle.ssd.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join([tests, environment.get("PYTHONPATH", "")])
        environment["TRITON_CACHE_DIR"] = str(tmp_path)
        printed = printed_by(COMPILED, str(tmp_path / "kernel.cubin"), env=environment)
        products, found = zip(*(line.split() for line in printed.splitlines()), strict=True)
        assert found == ("0",) * 3
        assert min(map(int, products)) > 0

    def test_a_misled_product_is_found(self):
        listing = """
            /*0060*/  ULEA.HI.X UR5, UR17, UR5, URZ, 0x3, UP0 ;
            /*0070*/  ULDC.64 UR18, c[0x0][0x208] ;
            /*0080*/  UMOV UR30, UR16 ;
            /*0090*/  HGMMA.64x32x16.F32 R24, R56, gdesc[UR28].tnspB, RZ, !UPT ;
            /*00a0*/  UIADD3 UR4, UP0, {base}, 0x40, URZ ;
            /*00b0*/  UMOV UR30, UR4 ;
            /*00c0*/  HGMMA.64x32x16.F32 R24, R60, gdesc[UR28].tnspB, R24 ;
        """
        assert misled_products(listing.replace("{base}", "UR16")) == (2, [])
        assert misled_products(listing.replace("{base}", "UR19")) == (2, ["00c0"])


COMPILED = """
import sys
import triton
from mambaslots.inference.kernels.delta_replay import *
from oracle.warpgroup_products import machine_code, misled_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = complete_chunks_kernel
types = dict.fromkeys(("g_inputs", "beta_inputs", "inverses", "states"), "*fp32")
types |= dict.fromkeys(("input_rows", "sources", "destinations"), "*i64") | {"input_blocks": "*i32"}
types |= dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i64")
types |= {"rows": "i32", "groups": "i32"}
for dtype, key_dim, value_dim in (("fp16", 24, 40), ("bf16", 24, 40), ("fp16", 16, 24)):
    constants = dict(
        heads=2, heads_of_key=1, key_dim=key_dim, value_dim=value_dim, chunk_size=64,
        block_tokens=16, ROWS=COMPLETION_ROWS, **completion_blocks(key_dim, value_dim),
    )
    of_dtype = types | dict.fromkeys(("k_inputs", "v_inputs"), "*" + dtype)
    signature = {name: of_dtype.get(name, "constexpr") for name in kernel.arg_names}
    places = [(kernel.arg_names.index(name),) for name in of_dtype if name not in ("rows", "groups")]
    aligned = {place: [["tt.divisibility", 16]] for place in places}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": COMPLETION_WARPS, "num_stages": COMPLETION_STAGES},
    )
    products, found = misled_products(machine_code(compiled.asm["cubin"], sys.argv[1]))
    print(products, len(found))
"""


assert LONGEST >= 256
