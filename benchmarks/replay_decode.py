"""What does Mamba-2's decode by replay cost beside the recurrent update, and what do the scan's stages cost?

scan        of one layer's 4,096 tokens of one row at the shapes of Nemotron-H-8B in bfloat16, stage by stage;
            sums of dt * A and products of C and B beside megatron-core's, where it is installed
decode      of one token of each row, by `selective_state_update`, which reads and writes a state, and by
            `ssd_replay`, which reads a state and the inputs since the last grid point, with half a chunk of
            them and with almost a whole one; and where every row completes its chunk, and so stores its state
GB/s        the bytes that a call must move, over its time; beside it that of a copy of as many

Decodes go through so many layers in turn that the L2 cache does not hold their states. Times are those of one
layer, medians on a GPU, in a CUDA graph.

    python benchmarks/replay_decode.py                    (one GPU)
    python benchmarks/replay_decode.py --device cpu       (does it run? in the interpreter, at a tiny size)
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.command_line import add_device, make_parser


@dataclass(frozen=True)
class Sizes:
    heads: int = 128
    head_dim: int = 64
    groups: int = 8
    state_dim: int = 128
    chunk: int = 128
    prompt: int = 4096
    rows: tuple[int, ...] = (1, 32, 128)


L2_BYTES = 2**28
"""More than any L2 cache holds."""
TINY = Sizes(heads=2, head_dim=8, groups=1, state_dim=16, chunk=16, prompt=40, rows=(1, 2))


def measured(sizes: Sizes, device: str) -> dict[str, dict[str, Any]]:
    """{call: {"us": microseconds, "bytes": what it must move, or None}}; on a CPU nothing is timed."""
    import torch
    import torch.nn.functional as F
    import triton
    from mambaslots.inference.kernels.mixer_inputs import SsdInputs
    from mambaslots.inference.kernels.ssd import selective_state_update, ssd_chunk_scan
    from mambaslots.inference.kernels.ssd_replay import ssd_replay
    from mambaslots.inference.kernels.ssd_stages import chunk_cumsum, chunk_scan, chunk_scores, ssd_states
    from mambaslots.inference.kernels.step_rows import ReplayRows, ScanRows

    gpu = device == "cuda"
    H, P, G, N, chunk = sizes.heads, sizes.head_dim, sizes.groups, sizes.state_dim, sizes.chunk
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, dict[str, Any]] = {}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def inputs(*shape: int) -> tuple[torch.Tensor, ...]:
        """x, B and C, parts of one tensor."""
        parts = normal(*shape, H * P + 2 * G * N).bfloat16().split([H * P, G * N, G * N], dim=-1)
        return tuple(
            part.unflatten(-1, size) for part, size in zip(parts, ((H, P), (G, N), (G, N)), strict=True)
        )

    def timed(name: str, call: Callable[[], object], size: int | None = None, layers: int = 1) -> None:
        call()
        us = 1e3 * triton.testing.do_bench_cudagraph(call, rep=20) / layers if gpu else None
        found[name] = {"us": us, "bytes": size}

    A, D = -torch.logspace(-2, 0.5, H, device=device), normal(H)
    x, B, C = inputs(sizes.prompt)
    dt = F.softplus(normal(sizes.prompt, H) - 3)
    chunks = -(-sizes.prompt // chunk)
    cuts = (torch.arange(chunks + 1, dtype=torch.int32, device=device) * chunk).clamp(max=sizes.prompt)
    pool = normal(2, H, P, N)
    row = ScanRows(
        torch.tensor([0], device=device), torch.tensor([1], device=device), chunk, cuts,
        torch.zeros_like(cuts[1:]), torch.tensor([0, chunks], dtype=torch.int32, device=device),
        torch.full((chunks,), -1, device=device),
    )  # fmt: skip
    steps, sums = chunk_cumsum(dt, A, chunk, cuts)
    CB = chunk_scores(C, B, chunk, cuts, torch.bfloat16)
    entering = ssd_states(x, B, steps, sums, pool, row)
    timed("scan: chunk_cumsum", lambda: chunk_cumsum(dt, A, chunk, cuts))
    timed("scan: chunk_scores", lambda: chunk_scores(C, B, chunk, cuts, torch.bfloat16))
    timed("scan: ssd_states", lambda: ssd_states(x, B, steps, sums, pool, row))
    timed("scan: chunk_scan", lambda: chunk_scan(x, steps, sums, C, CB, D, entering, cuts))
    timed("scan: all", lambda: ssd_chunk_scan(x, dt, A, B, C, D, pool, row))
    state, token = H * P * N * 4, (H * P + G * N) * 2 + 2 * H * 4
    for rows in sizes.rows:
        x, B, C = inputs(rows, 1)
        dt = F.softplus(normal(rows, 1, H) - 3)
        layers = -(-L2_BYTES // (rows * state)) if gpu else 1
        pools = [
            (
                normal(rows, H, P, N),
                normal(rows, chunk, H, P).bfloat16(),
                normal(rows, chunk, G, N).bfloat16(),
                F.softplus(normal(rows, 2, H, chunk) - 3) * torch.tensor([[[1]], [[-1]]], device=device),
            )
            for _ in range(layers)
        ]
        own = torch.arange(rows, device=device)
        lengths = torch.ones(rows, dtype=torch.int32, device=device)

        def recurrent() -> None:
            for pool, *_ in pools:  # noqa: B023
                selective_state_update(x, dt, A, B, C, D, pool, own, own[:, None])  # noqa: B023

        def replay(starts: torch.Tensor, destinations: torch.Tensor) -> None:
            at = ReplayRows(own, starts, lengths, own, destinations, chunk)  # noqa: B023
            for pool, *kept in pools:  # noqa: B023
                ssd_replay(x, dt, A, B, C, D, pool, SsdInputs(*kept), at)  # noqa: B023

        def copy() -> None:
            for pool, *_ in pools:  # noqa: B023
                copied.copy_(pool)  # noqa: B023

        timed(f"{rows} rows: selective_state_update", recurrent, rows * 2 * state, layers)
        for what, offset, stored in (
            ("half a chunk", chunk // 2, False),
            ("a whole chunk", chunk - 2, False),
            ("completes its chunk", chunk - 1, True),
        ):
            starts = torch.full_like(lengths, offset)
            destinations = own if stored else torch.full_like(own, -1)
            timed(
                f"{rows} rows: ssd_replay, {what}",
                partial(replay, starts, destinations),
                rows * ((1 + stored) * state + offset * token),
                layers,
            )
        copied = torch.empty_like(pools[0][0])
        timed(f"{rows} rows: copy of the states", copy, rows * 2 * state, layers)
    return found


def main() -> int:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU (or --device cpu)")
        return 0
    found = measured(Sizes() if arguments.device == "cuda" else TINY, arguments.device)
    print(torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu")
    print(f"{'':48}{'us':>10}{'MB':>10}{'GB/s':>10}")
    for name, figures in found.items():
        us, size = figures["us"], figures["bytes"]
        shown = f"{'-' if us is None else format(us, '.1f'):>10}"
        shown += f"{'' if size is None else format(size / 1e6, '.1f'):>10}"
        shown += f"{'' if us is None or size is None else format(size / us / 1e3, '.0f'):>10}"
        print(f"{name:48}{shown}")
    for rows in Sizes.rows if arguments.device == "cuda" else ():
        recurrent = found[f"{rows} rows: selective_state_update"]["us"]
        replay = found[f"{rows} rows: ssd_replay, half a chunk"]["us"]
        print(
            f"decode of {rows}: a replay of half a chunk takes {replay / recurrent:.2f} of a recurrent update"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
