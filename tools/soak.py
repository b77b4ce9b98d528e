"""Everything switched on at once, for as long as you like: is every answer right, and does memory stay flat?

    python tools/soak.py --minutes 60                        (float64, one thread)
    python tools/soak.py --minutes 15 --device cuda          (bfloat16, batch_invariant: bit for bit)
    python tools/soak.py --repeat engine 17                  (one round again, of a seed that failed)

A soak is a sequence of rounds. A round is one world, with settings and traffic of its own seed: an engine, a
server, or two replicas. It ends with all requests served and nothing held. A sample of its answers is held
against a model that computes token by token in float64, or against an engine without cache.

A line every 30 s says how far it is. The last line: requests, answers compared, mismatches, requests that
resumed something, and the resident memory after a warm-up (a sixth of the time) and at the end. The exit
status is 1 where an answer differs or a round fails, where nothing was resumed, and, from five minutes on,
where a kind of event never happened, or memory at rest grew by more than 1 %.
"""

import argparse
import json
import platform
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from arguments import add_count, add_device, add_minutes, check_device, make_parser
from soaking.rounds import (
    KINDS,
    MIB,
    ON_DEVICE,
    ROUND_S,
    MemoryWatch,
    RoundTally,
    ends,
    required_events,
    run_round,
)

LINE_S = 30.0
JUDGED_S = 300.0
"""A soak that is shorter may lack events, and readings of memory."""
MAX_GROWTH = 0.01
SEEDS = 100_000
"""Of a soak: round N of a kind has the seed `--seed` x SEEDS + N."""


class Soak:
    """Rounds of some kinds by turns, until the time is over."""

    def __init__(self, kinds: list[str], seed: int, seconds: float, device: str) -> None:
        self.tally = RoundTally()
        self.memory = MemoryWatch(device)
        self.num_rounds: Counter[str] = Counter()
        self._kinds, self._seed, self._seconds, self._device = kinds, seed, seconds, device
        self._round_s = min(ROUND_S[device], seconds / (4 * len(kinds)))
        self._most_on_device = 0

    def run(self) -> None:
        begun = said = time.monotonic()
        while (elapsed := time.monotonic() - begun) < self._seconds or not self._each_kind_ran:
            kind = self._kinds[self.num_rounds.total() % len(self._kinds)]
            self._round(kind)
            if elapsed > self._seconds / 6 and self._each_kind_ran:  # before is the warm-up
                self.memory.read()
            if time.monotonic() - said >= LINE_S:
                said = time.monotonic()
                print(self._line(said - begun), flush=True)

    @property
    def _each_kind_ran(self) -> bool:
        return all(self.num_rounds[kind] for kind in self._kinds)

    def _round(self, kind: str) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tally = run_round(kind, self._seed * SEEDS + self.num_rounds[kind], self._round_s, self._device)
        if self._device == "cuda":
            self._most_on_device = max(self._most_on_device, torch.cuda.max_memory_allocated())
        for mismatch in tally.mismatches:
            print(mismatch, flush=True)
        self.tally.add(tally)
        self.num_rounds[kind] += 1

    def _line(self, elapsed: float) -> str:
        tally, resident = self.tally, self.memory.resident[-1:]
        return (
            f"{elapsed / 60:6.1f} min  {self.num_rounds.total():6,} rounds  {tally.requests:9,} requests  "
            f"{tally.comparisons:9,} compared  {len(tally.mismatches)} mismatches  {tally.hits:9,} hits  "
            + (f"{resident[0] / MIB:.1f} MiB" if resident else "warming up")
        )

    def faults(self) -> list[str]:
        """Why the soak has failed."""
        tally, found = self.tally, []
        if tally.mismatches:
            found.append(f"{len(tally.mismatches)} mismatches")
        if not tally.hits:
            found.append("nothing was resumed")
        if not tally.comparisons:
            found.append("nothing was compared")
        if self._seconds < JUDGED_S:
            return found
        for kind in self._kinds:
            found += [
                f"{kind} rounds: never {event}"
                for event in required_events(kind, self._device)
                if not tally.events[event]
            ]
        if not self.memory.is_enough:
            found.append(f"memory was read {len(self.memory.resident)} times only")
        start, end = ends(self.memory.resident)
        if end - start > MAX_GROWTH * start:
            found.append(f"resident memory grew from {start:.1f} to {end:.1f} MiB")
        start, end = ends(self.memory.on_device)
        if end - start > MAX_GROWTH * self._most_on_device / MIB:
            found.append(f"memory of the GPU at rest grew from {start:.1f} to {end:.1f} MiB")
        return found

    def report(self) -> None:
        """The table of events, and the last line."""
        tally = self.tally
        print("\n" + ", ".join(f"{count:,} {kind} rounds" for kind, count in self.num_rounds.items()))
        print(f"{tally.resumed_tokens:,} prompt tokens resumed, {tally.tokens_compared:,} tokens compared\n")
        for event, count in sorted(tally.events.items()):
            print(f"{count:12,}  {event}")
        start, end = ends(self.memory.on_device)
        if end:
            most = self._most_on_device / MIB
            print(f"\nGPU memory at rest: start {start:.1f} MiB, end {end:.1f} MiB; at most {most:,.0f} MiB")
        for fault in self.faults():
            print(f"failed: {fault}")
        start, end = ends(self.memory.resident)
        growth = 100 * (end - start) / start if start else 0.0
        print(
            f"requests {tally.requests:,}, comparisons {tally.comparisons:,}, "
            f"{len(tally.mismatches)} mismatches, hits {tally.hits:,}, "
            f"memory start {start:.1f} MiB, end {end:.1f} MiB ({growth:+.2f} %)"
        )

    def figures(self) -> dict[str, object]:
        return {
            "benchmark": "soak",
            "seed": self._seed,
            "seconds": self._seconds,
            "device": torch.cuda.get_device_name() if self._device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rounds": self.num_rounds,
            **vars(self.tally),
            "resident": self.memory.resident,
            "on_device": self.memory.on_device,
            "faults": self.faults(),
        }


def main() -> int:
    parser = make_parser(__doc__)
    add_minutes(parser, 1.0)
    add_count(parser, "--seed", 0, "another seed soaks with other settings and traffic", at_least=0)
    parser.add_argument("--rounds", type=_kinds, help=f"which, with commas (default: {','.join(KINDS)})")
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "SEED"), help="one round again")
    add_device(parser, "cpu")
    args = parser.parse_args()
    check_device(parser, args.device)
    kinds = args.rounds or list(ON_DEVICE[args.device])
    if missing := [kind for kind in kinds if kind not in ON_DEVICE[args.device]]:
        parser.error(f"argument --rounds: {missing[0]!r}; accepted: {', '.join(ON_DEVICE[args.device])}")
    torch.set_num_threads(1)
    if args.repeat:
        kind, seed = args.repeat
        if kind not in KINDS:
            parser.error(f"argument --repeat: {kind!r}; accepted: {', '.join(KINDS)}")
        if not seed.isdecimal():
            parser.error(f"argument --repeat: {seed!r}; accepted: a round's seed")
        tally = run_round(kind, int(seed), 2 * ROUND_S[args.device], args.device)
        print(tally)
        return bool(tally.mismatches)
    soak = Soak(kinds, args.seed, 60 * args.minutes, args.device)
    soak.run()
    soak.report()
    if args.json is not None:
        args.json.write_text(json.dumps(soak.figures(), indent=1) + "\n")
    return bool(soak.faults())


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; accepted: {', '.join(KINDS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
