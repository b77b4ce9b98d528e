"""How fast do states move: as fast as memory, and how does megatron-core's own way compare?

States of Nemotron-H-8B (24 Mamba layers, 97 MiB with float32 SSM states, 49 MiB with bfloat16) and states
under 1 MiB, of which a launch rather than memory is the cost, move between the pools of a server:

commit      n scratch states into durable slots. Stock: `MambaSlotAllocator._copy_intermediate_to_cache`,
            `dst[:, to] = src[:, of]` for each tensor. Ours: `copy_states`, one launch
restore     n durable states into live slots. Stock: `MambaSlotAllocator.restore_to_live` of one request after
            another, two strided copies each. Ours: `copy_states`, one launch for all

Both sides get lists of ints, as from their hosts. Figures are medians of calls in a queue, so that the host's
work counts only where the GPU waits for it; "graph" is our launch alone, with its indices on the device,
launched as a CUDA graph. Slots change from call to call and pools are larger than the L2 cache. GB/s counts
bytes read and bytes written, once each; % is of a large device-to-device copy in the same run. What both
sides wrote is compared with its source, bit for bit. "launches" are kernels and copies on the device that one
call makes, not counting the indices' way from the host, as the profiler saw them.

Without megatron-core, stock's two methods are written out here. On the CPU the sizes are small, ours is the
reference, and nothing is judged.
"""

import datetime
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import torch
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.kernels.reference import torch_state_copy as reference
from mambaslots.inference.kernels.state_copy import copy_states
from mambaslots.inference.kernels.state_pools import ConvAndSsm
from mambaslots.state_spec import StateTensor
from support.command_line import add_count, add_device, check_device, make_parser

Call = Callable[[], object]


@dataclass(frozen=True)
class Model:
    """Shapes of the states of one model, and how many of them the pools hold."""

    name: str
    layers: int
    conv_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_shape: tuple[int, ...]
    ssm_dtype: torch.dtype
    slots: int
    """Live, durable and scratch slots each."""

    @property
    def state_bytes(self) -> int:
        conv = torch.Size(self.conv_shape).numel() * self.conv_dtype.itemsize
        return self.layers * (conv + torch.Size(self.ssm_shape).numel() * self.ssm_dtype.itemsize)


BF16, FP32 = torch.bfloat16, torch.float32
GPU_MODELS = (
    Model("Nemotron-H-8B fp32", 24, (10240, 3), BF16, (128, 64, 128), FP32, 64),
    Model("Nemotron-H-8B bf16", 24, (10240, 3), BF16, (128, 64, 128), BF16, 64),
    Model("small", 24, (1024, 3), BF16, (16, 32, 16), FP32, 512),
)
CPU_MODELS = (
    Model("1/256 of Nemotron-H-8B", 24, (40, 3), BF16, (2, 16, 128), FP32, 16),
    Model("tiny", 4, (32, 3), BF16, (2, 8, 16), FP32, 32),
)


class Device:
    """What is timed, and how, on a GPU or on the CPU."""

    def __init__(self, name: str, calls: int, repeats: int) -> None:
        self.name = name
        self.gpu = name.startswith("cuda")
        self._calls, self._repeats = calls, repeats

    def seconds(self, calls: Sequence[Call]) -> float:
        """The median time of one call, in queues of calls that take turns."""
        queue = list(islice(cycle(calls), max(self._calls, len(calls))))
        for call in queue:  # warm-up: compiles, and touches all memory
            call()
        return statistics.median(self._seconds(queue) for _ in range(self._repeats)) / len(queue)

    def _seconds(self, queue: list[Call]) -> float:
        if not self.gpu:
            start = time.perf_counter()
            for call in queue:
                call()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for call in queue:
            call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def graph_seconds(self, calls: Sequence[Call]) -> float | None:
        """The median time of one call when all are one CUDA graph: without the host."""
        if not self.gpu:
            return None
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.seconds([graph.replay]) / len(calls)

    def launches(self, call: Call) -> int | None:
        """Kernels and copies on the device, but for copies from the host; None where none can be seen."""
        if not self.gpu:
            return None
        call()
        torch.cuda.synchronize()
        watched = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=watched, acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        on_device = [event for event in profile.events() if event.device_type.name == "CUDA"]
        return sum("HtoD" not in event.name for event in on_device) if on_device else None

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a copy far larger than any cache."""
        size = 4 << 30 if self.gpu else 16 << 20
        of, to = (torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.name) for _ in range(2))
        return 2 * size / self.seconds([lambda: to.copy_(of)])


def random_states(model: Model, device: str, slots: int) -> ConvAndSsm:
    """[layers, slots, ...] of random bits: zeros move faster than data."""
    made = ConvAndSsm(
        torch.empty(model.layers, slots, *model.conv_shape, dtype=model.conv_dtype, device=device),
        torch.empty(model.layers, slots, *model.ssm_shape, dtype=model.ssm_dtype, device=device),
    )
    for states in made:
        states.view(torch.int16).random_(-(2**15), 2**15)
    return made


class WrittenOutSlots:
    """Two methods of megatron-core's MambaSlotAllocator (0.19.2): the calls to torch that they make."""

    def _copy_intermediate_to_cache(self: Any, src_offsets: list[int], slots: list[int]) -> None:
        device = self.ssm_states.device
        src_idx = torch.tensor(src_offsets, dtype=torch.int64, device=device)
        dst_idx = torch.tensor(slots, dtype=torch.int64, device=device)
        self.ssm_states[:, dst_idx] = self.intermediate_ssm_out[:, src_idx]
        self.conv_states[:, dst_idx] = self.intermediate_conv_out[:, src_idx]

    def restore_to_live(self: Any, request_idx: int, block_id: int) -> bool:
        slot = self.block_to_slot[block_id].item()
        mamba_idx = self.context.mamba_metadata.request_to_mamba_state_idx[request_idx].item()
        self.context.mamba_conv_states[:, mamba_idx].copy_(self.conv_states[:, slot])
        self.context.mamba_ssm_states[:, mamba_idx].copy_(self.ssm_states[:, slot])
        return True


def stock_class() -> tuple[Any, str]:
    """megatron-core's allocator and where it is from, or its methods written out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.inference.contexts.mamba_slot_allocator import MambaSlotAllocator
    except ImportError as error:
        return WrittenOutSlots, f"written out here (no megatron-core: {error})"
    return MambaSlotAllocator, f"megatron-core {importlib.metadata.version('megatron-core')}"


class Pools:
    """One model's states: scratch, which both sides read; ours, live and durable; stock's, the same."""

    def __init__(self, model: Model, device: str, stock: Any) -> None:
        self.model = model
        self.scratch = random_states(model, device, model.slots)
        states = (
            StateTensor("conv", model.layers, model.conv_shape, model.conv_dtype),
            StateTensor("ssm", model.layers, model.ssm_shape, model.ssm_dtype),
        )
        pool = StatePool(states, model.slots, model.slots, device)
        self.live = ConvAndSsm(pool["conv"][:, : pool.num_live], pool["ssm"][:, : pool.num_live])
        self.durable = ConvAndSsm(pool.durable("conv"), pool.durable("ssm"))
        self.stock_live = random_states(model, device, model.slots)
        self.stock_durable = random_states(model, device, model.slots)
        for ours, theirs in zip(self.durable, self.stock_durable, strict=True):
            ours.copy_(theirs)

        # Stock's constructor wants a whole context; its methods read these attributes alone.
        self.stock = stock.__new__(stock)
        self.stock.conv_states, self.stock.ssm_states = self.stock_durable
        self.stock.intermediate_conv_out, self.stock.intermediate_ssm_out = self.scratch
        same = torch.arange(model.slots, dtype=torch.int32)
        self.stock.block_to_slot = same
        self.stock.context = SimpleNamespace(
            mamba_metadata=SimpleNamespace(request_to_mamba_state_idx=same),
            mamba_conv_states=self.stock_live.conv,
            mamba_ssm_states=self.stock_live.ssm,
        )

    def stock_commit(self, read: list[int], write: list[int]) -> None:
        self.stock._copy_intermediate_to_cache(read, write)

    def stock_restore(self, read: list[int], write: list[int]) -> None:
        for block, request in zip(read, write, strict=True):
            self.stock.restore_to_live(request, block)


@dataclass(frozen=True)
class Row:
    """One line: seconds a call, and what follows from them."""

    model: str
    state_mib: float
    what: str
    n: int
    bytes: int
    """Read and written by the least traffic."""
    seconds: dict[str, float | None]
    """"ours" and "stock", called with lists; "graph", our launch in a captured graph."""
    launches: dict[str, int | None]
    copy_bandwidth: float

    def share(self, side: str) -> float | None:
        """Of the device copy's bandwidth."""
        taken = self.seconds.get(side)
        return self.bytes / taken / self.copy_bandwidth if taken else None

    @property
    def ratio(self) -> float | None:
        ours, stock = self.seconds.get("ours"), self.seconds.get("stock")
        return stock / ours if stock and ours else None

    def __str__(self) -> str:
        def number(value: float | None, style: str) -> str:
            return "-" if value is None else format(value, style)

        gigabytes = self.bytes / self.seconds["ours"] / 1e9 if self.bytes and self.seconds["ours"] else None
        micro = [None if (taken := self.seconds.get(side)) is None else taken * 1e6 for side in SIDES]
        shares = [self.share(side) if self.bytes else None for side in ("ours", "graph")]
        made = "/".join(number(self.launches.get(side), "d") for side in ("ours", "stock"))
        return (
            f"{self.model:<27}{self.what:<9}{self.n:>4}{number(gigabytes, '.0f'):>8}"
            + "".join(f"{number(share, '.1%'):>8}" for share in shares)
            + "".join(f"{number(taken, '.1f'):>11}" for taken in micro)
            + f"{number(self.ratio, '.2f'):>8}{made:>9}"
        )


SIDES = ("ours", "graph", "stock")
HEADER = (
    f"{'states':<27}{'what':<9}{'n':>4}{'GB/s':>8}{'%':>8}{'graph %':>8}"
    f"{'ours us':>11}{'graph us':>11}{'stock us':>11}{'ratio':>8}{'launches':>9}"
)


@dataclass(frozen=True)
class Requirement:
    name: str
    measured: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT MET"
        return (
            f"{verdict:<8}{self.name}: {self.measured:.3g}, {'at most' if self.at_most else 'at least'} "
            f"{self.bound:g}"
        )


def moved(device: Device, pools: Pools, what: str, n: int, bandwidth: float) -> Row:
    """Measure one direction at one n, then compare what both sides wrote with its source."""
    model = pools.model
    commit = what == "commit"
    of, to = (pools.scratch, pools.durable) if commit else (pools.durable, pools.live)
    stock_of, stock_to = (
        (pools.scratch, pools.stock_durable) if commit else (pools.stock_durable, pools.stock_live)
    )
    stock = pools.stock_commit if commit else pools.stock_restore
    draw = random.Random(n)
    turns = max(2, model.slots // n) if n * model.state_bytes < 1 << 30 else 4
    pairs = [tuple(draw.sample(range(model.slots), n) for _ in range(2)) for _ in range(min(turns, 16))]
    on_device = [[torch.tensor(listed, device=device.name) for listed in pair] for pair in pairs]

    def ours(read: Any, write: Any) -> Call:
        return lambda: copy_states(of, read, to, write)

    def launched(read: Any, write: Any) -> Call:
        if not device.gpu:
            return lambda: reference.copy_states(of, read, to, write)
        from mambaslots.inference.kernels import state_move

        return lambda: state_move.copy_states(of, read, to, write)

    def theirs(read: list[int], write: list[int]) -> Call:
        return lambda: stock(read, write)

    row = Row(
        model.name,
        model.state_bytes / 2**20,
        what,
        n,
        2 * n * model.state_bytes,
        {
            "ours": device.seconds([ours(*pair) for pair in pairs]),
            "graph": device.graph_seconds([launched(*pair) for pair in on_device]),
            "stock": device.seconds([theirs(*pair) for pair in pairs]),
        },
        {
            "ours": device.launches(ours(*pairs[0])),
            "stock": device.launches(theirs(*pairs[0])),
        },
        bandwidth,
    )
    read, write = pairs[-1]
    for name, call, source, destination in (
        ("ours", ours(read, write), of, to),
        ("stock", theirs(read, write), stock_of, stock_to),
    ):
        for states in destination:
            states.view(torch.int16)[:, write] = -1
        call()
        for before, after in zip(source, destination, strict=True):
            if not torch.equal(before.view(torch.int16)[:, read], after.view(torch.int16)[:, write]):
                raise SystemExit(f"{model.name}, {what} of {n}: {name} copied other bits than its source's")
    return row


def requirements(rows: list[Row]) -> list[Requirement]:
    """What must hold on a GPU."""
    found = []
    for row in rows:
        small = row.state_mib <= 1
        share = row.share("ours") if row.bytes else None
        name = f"{row.model}, {row.what} of {row.n}"
        if not small and row.what in ("commit", "restore") and row.n >= 4 and share is not None:
            found.append(Requirement(f"{name}, share of the copy bandwidth", share, 0.85))
        if not small and row.what == "commit" and row.ratio is not None:
            found.append(Requirement(f"{name}, times stock's speed", row.ratio, 1.9))
        if row.what == "restore" and row.n == 16 and row.ratio is not None:
            found.append(Requirement(f"{name}, times stock's speed", row.ratio, 3 if small else 1.1))
            if row.launches["ours"] is not None:
                found.append(Requirement(f"{name}, launches", row.launches["ours"], 1, at_most=True))
    return found


def main() -> int:
    parser = make_parser(__doc__)
    add_device(parser, "cuda" if torch.cuda.is_available() else "cpu")
    add_count(parser, "--calls", 20, "calls in a queue")
    add_count(parser, "--repeats", 15, "queues")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    device = Device(arguments.device, arguments.calls, arguments.repeats)
    if device.gpu:
        torch.cuda.set_device(torch.device("cuda", torch.cuda.current_device()))
        hardware = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        hardware = f"the CPU, one thread of {os.cpu_count()} cores: nothing here is about a GPU"
    torch.manual_seed(0)
    stock, origin = stock_class()
    bandwidth = device.copy_bandwidth()
    print(f"measured on {hardware}\ntorch {torch.__version__}; stock: {origin}")
    print(f"a large copy in the same memory: {bandwidth / 1e9:.0f} GB/s, bytes read and written\n\n{HEADER}")

    rows: list[Row] = []
    for model in GPU_MODELS if device.gpu else CPU_MODELS:
        pools = Pools(model, device.name, stock)
        counts = (1, 4, 16, 32) if device.gpu else (1, 4, 16)
        for what in ("commit", "restore"):
            for n in counts:
                rows.append(moved(device, pools, what, n, bandwidth))
                print(rows[-1], flush=True)
        del pools
        if device.gpu:
            torch.cuda.empty_cache()

    judged = requirements(rows) if device.gpu else []
    print("\nrequirements" + ("" if judged else ": of a GPU; nothing to judge here"))
    for requirement in judged:
        print(requirement)
    if arguments.json:
        figures = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": hardware,
            "torch": torch.__version__,
            "stock": origin,
            "copy_bandwidth": bandwidth,
            "calls": arguments.calls,
            "repeats": arguments.repeats,
            "rows": [asdict(row) | {"share": row.share("ours"), "ratio": row.ratio} for row in rows],
            "requirements": [asdict(requirement) | {"met": requirement.met} for requirement in judged],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
