"""Argument checks shared by the public constructors and calls.

Every message names the argument, the value and what is accepted. This module does not need torch, so that
policies can check their settings without torch. `tensor_validation` checks tensors, dtypes and devices.
"""

import operator
import sys
from collections.abc import Mapping, MappingView, Sequence, Set
from operator import countOf
from typing import Any, TypeGuard

import numpy as np

INT32_MAX = 2**31 - 1
"""Largest number of blocks, slots, rows or tokens: hosts and kernels index with int32 tensors."""
INT64_MAX = 2**63 - 1
LONGEST_TIMEOUT_S = 1e6
"""Twelve days. No timer overflows at this timeout."""


def integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None, also: str = ""
) -> int:
    """`value` as an int within [minimum, maximum], or a ValueError. Bools and floats are rejected.

    `also`: what else the caller accepts, for the message.
    """
    low, high = minimum, maximum
    number = value if type(value) is int else _index(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        bounds = {
            (False, False): "an integer",
            (True, False): f"an integer >= {low}",
            (False, True): f"an integer <= {high}",
            (True, True): f"an integer from {low} to {high}",
        }[low is not None, high is not None]
        raise ValueError(f"{name} is {shown(value)}; accepted: {also + ', or ' if also else ''}{bounds}")
    return number


def optional_integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> int | None:
    return None if value is None else integer(name, value, minimum, maximum)


def real(name: str, value: object, minimum: float, maximum: float = float("inf")) -> float:
    """`value` as a finite float within [minimum, maximum], or a ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) <= _LARGEST_FLOAT or value != value else _INFINITY
        if minimum <= number <= maximum and number != float("inf"):  # NaN fails the comparison
            return number
    limit = f"from {minimum} to {maximum}" if maximum != float("inf") else f">= {minimum}"
    raise ValueError(f"{name} is {shown(value)}; accepted: a finite number {limit}")


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; accepted: True or False")
    return value


def one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} is {shown(value)}; accepted: one of {', '.join(map(repr, accepted))}")
    return value


def integers(name: str, values: object, minimum: int | None = None, maximum: int | None = None) -> list[int]:
    """A list of ints within [minimum, maximum] from an ordered iterable or a 1-D integer tensor.

    Raises:
        ValueError: `values` is something else; sets, dicts and their views have no order that callers mean.
    """
    if is_tensor(values):
        tensor: Any = values
        if tensor.dim() != 1 or str(tensor.dtype) not in _INTEGER_DTYPES or not holds_data(tensor):
            raise ValueError(f"{name} {described(values)}; accepted: a 1-D integer tensor that holds data")
        values = tensor.tolist()
    result = list(values) if type(values) is list else _listed(values)
    if result is None:
        raise ValueError(f"{name} is {shown(values)}; accepted: a list of integers or a 1-D integer tensor")
    low = -_INFINITY if minimum is None else minimum
    high = _INFINITY if maximum is None else maximum
    if not result or (set(map(type, result)) == {int} and low <= min(result) and max(result) <= high):
        return result
    return [integer(f"{name}[{i}]", value, minimum, maximum) for i, value in enumerate(result)]


def is_unordered(values: object) -> bool:
    """Whether `values` is a set, a dict, or a view of a dict."""
    return isinstance(values, (Set, Mapping, MappingView))


def all_ints(values: Sequence[int]) -> TypeGuard[list[int]]:
    """Whether `values` is a list of ints only; bools, tensors and numpy integers are not ints."""
    return type(values) is list and countOf(map(type, values), int) == len(values)


def ints_within(values: Sequence[int], minimum: int, maximum: int) -> TypeGuard[list[int]]:
    """Whether `values` is a non-empty list of ints within [minimum, maximum]."""
    if not all_ints(values) or not values:
        return False
    ordered = sorted(values)  # takes a third of the time of `min` and `max`
    return ordered[0] >= minimum and ordered[-1] <= maximum


def checked_integers(name: str, values: Sequence[int], minimum: int, maximum: int) -> list[int]:
    """As `integers`, but a list of accepted ints is returned without a copy, in half the time."""
    return values if ints_within(values, minimum, maximum) else integers(name, values, minimum, maximum)


def instance[T](name: str, value: object, cls: type[T]) -> T:
    if not isinstance(value, cls):
        raise ValueError(f"{name} is {shown(value)}; accepted: a {cls.__name__}")
    return value


def shown(value: object) -> str:
    """`repr(value)`, or the type where `repr` raises (for example for an int of thousands of digits)."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def described(value: Any) -> str:
    """`is ...` for messages: a tensor by its dtype, shape and device, another value by `shown`."""
    if is_tensor(value):
        return f"is a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"is {shown(value)}"


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor. Works without torch."""
    return any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(value).__mro__)


def holds_data(tensor: Any) -> bool:
    """Whether a tensor's numbers lie in memory with strides; meta and sparse tensors do not."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta


def set_field(settings: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass, for example to the int that replaces a numpy integer."""
    object.__setattr__(settings, name, value)


_INFINITY = float("inf")
_LARGEST_FLOAT = sys.float_info.max
_INTEGER_DTYPES = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _listed(values: Any) -> list[Any] | None:
    if isinstance(values, (str, bytes)) or is_unordered(values):
        return None
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        ints: list[int] = values.tolist()
        return ints
    try:
        return list(values)
    except TypeError:
        return None


def _index(value: object) -> int | None:
    if isinstance(value, bool) or is_tensor(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
