"""Eviction policies and checkpoint plans as text: those of a command line, and those of a user's file."""

import re
import runpy
from collections.abc import Callable
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
_PLAN_VALUES = {
    "decode": r"rolling|off|\d+",
    "prefill_interval": r"\d+",
    "marks": r"\d+(\s*\+\s*\d+)*",
    "every": r"\d+",
}


def parse_plan(spec: str) -> CheckpointPlan:
    """The plan that `spec` names; `PLAN_SYNTAX` says how.

    Raises:
        ValueError: a part is unknown or named twice, or a value is not what the part accepts.
    """
    settings: dict[str, object] = {}
    for part in filter(None, (word.strip() for word in spec.split(","))):
        name, _, text = (word.strip() for word in part.partition("="))
        if name not in _PLAN_VALUES or not re.fullmatch(_PLAN_VALUES[name], text):
            raise ValueError(f"plan has {part!r}; accepted: {PLAN_SYNTAX}")
        value: object = int(text) if text.isdecimal() else text
        if name == "marks":
            value = tuple(map(int, text.split("+")))
        for each in ("decode", "prefill_interval") if name == "every" else (name,):
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
            value = "+".join(map(str, value)) or None
        if value is not None:
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
        changes["eviction_policy"] = checked_policy("policy", _chosen("policy", policy, _named_policy))
    if plan is not None:
        changes["checkpoint_plan"] = instance("plan", _chosen("plan", plan, parse_plan), CheckpointPlan)
    return changes


def _named_policy(name: str) -> str:
    if name not in EVICTION_POLICIES:
        names = ", ".join(map(repr, EVICTION_POLICIES))
        raise refused("policy", name, f"one of {names}, or FILE.py:Class")
    return name


def _chosen(what: str, text: str, named: Callable[[str], object]) -> object:
    """An object of the class that "FILE.py:Class" names; `named` of other texts."""
    file, found, name = text.rpartition(".py:")
    if not found:
        return named(text)
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
