"""Argument checks shared by the public constructors and calls.

Every message names the argument, the value it got and what is accepted.
"""

import operator
import sys
from typing import Any

import torch


def integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None, also: str = ""
) -> int:
    """`value` as an int within [minimum, maximum], or a ValueError; bools and floats are no integers.

    `also` names what else the caller accepts.
    """
    number = _index(value)
    low, high = minimum, maximum
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        bounds = {
            (False, False): "an integer",
            (True, False): f"an integer >= {low}",
            (False, True): f"an integer <= {high}",
            (True, True): f"an integer from {low} to {high}",
        }[low is not None, high is not None]
        raise ValueError(f"{name} is {value!r}; accepted: {also + ', or ' if also else ''}{bounds}")
    return number


def optional_integer(name: str, value: object, minimum: int | None = None) -> int | None:
    return None if value is None else integer(name, value, minimum)


def real(name: str, value: object, minimum: float, maximum: float = float("inf")) -> float:
    """`value` as a finite float within [minimum, maximum], or a ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) <= _LARGEST_FLOAT or value != value else _INFINITY
        if minimum <= number <= maximum and number != float("inf"):  # NaN fails the comparison
            return number
    limit = f"from {minimum} to {maximum}" if maximum != float("inf") else f">= {minimum}"
    raise ValueError(f"{name} is {value!r}; accepted: a finite number {limit}")


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; accepted: True or False")
    return value


def one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} is {value!r}; accepted: one of {', '.join(map(repr, accepted))}")
    return value


def integers(name: str, values: object, minimum: int | None = None, maximum: int | None = None) -> list[int]:
    """A list of ints within [minimum, maximum] from any iterable or 1-D integer tensor, or a ValueError."""
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype.is_floating_point or values.dtype in _NOT_INTEGER:
            raise ValueError(
                f"{name} is a {values.dtype} tensor of shape {tuple(values.shape)}; "
                "accepted: a 1-D integer tensor"
            )
        values = values.tolist()
    result = _listed(values)
    if result is None:
        raise ValueError(f"{name} is {values!r}; accepted: a list of integers or a 1-D integer tensor")
    low = -_INFINITY if minimum is None else minimum
    high = _INFINITY if maximum is None else maximum
    if all(type(value) is int and low <= value <= high for value in result):
        return result
    return [integer(f"{name}[{i}]", value, minimum, maximum) for i, value in enumerate(result)]


def float_dtype(name: str, value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(f"{name} is {value!r}; accepted: a floating-point torch.dtype")
    return value


_INFINITY = float("inf")
_LARGEST_FLOAT = sys.float_info.max
_NOT_INTEGER = (torch.bool, torch.complex64, torch.complex128)


def _listed(values: Any) -> list[Any] | None:
    try:
        return None if isinstance(values, (str, bytes)) else list(values)
    except TypeError:
        return None


def _index(value: object) -> int | None:
    if isinstance(value, (bool, torch.Tensor)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
