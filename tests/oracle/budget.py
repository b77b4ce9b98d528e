"""How much of a test `make test` runs, and what is left to `make test-long`.

Cases: of a test marked `pytest.mark.sampled`, `make test` runs so many that each value of each parameter
occurs in one of them; of a test of a disaster it runs one of these. `sampled(seed=4)` wants only the first
four values of `seed`, and `sampled(name=("a", "b"))` only these two of `name`. `sampled(2)`, the mark of a
suite that runs on other engines as well, leaves a test no more than two. All other cases are marked `long`.

Kinds: of the cases of a test that asks for the fixture `kind` of model, `make test` runs one of those that
differ in nothing else: a third on the mix, the others on one kind in turn, by the name of the case. Models of
transformers, which are dear, are no kinds in turn: tests of their own name them.
`in_turn("mode")` does the same for the fixture `mode`, of which no value is preferred.

Examples: hypothesis draws as many as its profile says, "quick" or "long". `costly()` are settings for a test
whose examples take tenths of a second, `dear()` for one whose examples take longer.

Loops: `thinned(values, every=3)` are all values in the profile "long", and each third one in "quick".
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, settings
from oracle.model_kinds import MIX, OF_TRANSFORMERS


class Profile(NamedTuple):
    """Examples of a test, of a costly and of a dear one, and steps of one example of a state machine."""

    examples: int
    costly: int
    dear: int
    steps: int


PROFILES = {"quick": Profile(4, 3, 2, 6), "long": Profile(600, 60, 20, 50)}
for _name, _profile in PROFILES.items():
    settings.register_profile(
        _name,
        max_examples=_profile.examples,
        stateful_step_count=_profile.steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def profile() -> Profile:
    return PROFILES[settings.get_current_profile_name()]


def costly() -> settings:
    return settings(max_examples=profile().costly)


def dear() -> settings:
    return settings(max_examples=profile().dear)


def example_or_dear() -> settings:
    """Settings for a dear test that has an `@example`: quickly it runs that one alone."""
    return settings(dear(), phases=[Phase.explicit]) if is_quick() else dear()


def is_quick() -> bool:
    return settings.get_current_profile_name() == "quick"


def thinned[T](values: Sequence[T], every: int) -> Sequence[T]:
    return values[::every] if is_quick() else values


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark `long` what the samples of the tests marked `sampled` leave out, and all but one kind of model.

    Cases with and without the mark `gpu` are sampled apart: a machine runs the ones or the others.
    """
    items = _in_turn(items, "kind", MIX)
    for name in dict.fromkeys(name for item in items for name in _in_turn_names(item)):
        items = _in_turn(items, name, None)
    tests: defaultdict[tuple[str, bool], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("sampled"):
            on_gpu = item.get_closest_marker("gpu") is not None
            tests[item.nodeid.partition("[")[0], on_gpu].append(item)
    for cases in tests.values():
        wanted = _wanted(cases)
        # What runs in turn is no value to be sampled: of each case only one is left.
        ids = {id(case): _ids(case, ["kind", *_in_turn_names(case)]) for case in cases}
        chosen = sample([ids[id(case)] for case in wanted])
        most = [number for mark in cases[0].iter_markers("sampled") for number in mark.args]
        most += [1] * (cases[0].get_closest_marker("disaster") is not None)
        if most and len(chosen) > min(most):
            start = crc32(cases[0].nodeid.partition("[")[0].encode()) % len(chosen)
            chosen = (chosen + chosen)[start : start + min(most)]
        for case in cases:
            if case not in wanted or (ids[id(case)] and ids[id(case)] not in chosen):
                case.add_marker("long")


def _in_turn(items: Iterable[pytest.Item], fixture: str, preferred: str | None) -> list[pytest.Item]:
    """The items, but only one of those that differ in this fixture alone: the others are `long`.

    Of kinds, each may have been left another one.
    """
    chosen: list[pytest.Item] = []
    repeated: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # a case's name without the value
    for item in items:
        value = item.callspec.params.get(fixture) if hasattr(item, "callspec") else None
        asked = preferred is not None or fixture in _in_turn_names(item)
        if not asked or value is None or value not in item.callspec._idlist:
            chosen.append(item)
        else:
            ids = sorted(f"{i} {name}" for i, name in _ids(item, ["kind", fixture]))
            repeated[" ".join([item.nodeid.partition("[")[0], *ids])][value] = item
    for name, by_value in repeated.items():
        ours = [value for value in by_value if value not in OF_TRANSFORMERS and value != preferred]
        order = [preferred] * (preferred in by_value) * max(1, len(ours)) + ours + ours or list(by_value)
        wanted = order[crc32(name.encode()) % len(order)]
        for value, item in by_value.items():
            if value != wanted:
                item.add_marker("long")
        chosen.append(by_value[wanted])
    return chosen


def _in_turn_names(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("in_turn") for name in mark.args]


def sample(cases: list[set[tuple[int, str]]]) -> list[set[tuple[int, str]]]:
    """Cases that together have each value of all `cases`, each the first with most values still to come."""
    missing = set[tuple[int, str]]().union(*cases)
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda values: len(values & missing)))
        missing -= chosen[-1]
    return chosen


def _ids(case: Any, without: Iterable[str]) -> set[tuple[int, str]]:
    """The ids of a case's values, one of each parametrisation, and their places in the case's name.

    `without`: fixtures whose values are left out.
    """
    ids = list(case.callspec._idlist)
    for name in without:
        if case.callspec.params.get(name) in ids:
            ids.remove(case.callspec.params[name])
    return set(enumerate(ids))


def _wanted(cases: list[Any]) -> list[Any]:
    """The cases of a test that are not `long` by themselves, and have the values that `sampled` names.

    A name or a value that no case has restricts nothing: a test is never left out because one was renamed.
    """
    wanted = [case for case in cases if not case.get_closest_marker("long")]
    for name, values in cases[0].get_closest_marker("sampled").kwargs.items():
        if isinstance(values, int):
            known = dict.fromkeys(id(case.callspec.params.get(name)) for case in cases)
            first = list(known)[:values]
            named = [case for case in wanted if id(case.callspec.params.get(name)) in first]
        else:
            named = [case for case in wanted if case.callspec.params.get(name) in values]
        wanted = named or wanted
    return wanted
