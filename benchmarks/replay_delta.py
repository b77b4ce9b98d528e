"""What does decode by replay cost beside decode by recurrence, in a convolution and a gated delta rule?

Convolution: bfloat16, 10,240 channels, 4 taps, with bias and SiLU. Gated delta rule: bfloat16, 16 key heads,
32 value heads, Dk = Dv = 128, chunks of 64 tokens, states in float32, as in Qwen3.5-4B and Qwen3-Next.

Rows: 1, 8, 32 and 128 decodes of one token, at several places of a chunk. Times are medians of launches of a
CUDA graph, in microseconds a call. "kept" is what a prefill of 4,096 tokens in 8 rows stores for replays. The
difference is || replay - recurrence || / || recurrence || of the outputs.

    python benchmarks/replay_delta.py --json out.json        (one GPU)
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from support.command_line import make_parser, parse_on_gpu
from support.graph_timing import graph_us

if TYPE_CHECKING:
    from mambaslots.inference.kernels.mixer_inputs import DeltaInputs
    from mambaslots.inference.kernels.step_rows import ReplayRows

CHANNELS, TAPS = 10240, 4
KEY_HEADS, VALUE_HEADS, DIM, CHUNK = 16, 32, 128, 64
START, DELTA_STARTS = 40, (8, 40, 56)
"""Where in its chunk the token of every row is: of convolutions and prefills, and of gated delta rules."""
STEP = 8
"""Tokens of a step before them; a divisor of those places."""
ROWS = (1, 8, 32, 128)
PREFILL_ROWS, PREFILL_TOKENS = 8, 512


@dataclass(frozen=True)
class Figures:
    """One row of the table: microseconds."""

    name: str
    replay: float
    recurrence: float | None = None
    difference: float | None = None


class Bench:
    """Inputs of both sides on the GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = torch.device("cuda")
        torch.manual_seed(0)

    def normal(self, *shape: int, dtype: Any = None) -> Any:
        made = self.torch.randn(*shape, device=self.device, dtype=self.torch.float32)
        return made.to(dtype or self.torch.bfloat16)

    def index(self, values: list[int], dtype: Any = None) -> Any:
        return self.torch.tensor(values, dtype=dtype or self.torch.int64, device=self.device)

    def places(self, rows: int, start: int = START, length: int = 1) -> "ReplayRows":
        """Each row's slots, and where its token is; no row stores a state."""
        from mambaslots.inference.kernels.step_rows import ReplayRows

        int32, own = self.torch.int32, self.index(list(range(rows)))
        starts, lengths = self.index([start] * rows, int32), self.index([length] * rows, int32)
        return ReplayRows(own, starts, lengths, own, self.index([-1] * rows), CHUNK)

    def compared(self, name: str, replay: Callable[[], Any], recurrence: Callable[[], Any]) -> Figures:
        found, expected = replay().float(), recurrence().float()
        difference = float((found - expected).norm() / expected.norm())
        return Figures(name, graph_us(replay), graph_us(recurrence), difference)


def convolution(bench: Bench, rows: int) -> Figures:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    kernels = GpuKernelSet()

    torch = bench.torch
    x, weight, bias = bench.normal(rows, 1, CHANNELS), bench.normal(CHANNELS, TAPS), bench.normal(CHANNELS)
    windows = bench.normal(2 * rows, CHANNELS, TAPS - 1)
    rings = torch.zeros(rows, TAPS, CHANNELS, device=bench.device, dtype=torch.bfloat16)
    for tap in range(TAPS - 1):
        rings[:, (START - TAPS + 1 + tap) % TAPS] = windows[:rows, :, tap]
    sources, places = bench.index(list(range(rows))), bench.places(rows)
    elsewhere = bench.index(list(range(rows, 2 * rows)))[:, None]
    return bench.compared(
        f"convolution, {rows} rows",
        lambda: kernels.causal_conv1d_replay(x, weight, bias, windows, rings, places),
        lambda: kernels.causal_conv1d_update(x, weight, bias, windows, sources, elsewhere),
    )  # fmt: skip


def inputs(bench: Bench, *shape: int) -> dict[str, Any]:
    """What a convolution and gates give: q, k and v, parts of one tensor, g and beta."""
    F = bench.torch.nn.functional
    heads = (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
    parts = bench.normal(*shape, sum(heads) * DIM).split([count * DIM for count in heads], dim=-1)
    gates = bench.normal(2, *shape, VALUE_HEADS, dtype=bench.torch.float32)
    named = {name: part.unflatten(-1, (-1, DIM)) for name, part in zip("qkv", parts, strict=True)}
    return named | {"g": -F.softplus(gates[0] - 3), "beta": gates[1].sigmoid()}


def empty_buffers(bench: Bench, rows: int) -> "DeltaInputs":
    """What rows keep of their chunks, zeros."""
    from mambaslots.inference.kernels.mixer_inputs import DeltaInputs

    def zeros(*shape: int, dtype: Any) -> Any:
        return bench.torch.zeros(rows, *shape, device=bench.device, dtype=dtype)

    bfloat16, float32 = bench.torch.bfloat16, bench.torch.float32
    return DeltaInputs(
        k=zeros(CHUNK, KEY_HEADS, DIM, dtype=bfloat16),
        v=zeros(CHUNK, VALUE_HEADS, DIM, dtype=bfloat16),
        g=zeros(CHUNK, VALUE_HEADS, dtype=float32),
        beta=zeros(CHUNK, VALUE_HEADS, dtype=float32),
        new_v=zeros(CHUNK, VALUE_HEADS, DIM, dtype=bfloat16),
        inverses=zeros(VALUE_HEADS, (CHUNK + 16) // 2, CHUNK, dtype=float32),
    )


def delta_rule(bench: Bench, rows: int, start: int) -> Figures:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    kernels = GpuKernelSet()

    kept = inputs(bench, rows, CHUNK)
    step = {name: tensor[:, start : start + 1] for name, tensor in kept.items()}
    buffers = empty_buffers(bench, rows)
    states = bench.normal(3 * rows, VALUE_HEADS, DIM, DIM, dtype=bench.torch.float32) / 8
    sources = bench.index(list(range(rows)))
    for first in range(0, start, STEP):
        tokens = {name: tensor[:, first : first + STEP] for name, tensor in kept.items()}
        kernels.gated_delta_rule_replay(
            **tokens, states=states, inputs=buffers, rows=bench.places(rows, first, STEP)
        )
        # The recurrence decodes from the state after the tokens before this one.
        live = list(range(rows, 2 * rows))
        at_last = bench.index([[-1] * (STEP - 1) + [slot] for slot in live])
        entering = bench.index(live) if first else sources
        kernels.gated_delta_rule_update(**tokens, states=states, sources=entering, destinations=at_last)
    elsewhere = bench.index(list(range(2 * rows, 3 * rows)))[:, None]
    return bench.compared(
        f"gated delta rule, {rows} rows, token {start}",
        partial(
            kernels.gated_delta_rule_replay, **step, states=states, inputs=buffers,
            rows=bench.places(rows, start),
        ),
        partial(
            kernels.gated_delta_rule_update, **step, states=states, sources=bench.index(live),
            destinations=elsewhere,
        ),
    )  # fmt: skip


def keeping(bench: Bench) -> list[Figures]:
    """What a prefill stores for replays: the last inputs of each row, and a tail of START tokens."""
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
    from mambaslots.inference.kernels.step_rows import TailRows

    kernels = GpuKernelSet()

    torch, rows = bench.torch, PREFILL_ROWS
    int32 = torch.int32
    cuts = bench.index([row * PREFILL_TOKENS for row in range(rows + 1)], int32)
    slots, x = bench.index(list(range(rows))), bench.normal(rows * PREFILL_TOKENS, CHANNELS)
    windows = bench.normal(rows, CHANNELS, TAPS - 1)
    rings = torch.zeros(rows, TAPS, CHANNELS, device=bench.device, dtype=torch.bfloat16)
    starts = bench.index([0] * rows, int32)
    packed = {name: part for name, part in inputs(bench, rows * PREFILL_TOKENS).items() if name != "q"}
    buffers = empty_buffers(bench, rows)
    tails = bench.index([(row + 1) * PREFILL_TOKENS - START for row in range(rows)])
    calls: dict[str, Callable[[], Any]] = {
        "convolution, kept": partial(kernels.keep_conv_inputs, x, windows, rings, slots, starts, slots, cuts),
        "gated delta rule, kept": partial(
            kernels.keep_delta_inputs, **packed, new_v=packed["v"], inputs=buffers,
            rows=TailRows(slots, tails, cuts),
        ),
    }  # fmt: skip
    return [Figures(name, graph_us(call)) for name, call in calls.items()]


def table(rows: list[Figures]) -> list[str]:
    lines = ["| | replay us | recurrence us | ratio | difference |", "|---|---|---|---|---|"]
    for row in rows:
        if row.recurrence is None:
            lines.append(f"| {row.name} | {row.replay:.1f} | - | - | - |")
        else:
            ratio = row.replay / row.recurrence
            times = f"{row.replay:.1f} | {row.recurrence:.1f} | {ratio:.2f}"
            lines.append(f"| {row.name} | {times} | {row.difference:.1e} |")
    return lines


def main() -> int:
    parser = make_parser(__doc__)
    arguments = parse_on_gpu(parser)
    import torch
    import triton

    bench = Bench()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{machine}; the first calls compile and tune", flush=True)
    rows = []
    with torch.no_grad():
        measures: list[Callable[[], Figures]] = [partial(convolution, bench, count) for count in ROWS]
        measures += [partial(delta_rule, bench, count, start) for count in ROWS for start in DELTA_STARTS]
        for measure in measures:
            rows.append(measure())
            print(table(rows)[-1], flush=True)
        rows += keeping(bench)
    print("\n".join(table(rows)))
    if arguments.json:
        figures = {"machine": machine, "figures": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
