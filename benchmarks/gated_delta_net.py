"""What does a gated delta net's mixer cost by slots, against fla's own functions on dense states?

One layer in bfloat16 at the shapes of Qwen3.5-4B: 16 key heads, 32 value heads, Dk = Dv = 128, a convolution
of 8,192 channels and 4 taps. The projections before and behind it are the same on both sides, and left out.

ours   convolution, gated delta rule and gated norm, from slots to slots of pools; "stored" also stores a
       state every 256 tokens
fla    fla's convolution, `chunk_gated_delta_rule` or `fused_recurrent_gated_delta_rule`, and gated norm, with
       dense states in and out. The norm is fla's on both sides

Rows: prefills of 4,096 tokens in all, from states; decodes of 1, 8 and 64 rows. Times are medians in
microseconds: of calls by events, and of launches of a CUDA graph, without the host's part. The first prefill
must cost at most 1.3 times fla's by both.

    python benchmarks/gated_delta_net.py --json out.json --markdown out.md        (one GPU)
"""

import datetime
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from support.command_line import make_parser, new_file, parse_on_gpu
from support.graph_timing import graph_us

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
SPLIT = [KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM]
CHUNK, STORED_EVERY = 64, 256
PREFILLS = ((1, 4096), (8, 512))
DECODES = (1, 8, 64)
MOST = 1.3
LARGEST_DIFFERENCE = 2e-2


@dataclass
class Figures:
    """One row of the table: microseconds by events and by graph, ours and fla's."""

    name: str
    ours: float
    fla: float
    ours_graph: float
    fla_graph: float
    difference: float
    """|| ours - fla || / || fla || of the layer's output."""
    stored: float | None = None
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.fla

    @property
    def graph_ratio(self) -> float:
        return self.ours_graph / self.fla_graph


class Bench:
    """The layer's parameters, and inputs that both sides read."""

    def __init__(self) -> None:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fla.modules import FusedRMSNormGated
        self.torch = torch
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.weight = self.normal(CHANNELS, TAPS) / 2
        self.norm = FusedRMSNormGated(DIM, eps=1e-6, device=self.device, dtype=torch.bfloat16)

    def our_norm(self, o: Any, z: Any) -> Any:
        """What `norm` computes, by our kernel: [tokens, heads, DIM]."""
        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        return GpuKernelSet.rms_norm_then_gate(o, z, self.norm.weight, self.norm.eps)

    def normal(self, *shape: int, dtype: Any = None) -> Any:
        dtype = dtype or self.torch.bfloat16
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.float32).to(dtype)

    def index(self, values: list[int], dtype: Any = None) -> Any:
        return self.torch.tensor(values, dtype=dtype or self.torch.int64, device=self.device)

    def inputs(self, rows: int, tokens: int) -> dict[str, Any]:
        """What the projections give, [rows, tokens, ...]; log decays as of A from 1 to 16 and small steps."""
        F = self.torch.nn.functional
        gates = self.normal(2, rows, tokens, VALUE_HEADS, dtype=self.torch.float32)
        decay = self.torch.linspace(0.05, 4, VALUE_HEADS, device=self.device)
        return {
            "mixed": self.normal(rows, tokens, CHANNELS),
            "z": self.normal(rows, tokens, VALUE_HEADS, DIM),
            "g": -decay * F.softplus(gates[0] - 3),
            "beta": gates[1].sigmoid().to(self.torch.bfloat16),
            "windows": self.normal(rows, CHANNELS, TAPS),
            "states": self.normal(rows, VALUE_HEADS, DIM, DIM, dtype=self.torch.float32) / 8,
        }

    def pools(self, inputs: dict[str, Any], slots: int) -> tuple[Any, Any]:
        """Pools whose first slots hold the rows' states; fla's window has one more place, the oldest."""
        windows = self.torch.zeros(slots, CHANNELS, TAPS - 1, device=self.device, dtype=self.torch.bfloat16)
        states = self.torch.zeros(slots, VALUE_HEADS, DIM, DIM, device=self.device)
        windows[: len(inputs["windows"])] = inputs["windows"][..., 1:]
        states[: len(inputs["states"])] = inputs["states"]
        return windows, states

    def parts(self, convolved: Any) -> list[Any]:
        """q, k and v [..., heads, DIM], views of the convolution's output."""
        return [part.unflatten(-1, (-1, DIM)) for part in convolved.split(SPLIT, dim=-1)]

    def time_us(self, call: Callable[[], Any]) -> float:
        import triton

        found: float = triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")
        return 1e3 * found


def compared(
    bench: Bench, name: str, ours: Callable[[], Any], theirs: Callable[[], Any], stored: Any = None
) -> Figures:
    expected = theirs().float().flatten()
    difference = float((ours().float().flatten() - expected).norm() / expected.norm())
    return Figures(
        name, bench.time_us(ours), bench.time_us(theirs), graph_us(ours), graph_us(theirs),
        difference, None if stored is None else graph_us(stored),
    )  # fmt: skip


def prefill(bench: Bench, rows: int, tokens: int) -> Figures:
    """`rows` sequences of `tokens` tokens each, from states that are carried."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
    from mambaslots.inference.kernels.step_rows import ConvRows, ScanRows

    kernels = GpuKernelSet()

    torch = bench.torch
    made = bench.inputs(rows, tokens)
    chunks_a_row = tokens // CHUNK
    every = STORED_EVERY // CHUNK
    inner = [c + 1 for c in range(rows * chunks_a_row) if (c + 1) % every == 0 and (c + 1) % chunks_a_row]
    windows, states = bench.pools(made, 2 * rows + len(inner))
    total = rows * tokens
    stored = bench.index([-1] * (rows * chunks_a_row))
    for place, end in enumerate(inner):
        stored[end - 1] = 2 * rows + place
    ends = [end * CHUNK for end in inner]
    slots = list(range(2 * rows, 2 * rows + len(inner)))
    checkpoints = {
        "checkpoint_rows": bench.index([end // tokens for end in ends]),
        "checkpoint_ends": bench.index(ends),
        "checkpoint_destinations": bench.index(slots),
    }
    nothing = {name: bench.index([]) for name in checkpoints}
    sources, destinations = bench.index(list(range(rows))), bench.index(list(range(rows, 2 * rows)))
    starts = bench.index([row * tokens for row in range(rows + 1)])
    token_rows = torch.arange(total, device=bench.device) // tokens
    cuts = torch.arange(0, total + 1, CHUNK, device=bench.device, dtype=torch.int32)
    seq_idx = (torch.arange(rows * chunks_a_row, device=bench.device) // chunks_a_row).int()
    row_chunks = torch.arange(rows + 1, device=bench.device, dtype=torch.int32) * chunks_a_row
    none_stored = torch.full_like(stored, -1)
    mixed, z = made["mixed"].flatten(0, 1), made["z"].flatten(0, 1)
    g, beta = made["g"].flatten(0, 1), made["beta"].flatten(0, 1)

    def convolve(at: dict[str, Any]) -> Any:
        rows = ConvRows(sources, destinations, starts, token_rows, **at)
        return kernels.causal_conv1d_prefill(mixed, bench.weight, None, windows, rows)

    def layer(at: dict[str, Any], chunk_destinations: Any) -> Any:
        rows = ScanRows(sources, destinations, CHUNK, cuts, seq_idx, row_chunks, chunk_destinations)
        o = kernels.gated_delta_rule_scan(*bench.parts(convolve(at)), g, beta, states, rows)
        return bench.our_norm(o, z)

    @torch.no_grad()
    def ours() -> Any:
        return layer(nothing, none_stored)

    @torch.no_grad()
    def ours_stored() -> Any:
        return layer(checkpoints, stored)

    @torch.no_grad()
    def theirs() -> Any:
        convolved, _ = causal_conv1d(
            made["mixed"], bench.weight, initial_state=made["windows"], output_final_state=True,
            activation="silu",
        )  # fmt: skip
        q, k, v = bench.parts(convolved)
        o, _ = chunk_gated_delta_rule(
            q, k, v, g=made["g"], beta=made["beta"], initial_state=made["states"], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return bench.norm(o, made["z"])

    figures = compared(bench, f"prefill {rows} x {tokens}", ours, theirs, ours_stored)
    if rows == 1:
        figures.stages = stages(bench, convolve, nothing, made, states, cuts, row_chunks, none_stored)
    return figures


def stages(
    bench: Bench, convolve: Any, nothing: Any, made: Any, states: Any, cuts: Any, row_chunks: Any, stored: Any
) -> dict[str, float]:
    """Microseconds of each stage of one row's prefill by graph, and of fla's stage between chunks."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from mambaslots.inference.kernels import delta as module
    from mambaslots.inference.kernels.delta import delta_operands, delta_state_passing
    from mambaslots.inference.kernels.step_rows import ScanRows

    torch, fla = bench.torch, module.stages()
    parts = bench.parts(convolve(nothing))
    chunks = len(cuts) - 1
    pairs = torch.arange(chunks, device=bench.device).view(torch.int32).view(chunks, 2)
    at = {"cu_seqlens": cuts, "chunk_indices": pairs}
    q, k, v = (x[None] for x in delta_operands(*parts))
    g, beta = made["g"], made["beta"]
    sums = fla.chunk_local_cumsum(g, chunk_size=CHUNK, scale=1.4426950408889634, **at)
    w, u, _ = fla.chunk_gated_delta_rule_fwd_intra(k, v, sums, beta, chunk_size=CHUNK, **at)
    rows = ScanRows(
        bench.index([0]), bench.index([1]), CHUNK, cuts, torch.zeros_like(cuts[1:]), row_chunks, stored
    )
    passing = partial(delta_state_passing, k[0], w[0], u[0], sums[0], states, rows)
    entering, new_values = passing()
    calls: dict[str, Callable[[], Any]] = {
        "convolution": partial(convolve, nothing),
        "operands": partial(delta_operands, *parts),
        "sums of decays": partial(
            fla.chunk_local_cumsum, g, chunk_size=CHUNK, scale=1.4426950408889634, **at
        ),
        "WY form": partial(fla.chunk_gated_delta_rule_fwd_intra, k, v, sums, beta, chunk_size=CHUNK, **at),
        "between chunks": passing,
        "outputs": partial(
            fla.chunk_fwd_o, q, k, new_values[None], entering[None], sums, scale=DIM**-0.5,
            chunk_size=CHUNK, **at,
        ),
        "norm": partial(bench.our_norm, new_values, made["z"][0]),
        "fla's norm": partial(bench.norm, new_values, made["z"][0]),
        "fla's between chunks": partial(
            chunk_gated_delta_rule_fwd_h, k, w, u, sums, initial_state=made["states"],
            output_final_state=True, chunk_size=CHUNK,
        ),
        "fla's norm of q": partial(l2norm_fwd, parts[0][None].contiguous()),
    }  # fmt: skip
    with torch.no_grad():
        return {name: graph_us(call) for name, call in calls.items()}


def decode(bench: Bench, rows: int) -> Figures:
    """One token of `rows` sequences; ours in place."""
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    kernels = GpuKernelSet()

    torch = bench.torch
    made = bench.inputs(rows, 1)
    windows, states = bench.pools(made, 2 * rows)
    sources = bench.index(list(range(rows)))
    elsewhere = bench.index(list(range(rows, 2 * rows)))[:, None]
    cache = made["windows"].clone()

    @torch.no_grad()
    def ours() -> Any:
        convolved = kernels.causal_conv1d_update(
            made["mixed"], bench.weight, None, windows, sources, elsewhere
        )
        o = kernels.gated_delta_rule_update(
            *bench.parts(convolved), made["g"], made["beta"], states, sources, elsewhere
        )
        return bench.our_norm(o[:, 0], made["z"][:, 0])

    @torch.no_grad()
    def theirs() -> Any:
        convolved = causal_conv1d_update(made["mixed"], cache, weight=bench.weight, activation="silu")
        if isinstance(convolved, tuple):
            convolved = convolved[0]
        q, k, v = bench.parts(convolved)
        o, _ = fused_recurrent_gated_delta_rule(
            q, k, v, g=made["g"], beta=made["beta"], initial_state=made["states"], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return bench.norm(o, made["z"])

    figures = compared(bench, f"decode {rows}", ours, theirs)
    # fla moves its window on with every call: only a first call reads what ours reads.
    cache.copy_(made["windows"])
    expected = theirs().float().flatten()
    figures.difference = float((ours().float().flatten() - expected).norm() / expected.norm())
    return figures


def table(rows: list[Figures]) -> list[str]:
    lines = [
        "| | ours us | fla us | ratio | ours in a graph | fla in a graph | ratio | stored | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stored = "-" if row.stored is None else f"{row.stored:.1f}"
        lines.append(
            f"| {row.name} | {row.ours:.1f} | {row.fla:.1f} | {row.ratio:.2f} | {row.ours_graph:.1f} "
            f"| {row.fla_graph:.1f} | {row.graph_ratio:.2f} | {stored} | {row.difference:.1e} |"
        )
    for row in rows:
        if row.stages:
            lines += ["", f"| stage of {row.name}, in a graph | us |", "|---|---|"]
            lines += [f"| {name} | {time:.1f} |" for name, time in row.stages.items()]
    return lines


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--markdown", type=new_file, metavar="PATH", help="write the tables to this file")
    arguments = parse_on_gpu(parser)
    import torch
    import triton

    bench = Bench()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{machine}; the first calls compile and tune, for minutes", flush=True)
    rows: list[Figures] = []
    # What is required comes first. Every row is written at once: tuning may outlast a machine's time.
    cases = [partial(prefill, bench, *PREFILLS[0]), *(partial(decode, bench, count) for count in DECODES)]
    cases += [partial(prefill, bench, *shape) for shape in PREFILLS[1:]]
    for case in cases:
        rows.append(case())
        print(table(rows[-1:])[2], flush=True)
        lines = [machine, "", *table(rows), "", verdict(rows)]
        if arguments.json is not None:
            document = {
                "benchmark": "gated_delta_net",
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": machine,
                "rows": [asdict(row) | {"ratio": row.ratio, "graph_ratio": row.graph_ratio} for row in rows],
            }
            arguments.json.write_text(json.dumps(document, indent=2) + "\n")
        if arguments.markdown is not None:
            arguments.markdown.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return lines[-1].startswith("NOT MET")


def verdict(rows: list[Figures]) -> str:
    first = rows[0]
    faults = [
        f"{first.name} by {what}: {ratio:.2f} times fla's, at most {MOST}"
        for what, ratio in (("calls", first.ratio), ("a graph", first.graph_ratio))
        if not ratio <= MOST
    ]
    faults += [
        f"{row.name}: differs by {row.difference:.1e}"
        for row in rows
        if not row.difference <= LARGEST_DIFFERENCE
    ]
    return "NOT MET " + "; ".join(faults) if faults else f"met: at most {MOST} times fla's time"


if __name__ == "__main__":
    sys.exit(main())
