"""The table of interrupts: how each public call fares when something happens at each of its lines.

    python -m tests.oracle.interrupt_report                          # every line; about half an hour
    python -m tests.oracle.interrupt_report --stride 20 --kinds KeyboardInterrupt drops
    python -m tests.oracle.interrupt_report --calls "step (decode)" pin

Places: lines of one call, or its calls of builtin functions, or its allocations of tensors. Tried: engines in
which something happened at one of them. Wrong: engines that were left wrong, by what was found first. Broken:
engines that asked for a reset.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .calls import CALLS, Call
from .interrupts import DROPS, ERRORS, Tally, drop_in_call, every, interrupt_call
from .places import Allocations, Monitor, Places, monitored

POLICIES = ("lru", "value")
SECOND = (1, 3, 7, 20, 60, 150)  # lines between two interrupts


def interrupts(error: str, call: Call, monitor: Monitor, stride: int) -> Tally:
    """At each line once: the user makes every second call again, and goes on without the others."""
    return once(ERRORS[error], call, monitor.lines, stride)


def behind_calls(call: Call, monitor: Monitor, stride: int) -> Tally:
    """Behind each call of a builtin function once."""
    return once(KeyboardInterrupt, call, monitor.returns, stride)


def once(error: type[BaseException], call: Call, places: Callable[[], Places], stride: int) -> Tally:
    tally = Tally()
    for again in (False, True):
        chosen = every(2 * stride, 1 + again * stride)
        tally.add_all(interrupt_call(call, error, places, chosen, again=again))
    return tally


def second_interrupts(call: Call, monitor: Monitor, stride: int) -> Tally:
    """At some lines twice: while the engine handles the first interrupt, or in the call made once more."""
    tally = Tally()
    for number, then in enumerate(SECOND):
        chosen = every(2 * len(SECOND) * stride, 1 + 2 * number * stride)
        tally.add_all(interrupt_call(call, KeyboardInterrupt, monitor.lines, chosen, again=True, then=then))
    return tally


def drops(call: Call, monitor: Monitor, stride: int) -> Tally:
    """At each line a stream goes, in one of the ways and under one of the policies."""
    tally, ways = Tally(), [(policy, drop) for policy in POLICIES for drop in DROPS.values()]
    for number, (policy, drop) in enumerate(ways):
        chosen = every(len(ways) * stride, 1 + number * stride)
        tally.add_all(drop_in_call(call, drop, monitor.lines, chosen, policy))
    return tally


def allocations(call: Call, monitor: Monitor, stride: int) -> Tally:
    """At each allocation of a tensor the memory is short, with both errors."""
    tally, chosen = Tally(), every(max(1, stride // 10))
    for again, error in ((False, torch.OutOfMemoryError), (True, MemoryError)):
        tally.add_all(interrupt_call(call, error, Allocations, chosen, again=again))
    return tally


Kind = Callable[[Call, Monitor, int], Tally]
KINDS: dict[str, Kind] = {
    **{error: partial(interrupts, error) for error in ("KeyboardInterrupt", "MemoryError", "AlarmError")},
    "behind calls": behind_calls,
    "two interrupts": second_interrupts,
    "drops": drops,
    "allocations": allocations,
}


def rows(kinds: list[str], calls: list[str], stride: int) -> Iterator[tuple[str, str, Tally]]:
    """Kind, call and what came of it."""
    with monitored() as monitor:
        for kind in kinds:
            for name in calls:
                if not CALLS[name].absent:
                    yield kind, name, KINDS[kind](CALLS[name], monitor, stride)


def line_of(name: str, tally: Tally) -> str:
    """One row of the table."""
    found = ", ".join(f"{count} {what}" for what, count in sorted(tally.outcomes.items()) if what != "right")
    num_broken = tally.outcomes["broken"]
    wrong = tally.num_wrong - num_broken
    return f"{name:36}{tally.num_places:8}{tally.outcomes.total():8}{wrong:8}{num_broken:8}  {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description="How each public call fares when it is interrupted.")
    parser.add_argument("--stride", type=int, default=1, help="try every so manieth line")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--calls", nargs="*", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--examples", action="store_true", help="say where, and what was found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, num_lines, kind, begin = Tally(), 0, "", time.perf_counter()
    for of_kind, name, tally in rows(options.kinds, options.calls, options.stride):
        if of_kind != kind:
            kind = of_kind
            print(f"\n{kind:36}{'places':>8}{'tried':>8}{'wrong':>8}{'broken':>8}")
        print(line_of(name, tally), flush=True)
        if options.examples:
            for outcome, examples in tally.examples.items():
                for example in examples:
                    print(f"    {outcome}: {example}")
        num_lines += tally.num_places
        total.add_all(tally)
    total.num_places = num_lines
    print(f"\n{line_of('in all', total)}  ({time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
