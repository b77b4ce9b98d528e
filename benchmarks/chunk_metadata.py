"""How long does the chunk metadata of one step take, and how long a Python loop over the same chunks?

The three arrays cu_chunk_seqlens, seq_idx and last_chunk_indices of the absolute grid, by
  closed form       `vllm.build_chunk_metadata`: int32 tensors in, int32 tensors out
  loop              a Python loop over chunks, plain lists in and out: each chunk's end by arithmetic
  tight loop        the same, the cuts of a row from one `range`, appends bound to locals
  tight + tensors   the tight loop, its lists then made int32 tensors the fastest way we know
  .item() + tensors the tight loop over tensors, read element by element
  row by row        lists again, one `range` and one list repetition a row, nothing executed per chunk
Medians in one process, the contenders in turn, one torch thread. The arrays are compared before
anything is timed. The loops over lists get lists that were made outside the clock.
"""

import datetime
import json
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from mambaslots.vllm import build_chunk_metadata
from support.command_line import add_count, make_parser
from torch import Tensor

Lists = tuple[list[int], list[int], list[int]]
Tensors = tuple[Tensor, Tensor, Tensor]

OURS = "closed form"
LOOPS = ("loop", "tight loop", "tight + tensors", ".item() + tensors", "row by row")


def loop(computed: list[int], starts: list[int], chunk_size: int) -> Lists:
    cu: list[int] = []
    seq_idx: list[int] = []
    last: list[int] = []
    for row, before in enumerate(computed):
        start, stop = starts[row], starts[row + 1]
        position = before
        while start < stop:
            cu.append(start)
            seq_idx.append(row)
            tokens = min(chunk_size - position % chunk_size, stop - start)
            start += tokens
            position += tokens
        last.append(len(cu) - 1 if starts[row] < stop else -1)
    cu.append(starts[-1])
    return cu, seq_idx, last


def tight_loop(computed: list[int], starts: list[int], chunk_size: int) -> Lists:
    cu: list[int] = []
    seq_idx: list[int] = []
    last: list[int] = []
    add_start, add_row = cu.append, seq_idx.append
    for row, (before, (start, stop)) in enumerate(zip(computed, pairwise(starts), strict=True)):
        if start == stop:
            last.append(-1)
            continue
        add_start(start)
        add_row(row)
        for cut in range(start + chunk_size - before % chunk_size, stop, chunk_size):
            add_start(cut)
            add_row(row)
        last.append(len(cu) - 1)
    cu.append(starts[-1])
    return cu, seq_idx, last


def item_loop(computed: Tensor, starts: Tensor, chunk_size: int) -> Lists:
    cu: list[int] = []
    seq_idx: list[int] = []
    last: list[int] = []
    add_start, add_row = cu.append, seq_idx.append
    for row in range(computed.numel()):
        before, start, stop = int(computed[row].item()), int(starts[row].item()), int(starts[row + 1].item())
        if start == stop:
            last.append(-1)
            continue
        add_start(start)
        add_row(row)
        for cut in range(start + chunk_size - before % chunk_size, stop, chunk_size):
            add_start(cut)
            add_row(row)
        last.append(len(cu) - 1)
    cu.append(int(starts[-1].item()))
    return cu, seq_idx, last


def row_by_row(computed: list[int], starts: list[int], chunk_size: int) -> Lists:
    cu: list[int] = []
    seq_idx: list[int] = []
    last: list[int] = []
    for row, (before, (start, stop)) in enumerate(zip(computed, pairwise(starts), strict=True)):
        if start == stop:
            last.append(-1)
            continue
        cu.append(start)
        cu += range(start + chunk_size - before % chunk_size, stop, chunk_size)
        seq_idx += [row] * (len(cu) - len(seq_idx))
        last.append(len(cu) - 1)
    cu.append(starts[-1])
    return cu, seq_idx, last


def tensors(lists: Lists) -> Tensors:
    """int32 tensors; through `array`, four times as fast as `torch.tensor(list)`."""
    cu, seq_idx, last = (torch.frombuffer(array("i", values), dtype=torch.int32) for values in lists)
    return cu, seq_idx, last


def shapes() -> list[tuple[str, int, list[int], list[int]]]:
    """(name, chunk size, computed tokens, new tokens), the one that has a requirement first."""
    draw = random.Random(0)
    anywhere = [draw.randint(0, 8192) for _ in range(256)]
    ragged = [draw.randint(1, 3071) for _ in range(256)]
    return [
        ("256 prefills of 1,536, C=128", 128, [0] * 256, [1536] * 256),
        ("  resumed on the C grid", 128, [128 * (c // 128) for c in anywhere], [1536] * 256),
        ("  resumed anywhere", 128, anywhere, [1536] * 256),
        ("  1 to 3,071, resumed anywhere", 128, anywhere, ragged),
        ("  every fourth without tokens", 128, [0] * 256, [1536 * (i % 4 > 0) for i in range(256)]),
        ("256 prefills of 1,536, C=256", 256, [0] * 256, [1536] * 256),
        ("32 prefills of 512, C=16", 16, [0] * 32, [512] * 32),
        ("1 prefill of 8,192, C=128", 128, [0], [8192]),
        ("8 prefills of 40, C=128", 128, [0] * 8, [40] * 8),
    ]


def measure(chunk_size: int, computed: list[int], lengths: list[int], repeats: int) -> dict[str, float]:
    """Median microseconds by contender; exits when their arrays differ."""
    starts = list(accumulate(lengths, initial=0))
    computed_tensor = torch.tensor(computed, dtype=torch.int32)
    starts_tensor = torch.tensor(starts, dtype=torch.int32)
    contenders: dict[str, Callable[[], Lists | Tensors]] = {
        OURS: lambda: build_chunk_metadata(computed_tensor, starts_tensor, chunk_size),
        "loop": lambda: loop(computed, starts, chunk_size),
        "tight loop": lambda: tight_loop(computed, starts, chunk_size),
        "tight + tensors": lambda: tensors(tight_loop(computed, starts, chunk_size)),
        ".item() + tensors": lambda: tensors(item_loop(computed_tensor, starts_tensor, chunk_size)),
        "row by row": lambda: row_by_row(computed, starts, chunk_size),
    }

    expected = loop(computed, starts, chunk_size)
    for name, call in contenders.items():
        got = tuple(values.tolist() if isinstance(values, Tensor) else values for values in call())
        if got != expected:
            raise SystemExit(f"{name} gives other arrays than the loop; nothing was timed")

    times: dict[str, list[int]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            call()  # the contender before has had the caches
            begin = time.perf_counter_ns()
            call()
            times[name].append(time.perf_counter_ns() - begin)
    return {name: statistics.median(values) / 1000 for name, values in times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    add_count(parser, "--repeats", 301, "timed calls of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    print(f"median us of {arguments.repeats}; in brackets, times the closed form\n")
    print(f"{'':32}{'chunks':>7}{OURS:>13}" + "".join(f"{name:>19}" for name in LOOPS))
    rows = []
    for name, chunk_size, computed, lengths in shapes():
        medians = measure(chunk_size, computed, lengths, arguments.repeats)
        chunks = len(loop(computed, list(accumulate(lengths, initial=0)), chunk_size)[1])
        ratios = {other: medians[other] / medians[OURS] for other in LOOPS}
        cells = "".join(f"{medians[other]:11.1f} {f'({ratios[other]:.1f})':>7}" for other in LOOPS)
        print(f"{name:32}{chunks:7,}{medians[OURS]:13.1f}{cells}")
        rows.append(
            {
                "shape": name.strip(),
                "chunk_size": chunk_size,
                "chunks": chunks,
                "median_us": medians,
                "times_closed_form": ratios,
            }
        )
        if len(rows) == 1:
            headline = (
                f"{name}: {ratios['loop']:.1f}x faster than a per-chunk loop over plain lists; {LOOPS[1]} "
                f"{ratios['tight loop']:.1f}x, with its tensors made {ratios['tight + tensors']:.1f}x"
            )
    print(f"\n{headline}")

    if arguments.json is not None:
        report = {
            "benchmark": "chunk_metadata",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"platform": platform.platform(), "processor": processor(), "torch_threads": 1},
            "versions": {
                "python": sys.version.split()[0],
                "numpy": np.__version__,
                "torch": torch.__version__,
            },
            "repeats": arguments.repeats,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def processor() -> str:
    """The CPU's name, where the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
