"""Argument checks of public constructors and calls.

Every message names the argument, the value and what is accepted. The checks of dtypes, tensors and devices
import torch when they are called; the others need no torch. `ceil_div` is here for all packages.
"""

import math
import operator
import sys
from collections.abc import Callable, Mapping, MappingView, Sequence, Set
from dataclasses import fields
from operator import countOf
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    import torch

INT32_MAX = 2**31 - 1
"""Largest number of blocks, slots, rows or tokens: hosts and kernels index with int32 tensors."""
INT64_MAX = 2**63 - 1
LONGEST_TIMEOUT_S = 1e6  # twelve days: no timer overflows
_INFINITY = float("inf")
_FLOAT_DTYPES = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")
_INTEGER_DTYPES = tuple(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_LONGEST_SHOWN = 8  # items of a tuple or a mapping that `brief_repr` writes out


def integer(
    name: str, value: object, minimum: float = -_INFINITY, maximum: float = _INFINITY, also: str = ""
) -> int:
    """`value` as an int within [minimum, maximum], or a ValueError that says what is accepted, `also` too."""
    number = value if type(value) is int else _index(value)
    if number is not None and minimum <= number <= maximum:
        return number
    bounds = f"an integer from {minimum} to {maximum}"
    if maximum == _INFINITY:
        bounds = "an integer" if minimum == -_INFINITY else f"an integer >= {minimum}"
    raise ValueError(f"{name} is {shown(value)}; accepted: {also + ', or ' if also else ''}{bounds}")


def real(name: str, value: object, minimum: float, maximum: float = _INFINITY) -> float:
    """`value` as a finite float within [minimum, maximum], or a ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) <= sys.float_info.max or value != value else _INFINITY
        if minimum <= number <= maximum and number != _INFINITY:  # NaN fails the comparison
            return number
    limit = f"from {minimum} to {maximum}" if maximum != _INFINITY else f">= {minimum}"
    raise ValueError(f"{name} is {shown(value)}; accepted: a finite number {limit}")


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; accepted: True or False")
    return value


def one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} is {shown(value)}; accepted: one of {', '.join(map(repr, accepted))}")
    return value


def instance[T](name: str, value: object, cls: type[T]) -> T:
    if not isinstance(value, cls):
        raise ValueError(f"{name} is {shown(value)}; accepted: a {cls.__name__}")
    return value


def set_field(settings: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass, e.g. to the int that replaces a numpy integer."""
    object.__setattr__(settings, name, value)


def check_fields(
    settings: object, check: Callable[..., object], /, *, or_none: bool = False, **arguments: tuple[Any, ...]
) -> None:
    """Set each named field of a frozen dataclass to `check(name, value, *arguments)`."""
    for name, more in arguments.items():
        value = getattr(settings, name)
        if value is not None or not or_none:
            set_field(settings, name, check(name, value, *more))


# ---- lists of integers


def integers(name: str, values: object, minimum: float = -_INFINITY, maximum: float = _INFINITY) -> list[int]:
    """A list of ints within [minimum, maximum] from an ordered iterable or a 1-D integer tensor."""
    if is_tensor(values):
        tensor: Any = values
        if tensor.dim() != 1 or str(tensor.dtype) not in _INTEGER_DTYPES or not holds_data(tensor):
            raise ValueError(f"{name} {described(values)}; accepted: a 1-D integer tensor that holds data")
        values = tensor.tolist()
    result = list(values) if type(values) is list else as_list(values)
    if result is None:
        raise ValueError(f"{name} is {shown(values)}; accepted: a list of integers or a 1-D integer tensor")
    if not result or (set(map(type, result)) == {int} and minimum <= min(result) and max(result) <= maximum):
        return result
    return [integer(f"{name}[{i}]", value, minimum, maximum) for i, value in enumerate(result)]


def ints_within(values: Sequence[int], minimum: int, maximum: int) -> TypeGuard[list[int]]:
    """Whether `values` is a non-empty list of ints within [minimum, maximum]; bools are not ints."""
    if type(values) is not list or not values or countOf(map(type, values), int) < len(values):
        return False
    ordered: list[int] = sorted(values)  # a third of the time of `min` and `max`
    return ordered[0] >= minimum and ordered[-1] <= maximum


def checked_integers(name: str, values: Sequence[int], minimum: int, maximum: int) -> list[int]:
    """As `integers`, but a list of accepted ints is returned without a copy, in half the time."""
    return values if ints_within(values, minimum, maximum) else integers(name, values, minimum, maximum)


def as_list(values: Any) -> list[Any] | None:
    """The items of an iterable; None for text, and for sets and dicts, which have no order that is meant."""
    if isinstance(values, (str, bytes, Set, Mapping, MappingView)):
        return None
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return list(values.tolist())
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


# ---- tensors


def is_tensor(value: object) -> bool:
    return any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(value).__mro__)


def holds_data(tensor: Any) -> bool:
    """Whether a tensor's numbers lie in memory with strides; meta and sparse tensors do not."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_meta


def float_dtype(name: str, value: object) -> "torch.dtype":
    """`value`, a dtype in which states and weights can be computed; else a ValueError."""
    import torch

    if not isinstance(value, torch.dtype) or str(value) not in _FLOAT_DTYPES:
        raise ValueError(f"{name} is {shown(value)}; accepted: torch.float16, bfloat16, float32 or float64")
    return value


def numbers(name: str, value: object, shape: Sequence[int]) -> "torch.Tensor":
    """`value`, a tensor of this shape whose real numbers can be copied into a state; else a ValueError."""
    tensor: Any = value
    if (
        not is_tensor(tensor)
        or tuple(tensor.shape) != tuple(shape)
        or str(tensor.dtype) not in _FLOAT_DTYPES + _INTEGER_DTYPES
        or not holds_data(tensor)
    ):
        raise ValueError(
            f"{name} {described(value)}; accepted: a tensor of real numbers, of shape {tuple(shape)}, that "
            "holds data"
        )
    return tensor  # type: ignore[no-any-return]


def device(name: str, value: object) -> "torch.device":
    """`value`, a device or its name, as a device on which tensors hold data; else a ValueError."""
    import torch

    try:
        if isinstance(value, (str, torch.device)) and holds_data(torch.empty(0, device=value)):
            return torch.device(value)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # every missing backend raises another type of error
        raise ValueError(f"{name} is {value!r}; accepted: a device that is here") from error
    raise ValueError(f"{name} is {shown(value)}; accepted: a torch.device that holds data, or its name")


def addressable(name: str, value: object, shape: Sequence[int], dtype: "torch.dtype") -> None:
    """Raise a ValueError that names `value` if a tensor of this shape and dtype has 2**63 bytes or more."""
    size = math.prod(shape) * dtype.itemsize
    if size > INT64_MAX:
        raise ValueError(
            f"{name} is {shown(value)}, which makes a tensor of {size:.3g} bytes; accepted: less than 2**63"
        )


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up: 7 tokens need 3 blocks of 3."""
    return -(-number // divisor)


# ---- how values are printed


def refused(name: str, value: object, accepted: str) -> ValueError:
    """The error for a bad argument: `refused("seed", -1, "0 or more")`: "seed is -1; accepted: 0 or more"."""
    return ValueError(f"{name} is {shown(value)}; accepted: {accepted}")


def shown(value: object) -> str:
    """`repr(value)`, or the type where `repr` raises (e.g. for an int of thousands of digits)."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def described(value: Any) -> str:
    """`is ...` for messages: a tensor by its dtype, shape and device, another value by `shown`."""
    if is_tensor(value):
        return f"is a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"is {shown(value)}"


def brief_repr(value: Any) -> str:
    """A dataclass in one line without its lists, which may be a user's: `Result(id=3, tokens=<40 items>)`."""
    named = ((field.name, getattr(value, field.name)) for field in fields(value) if field.repr)
    parts = [
        f"{name}={_brief(item)}"
        for name, item in named
        if item is not None and not (isinstance(item, (list, tuple, Mapping)) and not item)
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _brief(item: Any) -> str:
    if isinstance(item, list) or (isinstance(item, tuple) and len(item) > _LONGEST_SHOWN):
        return f"<{len(item)} item{'s' * (len(item) != 1)}>"
    if isinstance(item, Mapping):
        item = {key: entry for key, entry in item.items() if entry != 0}
        if len(item) > _LONGEST_SHOWN or not all(isinstance(entry, int) for entry in item.values()):
            return f"<{len(item)} {'entry' if len(item) == 1 else 'entries'}>"
    return f"{item:.4g}" if isinstance(item, float) else repr(item)
