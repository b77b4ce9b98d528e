"""What the GPU does in a step, by torch's profiler: idle time between steps, and time by family of kernels.

A `MarkedModel` launches an empty kernel before and after each forward; a CUDA graph captures both. The two
marks separate forwards on the GPU's own timeline. Between the forward of one step and that of the next lie
the sampling, the copy of the tokens and the copy of the next step's index tensors; the GPU idles while none
of them runs.
"""

import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import mambaslots as ms
import torch
from torch.autograd import DeviceType

MARK = "spin_kernel"  # of torch.cuda._sleep
FAMILIES = (
    ("mark", MARK),
    ("attention", r"flash|fmha|paged_attention|attention|prepare_varlen"),
    ("rotary and KV", r"rotary|rope|write_kv"),
    (
        "convolution",
        r"conv1d|short_conv|conv_(depthwise|prefill|update|replay)|cudnn.*conv|keep_conv",
    ),
    ("norms", r"rms_?norm|layer_?norm|l2norm|norm_fwd|gated_norm|norm_kernel"),
    (
        "scan stages",
        r"ssd|chunk_scan|chunk_state|chunk_cumsum|bmm_chunk|state_passing|selective_scan"
        r"|delta|wy_|kkt|solve_tril|cumsum_scalar|chunk_fwd|chunk_gated|recompute_w_u|time_steps|recurrent",
    ),
    ("sampling", r"argmax|MaxOps|draw_kernel|score_kernel|top_?k|softmax|multinomial|radix|sort"),
    ("products in float32", r"simt|sgemm|f32f32|gemv.*<int, int, float"),
    ("products", r"gemm|gemv|nvjet|cublas|cutlass|xmma|split_?k|dot_kernel|Kernel2"),
    ("states", r"copy_states|capture_boundaries|move_\w*(states|pairs)|zero_states"),
    ("activations", r"silu|swiglu|relu|gelu|sigmoid|softplus|threshold|activation_kernel|clamp"),
    ("copies", r"memcpy|memset|copy_kernel|copy_device|CatArray|FillFunctor|copy_rows"),
    ("indexing", r"index|gather|scatter"),
    ("other elementwise", r"elementwise|reduce_kernel|triton_|DeviceScan"),
)


class Launch(NamedTuple):
    """One kernel, copy or fill on the GPU; times in ns."""

    start: int
    end: int
    name: str


class MarkedModel:
    """Calls a model between two marks; on a CPU without marks."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.state_spec = model.state_spec
        self._model = model
        self._marks = device.type == "cuda"

    def __call__(self, inputs: ms.StepInputs) -> Any:
        if not self._marks:
            return self._model(inputs)
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        logits = self._model(inputs)
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        return logits


def record(call: Callable[[], object]) -> list[Launch]:
    """What runs on the GPU while `call` runs, in the order of the starts."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()  # a forward that runs already would be cut in two
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    launches = []
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and "Sync" not in event.name():
            start = event.start_ns()
            launches.append(Launch(start, start + event.duration_ns(), event.name()))
    return sorted(launches)


def trace_steps(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Idle time between `steps` decode steps and their successors, and the kernels of one; times in us.

    `idle_us` adds up all gaps between two forwards, `gap_us` is the largest of them; both are medians over
    the steps, as shares of the time from one forward's start to the next.
    """

    def run() -> None:
        for _ in range(steps + 1):
            step()

    return steps_of(record(run))


def steps_of(launches: list[Launch]) -> dict[str, Any]:
    """`trace_steps` of what was recorded."""
    marks = [index for index, launch in enumerate(launches) if MARK in launch.name]
    begins, ends = marks[::2], marks[1::2]
    if len(begins) < 2 or len(begins) != len(ends):
        raise ValueError(
            f"the trace has {len(marks)} marks in {len(launches)} launches; two a step are needed"
        )
    periods, idles, gaps, inside = [], [], [], []
    for (begin, following), end in zip(pairwise(begins), ends, strict=False):
        periods.append(launches[following].start - launches[begin].start)
        between = _gaps(launches[end : following + 1])
        idles.append(sum(between))
        gaps.append(max(between, default=0))
        inside.append(sum(_gaps(launches[begin : end + 1])))
    count = len(periods)
    return {
        "steps": count,
        "period_us": statistics.median(periods) / 1e3,
        "idle_us": statistics.median(idles) / 1e3,
        "idle_share": statistics.median(idle / period for idle, period in zip(idles, periods, strict=True)),
        "gap_us": statistics.median(gaps) / 1e3,
        "gap_share": statistics.median(gap / period for gap, period in zip(gaps, periods, strict=True)),
        "gaps_in_forward_us": statistics.median(inside) / 1e3,
        "kernels": kernel_table(launches[begins[0] : begins[-1]], count),
    }


def _gaps(launches: list[Launch]) -> list[int]:
    """The times in ns in which nothing runs, from the end of the first launch to the start of the last."""
    gaps = []
    busy_until = launches[0].end
    for launch in launches[1:]:
        if launch.start > busy_until:
            gaps.append(launch.start - busy_until)
        busy_until = max(busy_until, launch.end)
    return gaps


def kernel_table(launches: list[Launch], steps: int = 1) -> dict[str, Any]:
    """Launches and us a step, by family and by name, the longest first."""
    families: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for launch in launches:
        for table, key in ((families, family_of(launch.name)), (names, launch.name[:160])):
            entry = table.setdefault(key, [0.0, 0.0])
            entry[0] += 1 / steps
            entry[1] += (launch.end - launch.start) / 1e3 / steps
    total = sum(us for _, us in families.values())

    def rows(table: dict[str, list[float]], most: int) -> list[dict[str, Any]]:
        longest = sorted(table.items(), key=lambda item: -item[1][1])[:most]
        return [
            {"name": name, "launches": round(count, 1), "us": round(us, 1), "share": round(us / total, 4)}
            for name, (count, us) in longest
        ]

    return {
        "launches": round(len(launches) / steps, 1),
        "us": round(total, 1),
        "families": rows(families, 20),
        "names": rows(names, 40),
    }


def family_of(name: str) -> str:
    """The family of a kernel's name."""
    for family, pattern in FAMILIES:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "other"
