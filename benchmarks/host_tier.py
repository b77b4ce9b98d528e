"""What does host memory behind a tenth of the states bring back, and what does a copy cost?

resumed     conversations with a small model, served with all states on the device; with the most slots that
            those filled at once divided by ten; and with the same and a host tier. "tokens" are resumed
            prompt tokens, "%" of the first row's, "differ" answers that differ from the first row's
copies      one state of Nemotron-H-8B, to host memory and back; "bus" is a plain copy of the same bytes
            between pinned memory and the device, and "%" is of it. "caller us" is what the call takes of the
            step's thread, "stream us" how long the step's stream is busy; `fetch` waits, checksum included
step        a step of products alone, and with a state leaving in each: the streams' time a step

On the CPU copies are plain ones and states small: the times say nothing about a GPU.
"""

import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mambaslots as ms
import torch
from mambaslots.inference.contexts.tier_copies import HostCopies
from support.command_line import add_count, add_device, check_device, make_parser

STATE_BYTES = {"cuda": 97 << 20, "cpu": 1 << 20}
NUM_SLOTS = 8
REPETITIONS = 20


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cpu")
    add_count(parser, "--conversations", 40, "conversations that are served in turn")
    add_count(parser, "--turns", 6, "turns of each conversation")
    args = parser.parse_args()
    check_device(parser, args.device)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"date": str(datetime.date.today()), "torch": torch.__version__}
    figures["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    figures["resumed"] = resumed(device, args.conversations, args.turns)
    figures["copies"] = copies(device)
    figures["step"] = step(device)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["resumed"]["tier"]["share"] < 0.9 or any(row["differ"] for row in figures["resumed"].values()):
        sys.exit("fewer than 90 % of the unlimited pool's tokens were resumed, or answers differ")


# ---- what is resumed


def resumed(device: torch.device, num_talks: int, num_turns: int) -> dict[str, dict[str, float]]:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(torch.float64), seed=1).to(device)
    base = ms.InferenceConfig(
        block_size_tokens=64, max_requests=4, max_tokens_per_step=512, max_sequence_length=2048,
        num_kv_blocks=num_talks * 32, num_mamba_slots=num_talks * num_turns * 4,
    )  # fmt: skip
    unlimited = serve(model, base, num_talks, num_turns)
    working_set = unlimited[0].stats().cache.num_committed_slots
    few = replace(base, num_mamba_slots=max(1, working_set // 10))
    bytes_of_all = 2 * working_set * model.state_spec().slot_bytes
    tier = replace(few, host_cache_gb=bytes_of_all / (1 << 30))
    print(f"resumed: {num_talks} conversations of {num_turns} turns")
    print(f"{'':14}{'slots':>7}{'tokens':>10}{'%':>8}{'differ':>8}{'came back':>11}")
    rows = {}
    for name, config in (("unlimited", base), ("a tenth", few), ("tier", tier)):
        engine, answers = unlimited if config is base else serve(model, config, num_talks, num_turns)
        cache = engine.stats().cache
        first = unlimited[0].stats().cache.num_resumed_tokens
        rows[name] = row = {
            "slots": config.num_mamba_slots or 0,
            "tokens": cache.num_resumed_tokens,
            "share": cache.num_resumed_tokens / max(1, first),
            "differ": sum(map(list.__ne__, answers, unlimited[1])),
            "fetched": cache.tiers.num_states_fetched,
        }
        print(
            f"{name:14}{row['slots']:>7,}{row['tokens']:>10,}{100 * row['share']:>8.1f}"
            f"{row['differ']:>8}{row['fetched']:>11,}"
        )
    print(f"working set: {working_set:,} states\n")
    return rows


def serve(
    model: ms.models.HybridLM, config: ms.InferenceConfig, num_talks: int, num_turns: int
) -> tuple[ms.DynamicInferenceEngine, list[list[int]]]:
    """The engine that served the conversations, a turn of four of them at a time, and its answers."""
    engine = ms.DynamicInferenceEngine(model, config)
    draw = random.Random(5)
    texts = [[draw.randrange(256) for _ in range(draw.randint(70, 200))] for _ in range(num_talks)]
    params = ms.SamplingParams(max_tokens=24)
    answers = []
    for _ in range(num_turns):
        for start in range(0, num_talks, 4):
            batch = range(start, min(start + 4, num_talks))
            for talk in batch:
                texts[talk] += [draw.randrange(256) for _ in range(draw.randint(10, 60))]
            for talk, result in zip(batch, engine.generate([texts[t] for t in batch], params), strict=True):
                texts[talk] = texts[talk] + result.tokens
                answers.append(result.tokens)
    engine.check_integrity()
    return engine, answers


# ---- copies


class Timer:
    """Times work on the current stream, and on the thread that launches it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __call__(self, work: Callable[[int], object]) -> tuple[float, float, float]:
        """Medians in microseconds: of the call, of the current stream, and until all is done."""
        calls, streams, alls = [], [], []
        for number in range(-3, REPETITIONS):
            self.wait()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (self._device.type == "cuda"))]
            begun = time.perf_counter()
            for event in events[:1]:
                event.record()
            work(number)
            for event in events[1:]:
                event.record()
            called = time.perf_counter()
            self.wait()
            ended = time.perf_counter()
            if number >= 0:
                calls.append(1e6 * (called - begun))
                alls.append(1e6 * (ended - begun))
                streams.append(1e3 * events[0].elapsed_time(events[1]) if events else alls[-1])
        return statistics.median(calls), statistics.median(streams), statistics.median(alls)


def copies(device: torch.device) -> dict[str, dict[str, float]]:
    state_bytes = STATE_BYTES[device.type]
    memory = torch.randint(0, 255, (NUM_SLOTS, state_bytes), dtype=torch.uint8, device=device)
    tier = HostCopies(NUM_SLOTS, state_bytes, memory.__getitem__, device)
    timer = Timer(device)
    for slot in range(NUM_SLOTS):
        tier.store(slot, slot, slot + 1)
    timer.wait()
    work: dict[str, Callable[[int], object]] = {
        "bus out": lambda n: tier.memory[n % NUM_SLOTS].copy_(memory[n % NUM_SLOTS], non_blocking=True),
        "store": lambda n: tier.store(n % NUM_SLOTS, n % NUM_SLOTS, n % NUM_SLOTS + 1),
        "bus in": lambda n: memory[n % NUM_SLOTS].copy_(tier.memory[n % NUM_SLOTS], non_blocking=True),
        "fetch": lambda n: tier.fetch(n % NUM_SLOTS, n % NUM_SLOTS, n % NUM_SLOTS + 1),
    }
    print(f"copies: a state of {state_bytes / (1 << 20):.0f} MiB")
    print(f"{'':10}{'caller us':>11}{'stream us':>11}{'done us':>10}{'GB/s':>8}{'%':>7}")
    rows: dict[str, dict[str, float]] = {}
    bus = 0.0
    for name, one in work.items():
        caller, stream, done = timer(one)
        speed = state_bytes / done / 1e3
        bus = speed if name.startswith("bus") else bus
        rows[name] = {"caller_us": caller, "stream_us": stream, "done_us": done, "gb_s": speed}
        share = 100 * speed / bus
        print(f"{name:10}{caller:>11.0f}{stream:>11.0f}{done:>10.0f}{speed:>8.1f}{share:>7.1f}")
    good = all(tier.fetch(slot, slot, slot + 1) for slot in range(NUM_SLOTS))
    print(f"all states came back whole: {good}\n")
    rows["whole"] = {"all": float(good)}
    return rows


def step(device: torch.device) -> dict[str, float]:
    """A step of products of about 20 ms on an H100, alone and with states that leave."""
    state_bytes, width = STATE_BYTES[device.type], 8192 if device.type == "cuda" else 256
    memory = torch.zeros(NUM_SLOTS, state_bytes, dtype=torch.uint8, device=device)
    tier = HostCopies(NUM_SLOTS, state_bytes, memory.__getitem__, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.zeros(width, width, dtype=dtype, device=device) for _ in range(2))
    timer = Timer(device)

    def products() -> None:
        for _ in range(12):
            torch.mm(left, right)

    def leaving(number: int, num_states: int) -> None:
        for state in range(num_states):
            slot = (number * num_states + state) % NUM_SLOTS
            tier.store(slot, slot, 1)
            memory[slot, :8] = 1  # the next writer
        products()

    print(f"step: products of {width}, the stream's time")
    figures: dict[str, float] = {}
    for num_states in (0, 1, 2, 4):
        _, stream, _ = timer(lambda number, num_states=num_states: leaving(number, num_states))
        figures[str(num_states)] = stream
        extra = stream - figures["0"]
        print(f"{num_states} states leave: {stream:>9.0f} us, {extra:>+7.0f} us")
    return figures


if __name__ == "__main__":
    main()
