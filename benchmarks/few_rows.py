"""What do products of one row cost: padded to 32 for cuBLASLt, by cuBLAS as it likes, and by `few_rows`?

bfloat16, the weights of Qwen3.5-4B and Nemotron-H-8B, enough copies of each that no cache holds them. "32
rows" is cuBLASLt without split-K, which has the same bits at every number of rows; "1 row" is cuBLAS with
torch's own switches; "8 rows" is the kernel that decodes of up to 8 rows take with batch invariance. "limit"
reads the weights once at 4.2 TB/s. "equal" says whether the kernel's bits are those of cuBLASLt. Times are
medians of launches of a CUDA graph, in microseconds a product.

    python benchmarks/few_rows.py --json out.json        (one GPU)
"""

import json
import sys
from itertools import cycle

import torch
from mambaslots.inference.engines.invariance.switches import SWITCHES, read_switch, write_switches
from support.command_line import make_parser, parse_on_gpu
from support.graph_timing import graph_us

SHAPES = {
    "Qwen3.5-4B": ((2560, 9216), (18432, 2560), (8192, 2560), (2560, 4096), (1024, 2560), (248320, 2560)),
    "Nemotron-H-8B": (
        (4096, 21504),
        (21504, 4096),
        (18560, 4096),
        (4096, 8192),
        (6144, 4096),
        (131072, 4096),
    ),
}
"""Outputs and inputs of a product."""
BYTES_PER_US = 4.2e6
COPIES_BYTES = 3e8
CALLS = 12


def measure(outputs: int, size: int) -> dict[str, float | bool]:
    """Column -> microseconds."""
    from mambaslots.inference.kernels.few_rows import product

    num_copies = max(2, min(CALLS, int(COPIES_BYTES / (outputs * size * 2))))
    device = torch.device("cuda")
    weights = [
        torch.randn(outputs, size, device=device, dtype=torch.bfloat16) * size**-0.5
        for _ in range(num_copies)
    ]
    rows = torch.randn(256, size, device=device, dtype=torch.bfloat16)
    before = {name: read_switch(name) for name in SWITCHES}
    found: dict[str, float | bool] = {"limit": outputs * size * 2 / BYTES_PER_US}

    def us(num_rows: int) -> float:
        """By cuBLAS."""
        some, each = rows[:num_rows].clone(), cycle(weights)
        return graph_us(lambda: torch.mm(some, next(each).T), calls=CALLS)

    found["1 row"] = us(1)
    write_switches(SWITCHES)
    try:
        found["32 rows"] = us(32)
        expected = torch.mm(rows, weights[0].T)
    finally:
        write_switches(before)
    some, each = rows[:8].clone(), cycle(weights)
    found["8 rows"] = graph_us(lambda: product(some, next(each).T, torch.bfloat16), calls=CALLS)
    found["equal"] = torch.equal(product(some, weights[0].T, torch.bfloat16), expected[:8])
    return found


def main() -> int:
    parser = make_parser(__doc__)
    arguments = parse_on_gpu(parser)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds\n")
    results = []
    for model, shapes in SHAPES.items():
        for outputs, size in shapes:
            found = measure(outputs, size)
            if not results:
                print(f"{'':30}" + "".join(f"{name:>10}" for name in found) + f"{'8 : 32':>10}")
            texts = [
                f"{value!s:>10}" if isinstance(value, bool) else f"{value:10.2f}" for value in found.values()
            ]
            ratio = found["8 rows"] / found["32 rows"]
            print(f"{model:14}{f'{size} -> {outputs}':>16}" + "".join(texts) + f"{ratio:10.3f}", flush=True)
            results.append({"model": model, "outputs": outputs, "inputs": size, **found})
    if arguments.json:
        figures = {
            "benchmark": "few_rows",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        arguments.json.write_text(json.dumps(figures | {"products": results}, indent=1) + "\n")
    return 0 if all(row["equal"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
