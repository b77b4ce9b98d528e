"""What does a precision cost the SSD scan of one Mamba layer, and how far is it from float64?

x, B and C are multiplied as they are: "bfloat16", "float16", "float32"; `ssd_chunk_scan` itself widens
float16. "bfloat16 widened" has inputs of bfloat16, whose operands are widened to float32. Each precision has
a process of its own, as what is compiled stays.

time        of one layer's scan of a row of 4,096 tokens that resumes from a state and stores one, at the
            shapes of Nemotron-H-8B, and of its stages; medians on a GPU. "2 more" also stores two states
            inside
error       of outputs and of states, || found - exact || / || exact ||: 600 tokens with heads and states of
            Nemotron-H-8B's sizes, against the recurrence token by token in float64, from the same inputs

    python benchmarks/ssd_precision.py --json out.json        (one GPU)
    python benchmarks/ssd_precision.py --device cpu           (does it run?)
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from support.command_line import add_device, make_parser

PRECISIONS = ("bfloat16", "float16", "float32", "bfloat16 widened")
MOST = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5, "bfloat16 widened": 2**-7}
"""Largest error that is accepted, two units of rounding for 16 bits."""


def measured(precision: str, device: str) -> dict[str, Any]:
    """The figures of one precision, in this process, which must have compiled nothing."""
    import torch
    import torch.nn.functional as F
    import triton
    from mambaslots.inference.kernels import ssd as module
    from mambaslots.inference.kernels.ssd_stages import chunk_cumsum, chunk_scan, chunk_scores, ssd_states
    from mambaslots.inference.kernels.step_rows import ScanRows

    gpu = device == "cuda"
    widened = precision == "bfloat16 widened"
    inputs = getattr(torch, "bfloat16" if widened else precision, torch.float32)
    operands = torch.float32 if widened else inputs
    module.operand_dtype = lambda dtype: operands
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def case(
        tokens: int, heads: int, head_dim: int, groups: int, state_dim: int, chunk: int
    ) -> dict[str, Any]:
        sizes = [heads * head_dim, groups * state_dim, groups * state_dim]
        x, B, C = normal(tokens, sum(sizes)).to(inputs).split(sizes, 1)
        chunks = -(-tokens // chunk)
        ends = torch.arange(chunks + 1, dtype=torch.int32, device=device) * chunk
        return {
            "x": x.unflatten(1, (heads, head_dim)),
            "dt": F.softplus(normal(tokens, heads) - 3),
            "A": -torch.logspace(-2, 0.5, heads, device=device),
            "B": B.unflatten(1, (groups, state_dim)),
            "C": C.unflatten(1, (groups, state_dim)),
            "D": normal(heads),
            "ssm_states": normal(5, heads, head_dim, state_dim),
            "rows": ScanRows(
                sources=torch.tensor([0], device=device),
                destinations=torch.tensor([1], device=device),
                chunk_size=chunk,
                cu_chunk_seqlens=ends.clamp(max=tokens),
                seq_idx=torch.zeros(chunks, dtype=torch.int32, device=device),
                row_chunk_starts=torch.tensor([0, chunks], dtype=torch.int32, device=device),
                chunk_destinations=torch.full((chunks,), -1, device=device),
            ),
        }

    def scan(of: dict[str, Any]) -> torch.Tensor:
        return module.ssd_chunk_scan(**of)

    def error(found: torch.Tensor, exact: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    def time_us(call: Callable[[], object]) -> float | None:
        if not gpu:
            call()
            return None
        found: float = triton.testing.do_bench(call, warmup=50, rep=300, return_mode="median")
        return 1e3 * found

    small = case(600, 8, 64, 2, 128, 128) if gpu else case(40, 2, 8, 1, 16, 16)
    large = case(4096, 128, 64, 8, 128, 128) if gpu else small
    of = large
    scan(large)  # the first call tunes, and its sizes count
    small["ssm_states"].normal_(generator=generator)
    inside = small["rows"].chunk_size * 2
    small["rows"].chunk_destinations[1] = 2
    state = small["ssm_states"][0].double()
    a, d = small["A"].double(), small["D"].double()
    group = torch.arange(len(d), device=device) // (len(d) // small["B"].shape[1])
    exact, states = [], {}
    for token in range(small["x"].shape[0]):
        x, dt, B, C = (small[name][token].double() for name in ("x", "dt", "B", "C"))
        state = (dt * a).exp()[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[group][:, None]
        exact.append((state * C[group][:, None]).sum(-1) + d[:, None] * x)
        states[token + 1] = state
    y = scan(small)
    pool = small["ssm_states"]
    errors = {
        "outputs": error(y, torch.stack(exact)),
        "states": max(error(pool[2], states[inside]), error(pool[1], states[len(exact)])),
    }

    rows: ScanRows = of["rows"]
    stored = rows.chunk_destinations.clone()
    stored[:2] = torch.tensor([2, 3])
    two = dict(large, rows=rows._replace(chunk_destinations=stored))
    ends, chunk = rows.cu_chunk_seqlens, rows.chunk_size
    x, B, C = (of[name] for name in "xBC")
    pool_of_all = of["ssm_states"]
    dt, log_decays = chunk_cumsum(of["dt"], of["A"], chunk, ends)
    CB = chunk_scores(C, B, chunk, ends, operands)
    entering = ssd_states(x, B, dt, log_decays, pool_of_all, rows, operands)
    calls: dict[str, Callable[[], object]] = {
        "sums of dt A": lambda: chunk_cumsum(of["dt"], of["A"], chunk, ends),
        "C B": lambda: chunk_scores(C, B, chunk, ends, operands),
        "states": lambda: ssd_states(x, B, dt, log_decays, pool_of_all, rows, operands),
        "chunk_scan": lambda: chunk_scan(
            of["x"], dt, log_decays, of["C"], CB, of["D"], entering, ends
        ),
        "all": lambda: scan(large),
        "all, 2 more": lambda: scan(two),
    }  # fmt: skip
    return {
        "precision": precision,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "errors": errors,
        "us": {name: time_us(call) for name, call in calls.items()},
    }


def in_a_process(precision: str, device: str) -> dict[str, Any]:
    environment = dict(os.environ)
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1"}
    command = [sys.executable, __file__, "--device", device, "--only", precision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    parser.add_argument("--only", choices=PRECISIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measured(arguments.only, arguments.device)))
        return 0
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("nothing measured: this needs a GPU (or --device cpu)")
            return 0
    rows = [in_a_process(precision, arguments.device) for precision in PRECISIONS]
    print(f"{rows[0]['device']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}\n")
    print(f"{'':20}" + "".join(f"{row['precision']:>17}" for row in rows))
    names = dict.fromkeys((*rows[-1]["us"], *rows[0]["us"]))
    for name in names:
        times = [row["us"].get(name) for row in rows]
        print(f"{name + ', us':20}" + "".join(f"{'-':>17}" if t is None else f"{t:17.1f}" for t in times))
    for name in rows[0]["errors"]:
        print(f"{'error of ' + name:20}" + "".join(f"{row['errors'][name]:17.1e}" for row in rows))
    faulty = []
    for row in rows:
        most, worst = MOST[row["precision"]], max(row["errors"].values())
        if not worst <= most:
            faulty.append(f"{row['precision']}: {worst:.1e}, at most {most:.0e}")
    print("\nNOT MET " + "; ".join(faulty) if faulty else "\nmet     all within their precision of float64")
    if arguments.json is not None:
        document = {
            "benchmark": "ssd_precision",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
