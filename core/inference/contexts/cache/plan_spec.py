"""A checkpoint plan as one word of a command line, for example "interval=1024,decode=off,no-tail"."""

from dataclasses import fields

from .checkpoint_plan import CheckpointPlan

_PARTS = (
    "parts of CheckpointPlan, separated by commas, over the defaults: tail, branch, chunk_ends (no-tail, "
    "no-branch, no-chunk_ends switch off), learned, decode=rolling|off|N, prefill_interval=N, "
    "offsets_from_start=N+N, offsets_from_end=N+N, marks=N+N"
)
_EVERY = "every=N is decode=N,prefill_interval=N"
PLAN_SYNTAX = f"{_PARTS}, max_states_per_path=N; {_EVERY}"
"""The syntax of `parse_plan`, for a help text."""
UNLIMITED_PLAN_SYNTAX = f"{_PARTS}; {_EVERY}"
"""The syntax of `parse_plan` without a limit of states per path."""
_SWITCHES = ("tail", "branch", "chunk_ends", "learned")
_NUMBERS = ("prefill_interval", "max_states_per_path")
_LISTS = ("offsets_from_start", "offsets_from_end", "marks")


def parse_plan(spec: str, path_limit: bool = True) -> CheckpointPlan:
    """The plan that `spec` names; `PLAN_SYNTAX` says how.

    Args:
        spec: parts of a plan.
        path_limit: whether max_states_per_path is a part; if not, `UNLIMITED_PLAN_SYNTAX` is accepted.

    Raises:
        ValueError: a part is unknown or named twice, or a value is not what the part takes.
    """
    settings: dict[str, object] = {}
    for part in filter(None, (word.strip() for word in spec.split(","))):
        settings_of_part = _part(part)
        if settings_of_part is None or (not path_limit and "max_states_per_path" in settings_of_part):
            syntax = PLAN_SYNTAX if path_limit else UNLIMITED_PLAN_SYNTAX
            raise ValueError(f"plan has {part!r}; accepted: {syntax}")
        for name, value in settings_of_part.items():
            if name in settings:
                raise ValueError(f"plan is {spec!r}; accepted: {name} once")
            settings[name] = value
    return CheckpointPlan(**settings)  # type: ignore[arg-type]


def _part(part: str) -> dict[str, object] | None:
    """The settings that a part names; None for what is no part."""
    name, equals, text = part.partition("=")
    name = name.strip()
    if not equals and name.removeprefix("no-") in _SWITCHES:
        return {name.removeprefix("no-"): not name.startswith("no-")}
    if equals and name == "decode" and text in ("rolling", "off"):
        return {name: text}
    numbers = [int(number) if number.strip().isdecimal() else None for number in text.split("+")]
    if not equals or None in numbers:
        return None
    if name in _LISTS:
        return {name: tuple(numbers)}
    if len(numbers) == 1 and name == "every":
        return dict.fromkeys(("decode", "prefill_interval"), numbers[0])
    if len(numbers) == 1 and name in ("decode", *_NUMBERS):
        return {name: numbers[0]}
    return None


def shown_plan(plan: CheckpointPlan) -> str:
    """The whole of `plan` as a spec that `parse_plan` reads."""
    words = []
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name in _SWITCHES:
            words += [each.name] if value else [f"no-{each.name}"] if each.default else []
        elif each.name in _LISTS:
            words += [f"{each.name}={'+'.join(map(str, value))}"] if value else []
        elif value is not None:
            words.append(f"{each.name}={value}")
    return ",".join(words)
