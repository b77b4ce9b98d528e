"""Whatever happens at whatever line of a public call: no token is wrong or lost, and nothing is left.

`make test` tries some lines of each call, `make test-long` all of them; `python -m
tests.oracle.interrupt_report` prints what came of it. Each call meets another kind of state in each test.
"""

from collections.abc import Iterator

import pytest
import torch
from oracle.budget import is_quick
from oracle.calls import CALLS, Stage
from oracle.interrupts import (
    DROPS,
    ERRORS,
    Choice,
    Tally,
    drop_in_call,
    every,
    interrupt_call,
    some,
)
from oracle.ledger import check_objects, objects
from oracle.places import Allocations, Monitor, monitored
from oracle.toy_lm import TOYS

NAMES = [name for name, call in CALLS.items() if not call.absent]
ALL = "every place"
extents = pytest.mark.parametrize("extent", ["some places", pytest.param(ALL, marks=pytest.mark.long)])
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def monitor() -> Iterator[Monitor]:
    with monitored() as monitor:
        yield monitor


def assert_right(tally: Tally) -> None:
    """Something happened, and afterwards all was right."""
    print(f"{tally.num_places} places, {dict(tally.outcomes)}")
    assert not tally.num_wrong, f"{dict(tally.outcomes)}: {tally.examples}"
    assert tally.outcomes["right"] > tally.outcomes.total() * 0.9, "hardly anything happened"


def chosen(extent: str, count: int, number: int, ways: int) -> Choice:
    """Which places the way with this number takes, of a test that goes through so many `ways`."""
    return every(ways, 1 + number) if extent == ALL else some(count, 3 + 17 * number)


def toy_for(name: str, test: int) -> str:
    """The kind of model that a test, by its number, makes the call of this name on: each in turn."""
    return list(TOYS)[(NAMES.index(name) + test) % len(TOYS)]


@extents
@names
def test_an_exception_at_any_line_leaves_nothing_wrong(name: str, extent: str, monitor: Monitor) -> None:
    tally = Tally()
    ways = (False, True)
    if is_quick():  # each way for every other call
        ways = ways[NAMES.index(name) % 2 :][:1]
    for again in ways:
        choice, toy = chosen(extent, 2, int(again), 2), toy_for(name, 0)
        tally.add_all(
            interrupt_call(CALLS[name], KeyboardInterrupt, monitor.lines, choice, again=again, toy=toy)
        )
    assert_right(tally)


@pytest.mark.parametrize("name", ["next(stream)", "async for"])
def test_a_token_is_not_lost_where_a_stream_returns_it(name: str, monitor: Monitor) -> None:
    """At the last lines of the call."""
    last = interrupt_call(
        CALLS[name],
        KeyboardInterrupt,
        monitor.lines,
        lambda places: range(places - 5, places + 1),
        again=True,
    )
    assert_right(last)


@extents
@names
def test_an_exception_behind_any_call_leaves_nothing_wrong(name: str, extent: str, monitor: Monitor) -> None:
    """A builtin function has returned, and its value is lost."""
    choice = every() if extent == ALL else some(1, 7)
    toy = toy_for(name, 1)
    assert_right(interrupt_call(CALLS[name], KeyboardInterrupt, monitor.returns, choice, again=True, toy=toy))


@extents
@names
def test_an_error_at_any_line_leaves_nothing_wrong(name: str, extent: str, monitor: Monitor) -> None:
    """Unlike Control-C, these are caught by `except Exception`."""
    tally = Tally()
    errors = ["MemoryError", "AlarmError"]
    for number, error in enumerate(errors if extent == ALL else errors[NAMES.index(name) % 2 :][:1]):
        choice = every(6, 1 + 3 * number) if extent == ALL else some(1, 11)
        toy = toy_for(name, 2)
        tally.add_all(interrupt_call(CALLS[name], ERRORS[error], monitor.lines, choice, again=True, toy=toy))
    assert_right(tally)


@extents
@names
def test_an_exception_while_another_one_is_handled_leaves_nothing_wrong(
    name: str, extent: str, monitor: Monitor
) -> None:
    tally, call = Tally(), CALLS[name]
    for number, then in enumerate((1, 4, 11, 35, 120) if extent == ALL else (9,)):
        choice = every(10, 1 + 2 * number) if extent == ALL else some(2, 40)
        tally.add_all(
            interrupt_call(
                call, KeyboardInterrupt, monitor.lines, choice, again=True, then=then, toy=toy_for(name, 3)
            )
        )
    assert_right(tally)


@extents
@names
def test_a_stream_that_goes_at_any_line_leaves_nothing(name: str, extent: str, monitor: Monitor) -> None:
    tally, ways = Tally(), [(policy, drop) for policy in ("lru", "value") for drop in DROPS.values()]
    for number, (policy, drop) in enumerate(ways):
        if extent == ALL or number == NAMES.index(name) % len(ways):
            choice = chosen(extent, 2, number, len(ways))
            toy = toy_for(name, 4)
            tally.add_all(drop_in_call(CALLS[name], drop, monitor.lines, choice, policy, toy))
    assert_right(tally)


@extents
@pytest.mark.parametrize("name", ["cancel (running)", "stream.close", "step (ends requests)", "reset"])
def test_a_monitor_holds_no_request_that_has_ended(name: str, extent: str, monitor: Monitor) -> None:
    """An exception comes at the monitor's lines, too."""
    choice = every() if extent == ALL else some(6, 5)
    assert_right(
        interrupt_call(CALLS[name], KeyboardInterrupt, monitor.lines, choice, again=False, watched=True)
    )


@extents
@pytest.mark.parametrize("name", [*(n for n in NAMES if n.startswith("step")), "suspend", "resume", "reset"])
@pytest.mark.usefixtures("monitor")
def test_memory_that_runs_out_at_any_allocation_leaves_nothing_wrong(name: str, extent: str) -> None:
    tally = Tally()
    for number, error in enumerate((torch.OutOfMemoryError, MemoryError)):
        choice = every() if extent == ALL else some(2, 1 + number)
        toy, again = toy_for(name, 1 + number), bool(number)
        tally.add_all(interrupt_call(CALLS[name], error, Allocations, choice, again=again, toy=toy))
    if tally.num_places:
        assert_right(tally)


@pytest.mark.usefixtures("monitor")
def test_an_engine_that_cannot_be_built_leaves_nothing() -> None:
    counted, before = Allocations(), objects()
    with counted.watched():
        Stage()
    for number in range(1, counted.num_passed + 1):
        places = Allocations()
        places.actions[number] = out_of_memory
        with pytest.raises((torch.OutOfMemoryError, ValueError)), places.watched():  # or: no such device
            Stage()
    check_objects(before)
    assert counted.num_passed


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("at an allocation")
