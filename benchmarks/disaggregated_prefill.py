"""Prefill apart from decode, beside two engines that do both, and beside one.

Two processes each have the whole model (two GPUs, or the CPU). Long prompts arrive at a fixed rate while
other requests decode. Three ways to serve the same requests:

    1 + 1     the first process computes the long prompts, the second one decodes (`DisaggregatedEngine`)
    2 mixed   each process is an engine with chunked prefill, and has half of the requests
    1 mixed   one engine with chunked prefill has all of them, on half of the hardware

For each: the time to the first token of a long prompt, the time between two tokens of any request, and how
many tokens were generated a second. Prompts arrive so often that computing them takes `--load` of one
process, as measured at the start of the run.

    python benchmarks/disaggregated_prefill.py --json out.json                      (two GPUs; bfloat16)
    python benchmarks/disaggregated_prefill.py --shape tiny --device cpu            (does it run?)
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import torch
import torch.distributed as dist
from serving.models import HYBRID_SHAPES, PATTERN, add_hybrid_shape
from support.command_line import add_count, add_device, make_parser
from support.disaggregated_traffic import SHORT_ANSWER, SHORT_PROMPT, Row, Served, Traffic

TIMEOUT = timedelta(seconds=300)
WAYS = {"1 + 1": 1, "2 mixed": 2, "1 mixed": 1}
"""How many engines share the requests."""
ROWS = {  # (prompt, answer, long prompts)
    "8b": ((1024, 64, 32), (4096, 64, 20), (4096, 256, 16), (16384, 64, 6)),
    "tiny": ((128, 8, 6), (512, 8, 6)),
}
BLOCKS = {"8b": 256, "tiny": 32}
ROWS_BESIDE = 16
"""Long prompts that an engine serves at once, beside the requests that decode."""


class Side:
    """One of the two processes."""

    def __init__(self, number: int, port: int, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.number, self.args, self.num_meetings = number, args, 0
        self.store, self.channel_store = (
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT) for _ in range(2)
        )
        on_gpu = args.device == "cuda"
        device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        config = ms.models.HybridConfig(
            pattern=PATTERN[: args.layers],
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            **HYBRID_SHAPES[args.shape],
        )
        self.vocabulary = config.vocab_size
        self.model = ms.models.HybridLM(config, seed=0, device=device)

    def engine(self, tokens_per_step: int) -> ms.DynamicInferenceEngine:
        block, rows = BLOCKS[self.args.shape], self.args.streams + ROWS_BESIDE
        longest = max(prompt + answer for prompt, answer, _ in ROWS[self.args.shape]) + SHORT_PROMPT
        config = ms.InferenceConfig(
            block_size_tokens=block,
            max_requests=rows,
            max_tokens_per_step=max(tokens_per_step, rows, block),
            max_sequence_length=longest,
            num_kv_blocks=10 * -(-longest // block) + rows * 4,
            num_mamba_slots=48,
            num_cuda_graphs=24,
        )
        engine = ms.DynamicInferenceEngine(self.model, config)
        engine.set_weights_version("seed 0")
        return engine

    def meet(self) -> None:
        """Returns when the other side has come here, too."""
        self.num_meetings += 1
        self.store.set(f"meeting {self.num_meetings}, {self.number}", "")
        self.store.wait([f"meeting {self.num_meetings}, {1 - self.number}"], TIMEOUT)

    def rows(self) -> list[Row]:
        """The rows; side 0 measures how long prompts take, behind a first one that compiles kernels."""
        shape, streams = ROWS[self.args.shape], self.args.streams
        if self.number == 0:
            engine = self.engine(self.args.prefill_tokens)
            for length in sorted({prompt for prompt, _, _ in shape}):
                for seed in range(2):
                    engine.reset_prefix_cache()
                    tokens = torch.randint(self.vocabulary, (length,), generator=_seeded(seed)).tolist()
                    began = time.perf_counter()
                    engine.warm(tokens)
                    if self.args.device == "cuda":
                        torch.cuda.synchronize()
                    computed_s = time.perf_counter() - began
                self.store.set(f"computed {length}", repr(computed_s))
        self.meet()
        computed = {prompt: float(self.store.get(f"computed {prompt}")) for prompt, _, _ in shape}
        lengths = (SHORT_PROMPT, SHORT_ANSWER) if self.args.shape == "8b" else (16, 16)
        return [
            Row(prompt, answer, count, computed[prompt] / self.args.load, streams, *lengths)
            for prompt, answer, count in shape
        ]

    async def run(self, way: str, rows: list[Row]) -> None:
        """Serve all rows one way; the first row once before, which compiles and captures."""
        if way == "1 + 1" and self.number == 0:
            await self._prefill(rows)
        elif self.number >= WAYS[way] and way != "1 + 1":
            for _ in range(2 * len(rows) + 2):
                await asyncio.to_thread(self.meet)
        elif way == "1 + 1":
            engine = self.engine(self.args.chunk)
            server: ms.AsyncEngine = msd.DisaggregatedEngine(
                engine, self.channel_store, min_prefill_tokens=self.args.min_prefill,
                silence_s=30.0, timeout_s=60.0, hand_over_timeout_s=20.0,
            )  # fmt: skip
            async with server:
                assert await server.connected(120)  # type: ignore[attr-defined]
                await self._serve(way, server, rows)
        else:
            async with ms.AsyncEngine(self.engine(self.args.chunk)) as server:
                await self._serve(way, server, rows)

    async def _prefill(self, rows: list[Row]) -> None:
        worker = msd.PrefillWorker(
            self.engine(self.args.prefill_tokens), self.channel_store, hand_over_timeout_s=20.0
        )
        serving = asyncio.create_task(worker.serve())
        for _ in range(2 * len(rows) + 2):
            await asyncio.to_thread(self.meet)
            if serving.done():
                serving.result()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    async def _serve(self, way: str, server: ms.AsyncEngine, rows: list[Row]) -> None:
        # With side 1 alone in "1 + 1", all requests are its own.
        share, num_shares = (0 if WAYS[way] == 1 else self.number), WAYS[way]
        await self._capture(server)
        for number, row in enumerate((replace(rows[0], seed=1), *rows)):
            await asyncio.to_thread(self.meet)
            served = await Traffic(server, row, share, num_shares, self.vocabulary).serve()
            self.store.set(f"{way}, {number}, {share}", served.to_json())
            await asyncio.to_thread(self.meet)

    async def _capture(self, server: ms.AsyncEngine) -> None:
        """Decode once with each number of rows, so that no graph is captured while times are taken."""
        if self.args.device == "cpu":
            return
        params = ms.SamplingParams(max_tokens=8)
        for rows in range(1, self.args.streams + ROWS_BESIDE + 1):
            prompts = [torch.randint(self.vocabulary, (8,)).tolist() for _ in range(rows)]
            await asyncio.gather(*(server.generate(prompt, params) for prompt in prompts))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run_side(number: int, port: int, args: argparse.Namespace) -> None:
    side = Side(number, port, args)
    rows = side.rows()
    for way in args.ways:
        asyncio.run(side.run(way, rows))
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if number == 0:
        side.store.set("intervals", json.dumps([row.interval_s for row in rows]))


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A dict for each row and way: what was asked, and the figures."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    spawn = multiprocessing.get_context("spawn")
    sides = [spawn.Process(target=run_side, args=(number, store.port, args)) for number in range(2)]
    for side in sides:
        side.start()
    while any(side.is_alive() for side in sides):
        if any(side.exitcode for side in sides):
            for side in sides:
                side.terminate()
            raise SystemExit("a side failed")
        time.sleep(0.2)
    found = []
    intervals = json.loads(store.get("intervals"))
    for number, (prompt, answer, count) in enumerate(ROWS[args.shape]):
        for way in args.ways:
            texts = [store.get(f"{way}, {number + 1}, {share}") for share in range(WAYS[way])]
            served = Served.joined(texts)
            for failure in set(served.failures):
                print(f"missed: {failure}")
            asked = {
                "prompt": prompt, "answer": answer, "prompts": count, "interval_s": intervals[number],
                "way": way,
            }  # fmt: skip
            found.append(asked | served.figures())
    return found


def show(rows: list[dict[str, Any]]) -> None:
    print("times in ms                  first token             between two tokens")
    print(
        "prompt answer way          median      p95      median     p95     max   tokens/s  hand-over  missed"
    )
    for row in rows:
        hand_over = f"{row['hand-over median']:9.1f}" if "hand-over median" in row else " " * 9
        print(
            f"{row['prompt']:6,} {row['answer']:6} {row['way']:8} "
            f"{row['first token median']:10.1f} {row['first token p95']:8.1f}  "
            f"{row['gap median']:10.1f} {row['gap p95']:7.1f} {row['gap max']:7.1f} "
            f"{row['tokens/s']:10.0f}  {hand_over}  {row['missed']:6}"
        )


def verdict(rows: list[dict[str, Any]]) -> str:
    """When "1 + 1" was better than "2 mixed", in one sentence."""
    better: dict[str, list[str]] = {"gap p95": [], "gap max": [], "first token median": [], "tokens/s": []}
    for row in rows:
        if row["way"] != "2 mixed":
            continue
        asked = [row[name] for name in ("prompt", "answer")]
        (apart,) = (one for one in rows if one["way"] == "1 + 1" and [one["prompt"], one["answer"]] == asked)
        for name, lengths in better.items():
            higher = name == "tokens/s"
            if apart[name] > row[name] if higher else apart[name] < row[name]:
                lengths.append(f"{row['prompt']:,}/{row['answer']}")
    texts = {
        "gap p95": "the 95th percentile of the time between two tokens",
        "gap max": "its maximum",
        "first token median": "the median time to the first token",
        "tokens/s": "tokens a second",
    }
    parts = [f"for {texts[name]} at {', '.join(at) or 'no length'}" for name, at in better.items()]
    return "prompt/answer where prefill apart from decode pays: " + "; ".join(parts) + "."


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    add_hybrid_shape(parser)
    add_count(parser, "--streams", 16, "requests that decode beside the long prompts", at_least=2)
    add_count(parser, "--chunk", 1024, "tokens of a step of an engine that decodes")
    add_count(parser, "--prefill-tokens", 4096, "tokens of a step of the prefill engine")
    add_count(parser, "--min-prefill", 512, "prompts with fewer uncached tokens are not handed over")
    parser.add_argument(
        "--load", type=float, default=0.5, help="the share of one process that prompts take (default: 0.5)"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured (default: all)"
    )
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("nothing measured: this needs two GPUs (or --shape tiny --device cpu)")
        return
    if args.shape == "tiny":
        args.min_prefill = min(args.min_prefill, 64)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measured(args)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{gpu or platform.processor() or platform.machine()}, torch {torch.__version__}, {args.shape}\n")
    show(rows)
    if {"1 + 1", "2 mixed"} <= set(args.ways):
        print("\n" + verdict(rows))
    if args.json:
        figures = {
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "torch": torch.__version__,
            "shape": args.shape,
            "layers": args.layers,
            "streams": args.streams,
            "chunk": args.chunk,
            "prefill_tokens": args.prefill_tokens,
            "load": args.load,
            "rows": rows,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
