"""Against a float64 oracle that goes token by token, and against `reference`.

On the CPU in Triton's interpreter; the same cases on CUDA under the gpu mark.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mambaslots.inference.kernels import conv as fused
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ConvRows
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of
from torch import Tensor

BLOCK = fused.PREFILL_TOKENS
INTEGERS = {2: torch.int16, 4: torch.int32}
# To bfloat16 Triton's interpreter cuts off, where compiled kernels and torch round to the nearest.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 1e-5}
"""How far the one rounding of an output moves it."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(kernel_device(request.param))


@dataclass
class Row:
    tokens: int
    source: int = -1
    destination: int = -1
    checkpoints: dict[int, int] = field(default_factory=dict)  # tokens of this row before it -> destination


@dataclass
class Case:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    pool: Tensor
    rows: list[Row]
    activation: bool = True

    def checked(self, out: Tensor) -> Tensor:
        """`out` on the CPU, of the dtype of x."""
        assert out.dtype == self.x.dtype
        return out.cpu()

    def prefill(
        self, device: str, kernels: Any = fused, padding: int = 0, pool: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the real tokens, and the pool after; with `padding` rows, tokens and checkpoints."""
        ends = torch.tensor([row.tokens for row in self.rows], dtype=torch.int64).cumsum(0).tolist()
        total = ends[-1] if ends else 0
        starts = [0, *ends]
        taken = [
            (index, starts[index] + before, destination)
            for index, row in enumerate(self.rows)
            for before, destination in row.checkpoints.items()
        ] + [(-1, 0, -1)] * padding
        x = torch.cat([self.x, self.x.new_full((padding, self.x.shape[1]), float("nan"))])
        owners = [index for index, row in enumerate(self.rows) for _ in range(row.tokens)]

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        pool = moved(self.pool, device) if pool is None else pool
        with poisoned_allocations() if kernels is fused else nullcontext():
            out = kernels.causal_conv1d_prefill(
                widened(x, device), self.weight.to(device), on(device, self.bias), pool,
                ConvRows(
                    tensor([row.source for row in self.rows] + [-1] * padding),
                    tensor([row.destination for row in self.rows] + [-1] * padding),
                    tensor(starts + [total] * padding),
                    tensor(owners + [-1] * padding),
                    *(tensor([entry[part] for entry in taken]) for part in range(3)),
                ),
                activation=self.activation,
            )  # fmt: skip
        return self.checked(out[:total]), pool.cpu()

    def expected(self) -> tuple[Tensor, Tensor]:
        """Token by token in float64; windows as lists of raw inputs."""
        width = self.weight.shape[1] - 1
        pool = self.pool.clone()
        outputs, start = [], 0

        def store(window: list[Tensor], destination: int) -> None:
            for tap, raw in enumerate(window[len(window) - width :]):
                bits(pool)[destination, :, tap] = bits(raw)

        for row in self.rows:
            window = [
                self.pool[row.source, :, tap] if row.source >= 0 else self.x.new_zeros(self.x.shape[1])
                for tap in range(width)
            ]
            for seen in range(row.tokens + 1):
                if seen in row.checkpoints:
                    store(window, row.checkpoints[seen])
                if seen == row.tokens:
                    break
                window.append(self.x[start + seen])
                y = convolved(window[-width - 1 :], self.weight, self.bias)
                outputs.append(y / (1 + (-y).exp()) if self.activation else y)
            if row.destination >= 0:
                store(window, row.destination)
            start += row.tokens
        return torch.stack(outputs) if outputs else self.x.new_zeros(0, self.x.shape[1]).double(), pool


def convolved(window: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    total = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    for tap, raw in enumerate(window):
        total = total + raw.double() * weight[:, tap].double()
    return total


def on(device: str, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def moved(tensor: Tensor, device: str) -> Tensor:
    """A copy on `device` with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    bits(copy).copy_(bits(tensor))
    return copy


def widened(x: Tensor, device: str) -> Tensor:
    """`x` as a view of rows 32 elements longer, all NaN outside it, as it comes out of a projection."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 32), float("nan"), device=device)
    view = wide[..., 8:-24]
    bits(view).copy_(bits(x))
    return view


def case(
    rows: list[Row],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kernel: int = 4,
    conv_dim: int = 20,
    extra_width: int = 0,
    channels_last: bool = False,
) -> Case:
    """Random inputs; NaN in all slots that are not a source, and past the first kernel - 1 positions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    named = [index for row in rows for index in (row.source, row.destination, *row.checkpoints.values())]
    slots, width = max(named, default=0) + 2, kernel - 1
    pool = torch.full((slots, conv_dim, width + extra_width), float("nan"), dtype=dtype)
    if channels_last:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    for row in rows:
        if row.source >= 0:
            pool[row.source, :, :width] = normal(conv_dim, width)
    tokens = sum(row.tokens for row in rows)
    return Case(normal(tokens, conv_dim), normal(conv_dim, kernel), normal(conv_dim), pool, rows)


def check(made: Case, device: str, padding: int = 0) -> None:
    out, pool = made.prefill(device, padding=padding)
    expected_out, expected_pool = made.expected()
    torch.testing.assert_close(
        out.double(), expected_out, rtol=ROUNDING[out.dtype], atol=2e-6, equal_nan=True
    )
    assert torch.equal(bits(pool), bits(expected_pool))


def equal_bits(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


@pytest.mark.sampled(kernel=(2, 4), dtype=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_rows_of_every_length_around_the_blocks(
    device: str, kernel: int, dtype: torch.dtype, record_property: Any
) -> None:
    """In one batch, so that rows also start at every place of a block; in place, elsewhere, nowhere."""
    lengths = range(2 * BLOCK + 4)
    rows = [
        Row(tokens, source=index if index % 3 else -1, destination=(index, index, 50 + index, -1)[index % 4])
        for index, tokens in enumerate(lengths)
    ]
    record_property("cases", {"convolution of a row": len(rows)})
    check(case(rows, kernel=kernel, dtype=dtype), device)


@pytest.mark.sampled(kernel=(2, 4))
@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("in_place", [True, False])
def test_checkpoints_that_take_from_the_carried_window(
    device: str, kernel: int, in_place: bool, record_property: Any
) -> None:
    """Rows of 0 to kernel + 1 tokens with a checkpoint at every place, the first and the last included."""
    free = iter(range(100, 200))
    rows = [
        Row(
            tokens,
            source=index if carried else -1,
            destination=index if in_place else next(free),
            checkpoints={before: next(free) for before in range(tokens + 1)},
        )
        for index, (tokens, carried) in enumerate((n, c) for n in range(kernel + 2) for c in (True, False))
    ]
    record_property("cases", {"convolution of a row": len(rows)})
    check(case(rows, kernel=kernel), device)


def random_rows(seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    free = torch.randperm(60, generator=generator).tolist()
    rows = []
    for _ in range(1 + draw(6)):
        row = Row(draw((1, 3, 8, 3 * BLOCK)[draw(4)] + 1))
        if draw(4):
            row.source = free.pop()
        row.destination = (-1, row.source, free.pop())[min(draw(4), 2)]
        row.checkpoints = {draw(row.tokens + 1): free.pop() for _ in range(draw(4))}
        rows.append(row)
    return rows


@pytest.mark.sampled(seed=3)
@pytest.mark.parametrize("seed", range(24))
def test_random_layouts_with_padding(device: str, seed: int, record_property: Any) -> None:
    rows = random_rows(seed)
    record_property("cases", {"convolution of a row": len(rows)})
    made = case(
        rows,
        seed=seed,
        dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 3],
        kernel=2 + seed % 3,
        conv_dim=(3, 20, fused.PREFILL_CHANNELS + 5)[seed // 2 % 3],
        extra_width=(0, 1, 4)[seed % 3],
        channels_last=seed % 4 == 3,
    )
    check(made, device, padding=(0, 1, 5, 2 * BLOCK + 1)[seed % 4])


@pytest.mark.sampled(seed=4)
@pytest.mark.parametrize("seed", range(100, 112))
def test_equals_the_reference(device: str, seed: int, record_property: Any) -> None:
    rows = random_rows(seed)
    record_property("cases", {"convolution of a row": len(rows)})
    made = case(rows, seed=seed, kernel=2 + seed % 3, extra_width=seed % 2)
    (out, pool), (other, other_pool) = made.prefill(device, padding=seed % 4), made.prefill(device, KernelSet)
    torch.testing.assert_close(out, other, rtol=2 * ROUNDING[out.dtype], atol=2e-6)
    assert torch.equal(bits(pool), bits(other_pool))


def test_more_checkpoints_than_a_row_looks_at_once(device: str) -> None:
    """Those that take from a row's carried window are behind those of a longer one."""
    rows = [
        Row(150, source=0, destination=0, checkpoints={before: 10 + before for before in range(3, 150)}),
        Row(20, source=1, destination=1, checkpoints={before: 200 + before for before in range(21)}),
    ]
    check(case(rows, conv_dim=4), device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about such outputs, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_windows_keep_every_bit(device: str, dtype: torch.dtype) -> None:
    """Raw inputs and carried windows of arbitrary bits: quiet and signalling NaN, infinities, denormals."""
    rows = [
        Row(0, source=0, destination=10),
        Row(1, source=1, destination=1, checkpoints={1: 11}),
        Row(2, source=2, destination=12, checkpoints={1: 13}),
        Row(40, source=3, destination=3, checkpoints={2: 14, 3: 15, 17: 16}),
    ]
    made = case(rows, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor in (made.x, made.pool):
        integers = bits(tensor)
        few = torch.iinfo(integers.dtype)
        raw = torch.randint(few.min, few.max, tensor.shape, generator=generator, dtype=integers.dtype)
        exponent = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
        integers.copy_(torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, raw | exponent, raw))
    _, pool = made.prefill(device)
    assert torch.equal(bits(pool), bits(made.expected()[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    rows = [
        Row(n, source=i, destination=i, checkpoints={n // 2: 20 + i}) for i, n in enumerate((5, 37, 2, 50))
    ]
    together = case(rows, dtype=dtype)
    out, pool = together.prefill(device, padding=3)
    start = 0
    for index, row in enumerate(rows):
        alone = dataclasses.replace(together, x=together.x[start : start + row.tokens], rows=[row])
        alone_out, alone_pool = alone.prefill(device)
        assert torch.equal(bits(alone_out), bits(out[start : start + row.tokens]))
        for slot in (index, 20 + index):
            assert torch.equal(bits(alone_pool[slot]), bits(pool[slot]))
        start += row.tokens


@pytest.mark.sampled(kernel=(4,), dtype=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [2, 4])
def test_cuts_change_no_bit(device: str, kernel: int, dtype: torch.dtype) -> None:
    """A row in one call, in chunks through its slot, and its tokens one by one through the decode kernel."""
    whole = case([Row(2 * BLOCK + 7, source=0, destination=1)], dtype=dtype, kernel=kernel)
    out, pool = whole.prefill(device)
    for chunk in (2, kernel, BLOCK - 1, BLOCK + 1):
        outputs, state = [], whole.pool
        for start in range(0, whole.x.shape[0], chunk):
            x = whole.x[start : start + chunk]
            source = 0 if start == 0 else 1
            rows = [Row(x.shape[0], source=source, destination=1)]
            part, state = dataclasses.replace(whole, x=x, pool=state, rows=rows).prefill(device)
            outputs.append(part)
        assert equal_bits((torch.cat(outputs), state), (out, pool)), chunk

    indices = torch.full((1, whole.x.shape[0]), -1, dtype=torch.int64, device=device)
    indices[0, -1] = 1
    state = whole.pool.to(device)
    decoded = fused.causal_conv1d_update(
        whole.x[None].to(device), whole.weight.to(device), whole.bias.to(device), state,
        torch.zeros(1, dtype=torch.int64, device=device), indices,
    )  # fmt: skip
    assert equal_bits((decoded[0].cpu(), state.cpu()), (out, pool))


@pytest.mark.sampled(seed=1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU orders its programs itself")
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_programs_changes_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program reads what another writes: in place, checkpoints within the first tokens, both kernels."""
    rows = [
        Row(n, source=n, destination=n, checkpoints={n // 2: 50 + n, n: 100 + n}) for n in range(0, 40, 3)
    ]
    made = case(rows, seed=seed, conv_dim=fused.PREFILL_CHANNELS + 5)
    decoded = case([Row(2, source=n) for n in range(5)], conv_dim=fused.UPDATE_CHANNELS + 5)
    destinations = [[n, 5 + n] if n % 2 else [5 + n, n] for n in range(5)]
    decoded.pool = torch.cat([decoded.pool, decoded.pool])[:10]
    in_order = made.prefill("cpu"), update(decoded, destinations, "cpu")
    shuffle_programs(monkeypatch, seed)
    assert equal_bits(made.prefill("cpu"), in_order[0])
    assert equal_bits(update(decoded, destinations, "cpu"), in_order[1])


def shuffle_programs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Triton's interpreter runs a grid's programs in a random order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    order: list[int] = []

    def set_grid_dim(x: int, y: int, z: int) -> None:
        order[:] = torch.randperm(x, generator=torch.Generator().manual_seed(seed)).tolist()
        set_dim(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(order[x], y, z))


@pytest.mark.parametrize("kernel", [2, 4])
def test_prefill_moves_no_byte_too_many(kernel: int) -> None:
    """Each carried window once, each window stored once, however many blocks a row has."""
    rows = [*random_rows(7), Row(3 * BLOCK + 1, source=70, destination=70, checkpoints={2: 71, 20: 72})]
    conv_dim = fused.PREFILL_CHANNELS + 5
    made = case(rows, kernel=kernel, conv_dim=conv_dim, extra_width=1)
    window = conv_dim * (kernel - 1) * made.pool.element_size()
    with traffic_of(made.pool) as traffic:
        made.prefill("cpu", padding=4, pool=made.pool)
    assert traffic.loaded == window * sum(row.source >= 0 for row in rows)
    assert traffic.stored == window * sum((row.destination >= 0) + len(row.checkpoints) for row in rows)


def test_decode_moves_no_byte_too_many() -> None:
    rows = [Row(3, source=0), Row(3, source=-1), Row(3, source=2), Row(3, source=-1)]
    destinations = [[-1, 0, -1], [-1, -1, 1], [3, 4, 2], [-1, -1, -1]]
    made = case(rows, conv_dim=fused.UPDATE_CHANNELS + 5, extra_width=2)
    made.pool = torch.zeros(6, *made.pool.shape[1:])
    window = made.x.shape[1] * 3 * 4
    with traffic_of(made.pool) as traffic:
        out, _ = update(made, destinations, "cpu", pool=made.pool)
    assert traffic.loaded == 2 * window
    assert traffic.stored == 5 * window
    assert out[3].isnan().all()  # a padding row's program does nothing


@pytest.mark.parametrize("padding", [0, 3])
def test_nothing_to_do(device: str, padding: int) -> None:
    made = case([Row(0), Row(0, source=0, destination=0)])
    check(made, device, padding)
    check(dataclasses.replace(made, rows=[]), device, padding)


# Decode


def update(
    made: Case,
    destinations: list[list[int]],
    device: str,
    kernels: Any = fused,
    pool: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`made.rows` of equally many tokens through the decode kernel."""
    pool = moved(made.pool, device) if pool is None else pool
    shape = (len(made.rows), len(destinations[0]), made.x.shape[1])
    sources = torch.tensor([row.source for row in made.rows], device=device)
    with poisoned_allocations() if kernels is fused else nullcontext():
        out = kernels.causal_conv1d_update(
            widened(made.x.view(shape), device), made.weight.to(device), on(device, made.bias), pool,
            sources, torch.tensor(destinations, device=device),
            activation=made.activation,
        )  # fmt: skip
    return made.checked(out), pool.cpu()


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(device: str, dtype: torch.dtype, tokens: int, kernel: int, record_property: Any) -> None:
    """In place after any of the tokens or none, to other slots after others, padding rows between."""
    free = iter(range(20, 200))
    rows, destinations = [], []
    for index in range(2 * tokens + 3):
        padding = index % 4 == 2
        source = -1 if padding or index % 5 == 4 else index
        row = [-1 if padding or (index + token) % 3 == 0 else next(free) for token in range(tokens)]
        if source >= 0 and index % 2:
            row[index % tokens] = source
        if not padding and source < 0:
            row[-1] = next(free)
        rows.append(
            Row(tokens, source, -1, {token + 1: row[token] for token in range(tokens) if row[token] >= 0})
        )
        destinations.append(row)
    record_property("cases", {"convolution of a row": len(rows)})
    conv_dim = fused.UPDATE_CHANNELS + 3
    made = case(rows, dtype=dtype, kernel=kernel, conv_dim=conv_dim, extra_width=tokens % 2, seed=tokens)
    real = torch.tensor([row.source >= 0 or bool(row.checkpoints) for row in rows])
    bits(made.x.view(len(rows), tokens, -1)[~real]).fill_(-1)

    out, pool = update(made, destinations, device)
    expected_out, expected_pool = made.expected()
    expected_out = expected_out.view(out.shape)
    torch.testing.assert_close(out[real].double(), expected_out[real], rtol=ROUNDING[dtype], atol=2e-6)
    assert torch.equal(bits(pool), bits(expected_pool))

    other, other_pool = update(made, destinations, device, KernelSet)
    torch.testing.assert_close(out[real], other[real], rtol=2 * ROUNDING[dtype], atol=2e-6)
    assert torch.equal(bits(pool), bits(other_pool))

    alone = dataclasses.replace(made, x=made.x[tokens : 2 * tokens], rows=rows[1:2])
    assert torch.equal(bits(update(alone, destinations[1:2], device)[0][0]), bits(out[1]))


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [fused, KernelSet], ids=["triton", "reference"])
@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_bias_or_silu_and_rounded(
    device: str, kernels: Any, activation: bool, dtype: torch.dtype, record_property: Any
) -> None:
    """Prefill and decode; no output differs from the exact one by more than its rounding."""
    rows = [Row(2, source=0, destination=1, checkpoints={1: 2}), Row(2 * BLOCK + 1, source=3, destination=3)]
    record_property("cases", {"convolution of a row": 4})
    made = dataclasses.replace(case(rows, dtype=dtype), bias=None, activation=activation)
    rtol = ROUNDING[dtype]
    out, pool = made.prefill(device, kernels)
    expected_out, expected_pool = made.expected()
    torch.testing.assert_close(out.double(), expected_out, rtol=rtol, atol=2e-6)
    assert torch.equal(bits(pool), bits(expected_pool))

    rows = [Row(2, source=0, checkpoints={1: 1, 2: 0}), Row(2, source=2, checkpoints={2: 2})]
    made = dataclasses.replace(made, rows=rows, x=made.x[:4])
    out, pool = update(made, [[1, 0], [-1, 2]], device, kernels)
    expected_out, expected_pool = made.expected()
    torch.testing.assert_close(out.flatten(0, 1).double(), expected_out, rtol=rtol, atol=2e-6, equal_nan=True)
    assert torch.equal(bits(pool), bits(expected_pool))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_decode_keeps_every_bit(device: str) -> None:
    made = case([Row(2, source=0, checkpoints={1: 0, 2: 1}), Row(2, source=2, checkpoints={1: 3, 2: 2})])
    generator = torch.Generator().manual_seed(1)
    for tensor in (made.x, made.pool):
        raw = torch.randint(-(1 << 23), -1, tensor.shape, generator=generator, dtype=torch.int32)
        bits(tensor).copy_(raw)  # NaN with all payloads, quiet and signalling
    assert made.x.isnan().all()
    _, pool = update(made, [[0, 1], [3, 2]], device)
    assert torch.equal(bits(pool), bits(made.expected()[1]))


# What only a GPU shows


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_offsets_beyond_two_to_the_31(device: str, needs_gpu_memory: Callable[[float], None]) -> None:
    """A slot at element 2^31 and beyond, of a pool in which no other memory is touched."""
    needs_gpu_memory(7)
    rows = [Row(5, source=1, destination=0, checkpoints={2: 2}), Row(3, destination=3)]
    made = case(rows, dtype=torch.bfloat16)
    stride = (1 << 31) // 3 + 160
    memory = torch.zeros(5 * stride, dtype=torch.bfloat16, device=device)
    pool = memory.as_strided(made.pool.shape, (stride, *made.pool.stride()[1:]))
    pool.copy_(made.pool)
    start = torch.tensor([0, 5, 8], device=device)
    index = torch.tensor
    out = fused.causal_conv1d_prefill(
        made.x.to(device), made.weight.to(device), made.bias.to(device), pool,
        ConvRows(
            index([1, -1], device=device), index([0, 3], device=device), start,
            index([0] * 5 + [1] * 3, device=device),
            index([0], device=device), index([2], device=device), index([2], device=device),
        ),
    )  # fmt: skip
    expected_out, expected_pool = made.expected()
    torch.testing.assert_close(out.cpu().double(), expected_out, rtol=ROUNDING[out.dtype], atol=2e-6)
    assert torch.equal(bits(pool.cpu().contiguous()), bits(expected_pool))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_in_place_at_full_size_does_not_race(device: str) -> None:
    """Nemotron-H-8B's channels, rows of 0 to 7 tokens, prefill and decode, many times over: equal bits."""
    rows = [Row(n % 8, source=n, destination=n, checkpoints={n % 8 // 2: 200 + n}) for n in range(128)]
    made = case(rows, dtype=torch.bfloat16, conv_dim=10240)
    expected_pool = made.expected()[1]
    for _ in range(20):
        assert torch.equal(bits(made.prefill(device)[1]), bits(expected_pool))
    rows = [Row(3, source=n, checkpoints={1: n, 3: 200 + n}) for n in range(128)]
    made = case(rows, dtype=torch.bfloat16, conv_dim=10240)
    expected_pool = made.expected()[1]
    for _ in range(20):
        _, pool = update(made, [[n, -1, 200 + n] for n in range(128)], device)
        assert torch.equal(bits(pool), bits(expected_pool))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_replays_in_a_graph_without_synchronising(device: str) -> None:
    """Captured as padding only, launched with rows: grids and addresses do not depend on values."""
    rows = [Row(9, source=0, destination=1, checkpoints={2: 2, 5: 3}), Row(2, source=4, destination=4)]
    made = case(rows)
    generator = {"dtype": torch.int64, "device": device}
    lists = {
        "sources": [0, 4, -1], "destinations": [1, 4, -1], "query_start_loc": [0, 9, 11, 11],
        "token_rows": [0] * 9 + [1] * 2 + [-1] * 5,
        "checkpoint_rows": [0, 0, -1], "checkpoint_ends": [2, 5, 0], "checkpoint_destinations": [2, 3, -1],
    }  # fmt: skip
    padding = {name: 0 if name in ("query_start_loc", "checkpoint_ends") else -1 for name in lists}
    static = ConvRows(**{name: torch.full((len(lists[name]),), padding[name], **generator) for name in lists})
    real = ConvRows(**{name: torch.tensor(values, **generator) for name, values in lists.items()})
    x = torch.cat([made.x, made.x.new_full((5, made.x.shape[1]), float("nan"))]).to(device)
    weight, bias, pool = made.weight.to(device), made.bias.to(device), made.pool.to(device)
    other_pool = pool.clone()
    fused.causal_conv1d_prefill(x, weight, bias, pool, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.causal_conv1d_prefill(x, weight, bias, pool, static)
    with no_synchronisation():
        for index, values in zip(static, real, strict=True):
            index.copy_(values)
        graph.replay()
        fused.causal_conv1d_prefill(x, weight, bias, other_pool, static)
    expected_out, expected_pool = made.expected()
    torch.testing.assert_close(out[:11].cpu().double(), expected_out, rtol=ROUNDING[out.dtype], atol=2e-6)
    for written in (pool, other_pool):
        assert torch.equal(bits(written.cpu()), bits(expected_pool))
