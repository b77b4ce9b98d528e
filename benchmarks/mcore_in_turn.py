"""megatron-core's cache and the drop-in's, a step of the one after a step of the other, in one process.

    python benchmarks/mcore_in_turn.py --rounds 6                      (one GPU of 80 GB)
    python benchmarks/mcore_in_turn.py --shape tiny --device cpu

Two engines serve the same conversations, as `examples/mcore_dynamic_inference.py` does, without CUDA graphs.
Each has a clock of its own steps, so that a machine that slows down slows both. A row: the median of the
rounds for each, the median of their ratios (above 1: the drop-in is faster), and how many rounds it won.
"""

import inspect
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support.command_line import add_count, add_device, check_device, make_parser

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import mcore_rig
import mcore_runs
from conversation_texts import conversations
from mambaslots.mcore import install

ROWS = ("first token, mean, ms", "first token, p90, ms", "first token after turn 1, ms", "all steps, ms")


class DropIn:
    """The methods that the drop-in replaces, which change places with megatron-core's own."""

    def __init__(self) -> None:
        install()
        replaced = sys.modules[install.__module__]._replaced  # type: ignore[attr-defined]
        self._both = [(o, name, old, inspect.getattr_static(o, name)) for o, name, old in replaced]

    def use(self, ours: bool) -> None:
        for owner, name, stock, drop_in in self._both:
            setattr(owner, name, drop_in if ours else stock)


@dataclass
class Turn:
    """One engine in one turn: its requests, their results and first tokens, by the clock of its own steps."""

    engine: Any
    requests: list[int]
    done: dict[int, Any] = field(default_factory=dict)
    first_ms: dict[int, float] = field(default_factory=dict)
    clock_ms: float = 0.0

    def step(self, device: str) -> None:
        begun = time.perf_counter()
        self.done |= mcore_rig.step(self.engine)
        if device == "cuda":
            torch.cuda.synchronize()
        self.clock_ms += 1e3 * (time.perf_counter() - begun)
        for request in self.requests:
            known = self.engine.requests.get(request)
            if request in self.done or (known is not None and known.record[-1].generated_tokens):
                self.first_ms.setdefault(request, self.clock_ms)


def one_round(number: int, host: Any, load: Any, users: list[Any], drop_in: DropIn, device: str) -> list[Any]:
    """For stock and for the drop-in, the numbers of `ROWS`."""
    engines, turns = {}, {False: [], True: []}  # type: ignore[var-annotated]
    for ours in turns:
        drop_in.use(ours)
        slots = load.state_slots * len(users)
        engines[ours] = host._engine(
            max_tokens=load.step, enable_chunked_prefill=True, num_mamba_slots=slots, cuda_graphs=False
        )
    texts = {ours: [mcore_runs.system_prompt(user, load.system_prompt) for user in users] for ours in turns}
    for index in range(len(users[0].turns)):
        for ours, engine in engines.items():
            drop_in.use(ours)
            for text, user in zip(texts[ours], users, strict=True):
                text.extend(f"\nUser: {user.turns[index].text}\nBot: ".encode())
            requests = [
                mcore_rig.add(engine, text, load.answer, return_log_probs=False) for text in texts[ours]
            ]
            turns[ours].append(Turn(engine, requests))
        while any(engine.has_unfinished_requests() for engine in engines.values()):
            for ours in (False, True) if number % 2 else (True, False):
                if engines[ours].has_unfinished_requests():
                    drop_in.use(ours)
                    turns[ours][-1].step(device)
        for ours in turns:
            for text, request in zip(texts[ours], turns[ours][-1].requests, strict=True):
                text.extend(turns[ours][-1].done[request].tokens)
    figures = []
    for ours in turns:
        firsts = [[turn.first_ms[request] for request in turn.requests] for turn in turns[ours]]
        every = [first for turn in firsts for first in turn]
        p90 = statistics.quantiles(every, n=10, method="inclusive")[-1]
        later = statistics.fmean(every[len(firsts[0]) :])
        figures.append((statistics.fmean(every), p90, later, sum(turn.clock_ms for turn in turns[ours])))
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=mcore_runs.LOADS, default="8b", help="(default: %(default)s)")
    add_count(parser, "--rounds", 6, "after one that is not counted")
    add_count(parser, "--users", 8, "conversations", 2)
    add_count(parser, "--answer", 24, "tokens of an answer")
    add_device(parser, "cuda")
    args = parser.parse_args()
    check_device(parser, args.device)
    torch.set_num_threads(1)
    load = replace(mcore_runs.LOADS[args.shape], answer=args.answer)
    users = conversations(args.users, 3, 0)
    with mcore_rig.on_this_machine():
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = mcore_rig.hybrid_model(dtype=dtype, shape=mcore_rig.SHAPES[args.shape])
        host, drop_in = mcore_runs.Host(model, users, load), DropIn()
        rounds = []
        for number in range(1 + args.rounds):
            figures = one_round(number, host, load, users, drop_in, args.device)
            if number:
                rounds.append(figures)
                print(f"round {number}: first token {figures[0][0]:.1f}, {figures[1][0]:.1f} ms", flush=True)
        drop_in.use(True)
    rows = []
    for name, column in zip(
        ROWS, zip(*(zip(*figures, strict=True) for figures in rounds), strict=True), strict=True
    ):
        stock, ours = (statistics.median(side) for side in zip(*column, strict=True))
        ratio, won = statistics.median(s / o for s, o in column), sum(o < s for s, o in column)
        rows.append({"row": name, "stock": stock, "drop_in": ours, "ratio": ratio, "won": won})
        print(
            f"{name:28s} stock {stock:8.1f}, drop-in {ours:8.1f}: {ratio:.3f}x, {won} of {args.rounds} rounds"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"benchmark": "mcore_in_turn", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
