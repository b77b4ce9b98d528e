"""A checkpoint plan as one word of a command line, for example "interval=1024,decode=off,no-tail"."""

from dataclasses import fields

from .checkpoint_plan import CheckpointPlan

PLAN_SYNTAX = (
    "parts of CheckpointPlan, separated by commas, over the defaults: tail, branch, chunk_ends (no-tail, "
    "no-branch, no-chunk_ends switch off), decode=rolling|off|N, prefill_interval=N, offsets_from_start=N+N, "
    "offsets_from_end=N+N, marks=N+N, max_states_per_path=N; every=N is decode=N,prefill_interval=N"
)
"""The syntax of `parse_plan`, for a help text."""
_SWITCHES = ("tail", "branch", "chunk_ends")
_NUMBERS = ("prefill_interval", "max_states_per_path")
_LISTS = ("offsets_from_start", "offsets_from_end", "marks")


def parse_plan(spec: str) -> CheckpointPlan:
    """The plan that `spec` names; `PLAN_SYNTAX` says how.

    Raises:
        ValueError: a part is unknown or named twice, or a value is not what the part takes.
    """
    settings: dict[str, object] = {}
    for part in filter(None, (word.strip() for word in spec.split(","))):
        for name, value in _part(part).items():
            if name in settings:
                raise ValueError(f"plan is {spec!r}; accepted: {name} once")
            settings[name] = value
    return CheckpointPlan(**settings)  # type: ignore[arg-type]


def _part(part: str) -> dict[str, object]:
    name, equals, text = part.partition("=")
    name = name.strip()
    if not equals and name.removeprefix("no-") in _SWITCHES:
        return {name.removeprefix("no-"): not name.startswith("no-")}
    if equals and name == "decode" and text in ("rolling", "off"):
        return {name: text}
    if equals and name == "every":
        return dict.fromkeys(("decode", "prefill_interval"), _number(part, text))
    if equals and name in ("decode", *_NUMBERS):
        return {name: _number(part, text)}
    if equals and name in _LISTS:
        return {name: tuple(_number(part, number) for number in text.split("+"))}
    raise ValueError(f"plan has {part!r}; accepted: {PLAN_SYNTAX}")


def _number(part: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"plan has {part!r}; accepted: {PLAN_SYNTAX}")
    return int(text)


def shown_plan(plan: CheckpointPlan) -> str:
    """The whole of `plan` as a spec that `parse_plan` reads."""
    words = []
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name in _SWITCHES:
            words.append(each.name if value else f"no-{each.name}")
        elif each.name in _LISTS:
            words += [f"{each.name}={'+'.join(map(str, value))}"] if value else []
        elif value is not None:
            words.append(f"{each.name}={value}")
    return ",".join(words)
