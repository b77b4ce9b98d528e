"""Does a server stand a crowd: every request answered, no answer mixed up, cached tokens rising, memory flat?

`mambaslots serve` runs in a process of its own. Clients, the official `openai` package over loopback, hold
conversations, each with a name of its own in every question: half of the requests are streamed, half of the
answers are greedy and half drawn with a seed. Beside them clients are killed in the middle of long answers.
Afterwards an engine in this process gets the same tokens: each answer must be its answer, token by token and
as text. That is exact in float64 only, which is the default.

requests            of conversations, without those of killed clients
not answered        an error came, or the connection broke
wrong               the answer is not that of the engine in this process
did not resume      a later turn with fewer cached tokens than its conversation's last prompt has whole
                    blocks, or with no more than the last turn
killed, freed       clients that were killed; milliseconds until the metrics count the request as cancelled
resident            of the server's process, from /proc, in MB, in tenths of the run. Pools are allocated at
                    the start, and their pages count once they are written: the first half fills them
growth              of the largest resident size from the third quarter of the run to the last

    python benchmarks/server_load.py                                        a minute
    python benchmarks/server_load.py --clients 50 --seconds 120 --num-mamba-slots 1000 --num-kv-blocks 2500
                                                                            (the docs' figures)

The exit code is 1 where a request is not answered, wrong, does not resume or is not freed, where the memory
grows by more than 3 %, where anything runs at the end, or where the server does not end by itself.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
from support.command_line import add_count, make_parser
from support.load_clients import Load, Turn

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "models/tiny-code"
BLOCK = 32
SAMPLE_S = 0.5
MAX_GROWTH = 0.03
ENDS_WITHIN_S = 60.0


@dataclass
class Server:
    """A process that serves.

    Attributes:
        url: its address.
        resident_mb: its resident memory, sampled.
    """

    process: subprocess.Popen[str]
    url: str
    resident_mb: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, model: Path, sizes: dict[str, int], dtype: str) -> "Server":
        options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "mambaslots", "serve", str(model), "--port=0", "--device=cpu",
             "--threads=1", f"--dtype={dtype}", *options],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if " serves " in line and "http://" in line:
                return cls(process, line[line.index("http://") :].strip())
        raise RuntimeError(f"the server ended with exit code {process.wait()} before it was ready")

    async def watch(self) -> None:
        """Sample the resident memory until the task is cancelled."""
        while True:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
            self.resident_mb.append(int(line.split()[1]) / 1e3)
            await asyncio.sleep(SAMPLE_S)

    def stop(self) -> int | None:
        """End the server as an operator would; its exit code, None where it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


def check(answers: list[list[Turn]], loaded: ms.LoadedModel, config: ms.InferenceConfig) -> list[str]:
    """Names what is wrong with each wrong answer, beside an engine of the same model."""
    engine = ms.DynamicInferenceEngine(loaded.model, config)
    wrong = []
    for number in range(max(map(len, answers), default=0)):
        turns = [turns[number] for turns in answers if number < len(turns) and turns[number].error is None]
        prompts = [loaded.codec.encode_chat(turn.messages) for turn in turns]
        params = [
            loaded.sampling_params(
                max_tokens=turn.max_tokens,
                **({"temperature": 0.0} if turn.seed is None else {"temperature": 0.8, "seed": turn.seed}),
            )
            for turn in turns
        ]
        results = engine.generate(prompts, params)
        for turn, prompt, result in zip(turns, prompts, results, strict=True):
            name = f"turn {number} of {turn.messages[1]['content'][:40]!r}"
            if turn.num_prompt_tokens != len(prompt):
                wrong.append(f"{name}: {turn.num_prompt_tokens} prompt tokens in place of {len(prompt)}")
            if turn.tokens != result.tokens:
                wrong.append(f"{name}: tokens {turn.tokens} in place of {result.tokens}")
            elif turn.text != loaded.codec.decode(result.tokens):
                wrong.append(f"{name}: {turn.text!r} in place of {loaded.codec.decode(result.tokens)!r}")
    return wrong


def num_not_resumed(answers: list[list[Turn]]) -> int:
    """Later turns that resumed less than their conversations allow."""
    number = 0
    for turns in answers:
        for before, turn in pairwise(turns):
            whole = (before.num_prompt_tokens - 1) // BLOCK * BLOCK
            resumed = turn.num_cached_tokens >= whole and turn.num_cached_tokens > before.num_cached_tokens
            number += turn.error is None and not resumed
    return number


def quantiles(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None
        for percent in (50, 90, 99)
    }


def growth_of(resident_mb: list[float]) -> float | None:
    """How much larger the last quarter's largest sample is than the third quarter's; None for few samples."""
    quarter = len(resident_mb) // 4
    if quarter < 2:
        return None
    return max(resident_mb[-quarter:]) / max(resident_mb[-2 * quarter : -quarter]) - 1


def figures_of(load: Load, seconds: float) -> dict[str, Any]:
    turns = [turn for turns in load.answers for turn in turns]
    answered = [turn for turn in turns if turn.error is None]
    by_turn = {number: [turn for turn in answered if turn.number == number] for number in range(load.turns)}
    return {
        "seconds": seconds,
        "conversations": len(load.answers),
        "requests": len(turns),
        "not_answered": len(turns) - len(answered),
        "errors": sorted({turn.error for turn in turns if turn.error is not None})[:10],
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in answered),
        "cached_tokens": sum(turn.num_cached_tokens for turn in answered),
        "answer_tokens": sum(len(turn.tokens) for turn in answered),
        "mean_cached_tokens_by_turn": [
            sum(turn.num_cached_tokens for turn in some) / len(some) if some else None
            for some in by_turn.values()
        ],
        "not_resumed": num_not_resumed(load.answers),
        "first_piece_s": quantiles([turn.first_s for turn in answered if turn.first_s is not None]),
        "between_pieces_s": quantiles([gap for turn in answered for gap in turn.gaps_s]),
        "killed": len(load.freed_s) + load.num_not_freed,
        "not_freed": load.num_not_freed,
        "freed_s": quantiles(load.freed_s),
    }


async def drive(load: Load, clients: int, kills: int | None, server: Server | None = None) -> dict[str, Any]:
    """Run the clients; the figures of what they saw, and of what is left in the server behind them."""
    watching = asyncio.create_task(server.watch()) if server is not None else None
    started = time.monotonic()
    await load.run(clients, kills)
    seconds = time.monotonic() - started
    left = json.loads(await load.get("/status.json"))
    for _ in range(100):
        if not (left["engine"]["running"] or left["engine"]["waiting"]):
            break
        await asyncio.sleep(0.1)
        left = json.loads(await load.get("/status.json"))
    if watching is not None:
        watching.cancel()
    return figures_of(load, seconds) | {
        "left_running": left["engine"]["running"] + left["engine"]["waiting"],
        "left_held_kv_blocks": left["pools"]["kv"]["held"],
    }


def failures_of(figures: dict[str, Any]) -> list[str]:
    """The names of the figures that are not as they must be."""
    names = ["not_answered", "wrong", "not_resumed", "not_freed", "left_running", "left_held_kv_blocks"]
    failed = [name for name in names if figures[name]]
    if (figures["growth"] or 0.0) > MAX_GROWTH:
        failed.append("growth")
    if figures["exit_code"] != 0:
        failed.append("exit_code")
    return failed


def print_table(figures: dict[str, Any]) -> None:
    def times(values: dict[str, float | None]) -> str:
        return " / ".join("-" if value is None else f"{value * 1e3:,.0f}" for value in values.values())

    by_turn = figures["mean_cached_tokens_by_turn"]
    resident = figures["resident_mb"]
    tenths = [resident[len(resident) * tenth // 10] for tenth in range(10)] + resident[-1:]
    growth = figures["growth"]
    for name, value in (
        ("clients", f"{figures['clients']:,}"),
        ("seconds", f"{figures['seconds']:,.0f}"),
        ("conversations", f"{figures['conversations']:,}"),
        ("requests", f"{figures['requests']:,}"),
        ("not answered", f"{figures['not_answered']:,}"),
        ("wrong", f"{len(figures['wrong']):,}"),
        ("prompt tokens", f"{figures['prompt_tokens']:,}"),
        ("  cached", f"{figures['cached_tokens']:,}"),
        ("  cached, mean by turn", " ".join("-" if mean is None else f"{mean:,.0f}" for mean in by_turn)),
        ("did not resume", f"{figures['not_resumed']:,}"),
        ("answer tokens", f"{figures['answer_tokens']:,}"),
        ("first piece, p50 / p90 / p99 (ms)", times(figures["first_piece_s"])),
        ("between pieces (ms)", times(figures["between_pieces_s"])),
        ("killed", f"{figures['killed']:,}"),
        ("  not freed", f"{figures['not_freed']:,}"),
        ("  freed after (ms)", times(figures["freed_s"])),
        ("resident (MB)", " ".join(f"{sample:,.0f}" for sample in tenths)),
        ("  growth", "-" if growth is None else f"{growth:+.1%}"),
        ("left running, KV blocks held", f"{figures['left_running']}, {figures['left_held_kv_blocks']}"),
        ("exit code of the server", str(figures["exit_code"])),
    ):
        print(f"{name:34s} {value}")


def options_of() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder (default: the demo's model)")
    parser.add_argument("--dtype", default="float64", help="of the weights (default: %(default)s)")
    add_count(parser, "--clients", 12, "conversations at once")
    add_count(parser, "--seconds", 30, "after which no request is sent any more")
    add_count(parser, "--turns", 4, "questions of a conversation")
    add_count(parser, "--answer-tokens", 24, "longest answer")
    add_count(parser, "--max-requests", 32, "requests that run at once")
    add_count(parser, "--num-mamba-slots", 300, "states in the cache")
    add_count(parser, "--num-kv-blocks", 800, "blocks of the KV pool")
    return parser.parse_args()


def main() -> int:
    options = options_of()
    torch.set_num_threads(1)
    sizes = {
        "block_size_tokens": BLOCK,
        "max_requests": options.max_requests,
        "max_sequence_length": 2048,
        "num_mamba_slots": options.num_mamba_slots,
        "num_kv_blocks": options.num_kv_blocks,
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = Server.start(options.model, sizes, options.dtype)
    exit_code: int | None = None
    try:
        name = options.model.resolve().name
        until_s = time.monotonic() + options.seconds
        load = Load(server.url, name, options.turns, options.answer_tokens, until_s, conversations=None)
        figures = asyncio.run(drive(load, options.clients, None, server))
    finally:
        exit_code = server.stop()
    loaded = ms.load(options.model, dtype=getattr(torch, options.dtype))
    config = ms.InferenceConfig(max_tokens_per_step=2048, **sizes)  # type: ignore[arg-type]
    figures |= {
        "clients": options.clients,
        "wrong": check(load.answers, loaded, config),
        "resident_mb": server.resident_mb,
        "growth": growth_of(server.resident_mb),
        "exit_code": exit_code,
    }
    figures["failed"] = failures_of(figures)
    print_table(figures)
    for line in [*figures["errors"], *figures["wrong"][:10]]:
        print(line)
    if options.json:
        options.json.write_text(json.dumps(figures))
    print("failed: " + ", ".join(figures["failed"]) if figures["failed"] else "as it must be: yes")
    return bool(figures["failed"])


if __name__ == "__main__":
    sys.exit(main())
