"""Argument checks shared by the public constructors and calls.

Every message names the argument, the value it got and what is accepted.
"""

import math
import operator
import sys
from collections.abc import Sequence
from operator import countOf
from typing import Any, TypeGuard

import torch

INT32_MAX = 2**31 - 1
"""Most blocks, slots, rows and tokens: hosts and kernels number them in int32 tensors."""
LONGEST_TIMEOUT_S = 1e6
"""Twelve days: no timer that is given this overflows."""


def integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None, also: str = ""
) -> int:
    """`value` as an int within [minimum, maximum], or a ValueError; bools and floats are no integers.

    `also` names what else the caller accepts.
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
    """A list of ints within [minimum, maximum] from any iterable or 1-D integer tensor, or a ValueError."""
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in _INTEGER_DTYPES or not holds_data(values):
            raise ValueError(f"{name} {described(values)}; accepted: a 1-D integer tensor that holds data")
        values = values.tolist()
    result = list(values) if type(values) is list else _listed(values)
    if result is None:
        raise ValueError(f"{name} is {shown(values)}; accepted: a list of integers or a 1-D integer tensor")
    low = -_INFINITY if minimum is None else minimum
    high = _INFINITY if maximum is None else maximum
    if not result or (set(map(type, result)) == {int} and low <= min(result) and max(result) <= high):
        return result
    return [integer(f"{name}[{i}]", value, minimum, maximum) for i, value in enumerate(result)]


def float_dtype(name: str, value: object) -> torch.dtype:
    """One of the dtypes that arithmetic is done in; not every floating-point dtype has a zero."""
    if not isinstance(value, torch.dtype) or value not in _FLOAT_DTYPES:
        raise ValueError(f"{name} is {shown(value)}; accepted: torch.float16, bfloat16, float32 or float64")
    return value


def numbers(name: str, value: object, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape whose real numbers can be copied into a state."""
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != torch.Size(shape)
        or value.dtype not in _FLOAT_DTYPES + _INTEGER_DTYPES
        or not holds_data(value)
    ):
        raise ValueError(
            f"{name} {described(value)}; accepted: a tensor of real numbers, of shape {tuple(shape)}, that "
            "holds data"
        )
    return value


def device(name: str, value: object) -> torch.device:
    """A device, or the name of one, on which tensors can be made and hold data."""
    try:
        if isinstance(value, (str, torch.device)) and holds_data(torch.empty(0, device=value)):
            return torch.device(value)
    except Exception as error:  # each backend that is missing raises its own
        raise ValueError(f"{name} is {value!r}; accepted: a device that is here") from error
    raise ValueError(f"{name} is {shown(value)}; accepted: a torch.device that holds data, or its name")


def all_ints(values: Sequence[int]) -> TypeGuard[list[int]]:
    """Whether this is a list of ints; bools, tensors and other integers are none."""
    return type(values) is list and countOf(map(type, values), int) == len(values)


def ints_within(values: Sequence[int], minimum: int, maximum: int) -> TypeGuard[list[int]]:
    """Whether this is a list of at least one int, all of them accepted."""
    if not all_ints(values) or not values:
        return False
    ordered = sorted(values)  # in a third of the time of `min` and `max`
    return ordered[0] >= minimum and ordered[-1] <= maximum


def checked_integers(name: str, values: Sequence[int], minimum: int, maximum: int) -> list[int]:
    """`integers`, without a copy and in half the time where a list of accepted ints is given."""
    return values if ints_within(values, minimum, maximum) else integers(name, values, minimum, maximum)


def instance[T](name: str, value: object, cls: type[T]) -> T:
    if not isinstance(value, cls):
        raise ValueError(f"{name} is {shown(value)}; accepted: a {cls.__name__}")
    return value


def addressable(name: str, value: object, shape: Sequence[int], dtype: torch.dtype) -> None:
    """A ValueError that blames `value` if a tensor of this shape is larger than any memory."""
    size = math.prod(shape) * dtype.itemsize
    if size > _MOST_BYTES:
        raise ValueError(
            f"{name} is {shown(value)}, which makes a tensor of {size:.3g} bytes; accepted: less than 2**63"
        )


def holds_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in memory, one after another or with strides."""
    return tensor.layout is torch.strided and not tensor.is_meta


def shown(value: object) -> str:
    """`repr`, or the type of what has none that Python prints (integers of thousands of digits)."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def described(value: object) -> str:
    """`is ...` for messages: a tensor by its dtype, shape and device, anything else as it is shown."""
    if isinstance(value, torch.Tensor):
        return f"is a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"is {shown(value)}"


_INFINITY = float("inf")
_LARGEST_FLOAT = sys.float_info.max
_MOST_BYTES = 2**63 - 1
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


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
