"""Something happens at every line of every public call: afterwards nothing may be wrong.

    python -m tests.oracle.interrupt_report       # the table: calls, lines, what was left wrong

An exception comes at a line (Control-C, an alarm, memory that runs out), or memory runs out where a tensor is
allocated, or somebody's last reference to a stream goes. The user goes on without a reset: he makes the call
again or does not, and all requests are served to the end. Their answers are held against
`oracle.toy_answers`.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mambaslots as ms
import torch

from .calls import TEXT, Call, Stage
from .ledger import LeftWrongError, check_objects, objects
from .places import Action, Places

# ---- what happens at a line


def raising(error: type[BaseException]) -> Callable[[Stage], Action]:
    def action(stage: Stage) -> Action:
        def interrupt() -> None:
            stage.interrupted = True
            raise error("at a line")

        return interrupt

    return action


def dropping(stage: Stage) -> Action:
    """The last reference to the bystanders' streams goes."""
    return stage.bystanders.clear


def dropping_in_cycle(stage: Stage) -> Action:
    """The streams are in a cycle of references, and garbage is collected at the line."""

    def drop() -> None:
        cycle: list[Any] = [*stage.bystanders]
        cycle.append(cycle)
        stage.bystanders.clear()
        del cycle
        gc.collect()

    return drop


def dropping_elsewhere(stage: Stage) -> Action:
    """Another thread has the last reference, and drops it while the line waits."""

    def drop() -> None:
        thread = threading.Thread(target=stage.bystanders.clear, daemon=True)
        thread.start()
        thread.join(10)
        if thread.is_alive():
            raise LeftWrongError("hang", "dropping a stream waits for the engine")

    return drop


class AlarmError(Exception):
    """What a handler of a signal raises."""


LONG_ANSWER = 30  # tokens of a stream that does not end in any call
DROPS = {"dropped": dropping, "in a cycle": dropping_in_cycle, "in a thread": dropping_elsewhere}
ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "AlarmError": AlarmError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


# ---- one call, and what comes after it


NOT_REACHED = "not reached"


@dataclass
class Tally:
    """What came of one call.

    Attributes:
        num_places: places of the call, counted where nothing happens.
        outcomes: "right", "broken", or in which way an engine was left wrong -> how often. "not reached"
            where the call had fewer places than before.
        examples: of each way the first few: at which place, and what was found.
    """

    num_places: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, where: str, text: str = "") -> None:
        self.outcomes[outcome] += 1
        if outcome not in ("right", NOT_REACHED):
            examples = self.examples.setdefault(outcome, [])
            if len(examples) < 5:
                examples.append(f"{where}: {text}")

    @property
    def num_wrong(self) -> int:
        return self.outcomes.total() - self.outcomes["right"] - self.outcomes[NOT_REACHED]

    def add_all(self, other: "Tally") -> None:
        """Count what else came of the same call."""
        self.num_places = max(self.num_places, other.num_places)
        self.outcomes.update(other.outcomes)
        for outcome, examples in other.examples.items():
            self.examples.setdefault(outcome, []).extend(examples)


def outcome_of(error: BaseException) -> str:
    """The word for an engine that raises `error` when its user goes on."""
    if isinstance(error, LeftWrongError):
        return error.kind
    if isinstance(error, RuntimeError) and "reset()" in str(error):
        return "broken"
    return type(error).__name__


def check_forgotten(stage: Stage) -> None:
    """Nothing that was cached can be resumed. Requests under way may cache the same text anew later."""
    chain = ms.PrefixHashChain(stage.engine.config.block_size_tokens)
    chain.extend_to(TEXT[:22])
    num_tokens = stage.engine.context.prefix_cache.resumable_tokens(chain)
    if num_tokens:
        raise LeftWrongError("stale", f"{num_tokens} tokens could be resumed of what was forgotten")


def go_on(stage: Stage, call: Call, again: bool, places: Places | None = None) -> None:
    """What a user does behind a call; raises what is wrong.

    Args:
        again: whether he makes the call once more.
        places: where something may still happen in the call that is made once more; he then makes it a third
            time.
    """
    if not call.mends:
        stage.engine.check_usable("this")
        stage.check_integrity()
    if again:
        if places is not None and places.actions:
            with suppressed(), places.watched():
                call.make(stage)
        call.make(stage)
        if call.forgets:
            check_forgotten(stage)
    call.go_on(stage)
    stage.check_integrity()
    stage.finish()
    stage.bystanders.clear()  # a stream that has been at its end for long
    stage.probe()
    stage.unpin_all(stage.interrupted)
    stage.check_idle()
    stage.forget_all()


@contextmanager
def suppressed() -> Iterator[None]:
    """What a call raises because of what happened in it."""
    try:
        yield
    except tuple(ERRORS.values()):
        pass
    except Exception as error:  # another one in its place: a bad argument, because comparing it failed
        if not isinstance(error.__cause__, tuple(ERRORS.values())):
            raise


class Trial:
    """Makes one call over and over, each time in a new engine."""

    def __init__(
        self, call: Call, new_places: Callable[[], Places], bystanders: bool = False, **settings: Any
    ) -> None:
        self._call = call
        self._settings = call.settings | settings
        self._new_places = new_places
        self.lengths: list[int | None] = [None]
        if bystanders:
            self.lengths = [LONG_ANSWER, self._length_that_ends_in_the_call()]
        self._left: dict[int | None, Counter[str]] = {}

    def _stage(self, length: int | None) -> Stage:
        stage = Stage(length, **self._settings)
        self._call.prepare(stage)
        return stage

    def _length_that_ends_in_the_call(self) -> int:
        stage = self._stage(LONG_ANSWER)
        (stream,) = stage.bystanders
        done = stage.engine.computed_prefix(stream.request_id)
        return max(1, len(done) - 18 + 2)

    def num_places(self, length: int | None) -> int:
        """Places of the call, counted where nothing happens. All that comes after it must be right."""
        stage = self._stage(length)
        places = self._new_places()
        with places.watched():
            self._call.make(stage)
        go_on(stage, self._call, again=False)
        self._left[length] = objects()
        return places.num_passed

    def run(
        self,
        where: list[int],
        action: Callable[[Stage], Action],
        again: bool,
        length: int | None = None,
    ) -> tuple[str, str]:
        """Do `action` at the places `where` of the call; the outcome, and what was found.

        Places behind the last one of the call count on in the call that follows.
        """
        text = ""
        try:
            reached = self._run(where, action, again or self._call.must_repeat, length)
            outcome = "right" if reached else NOT_REACHED
        except Exception as error:
            outcome, text = outcome_of(error), f"{type(error).__name__}: {error}"[:200]
            error.__traceback__ = None
        return outcome, text

    def _run(
        self, where: list[int], action: Callable[[Stage], Action], again: bool, length: int | None
    ) -> bool:
        stage = self._stage(length)
        places = self._new_places()
        places.actions = dict.fromkeys(where, action(stage))
        with suppressed(), places.watched():
            self._call.make(stage)
        reached = len(places.actions) < len(where)
        go_on(stage, self._call, again, places if len(where) > 1 else None)
        check_objects(self._left[length])
        return reached


Choice = Callable[[int], range]
"""From how many places a call has: at which of them something happens."""


def every(stride: int = 1, first: int = 1) -> Choice:
    """Each place whose number is `first` modulo `stride`."""
    return lambda num_places: range(first, num_places + 1, stride)


def some(count: int, first: int = 1) -> Choice:
    """About `count` places, equally far apart."""
    return lambda num_places: range(
        min(first, max(1, num_places)), num_places + 1, max(1, num_places // count)
    )


def interrupt_call(
    call: Call,
    error: type[BaseException],
    new_places: Callable[[], Places],
    choice: Choice,
    *,
    again: bool,
    then: int = 0,
    toy: str = "one sum",
    watched: bool = False,
) -> Tally:
    """Raise `error` at chosen places of a call, each time in a new engine.

    Args:
        again: whether the user makes the call once more.
        then: how many places later the error is raised a second time; 0 for once.
        toy: the kind of model, one of `TOYS`.
        watched: whether a monitor watches the engine.
    """
    trial, tally = Trial(call, new_places, toy=toy, watched=watched), Tally()
    tally.num_places = trial.num_places(None)
    for number in choice(tally.num_places):
        where = [number, number + then] if then else [number]
        outcome, text = trial.run(where, raising(error), again)
        tally.add(outcome, f"place {number}", text)
    return tally


def drop_in_call(
    call: Call,
    drop: Callable[[Stage], Action],
    new_places: Callable[[], Places],
    choice: Choice,
    policy: str,
    toy: str = "one sum",
) -> Tally:
    """Drop a stream at chosen places of a call: in turn one that runs on, and one that ends in the call.

    `policy`: the cache's eviction policy. `toy`: the kind of model, one of `TOYS`.
    """
    settings = {"eviction_policy": policy, "toy": toy}
    trial, tally = Trial(call, new_places, bystanders=True, **settings), Tally()
    for number, length in enumerate(trial.lengths):
        num_places = trial.num_places(length)
        tally.num_places = max(num_places, tally.num_places)
        for place in choice(num_places)[number :: len(trial.lengths)]:
            outcome, text = trial.run([place], drop, False, length)
            tally.add(outcome, f"place {place}, a stream of {length} tokens", text)
    return tally
