"""Eviction policies and checkpoint plans as text: those of a command line, and those of a user's file."""

import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

from .inference.contexts.cache.checkpoint_plan import CheckpointPlan
from .inference.contexts.cache.eviction import EVICTION_POLICIES, checked_policy
from .validation import instance, refused

PLAN_SYNTAX = (
    "fields of CheckpointPlan, separated by commas, over the defaults: decode=rolling|off|N, "
    "prefill_interval=N, marks=N+N; every=N is decode=N,prefill_interval=N"
)
"""The syntax of `parse_plan`, for a help text."""
_PLAN_NUMBERS = {
    "every": ("decode", "prefill_interval"),
    "decode": ("decode",),
    "prefill_interval": ("prefill_interval",),
}


def parse_plan(spec: str) -> CheckpointPlan:
    """The plan that `spec` names; `PLAN_SYNTAX` says how.

    Raises:
        ValueError: a part is unknown or named twice, or a value is not what the part accepts.
    """
    settings: dict[str, object] = {}
    for part in filter(None, (word.strip() for word in spec.split(","))):
        name, _, text = part.partition("=")
        name = name.strip()
        numbers = [int(number) if number.strip().isdecimal() else None for number in text.split("+")]
        value: object = numbers[0]
        names = _PLAN_NUMBERS.get(name, ()) if len(numbers) == 1 and value is not None else ()
        if name == "decode" and text in ("rolling", "off"):
            names, value = (name,), text
        elif name == "marks" and None not in numbers:
            names, value = (name,), tuple(numbers)
        if not names:
            raise ValueError(f"plan has {part!r}; accepted: {PLAN_SYNTAX}")
        for each in names:
            if each in settings:
                raise ValueError(f"plan is {spec!r}; accepted: {each} once")
            settings[each] = value
    return CheckpointPlan(**settings)  # type: ignore[arg-type]


def shown_plan(plan: CheckpointPlan) -> str:
    """The whole of `plan` as a spec that `parse_plan` reads."""
    words = []
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name == "marks":
            words += [f"{each.name}={'+'.join(map(str, value))}"] if value else []
        elif value is not None:
            words.append(f"{each.name}={value}")
    return ",".join(words)


def cache_changes(policy: str | None, plan: str | None) -> dict[str, Any]:
    """The fields of `InferenceConfig` that differ from their defaults; objects of a user's class are new.

    Args:
        policy: the name of an eviction policy, or "FILE.py:Class"; None for the default.
        plan: as `PLAN_SYNTAX` says, or "FILE.py:Class"; None for the default.

    Raises:
        ValueError: a name is unknown, or the file has no such class.
    """
    changes: dict[str, Any] = {}
    if policy is not None:
        own = _own("policy", policy)
        if own is None and policy not in EVICTION_POLICIES:
            names = ", ".join(map(repr, EVICTION_POLICIES))
            raise refused("policy", policy, f"one of {names}, or FILE.py:Class")
        changes["eviction_policy"] = checked_policy("policy", policy if own is None else own)
    if plan is not None:
        own = _own("plan", plan)
        chosen = parse_plan(plan) if own is None else own
        changes["checkpoint_plan"] = instance("plan", chosen, CheckpointPlan)
    return changes


def _own(what: str, text: str) -> object:
    """An object of the class that "FILE.py:Class" names; None for text without ".py:"."""
    file, found, name = text.rpartition(".py:")
    if not found:
        return None
    path = Path(f"{file}.py")
    if not path.is_file():
        raise refused(what, text, "FILE.py:Class with a file that is there")
    try:
        chosen = runpy.run_path(str(path)).get(name)
        if isinstance(chosen, type):
            return chosen()
    except Exception as error:
        raise ValueError(f"{what} is {text!r}, which raises {type(error).__name__}: {error}") from error
    raise refused(what, text, f"a class of {path}")
