"""Dataclasses in one line, without the tokens that they hold."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

_LONGEST = 8
"""Items of a tuple or a mapping that are written out."""


def brief_repr(value: Any) -> str:
    """The `repr` of a dataclass, in which a list is its number of items: they may be a user's tokens.

    Counts of zero in a mapping, and fields that are None or empty, are left out. A tuple is its number of
    items, unless it has few; a mapping, unless it has few entries and all are counts.
    """
    named = ((field.name, getattr(value, field.name)) for field in fields(value) if field.repr)
    shown = ", ".join(f"{name}={_brief(item)}" for name, item in named if not _is_nothing(item))
    return f"{type(value).__name__}({shown})"


def _is_nothing(item: Any) -> bool:
    return item is None or (isinstance(item, (list, tuple, Mapping)) and not item)


def _brief(item: Any) -> str:
    if isinstance(item, list) or (isinstance(item, tuple) and len(item) > _LONGEST):
        return f"<{len(item)} item{'s' * (len(item) != 1)}>"
    if isinstance(item, Mapping):
        item = {key: entry for key, entry in item.items() if entry != 0}
        if len(item) > _LONGEST or not all(isinstance(entry, int) for entry in item.values()):
            return f"<{len(item)} {'entry' if len(item) == 1 else 'entries'}>"
    if isinstance(item, float):
        return f"{item:.4g}"
    return repr(item)
