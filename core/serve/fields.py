"""The fields of a JSON object, read one by one, each with the sentence for a wrong value."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..validation import INT64_MAX, ints_within
from .errors import bad_field

_SHORT = reprlib.Repr(maxstring=60, maxlist=3, maxdict=3, maxlevel=2, maxlong=30, maxother=60)
_NUM_CHECKED = 2**16
"""Integers that are checked at once; other threads get their turn in between."""


def short(value: Any) -> str:
    """A JSON value as a few characters of JSON, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _SHORT.repr(value)


class Fields:
    """A JSON object whose fields are read by type. A field that is null counts as one that is missing.

    Args:
        values: the object.
        path: what messages write before a field's name, for example "messages[2].".
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, field: str) -> str:
        """The name of a field in messages."""
        return self.path + field

    def wrong(self, field: str, accepted: str) -> Exception:
        """The error of a field whose value is none of those `accepted`."""
        name = self.name(field)
        return bad_field(name, f"{name} is {short(self.values.get(field))}; accepted: {accepted}")

    def text(self, field: str, longest: int | None = None) -> str | None:
        """A string; one that is not empty and has at most `longest` characters where that is given."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        if longest is not None and not 1 <= len(value) <= longest:
            raise self.wrong(field, f"a string of 1 to {longest} characters")
        return value

    def boolean(self, field: str) -> bool:
        """True or false; false where the field is missing."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return bool(value)

    def integer(self, field: str, low: int, high: int = INT64_MAX) -> int | None:
        """An integer within [low, high]."""
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # JSON knows one kind of number
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bound = f" to {high}" if high != INT64_MAX else " or more"
            raise self.wrong(field, f"an integer, {low}{bound}")
        return value

    def number(self, field: str, low: float, high: float, above: bool = False) -> float | None:
        """A number within [low, high]; `above`: `low` itself is refused."""
        value = self.values.get(field)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise self.wrong(field, f"a number {'above' if above else 'from'} {low:g} up to {high:g}")
        return float(value)

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...] | None:
        """Token ids within the vocabulary."""
        value = self.values.get(field)
        return None if value is None else tuple(checked_ids(self.name(field), value, vocab_size - 1))

    def positions(self, field: str, most: int) -> tuple[int, ...]:
        """At most `most` positions of tokens."""
        value = self.values.get(field)
        if value is None:
            return ()
        if isinstance(value, list) and len(value) > most:
            raise bad_field(
                self.name(field), f"{self.name(field)} has {len(value)} entries; accepted: {most}"
            )
        return tuple(checked_ids(self.name(field), value, 2**31 - 1))

    def objects(self, field: str) -> list["Fields"] | None:
        """A list of objects."""
        values = self.values.get(field)
        if values is None:
            return None
        if not isinstance(values, list):
            raise self.wrong(field, "a list of objects")
        return [Fields({name: value}, self.path).object(name) for name, value in self._named(field, values)]

    def object(self, field: str) -> "Fields":
        """An object, which must be there."""
        value = self.values.get(field)
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Fields(value, f"{self.name(field)}.")

    def strings(self, field: str, most: int, longest: int) -> tuple[str, ...]:
        """A string, or a list of at most `most` strings; each of 1 to `longest` characters."""
        value = self.values.get(field)
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(field, f"a string, or a list of up to {most}")
        entries = [Fields({name: each}, self.path) for name, each in self._named(field, value)]
        texts = [entry.text(name, longest) for entry in entries for name in entry.values]
        if None in texts:
            raise self.wrong(field, f"a string, or a list of up to {most}")
        return tuple(text for text in texts if text is not None)

    @staticmethod
    def _named(field: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
        return [(f"{field}[{i}]", value) for i, value in enumerate(values)]

    def required(self, field: str) -> Any:
        """The value of a field that must be there."""
        value = self.values.get(field)
        if value is None:
            raise bad_field(self.name(field), f"{self.name(field)} is missing")
        return value


def checked_ids(name: str, value: Any, highest: int) -> list[int]:
    """`value` as a list of integers from 0 to `highest`; the error names the first other entry."""
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {short(value)}; accepted: a list of integers")
    parts = (value[first : first + _NUM_CHECKED] for first in range(0, len(value), _NUM_CHECKED))
    if all(ints_within(part, 0, highest) for part in parts):
        return value
    for i, each in enumerate(value):
        if type(each) is not int or not 0 <= each <= highest:
            message = f"{name}[{i}] is {short(each)}; accepted: an integer from 0 to {highest}"
            raise bad_field(name, message)
    return value


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether `value` is null or one of `neutral`; 0 is not false, and 1 is not true."""
    if value is None:
        return True
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
