"""What does a precision cost the SSD scan of one Mamba layer, and how far is it from float64?

`ssd_chunk_scan` multiplies float32 in one of three ways: "ieee" as it is, "tf32x3" in three products of
tensor cores, "tf32" in one. All products are set at once: those of megatron-core's stages by
TRITON_F32_DEFAULT, that of the scan by its argument; each precision in a process of its own, as what is
compiled stays.

time        of one layer's scan of a row of 4,096 tokens that resumes from a state and stores one, at the
            shapes of Nemotron-H-8B, and of its five stages; medians on a GPU. "2 more" also stores two
            states inside
error       of outputs and of states, || found - exact || / || exact ||: 600 tokens with heads and states of
            Nemotron-H-8B's sizes, against the recurrence token by token in float64

    python benchmarks/ssd_precision.py --json out.json        (one GPU)
    python benchmarks/ssd_precision.py --device cpu           (does it run? the interpreter has one precision)
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from command_line import add_device, make_parser

PRECISIONS = ("ieee", "tf32x3", "tf32")
MOST = {"ieee": 1e-5, "tf32x3": 1e-5, "tf32": None}
"""Largest error that is accepted; TF32 is shown beside them, and not used."""


def measured(precision: str, device: str) -> dict[str, Any]:
    """The figures of one precision, in this process, which must have compiled nothing."""
    import torch
    import torch.nn.functional as F
    import triton
    from mambaslots.inference.kernels import ssd_scan as module
    from mambaslots.inference.kernels.ssd_output import chunk_scan
    from mambaslots.inference.kernels.state_passing import state_passing

    gpu = device == "cuda"
    if not gpu:
        from contextlib import nullcontext

        torch.cuda.device = lambda index: nullcontext()  # type: ignore[assignment,misc]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def case(
        tokens: int, heads: int, head_dim: int, groups: int, state_dim: int, chunk: int
    ) -> dict[str, Any]:
        sizes = [heads * head_dim, groups * state_dim, groups * state_dim]
        x, B, C = normal(tokens, sum(sizes)).split(sizes, 1)
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
            "sources": torch.tensor([0], device=device),
            "destinations": torch.tensor([1], device=device),
            "chunk_size": chunk,
            "cu_chunk_seqlens": ends.clamp(max=tokens),
            "seq_idx": torch.zeros(chunks, dtype=torch.int32, device=device),
            "row_chunk_starts": torch.tensor([0, chunks], dtype=torch.int32, device=device),
            "chunk_destinations": torch.full((chunks,), -1, device=device),
        }

    def scan(of: dict[str, Any]) -> torch.Tensor:
        return module.ssd_chunk_scan(**of, input_precision=precision)

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
    inside = small["chunk_size"] * 2
    small["chunk_destinations"][1] = 2
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

    two = dict(large, chunk_destinations=large["chunk_destinations"].clone())
    two["chunk_destinations"][0], two["chunk_destinations"][1] = 2, 3
    log_decays, dt = module.stages().chunk_cumsum_fwd(
        of["dt"], of["A"], of["chunk_size"], of["cu_chunk_seqlens"]
    )
    updates = module.stages().chunk_state_fwd(
        of["B"], of["x"], dt, log_decays, of["cu_chunk_seqlens"], states_in_fp32=True
    )
    CB = module.stages().bmm_chunk_fwd(
        of["C"], of["B"], of["chunk_size"], of["cu_chunk_seqlens"], output_dtype=torch.float32
    )
    ends = of["cu_chunk_seqlens"]
    calls: dict[str, Callable[[], object]] = {
        "sums of dt A": lambda: module.stages().chunk_cumsum_fwd(of["dt"], of["A"], of["chunk_size"], ends),
        "chunk states": lambda: module.stages().chunk_state_fwd(
            of["B"], of["x"], dt, log_decays, ends, states_in_fp32=True
        ),
        "C B": lambda: module.stages().bmm_chunk_fwd(
            of["C"], of["B"], of["chunk_size"], ends, output_dtype=torch.float32
        ),
        "state_passing": lambda: state_passing(
            updates, log_decays, of["ssm_states"], of["sources"], of["destinations"], of["row_chunk_starts"],
            of["chunk_destinations"],
        ),
        "chunk_scan": lambda: chunk_scan(
            of["x"], dt, log_decays, of["C"], CB, of["D"], updates, ends, precision  # type: ignore[arg-type]
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
    environment = os.environ | {"TRITON_F32_DEFAULT": precision}
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
    print(f"{'':28}" + "".join(f"{row['precision']:>12}" for row in rows))
    for name in rows[0]["us"]:
        times = [row["us"][name] for row in rows]
        print(f"{name + ', us':28}" + "".join("           -" if t is None else f"{t:12.1f}" for t in times))
    for name in rows[0]["errors"]:
        print(f"{'error of ' + name:28}" + "".join(f"{row['errors'][name]:12.1e}" for row in rows))
    faulty = []
    for row in rows:
        most, worst = MOST[row["precision"]], max(row["errors"].values())
        if most is not None and not worst <= most:
            faulty.append(f"{row['precision']}: {worst:.1e}, at most {most:.0e}")
    print("\nNOT MET " + "; ".join(faulty) if faulty else "\nmet     ieee and tf32x3 within 1e-5 of float64")
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
