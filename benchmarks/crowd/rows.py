"""The rows of `crowds.py`: two sides that take turns, within a budget of time."""

import gc
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Sample = Callable[[], float]
"""Runs one repetition, and returns its milliseconds of CPU time."""


@dataclass(frozen=True)
class Sizes:
    """Pairs are (small, large)."""

    waiting: tuple[int, int] = (10, 50_000)
    prompts: tuple[int, int] = (1_250, 10_000)
    burst: int = 1_000
    document: int = 20_000
    max_length: tuple[int, int] = (4_096, 1_048_576)
    context: tuple[int, int] = (1_000, 40_000)
    logits: tuple[int, int] = (64, 131_072)
    candidates: int = 1_024
    blocks: tuple[int, int] = (4_096, 524_288)
    long_prompt: int = 320_000


QUICK = Sizes((10, 40), (10, 20), 8, 6_000, (4_096, 8_192), (32, 64), (8, 2_048), 64, (512, 1_024), 80_000)


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        small, large: milliseconds, or numbers of launches; None where they could not be measured.
        target: what `judged` may be at most; None where the row is reported only.
        at_least: whether `large` is the time that had passed when the budget ended the measurement.
        note: why there is no figure.
    """

    name: str
    small: float | None
    large: float | None
    target: float | None = None
    unit: str = "ms"
    at_least: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.small is None or self.large is None else self.large / self.small

    @property
    def judged(self) -> float | None:
        """The ratio of times, or the larger number of launches."""
        if self.small is None or self.large is None or self.unit == "ms":
            return self.ratio
        return max(self.small, self.large)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is no target, and where the figures do not say."""
        if self.judged is None or self.target is None:
            return None
        met = self.judged <= self.target
        return None if met and self.at_least else met

    def __str__(self) -> str:
        if self.small is None or self.large is None or self.judged is None:
            return f"{self.name:62}{self.note}"
        timed = self.unit == "ms"
        small, large = (f"{number:,.3f}" if timed else f"{number}" for number in (self.small, self.large))
        judged = f"{'>= ' * self.at_least}{self.judged:.2f}x" if timed else f"{self.judged}"
        target = "" if self.target is None else f"{self.target:g}" + "x" * timed
        verdict = {True: "met", False: "missed", None: ""}[self.met]
        return f"{self.name:62}{small:>10}{large:>12}{judged:>11}{target:>9}  {verdict}".rstrip()


HEADER = f"{'':62}{'small':>10}{'large':>12}{'times':>11}{'at most':>9}"
OVER_BUDGET = "not measured: over the budget"


class OverBudget(BaseException):
    """A measurement has used up its time. `elapsed_ms`: of the repetition that was ended."""

    elapsed_ms = 0.0


def cpu_ms(call: Callable[[], object]) -> float:
    """Milliseconds of this process's CPU time that a call takes."""
    begin = time.process_time_ns()
    try:
        call()
    except OverBudget as error:
        error.elapsed_ms = (time.process_time_ns() - begin) / 1e6
        raise
    return (time.process_time_ns() - begin) / 1e6


class Bench:
    """How often calls are repeated, at which sizes, and for how long at most.

    Attributes:
        repeats, some, few: numbers of repetitions, of short calls and of long ones.
        warm_up: steps before the first that counts; where there is time, more than a block has tokens.
    """

    def __init__(self, sizes: Sizes, repeats: int, budget_s: float) -> None:
        self.sizes = sizes
        self.repeats = repeats
        self.some, self.few = max(1, repeats // 10), max(1, repeats // 30)
        self.warm_up = min(20, repeats)
        self._budget_s = budget_s

    def start_budget(self) -> None:
        """Raise OverBudget when the budget has passed from now.

        The budget is wall time: a timer of CPU time would make the CPU clock tick in milliseconds.
        """
        signal.signal(signal.SIGALRM, _raise_over_budget)
        signal.setitimer(signal.ITIMER_REAL, self._budget_s, self._budget_s)

    def stop_budget(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def compare(
        self,
        name: str,
        small: Sample,
        large: Sample,
        target: float | None = None,
        repeats: int | None = None,
        warm_up: int = 0,
        num_requests: tuple[int, int] = (1, 1),
    ) -> Row:
        """The row of two sides that take turns: medians, divided by each side's `num_requests`."""
        num = warm_up + (self.repeats if repeats is None else repeats)
        turn = 10 if num > 20 else 1
        times: tuple[list[float], list[float]] = [], []
        at_least = False
        gc.disable()
        self.start_budget()
        try:
            for first in range(0, num, turn):
                for taken, side in zip(times, (small, large), strict=True):
                    for _ in range(min(turn, num - first)):
                        taken.append(side())
        except OverBudget as error:
            if not times[0] or not (times[1] or error.elapsed_ms):
                return Row(name, None, None, target, note=OVER_BUDGET)
            if not times[1]:
                at_least = True
                times[1].append(error.elapsed_ms)
        finally:
            self.stop_budget()
            gc.enable()
        medians = [
            statistics.median(taken[warm_up:] or taken) / divisor
            for taken, divisor in zip(times, num_requests, strict=True)
        ]
        return Row(name, *medians, target, at_least=at_least)


def _raise_over_budget(*_: object) -> None:
    raise OverBudget
