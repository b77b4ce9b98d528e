"""What a hand-over of a cached prefix costs, beside computing the prefix again.

Two processes each have the whole model (two GPUs, or the CPU). The first computes a prefix, with states at
its half and at its end, and sends it. The second receives it into an empty cache. Then the first process
measures the parts of a hand-over by itself, without the transport, and SHA-256 over as many bytes. Both sides
compute SHA-256 once, so it is a lower bound for each.

    python benchmarks/hand_over.py --json out.json                          (two GPUs; bfloat16)
    python benchmarks/hand_over.py --shape tiny --device cpu                (does it run?)

All figures are medians. "computed" is one `warm` on an empty cache. "received" is the whole
`receive_prefixes`; the sender works meanwhile, and its work is part of the figure.
"""

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mambaslots as ms
import mambaslots.distributed as msd
import torch
import torch.distributed as dist
from command_line import add_count, add_device, make_parser
from serving_models import HYBRID_SHAPES, PATTERN

LENGTHS = {"8b": (1024, 4096, 16384), "tiny": (128, 512)}
BLOCKS = {"8b": 256, "tiny": 32}
TIMEOUT = timedelta(seconds=300)


class Side:
    """One of the two processes."""

    def __init__(self, number: int, port: int, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        self.number, self.num_meetings = number, 0
        device = torch.device("cuda", number) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(device)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        config = ms.models.HybridConfig(
            pattern=PATTERN[: args.layers], dtype=dtype, **HYBRID_SHAPES[args.shape]
        )
        self.block, longest = BLOCKS[args.shape], max(LENGTHS[args.shape])
        settings = ms.InferenceConfig(
            block_size_tokens=self.block,
            max_requests=1,
            max_tokens=min(4096, longest),
            max_sequence_length=longest + self.block,
            num_kv_blocks=longest // self.block + 2,
            num_mamba_slots=8,
            checkpoint_plan=ms.CheckpointPlan(chunk_ends=False),
        )
        model = ms.models.HybridLM(config, seed=0, device=device)
        self.engine = ms.DynamicInferenceEngine(model, settings)
        self.engine.set_weights_version("seed 0")
        self.vocabulary, self.on_gpu = config.vocab_size, args.device == "cuda"

    def meet(self) -> None:
        """Returns when the other side has come here too."""
        self.num_meetings += 1
        self.store.set(f"meeting {self.num_meetings}, {self.number}", "")
        self.store.wait([f"meeting {self.num_meetings}, {1 - self.number}"], TIMEOUT)

    def time_ms(self, call: Callable[[], Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        result = call()
        if self.on_gpu:
            torch.cuda.synchronize()
        return result, 1e3 * (time.perf_counter() - started)

    def tokens(self, length: int) -> list[int]:
        draw = random.Random(length)
        return [draw.randrange(self.vocabulary) for _ in range(length)]

    def send(self, length: int, name: str) -> dict[str, float]:
        engine, tokens = self.engine, self.tokens(length)
        engine.reset_prefix_cache()
        engine.warm(tokens[: length // 2])
        _, half = self.time_ms(lambda: engine.reset_prefix_cache() or engine.warm(tokens[: length // 2]))
        _, rest = self.time_ms(lambda: engine.warm(tokens))
        self.meet()
        report, sent = self.time_ms(lambda: msd.send_prefixes(engine, self.store, name))
        assert not report.failure, report.failure
        export, exported = self.time_ms(lambda: msd.export_prefixes(engine))
        data, encoded = self.time_ms(lambda: msd.encode_prefixes(export))
        _, hashed = self.time_ms(lambda: hashlib.sha256(data).digest())
        shard, decoded = self.time_ms(lambda: msd.decode_prefixes(data))
        engine.reset_prefix_cache()
        _, imported = self.time_ms(lambda: msd.import_prefixes(engine, shard))
        return {
            "computed": half + rest, "sent": sent, "export": exported, "encode": encoded, "decode": decoded,
            "import": imported, "sha256": hashed, "MiB": len(data) / 2**20, "states": report.states,
        }  # fmt: skip

    def receive(self, length: int, name: str) -> dict[str, float]:
        self.engine.reset_prefix_cache()
        self.meet()
        report, received = self.time_ms(lambda: msd.receive_prefixes(self.engine, self.store, name))
        assert not report.failure, report.failure
        (result,) = self.engine.generate([[*self.tokens(length), 1]])
        assert result.num_resumed_tokens == length
        return {"received": received}


def run_side(number: int, port: int, args: argparse.Namespace) -> None:
    side = Side(number, port, args)
    for length in LENGTHS[args.shape]:
        part = side.receive if number else side.send
        figures = [part(length, f"{length}, {turn}") for turn in range(args.repeats + 1)][1:]
        medians = {name: statistics.median(row[name] for row in figures) for name in figures[0]}
        side.store.set(f"figures {length}, {number}", json.dumps(medians))


def measured(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    spawn = multiprocessing.get_context("spawn")
    sides = [spawn.Process(target=run_side, args=(number, store.port, args)) for number in range(2)]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    if any(side.exitcode for side in sides):
        raise SystemExit("a side failed")
    return {
        length: json.loads(store.get(f"figures {length}, 0")) | json.loads(store.get(f"figures {length}, 1"))
        for length in LENGTHS[args.shape]
    }


def show(rows: dict[int, dict[str, float]]) -> None:
    parts = ("export", "encode", "decode", "import")
    print(
        f"{'tokens':>7} {'MiB':>7} {'computed':>10} {'received':>10} {'times':>6}  of which, without the way:"
    )
    for length, row in rows.items():
        times = ", ".join(f"{name} {row[name]:.1f}" for name in parts)
        print(
            f"{length:7,} {row['MiB']:7.1f} {row['computed']:7.1f} ms {row['received']:7.1f} ms "
            f"{row['computed'] / row['received']:5.1f}x  {times}; SHA-256 once {row['sha256']:.1f}"
        )


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    parser.add_argument(
        "--shape", choices=HYBRID_SHAPES, default="8b", help="of the model (default: %(default)s)"
    )
    add_count(parser, "--layers", len(PATTERN), "only the first layers")
    add_count(parser, "--repeats", 5, "timed hand-overs of each length")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("nothing measured: this needs two GPUs (or --shape tiny --device cpu)")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measured(args)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{gpu or platform.processor() or platform.machine()}, torch {torch.__version__}, {args.shape}\n")
    show(rows)
    if args.json:
        figures = {
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "torch": torch.__version__,
            "shape": args.shape,
            "layers": args.layers,
            "rows": rows,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
