"""What does align mode's pre-copy cost, against kernels that read a state elsewhere than they write it?

When the running column of a request changes, once in a block, either its state is copied to the new column
before the forward (pre-copy: any kernel serves), or the forward reads the old column and writes the new ones
(copy-free). After sampling, both save the state at a boundary that lay between the drafts.

counted     bytes of a step of 32 decoding requests with 3 drafts each, from the rules of
            `align_rule` over many steps; "forward" is what the update itself reads and writes of
            states: one read and 1 + drafts written a request
measured    the launches, n of 32 requests having something to copy; GB/s counts bytes read and bytes written,
            % is of a large device-to-device copy in the same run. "queue" is a call in a queue of calls, with
            the host's work where the GPU waits for it; "graph" the launch alone, in a CUDA graph
steps       all layers' SSM update of a step in which n requests change their column: copy-free, and with the
            copy before it. What both wrote is compared, bit for bit

States of Nemotron-H-8B: 24 layers, conv windows of 3 + 3 inputs, float32 SSM states. On the CPU what is timed
is small, and the torch reference: times say nothing about a GPU there.
"""

import datetime
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from mambaslots.inference.kernels.kernel_set import kernel_set
from mambaslots.vllm import align_kernels, align_reference
from mambaslots.vllm.align_reference import AlignLayout, AlignState
from mambaslots.vllm.align_rule import advance, save_boundary
from state_movement import Device
from support.command_line import add_count, add_device, check_device, make_parser

REQUESTS, DRAFTS, HISTORY = 32, 3, 3
COLUMNS = 2 + DRAFTS
BLOCKS = (256, 512, 1024)
COUNTS = (0, 1, 4, 32)
COUNTED = (
    ("block", 6), ("accepted", 10), ("pre-copy", 12), ("post-copy", 12), ("forward", 12), ("pre %", 9),
    ("post %", 9),
)  # fmt: skip
TIMED = (("n", 4), ("bias", 6), ("MiB copied", 12), ("queue us", 12), ("graph us", 12), ("GB/s", 8), ("%", 8))


@dataclass(frozen=True)
class Shapes:
    name: str
    layers: int
    conv_dim: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int


GPU_SHAPES = Shapes("Nemotron-H-8B fp32", 24, 10240, 128, 64, 128, 8)
CPU_SHAPES = Shapes("small states", 4, 40, 2, 8, 64, 1)


@dataclass(frozen=True)
class Counted:
    """Bytes of a step of all requests, read and written."""

    block: int
    accepted: float
    """Tokens a step and request, the bonus token counted."""
    precopy: float
    postcopy: float
    forward: float

    def __str__(self) -> str:
        mib = [number / 2**20 for number in (self.precopy, self.postcopy, self.forward)]
        shares = (f"{copied / self.forward:>9.3%}" for copied in (self.precopy, self.postcopy))
        return (
            f"{self.block:>6}{self.accepted:>10.2f}" + "".join(f"{each:>12.2f}" for each in mib)
            + "".join(shares)
        )  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One launch, or one step: seconds, and the bytes that are copied in it."""

    what: str
    n: int
    bias: int
    bytes: int
    queue: float
    graph: float | None
    copy_bandwidth: float

    def __str__(self) -> str:
        best = self.graph or self.queue
        rated = self.bytes > 0 and not self.what.startswith("step")
        rate = f"{self.bytes / best / 1e9:.0f}" if rated else "-"
        share = f"{self.bytes / best / self.copy_bandwidth:.1%}" if rated else "-"
        graph = f"{self.graph * 1e6:.1f}" if self.graph else "-"
        return (
            f"{self.what:<24}{self.n:>4}{self.bias:>6}{self.bytes / 2**20:>12.2f}{self.queue * 1e6:>12.1f}"
            f"{graph:>12}{rate:>8}{share:>8}"
        )


class Window:
    """The requests' live slots, 2 + drafts each, which are the columns of their tables in turn."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self.shapes, self.device = shapes, torch.device(device)
        slots = REQUESTS * COLUMNS
        conv = (shapes.layers, slots, shapes.conv_dim, HISTORY + DRAFTS)
        ssm = (shapes.layers, slots, shapes.heads, shapes.head_dim, shapes.state_dim)
        self.conv = torch.empty(conv, dtype=torch.bfloat16, device=device)
        self.ssm = torch.empty(ssm, dtype=torch.float32, device=device)
        self.conv.view(torch.int16).random_(-(2**15), 2**15)
        self.ssm.normal_()
        self.table = torch.arange(slots, dtype=torch.int32, device=device).reshape(REQUESTS, COLUMNS)
        states = [AlignState(layer, HISTORY + DRAFTS) for layer in self.conv]
        states += [AlignState(layer, 0) for layer in self.ssm]
        self.layout = AlignLayout.from_tensors(states, [self.table], conv_dim_first=True)
        self.kernels = align_kernels if self.device.type == "cuda" else align_reference

    def numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def state_bytes(self) -> int:
        return bytes_copied(self.layout, 0)


def bytes_copied(layout: AlignLayout, bias: int) -> int:
    """Bytes that copying a row reads, and also writes; conv windows lack their first `bias` inputs."""
    copied = 0
    for states, width, _ in layout.states:
        whole = states[0].numel() * states.itemsize
        copied += whole // width * max(width - bias, 0) if width else whole
    return copied


def counted(layout: AlignLayout, block: int, odds: float) -> Counted:
    """Over 4 blocks of tokens of every request; each draft is right, if those before are, with `odds`."""
    draw = np.random.default_rng(0)
    requests = 512
    computed = draw.integers(block, 2 * block, requests)
    columns = (computed - 1) // block
    accepted = np.ones_like(computed)
    scheduled = np.full_like(computed, 1 + DRAFTS)
    one_way = np.array([bytes_copied(layout, bias) for bias in range(DRAFTS + 1)])
    copied, tokens, steps = np.zeros(2), 0, 4 * block // (1 + DRAFTS)
    for _ in range(steps):
        before = advance(columns, accepted, computed, scheduled, block)
        right = (draw.random((requests, DRAFTS)) < odds).cumprod(1).sum(1)
        after = save_boundary(before.columns, 1 + right, computed + 1 + right, block)
        for side, step in enumerate((before, after)):
            copied[side] += 2 * one_way[step.biases[step.moves]].sum()
        columns, accepted, computed = before.columns, after.accepted, computed + 1 + right
        tokens += int((1 + right).sum())
    precopy, postcopy = (copied / steps / requests * REQUESTS).tolist()
    forward = REQUESTS * bytes_copied(layout, 0) * (2 + DRAFTS)
    return Counted(block, tokens / steps / requests, precopy, postcopy, forward)


def launches(device: Device, window: Window, bandwidth: float) -> list[Timed]:
    """Both launches, with 0 to all requests having something to copy."""
    kernels, layout = window.kernels, window.layout
    numbers = window.numbers
    found = []
    for n in COUNTS:
        for bias in (0, 2)[: n + 1]:
            crossing = [row < n for row in range(REQUESTS)]
            sources = numbers([0 if crosses else 1 for crosses in crossing])
            running, biases = numbers([1] * REQUESTS), numbers([bias] * REQUESTS)
            accepted = numbers([1 + bias] * REQUESTS)
            # The boundary at 512 is that of column 0; the requests run in column 1.
            new = numbers([512 if crosses else 700 for crosses in crossing])
            drafted = numbers([DRAFTS] * REQUESTS)
            scheduled, computed = drafted + 1, new - accepted

            def precopy(sources: Any = sources, running: Any = running, biases: Any = biases) -> None:
                kernels.precopy_align(layout, running, sources, biases)

            def postprocess(
                accepted: Any = accepted,
                running: Any = running,
                tokens: Any = (computed, scheduled, drafted),
            ) -> None:
                kernels.postprocess_align(layout, accepted, running, *tokens, 512)

            size = 2 * n * bytes_copied(layout, bias)
            found.append(timed(device, "precopy", n, bias, size, precopy, bandwidth))
            found.append(timed(device, "postprocess", n, bias, size, postprocess, bandwidth))
    return found


def steps(device: Device, window: Window, bandwidth: float) -> list[Timed]:
    """The SSM updates of one step, all layers: reading the old column, or after a copy to the new one."""
    shapes = window.shapes
    model = kernel_set(window.device, torch.float32)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw).to(window.device)

    tokens = 1 + DRAFTS
    x = random(REQUESTS, tokens, shapes.heads, shapes.head_dim)
    dt, A, D = random(REQUESTS, tokens, shapes.heads), -random(shapes.heads), random(shapes.heads)
    B, C = (random(REQUESTS, tokens, shapes.groups, shapes.state_dim) for _ in range(2))
    table = window.table.long()
    written, here = table[:, 1:], table[:, 1].contiguous()
    found = []
    for n in COUNTS:
        sources = window.numbers([0 if row < n else 1 for row in range(REQUESTS)])
        running, biases = window.numbers([1] * REQUESTS), window.numbers([0] * REQUESTS)
        apart = table.gather(1, sources[:, None].long())[:, 0]

        def update(read: torch.Tensor) -> None:
            for states in window.ssm:
                model.selective_state_update(x, dt, A, B, C, D, states, read, written)

        def copy_free(apart: torch.Tensor = apart) -> None:
            update(apart)

        def copied(sources: Any = sources, running: Any = running, biases: Any = biases) -> None:
            window.kernels.precopy_align(window.layout, running, sources, biases)
            update(here)

        same(window, copy_free, copied, n)
        size = 2 * n * window.state_bytes
        found.append(timed(device, "step, copy-free", n, 0, 0, copy_free, bandwidth))
        found.append(timed(device, "step, pre-copy", n, 0, size, copied, bandwidth))
    return found


def same(window: Window, first: Any, second: Any, n: int) -> None:
    """Exits where the two write other states, from the same ones."""
    before, results = window.ssm[:2].clone(), []
    for call in (first, second):
        window.ssm[:2].copy_(before)
        call()
        results.append(window.ssm[:2].view(torch.int32).clone())
    if not torch.equal(*results):
        raise SystemExit(f"with {n} requests that change their column, copy-free wrote other bits")
    window.ssm.normal_()


def timed(device: Device, what: str, n: int, bias: int, size: int, call: Any, bandwidth: float) -> Timed:
    return Timed(what, n, bias, size, device.seconds([call]), device.graph_seconds([call] * 4), bandwidth)


def main() -> int:
    parser = make_parser(__doc__)
    add_device(parser, "cuda" if torch.cuda.is_available() else "cpu")
    add_count(parser, "--calls", 10, "calls in a queue")
    add_count(parser, "--repeats", 9, "queues")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    device = Device(arguments.device, arguments.calls, arguments.repeats)
    if device.gpu:
        hardware = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        hardware = f"the CPU, one thread of {os.cpu_count()} cores: nothing here is about a GPU"
    torch.manual_seed(0)

    shapes = GPU_SHAPES
    full = Window(shapes, arguments.device if device.gpu else "meta")
    state = f"a state of {full.state_bytes / 2**20:.1f} MiB"
    print(f"counted: {shapes.name}, {state}, {REQUESTS} requests; MiB a step\n")
    print("".join(f"{name:>{width}}" for name, width in COUNTED))
    counts = [counted(full.layout, block, odds) for block in BLOCKS for odds in (0.0, 0.5, 0.8, 1.0)]
    for row in counts:
        print(row)

    window = full if device.gpu else Window(CPU_SHAPES, arguments.device)
    bandwidth = device.copy_bandwidth()
    print(f"\nmeasured on {hardware}\n{window.shapes.name}; torch {torch.__version__}")
    print(f"a large copy in the same memory: {bandwidth / 1e9:.0f} GB/s, bytes read and written\n")
    print(f"{'what':<24}" + "".join(f"{name:>{width}}" for name, width in TIMED))
    rows = launches(device, window, bandwidth)
    for timing in rows:
        print(timing, flush=True)
    print()
    of_steps = steps(device, window, bandwidth)
    for timing in of_steps:
        print(timing, flush=True)
    if arguments.json:
        figures = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": hardware,
            "torch": torch.__version__,
            "copy_bandwidth": bandwidth,
            "counted": [asdict(row) for row in counts],
            "launches": [asdict(row) for row in rows],
            "steps": [asdict(row) for row in of_steps],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
