"""Against a float64 recurrence, token by token, and against `reference`.

On the CPU in Triton's interpreter; the same cases on CUDA under the gpu mark.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mambaslots.inference.kernels import ssd as fused
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.fresh_process import run_code
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}
NAN = float("nan")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(kernel_device(request.param))


@dataclass
class Case:
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    pool: Tensor
    sources: list[int]
    destinations: list[list[int]]

    @property
    def real(self) -> Tensor:
        return torch.tensor([max(s, *d) >= 0 for s, d in zip(self.sources, self.destinations, strict=True)])

    def run(self, device: str, kernels: Any = fused) -> tuple[Tensor, Tensor]:
        """Outputs and the pool after. x, B and C are views of one wide tensor, as of a convolution's."""
        rows, tokens, heads, head_dim = self.x.shape
        groups, state_dim = self.B.shape[2:]
        packed = torch.cat([part.flatten(2) for part in (self.x, self.B, self.C)], dim=2)
        wide = packed.new_full((rows, tokens, packed.shape[2] + 5), NAN, device=device)[..., 5:]
        wide.copy_(packed)
        x, B, C = wide.split([heads * head_dim, groups * state_dim, groups * state_dim], dim=2)
        pool = torch.empty_strided(self.pool.shape, self.pool.stride(), dtype=self.pool.dtype, device=device)
        bits(pool).copy_(bits(self.pool))
        with poisoned_allocations() if kernels is fused else nullcontext():
            out = kernels.selective_state_update(
                x.unflatten(2, (heads, head_dim)), self.dt.to(device), self.A.to(device),
                B.unflatten(2, (groups, state_dim)), C.unflatten(2, (groups, state_dim)), self.D.to(device),
                pool,
                torch.tensor(self.sources, dtype=torch.int64, device=device),
                torch.tensor(self.destinations, dtype=torch.int64, device=device).view(rows, tokens),
            )  # fmt: skip
        assert out.dtype == self.x.dtype
        return out.cpu(), pool.cpu()

    def row(self, index: int) -> "Case":
        one = slice(index, index + 1)
        return dataclasses.replace(
            self, x=self.x[one], dt=self.dt[one], B=self.B[one], C=self.C[one],
            sources=self.sources[one], destinations=self.destinations[one],
        )  # fmt: skip

    def token(self, index: int, pool: Tensor, sources: list[int], destinations: list[list[int]]) -> "Case":
        one = slice(index, index + 1)
        return dataclasses.replace(
            self, x=self.x[:, one], dt=self.dt[:, one], B=self.B[:, one], C=self.C[:, one],
            pool=pool, sources=sources, destinations=destinations,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Outputs in float64 (NaN for padding), and what each slot named as destination holds after."""
        tokens, heads = self.x.shape[1:3]
        group_of = [head // (heads // self.B.shape[2]) for head in range(heads)]
        out = torch.full(self.x.shape, NAN, dtype=torch.float64)
        stored = {}
        for row in torch.nonzero(self.real).flatten().tolist():
            state = torch.zeros(self.pool.shape[1:], dtype=torch.float64)
            if self.sources[row] >= 0:
                state = self.pool[self.sources[row]].double()
            for token in range(tokens):
                dt, x = self.dt[row, token].double(), self.x[row, token].double()
                key = self.B[row, token].double()[group_of]
                query = self.C[row, token].double()[group_of]
                update = torch.einsum("h,hp,hn->hpn", dt, x, key)
                state = (dt * self.A.double()).exp()[:, None, None] * state + update
                out[row, token] = torch.einsum("hpn,hn->hp", state, query) + self.D.double()[:, None] * x
                if self.destinations[row][token] >= 0:
                    stored[self.destinations[row][token]] = state
        return out, stored


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def case(
    sources: list[int],
    destinations: list[list[int]],
    *,
    seed: int = 0,
    heads: int = 4,
    head_dim: int = 8,
    groups: int = 2,
    state_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    strided: bool = False,
) -> Case:
    """Random inputs, NaN in those of padding rows and in all slots that are not a source."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, tokens = len(sources), len(destinations[0]) if destinations else 1
    slots = max([0, *sources, *(slot for row in destinations for slot in row)]) + 2
    pool = torch.full((slots, heads, head_dim, state_dim), NAN, dtype=pool_dtype)
    if strided:  # slots inside layers inside a larger allocation, as [slots, 2 layers, ...]
        pool = torch.full((slots, 2, heads, head_dim, state_dim), NAN, dtype=pool_dtype)[:, 1]
    for source in sources:
        if source >= 0:
            pool[source] = normal(heads, head_dim, state_dim).to(pool_dtype)
    made = Case(
        normal(rows, tokens, heads, head_dim).to(dtype),
        torch.rand(rows, tokens, heads, generator=generator).to(dtype),
        -torch.rand(heads, generator=generator) * 2,
        normal(rows, tokens, groups, state_dim).to(dtype),
        normal(rows, tokens, groups, state_dim).to(dtype),
        normal(heads),
        pool,
        sources,
        destinations,
    )
    for tensor in (made.x, made.dt, made.B, made.C):
        tensor[~made.real] = NAN
    return made


def close(got: Tensor, expected: Tensor, relative: float) -> bool:
    """By the norm, and no element further off than that of the largest."""
    error = (got.double() - expected).abs()
    scale = expected.abs().max()
    return bool(error.norm() <= relative * expected.norm() and error.max() <= 2 * relative * scale)


def rounding(device: str, dtype: torch.dtype) -> float:
    """How far one rounding to `dtype` moves a number, or float32 errors.

    To bfloat16 Triton's interpreter cuts off, where compiled kernels round to the nearest.
    """
    bfloat16 = 2**-7 if device == "cpu" else 2**-8
    return {torch.float32: 1e-6, torch.bfloat16: bfloat16, torch.float16: 2**-11}[dtype]


def check(made: Case, device: str) -> tuple[Tensor, Tensor]:
    out, pool = made.run(device)
    expected_out, stored = made.expected()
    real = made.real
    assert close(out[real], expected_out[real], rounding(device, out.dtype) * 1.01)
    # Off by little before its one rounding to the pool's dtype.
    unit = rounding(device, pool.dtype)
    for slot, state in stored.items():
        assert close(pool[slot], state, unit * 1.01)
    untouched = [slot for slot in range(pool.shape[0]) if slot not in stored]
    assert torch.equal(bits(pool[untouched]), bits(made.pool[untouched]))
    return out, pool


def layout(tokens: int, rows: int = 9) -> tuple[list[int], list[list[int]]]:
    """In place after any of the tokens or none, other slots after others, from zeros, padding between."""
    free = iter(range(rows, 1000))
    sources, destinations = [], []
    for index in range(rows):
        padding = index % 4 == 2
        source = -1 if padding or index % 5 == 4 else index
        row = [-1 if padding or (index + token) % 3 == 0 else next(free) for token in range(tokens)]
        if source >= 0 and index % 2:
            row[index % tokens] = source
        if not padding and source < 0:
            row[-1] = next(free)
        sources.append(source)
        destinations.append(row)
    return sources, destinations


@pytest.mark.sampled(tokens=(1, 3))
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_dtypes(
    device: str, dtype: torch.dtype, pool_dtype: torch.dtype, tokens: int, record_property: Any
) -> None:
    sources, destinations = layout(tokens)
    record_property("cases", {"recurrence of a row": len(sources)})
    made = case(
        sources, destinations, dtype=dtype, pool_dtype=pool_dtype, strided=tokens % 2 == 0, seed=tokens
    )
    out, pool = check(made, device)
    other, other_pool = made.run(device, KernelSet)
    assert close(out[made.real], other[made.real].double(), 2 * rounding(device, dtype))
    # NaN where nothing was written, in both; two units in the last place elsewhere.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[pool_dtype]
    torch.testing.assert_close(pool, other_pool, rtol=rtol, atol=1e-5, equal_nan=True)


SHAPES = [  # heads, head_dim, groups, state_dim
    (1, 1, 1, 1),
    (3, 5, 3, 7),
    (6, 24, 2, 12),
    (2, 33, 1, 96),
    (2, 64, 1, 128),
    (1, 80, 1, 128),
    (1, 20, 1, 256),
]


@pytest.mark.sampled(shape=3)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(device: str, shape: tuple[int, int, int, int], record_property: Any) -> None:
    """P and N of no power of two, more than one block of P, groups of one head and of all heads."""
    heads, head_dim, groups, state_dim = shape
    sources, destinations = layout(2, rows=4)
    record_property("cases", {"recurrence of a row": len(sources)})
    check(
        case(sources, destinations, heads=heads, head_dim=head_dim, groups=groups, state_dim=state_dim),
        device,
    )


def test_company_changes_no_bit(device: str) -> None:
    made = case(*layout(3), state_dim=128)
    out, pool = made.run(device)
    for index in torch.nonzero(made.real).flatten().tolist():
        alone, alone_pool = made.row(index).run(device)
        assert torch.equal(alone[0], out[index])
        for slot in made.destinations[index]:
            if slot >= 0:
                assert torch.equal(alone_pool[slot], pool[slot])


def test_tokens_in_one_call_or_several_change_no_bit(device: str) -> None:
    """With the state in float32, which loses nothing between calls."""
    sources, destinations = [0, 1, 2], [[10, 11, 12, 13], [-1, 1, -1, 21], [2, -1, -1, 32]]
    made = case(sources, destinations, state_dim=128)
    out, pool = made.run(device)
    state = made.pool
    for token in range(4):
        last = [-1, -1, -1]
        stored = made.token(token, state, sources, [[slot] for slot in (40, 41, 42)])
        enlarged = torch.cat([state, state.new_full((50 - state.shape[0], *state.shape[1:]), NAN)])
        part, state = dataclasses.replace(stored, pool=enlarged).run(device)
        assert torch.equal(part[:, 0], out[:, token])
        for row in range(3):
            last[row] = destinations[row][token]
            if last[row] >= 0:
                assert torch.equal(state[40 + row], pool[last[row]])
        sources = [40, 41, 42]


def test_many_steps_in_place_stay_close(device: str) -> None:
    """The decode loop: one token a step, the state in its slot, many steps against float64."""
    steps = 60
    made = case([0], [[-1] * (steps - 1) + [0]], state_dim=32, heads=2, groups=1)
    made.A.mul_(0.02)  # remembers about all of them
    expected_out, stored = made.expected()
    pool, outputs = made.pool, []
    for step in range(steps):
        out, pool = made.token(step, pool, [0], [[0]]).run(device)
        outputs.append(out)
    assert close(torch.cat(outputs, dim=1), expected_out, 1e-5)
    assert close(pool[0], stored[0], 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_moves_no_byte_too_many(tokens: int, pool_dtype: torch.dtype) -> None:
    """Each source once and each destination once, whatever the padding and the blocks."""
    sources, destinations = layout(tokens)
    made = case(sources, destinations, head_dim=20, state_dim=24, heads=2, pool_dtype=pool_dtype)
    state = made.pool[0].numel() * made.pool.element_size()
    args = [made.A, made.B.nan_to_num(1), made.C.nan_to_num(1), made.D, made.pool]
    with traffic_of(made.pool) as traffic, poisoned_allocations():
        out = fused.selective_state_update(
            made.x.nan_to_num(1),
            made.dt.nan_to_num(1),
            *args,
            torch.tensor(sources),
            torch.tensor(destinations),
        )
    assert traffic.loaded == state * sum(slot >= 0 for slot in sources)
    assert traffic.stored == state * sum(slot >= 0 for row in destinations for slot in row)
    assert out[~made.real].isnan().all()  # a padding row's programs do nothing
    assert not out[made.real].isnan().any()


def test_nothing_to_do(device: str) -> None:
    made = case([-1, -1], [[-1, -1]] * 2)
    _, pool = made.run(device)
    assert torch.equal(bits(pool), bits(made.pool))
    empty = dataclasses.replace(made.row(2), sources=[], destinations=[])
    assert empty.run(device)[0].shape == (0, 2, 4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_offsets_beyond_two_to_the_31(device: str, needs_gpu_memory: Callable[[float], None]) -> None:
    needs_gpu_memory(7)
    made = case([1, -1], [[0, 2], [-1, 3]], pool_dtype=torch.bfloat16)
    stride = (1 << 31) // 3 + 160
    memory = torch.zeros(5 * stride, dtype=torch.bfloat16, device=device)
    far = memory.as_strided(made.pool.shape, (stride, *made.pool.stride()[1:]))
    far.copy_(made.pool)
    near = made.pool.to(device)
    rest = [tensor.to(device) for tensor in (made.x, made.dt, made.A, made.B, made.C, made.D)]
    indices = [torch.tensor(values, device=device) for values in (made.sources, made.destinations)]
    out, other = (fused.selective_state_update(*rest, pool, *indices) for pool in (far, near))
    assert torch.equal(out, other)
    assert torch.equal(bits(far.contiguous()), bits(near))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_at_full_size(device: str, tokens: int, pool_dtype: torch.dtype) -> None:
    """Nemotron-H-8B's layer, in place, many times over: equal bits, near the oracle."""
    destinations = [[-1] * (tokens - 1) + [row] for row in range(24)]
    made = case(
        list(range(24)), destinations, heads=128, head_dim=64, groups=8, state_dim=128, pool_dtype=pool_dtype
    )
    out, pool = check(made, device)
    for _ in range(20):
        again, other = made.run(device)
        assert torch.equal(again, out)
        assert torch.equal(bits(other), bits(pool))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_replays_in_a_graph_without_synchronising(device: str) -> None:
    """Captured as padding only, launched with rows: grids and addresses do not depend on values."""
    made = case(*layout(2))
    rest = [tensor.to(device) for tensor in (made.x, made.dt, made.A, made.B, made.C, made.D)]
    pool = made.pool.to(device)
    real = [torch.tensor(values, device=device) for values in (made.sources, made.destinations)]
    static = [torch.full_like(values, -1) for values in real]
    fused.selective_state_update(*rest, pool, *static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.selective_state_update(*rest, pool, *static)
    eager_pool = pool.clone()
    with no_synchronisation():
        for values, indices in zip(static, real, strict=True):
            values.copy_(indices)
        graph.replay()
        eager = fused.selective_state_update(*rest, eager_pool, *static)
    rows = made.real.to(device)
    assert torch.equal(out[rows], eager[rows])
    assert torch.equal(bits(pool), bits(eager_pool))
    assert close(out[rows].cpu(), made.expected()[0][made.real], 1e-6)


COMPILE = """
import triton
from mambaslots.inference.kernels.ssd import UPDATE_WARPS, ssd_update_kernel, update_blocks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

block_p, block_n = update_blocks(8, 16)
constants = dict(
    TOKENS=1, HEADS=4, HEADS_PER_GROUP=2, HEAD_DIM=8, STATE_DIM=16, BLOCK_P=block_p, BLOCK_N=block_n,
    x_p_stride=1, b_n_stride=1, c_n_stride=1, n_stride=1,
)
types = dict.fromkeys(("x", "dt", "A", "B", "C", "D", "states", "out"), "*fp32")
types |= dict.fromkeys(("sources", "destinations"), "*i32")
names = ssd_update_kernel.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
source = ASTSource(fn=ssd_update_kernel, signature=signature, constexprs=constants)
options = {"num_warps": UPDATE_WARPS, "num_stages": 1}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def test_threads_that_hold_one_sum_hold_the_same_bits() -> None:
    """Any of them may store it. A product fused into a sum is rounded in one of two threads."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = run_code(COMPILE, env=environment)
    assert result.returncode == 0, result.stderr
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+),", result.stdout))
    sums = re.findall(r"(add|fma\.rn)\.(?:rn\.)?f32\s+%r\d+, ([^;]*);", result.stdout)
    users = [operation for operation, operands in sums if exchanged & set(operands.split(", "))]
    assert users == ["add"] * len(exchanged)
    assert len(exchanged) == 4
