"""Everything at once, at random: what users, operators, broken models and interrupts do to an engine.

    python -m tests.oracle.everything --minutes 20 --seed 0

A run is one engine of random settings and a few hundred random operations. Tokens and log-probs are held
against `oracle.toy_answers`, integrity is checked after each operation, and nothing may be left at the end.
A run is known by its seed: `--seed N --runs 1` repeats it.
"""

import argparse
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from random import Random
from typing import Any, get_args

import mambaslots as ms
import torch
from mambaslots.params_and_results import FinishReason

from .faults import POINTS, acting
from .ledger import Entry, Ledger, LeftWrongError, check_objects, objects
from .random_engine import ALPHABET, LONGEST_PROMPT, random_engine, random_plan
from .toy_answers import Ask
from .toy_lm import ForwardError, ToyLM

CHECKS_LOGITS = "invalid_logits" in get_args(FinishReason)


class Fuzzer(Ledger):
    """One run. `counts` says how often what was done.

    Attributes:
        longest_prompt: tokens of the longest prompt.
        answer_lengths: tokens that requests ask for.
        num_versions: different weights of the model.
    """

    longest_prompt = LONGEST_PROMPT
    answer_lengths: Sequence[int] = (1, 2, 3, 5, 8, 13, 24)
    num_versions = 5

    def __init__(self, seed: int, interrupts: float) -> None:
        """`interrupts`: the share of operations that are interrupted."""
        self.random = Random(seed)
        super().__init__(*self._engine_and_model())
        self.counts: Counter[str] = Counter()
        self._share = interrupts
        self._suspended = False
        self._resetting = False
        self._texts = [self._tokens(self.longest_prompt) for _ in range(3)]
        self._operations: list[Callable[[], None]] = [
            operation
            for weight, operations in (
                (12, (self._advance,)),
                (5, (self._ask, self._read)),
                (3, (self._open, self._fail, self._serve)),
                (
                    2,
                    (
                        self._drop,
                        self._drop_now,
                        self._cancel,
                        self._close,
                        self._pin,
                        self._unpin,
                        self._claim,
                    ),
                ),
                (
                    1,
                    (
                        self._clear_prefixes,
                        self._swap_weights,
                        self._warm,
                        self._look,
                        self._spoil,
                        self._score,
                    ),
                ),
                (1, (self._suspend, self._reset_now_and_then)),
            )
            for operation in operations
            for _ in range(weight)
        ]

    def _engine_and_model(self) -> tuple[ms.DynamicInferenceEngine, ToyLM]:
        engine, model, drafter = random_engine(self.random)
        if drafter is not None:
            drafter.entries = lambda: [*self.entries.values(), *self.strays]
        return engine, model

    # ---- one run

    def run(self, num_operations: int) -> None:
        """Operations, then the end: all is served, and nothing is left."""
        for _ in range(num_operations):
            self.operate()
        self._end()

    def operate(self) -> None:
        """One operation, whole or interrupted."""
        operation = self.random.choice(self._operations)
        chance = self.random.random()
        if chance < self._share:
            self._at_a_point(operation, self._interrupt)
        elif chance < 0.2 and (way := self._way_to_drop()) is not None:
            self._at_a_point(operation, way)
            way()  # where the point was not reached
        else:
            self._do(operation)
        self._mend()
        self.check_integrity()

    def _do(self, operation: Callable[[], None]) -> None:
        """Run an operation; models may fail in it, and pins may leave too little memory."""
        try:
            operation()
        except ForwardError:
            self.counts["failed forwards"] += 1
        except ms.KVBlockCapacityError:
            if not self.counts["pins"]:
                raise
            self.unpin_all(bool(self.counts["interrupts"]))

    def _at_a_point(self, operation: Callable[[], None], action: Callable[[], None]) -> None:
        """Do `action` at one of the first calls of a random point of an operation."""
        point, number = self.random.choice(sorted(POINTS)), self.random.choice((0, 0, 0, 1, 2, 5))
        with suppress(KeyboardInterrupt), acting(self.engine, point, action, number):
            self._do(operation)

    def _interrupt(self) -> None:
        self.counts["interrupts"] += 1
        raise KeyboardInterrupt

    def _mend(self) -> None:
        """What a user does behind each operation, interrupted or not."""
        self.model.fails, self.model.spoils, self.model.during = "", None, None
        if self._resetting:
            self._reset()
        self.engine.ensure_usable("this")
        self.engine.set_weights_version(self.model.version)
        if self._suspended:
            self.engine.resume()
            self._suspended = False

    def _end(self) -> None:
        self.unpin_all(bool(self.counts["interrupts"]))
        for entry in self.strays:
            entry.may_vanish = True
        self.finish()
        self.unpin_all(bool(self.counts["interrupts"]))
        for text in self._texts:
            lengths = [self.random.randint(1, self.longest_prompt) for _ in range(2)]
            self.generate([self._entry(text[:length]) for length in lengths])
        self.check_idle()
        self.forget_all()

    # ---- what is asked

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(ALPHABET) for _ in range(count)]

    def _prompt(self) -> list[int]:
        text = self.random.choice(self._texts)
        head = text[: self.random.choice([1, 4, 8, 9, 16, 17, 31, 33, 48, 60])]
        return head + self._tokens(self.random.choice([0, 0, 1, 3, 6]))

    def _entry(self, prompt: Sequence[int] | None = None) -> Entry:
        random = self.random
        length = random.choice(self.answer_lengths)
        draws: dict[str, Any] = random.choice(
            [
                {}, {}, {}, {"temperature": 1.3}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.8},
                {"temperature": 1.1, "top_k": 9, "top_p": 0.9},
            ]
        )  # fmt: skip
        stops = tuple(random.sample(range(ALPHABET), random.choice([0, 0, 0, 2])))
        prompt = self._prompt() if prompt is None else prompt
        seed = random.randrange(1 << 40)
        model = self.model
        ask = Ask(tuple(prompt), length, model.version, **draws, seed=seed, stops=stops, kind=model.kind)
        entry = Entry(ask)
        entry.salt = random.choice([None, None, None, b"tenant"])
        entry.prompt_log_probs = random.random() < 0.1
        entry.may_be_cut = bool(self.counts["pins"])  # pins may leave too little memory for it
        return entry

    def _plan(self) -> ms.CheckpointPlan | None:
        block = self.engine.config.block_size_tokens
        return random_plan(self.random, block, self.longest_prompt) if self.random.random() < 0.2 else None

    def _some_id(self, streams: bool | None = None) -> int | None:
        ids = [i for i, entry in self.entries.items() if streams in (None, entry.stream is not None)]
        return self.random.choice(ids) if ids else None

    # ---- operations

    def _ask(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.add(self._entry(), self._plan())

    def _open(self) -> None:
        self.stream(self._entry(), self._plan())

    def _advance(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.step()

    def _read(self) -> None:
        request_id = self._some_id(streams=True)
        if request_id is not None:
            self.read(request_id, self.random.randint(1, 4))

    def _serve(self) -> None:
        self.generate([self._entry() for _ in range(self.random.randint(1, 3))])

    def _score(self) -> None:
        sequences = [self._prompt() + self._tokens(5) for _ in range(self.random.randint(1, 3))]
        self.score(*sequences, start=self.random.choice([1, 2, 4, 5]))

    def _fail(self) -> None:
        self.model.fails = self.random.choice(["before", "after"])
        self.random.choice([self._advance, self._advance, self._read, self._serve, self._warm])()

    def _spoil(self) -> None:
        if CHECKS_LOGITS:
            self.model.spoils = self.random.randrange(8)
            self.counts["spoiled"] += 1
        self.random.choice([self._advance, self._read, self._serve])()

    def _cancel(self) -> None:
        request_id = self._some_id()
        if request_id is not None:
            self.cancel(request_id)

    def _close(self) -> None:
        request_id = self._some_id(streams=True)
        if request_id is not None:
            self.close(request_id)

    def _claim(self) -> None:
        request_id = self._some_id(streams=False)
        if request_id is not None:
            self.claim(request_id)

    def _drop(self) -> None:
        """A stream's last reference goes in the middle of a step, or of a call that makes several."""
        way = self._way_to_drop()
        if way is not None:
            self.model.during = way
            self.random.choice([self._advance, self._read, self._serve])()
            way()  # where no step was made

    def _drop_now(self) -> None:
        way = self._way_to_drop()
        if way is not None:
            way()

    def _way_to_drop(self) -> Callable[[], None] | None:
        """What drops a stream: its last reference goes, alone or in a cycle or in another thread."""
        request_id = self._some_id(streams=True)
        if request_id is None:
            return None
        entry = self.entries.pop(request_id)
        entry.may_be_cut = True
        self.strays.append(entry)
        gone: list[Any] = [entry.stream]
        entry.stream = None
        self.counts["dropped"] += 1
        return self.random.choice([gone.clear, lambda: _in_cycle(gone), lambda: _in_thread(gone)])

    def _warm(self) -> None:
        prefix = self._prompt()
        resumable = self.engine.warm(prefix)
        if not 0 <= resumable <= len(prefix):
            raise LeftWrongError("answer", f"warm says {resumable} of {len(prefix)} tokens")

    def _pin(self) -> None:
        self.counts["pins"] += 1
        for entry in [*self.entries.values(), *self.strays]:
            entry.may_be_cut = True
        with suppress(ValueError, ms.MambaSlotCapacityError):  # nothing of it is cached, or pins have all
            self.pins.append(self.engine.pin(self._prompt()))

    def _unpin(self) -> None:
        if self.pins:
            pin = self.random.choice(self.pins)
            with suppress(ValueError) if self.counts["interrupts"] else nullcontext():
                self.engine.unpin(pin)
            self.pins.remove(pin)

    def _clear_prefixes(self) -> None:
        self.engine.reset_prefix_cache()
        self.pins.clear()

    def _swap_weights(self) -> None:
        for entry in [*self.entries.values(), *self.strays]:
            entry.mixed = True
        self.pins.clear()
        self.counts["swaps"] += 1
        self.model.version = self.counts["swaps"] % self.num_versions
        self.engine.set_weights_version(self.model.version)
        if not self.engine.has_unfinished_requests():
            entry = self._entry()
            entry.resumes_nothing = True
            self.generate([entry])

    def _suspend(self) -> None:
        self._suspended = True
        self.engine.suspend()
        self.pins.clear()
        for operation in self.random.sample([self._ask, self._cancel, self._drop_now, self._look], 2):
            operation()
        if self.random.random() < 0.5:
            self.engine.resume()
            self._suspended = False

    def _reset_now_and_then(self) -> None:
        if self.random.random() < 0.3:
            self._reset()

    def _reset(self) -> None:
        self._resetting = True
        self.engine.reset()
        self.forget_all()
        self._resetting = False

    def _look(self) -> None:
        stats = self.engine.stats().cache
        if stats.num_prompt_tokens != stats.num_resumed_tokens + stats.num_computed_tokens:
            raise LeftWrongError("counts", f"prompt tokens are not accounted for: {stats}")
        for request_id, entry in self.entries.items():
            with suppress(ValueError):  # it has ended
                computed = tuple(self.engine.computed_prefix(request_id))
                expected = None if entry.mixed else entry.expected
                whole = entry.ask.prompt + (() if expected is None else expected.tokens)
                if expected is not None and computed != whole[: len(computed)]:
                    raise LeftWrongError("answer", f"{computed} are computed, not {whole}")


def _in_cycle(gone: list[Any]) -> None:
    cycle: list[Any] = [*gone]
    cycle.append(cycle)
    gone.clear()
    del cycle
    gc.collect()


def _in_thread(gone: list[Any]) -> None:
    thread = threading.Thread(target=gone.clear, daemon=True)
    thread.start()
    thread.join(10)
    if thread.is_alive():
        raise LeftWrongError("hang", "dropping a stream waits for the engine")


class Totals:
    """What came of all runs."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.num_steps = 0
        self.num_results = 0
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def run(self, seed: int, num_operations: int = 120, interrupts: float = 0.15) -> str:
        """One run; what was wrong, or "".

        Args:
            interrupts: the share of operations that are interrupted.
        """
        before, found = objects(), ""
        fuzzer = Fuzzer(seed, interrupts)
        try:
            fuzzer.run(num_operations)
            check_objects(before)
        except Exception as error:
            outcome = outcome_of(error)
            self.outcomes[outcome] += 1
            found = f"seed {seed}: {outcome}: {type(error).__name__}: {error}"[:400]
        self.num_runs += 1
        self.num_steps += fuzzer.num_steps
        self.num_results += fuzzer.num_results
        self.counts.update(fuzzer.counts)
        return found

    def __str__(self) -> str:
        leaks, broken = self.outcomes["leak"], self.outcomes["broken"]
        wrong = self.outcomes.total() - leaks - broken
        return (
            f"{self.num_runs} runs, {self.num_steps} steps, {self.num_results} results, "
            f"{self.counts['interrupts']} interrupts, {self.counts['dropped']} streams dropped, "
            f"{self.counts['failed forwards']} failed forwards, {self.counts['swaps']} swaps of weights; "
            f"{wrong} wrong, {leaks} leaks, {broken} broken"
        )


def outcome_of(error: BaseException) -> str:
    """The word for an engine that raises `error` when its user goes on."""
    if isinstance(error, LeftWrongError):
        return error.kind
    if isinstance(error, RuntimeError) and "reset()" in str(error):
        return "broken"
    return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything at once, at random, against a plain model.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, help="stop after so many runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next one")
    parser.add_argument("--operations", type=int, default=120, help="operations of a run")
    parser.add_argument("--interrupts", type=float, default=0.15, help="share of interrupted operations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    totals, begin, said = Totals(), time.monotonic(), time.monotonic()
    while totals.num_runs != options.runs and time.monotonic() - begin < 60 * options.minutes:
        seed = options.seed + totals.num_runs
        found = totals.run(seed, options.operations, options.interrupts)
        if found:
            print(found, flush=True)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{(said - begin) / 60:5.1f} min: {totals}", flush=True)
    print(f"seeds {options.seed} to {options.seed + totals.num_runs - 1}: {totals}")
    raise SystemExit(bool(totals.outcomes.total()))


if __name__ == "__main__":
    main()
