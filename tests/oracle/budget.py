"""How much of a test `make test` runs, and what is left to `make test-long`.

Cases: of a test marked `pytest.mark.sampled`, `make test` runs so many that each value of each parameter
occurs in one of them. `sampled(seed=4)` wants only the first four values of `seed`, and
`sampled(name=("a", "b"))` only these two of `name`. All other cases are marked `long`.

Kinds: of the cases of a test that asks for the fixture `kind` of model, `make test` runs one of those that
differ in nothing else: every other one on the mix, the others on one kind in turn, by the name of the case.

Examples: hypothesis draws as many as its profile says, "quick" or "long". `costly()` are settings for a test
whose examples take tenths of a second, `dear()` for one whose examples take longer.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from oracle.model_kinds import MIX

# Examples of a test, and steps of one example of a state machine.
PROFILES = {"quick": (60, 25), "long": (600, 50)}
for _name, (_examples, _steps) in PROFILES.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        stateful_step_count=_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def costly() -> settings:
    return settings(max_examples=settings.default.max_examples // 10)


def dear() -> settings:
    return settings(max_examples=settings.default.max_examples // 30)


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark `long` what the samples of the tests marked `sampled` leave out, and all but one kind of model.

    Cases with and without the mark `gpu` are sampled apart: a machine runs the ones or the others.
    """
    items = _on_one_kind(items)
    tests: defaultdict[tuple[str, bool], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("sampled"):
            on_gpu = item.get_closest_marker("gpu") is not None
            tests[item.nodeid.partition("[")[0], on_gpu].append(item)
    for cases in tests.values():
        wanted = _wanted(cases)
        chosen = sample([_ids(case) for case in wanted])
        for case in cases:
            if case not in wanted or _ids(case) not in chosen:
                case.add_marker("long")


def _on_one_kind(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items, without those that repeat another one with another kind of model: these are `long`."""
    chosen: list[pytest.Item] = []
    repeated: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # a case's name without its kind
    for item in items:
        kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
        if kind is None or kind not in item.callspec._idlist:
            chosen.append(item)
        else:
            name = " ".join([item.nodeid.partition("[")[0], *sorted(f"{i} {name}" for i, name in _ids(item))])
            repeated[name][kind] = item
    for name, by_kind in repeated.items():
        others = [kind for kind in by_kind if kind != MIX]
        order = [MIX] * (MIX in by_kind) * max(1, len(others)) + others
        wanted = order[crc32(name.encode()) % len(order)]
        for kind, item in by_kind.items():
            if kind != wanted:
                item.add_marker("long")
        chosen.append(by_kind[wanted])
    return chosen


def sample(cases: list[set[tuple[int, str]]]) -> list[set[tuple[int, str]]]:
    """Cases that together have each value of all `cases`, each the first with most values still to come."""
    missing = set[tuple[int, str]]().union(*cases)
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda values: len(values & missing)))
        missing -= chosen[-1]
    return chosen


def _ids(case: Any) -> set[tuple[int, str]]:
    """The ids of a case's values, one of each parametrisation, and their places in the case's name.

    Without the kind of model: of each case only one is left.
    """
    ids = list(case.callspec._idlist)
    if case.callspec.params.get("kind") in ids:
        ids.remove(case.callspec.params["kind"])
    return set(enumerate(ids))


def _wanted(cases: list[Any]) -> list[Any]:
    """The cases of a test that are not `long` by themselves, and have the values that `sampled` names.

    A name that no case has restricts nothing: a test is never left out because one of its values was renamed.
    """
    wanted = [case for case in cases if not case.get_closest_marker("long")]
    for name, values in cases[0].get_closest_marker("sampled").kwargs.items():
        if isinstance(values, int):
            known = dict.fromkeys(id(case.callspec.params[name]) for case in cases)
            first = list(known)[:values]
            named = [case for case in wanted if id(case.callspec.params[name]) in first]
        else:
            named = [case for case in wanted if case.callspec.params[name] in values]
        wanted = named or wanted
    return wanted
