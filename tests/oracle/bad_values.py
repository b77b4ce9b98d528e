"""Values that no caller should pass, by kind of argument, and the check that they are refused."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.budget import dear, is_quick

INT32_MAX = 2**31 - 1
UNPRINTABLE = 10**5000  # Python refuses to print an integer this long
CASES: Counter[str] = Counter()
"""Bad calls made so far, by target."""


@dataclass(frozen=True)
class Bad:
    """What one argument must not be: the known troublemakers, all of them tried, and more of their kind."""

    table: tuple[Any, ...]
    more: st.SearchStrategy[Any]

    def only(self, accepted: Callable[[Any], bool]) -> "Bad":
        """Without what this argument does accept."""
        kept = tuple(value for value in self.table if not accepted(value))
        return Bad(kept, self.more.filter(lambda value: not accepted(value)))

    def also(self, *table: Any) -> "Bad":
        return Bad(self.table + table, self.more)

    def inside(self, wrap: Callable[[Any], Any]) -> "Bad":
        """Each of these in an otherwise good container."""
        return Bad(tuple(map(wrap, self.table)), self.more.map(wrap))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on a device that holds no data."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Nothing:
    """An object that is none of the kinds."""

    def __repr__(self) -> str:
        return "Nothing()"


# ---- kinds of argument

_TENSORS = (
    torch.tensor(1), torch.tensor([1, 2]), torch.zeros(2, 3), torch.tensor(float("nan")),
    meta(dtype=torch.int64), meta(2, dtype=torch.int64), meta(2, 3), torch.zeros(0),
)  # fmt: skip
_ARRAYS = (np.array([1, 2]), np.array([[1]]), np.array(["1"]), np.array(1.5), np.array([None]))
_CONTAINERS = ([], [1], [[1]], (), (1, 2), {}, {1: 2}, set(), frozenset({1}), range(3))
_TEXTS = ("", "1", "lru ", "\ud800", b"", b"1", bytearray(b"1"))
_NUMBERS = (
    True, False, 0.0, 1.0, 1.5, -0.5, float("nan"), float("inf"), -float("inf"), 1e308, 1j,
    np.float32(1), np.float64("nan"), np.bool_(True), Decimal(1), Fraction(1, 2),
)  # fmt: skip
_OBJECTS = (Nothing(), Nothing, len, ..., NotImplemented, torch.float32, torch.device("cpu"), slice(2))

_anything = st.one_of(
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.decimals(),
    st.lists(st.integers(-3, 99), max_size=3),
    st.tuples(st.integers(), st.floats()),
    st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=2),
    st.lists(st.integers(0, 3), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.int64)),
    st.lists(st.integers(0, 3), max_size=3).map(lambda values: meta(len(values))),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.sampled_from(_OBJECTS),
)


def anything(*but: type) -> Bad:
    """Values of any type but these."""
    table = (None, *_NUMBERS, *_TEXTS, *_CONTAINERS, *_TENSORS, *_ARRAYS, *_OBJECTS, -1, 2**64, UNPRINTABLE)
    return Bad(table, _anything).only(lambda value: isinstance(value, but))


def integer(minimum: int | None = None, maximum: int | None = None, optional: bool = False) -> Bad:
    """What is no integer within [minimum, maximum]; bools are none."""
    outside: list[int] = []
    huge: st.SearchStrategy[Any] = st.nothing()
    if minimum is not None:
        outside += [minimum - 1, -(2**31), -(2**63), -(2**64), -(10**30), -UNPRINTABLE]
        huge |= st.integers(max_value=minimum - 1)
    if maximum is not None:
        outside += [maximum + 1, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**30, UNPRINTABLE]
        huge |= st.integers(min_value=maximum + 1)
    low, high = minimum, maximum
    outside = [n for n in outside if (low is not None and n < low) or (high is not None and n > high)]
    bad = anything(int).only(lambda value: optional and value is None)
    numpy_too = tuple(np.int64(n) for n in outside if -(2**63) <= n < 2**63)
    return Bad((True, False, *outside, *numpy_too, *bad.table), huge | bad.more)


def real(minimum: float, maximum: float | None = None, optional: bool = False) -> Bad:
    """What is no finite number within [minimum, maximum]."""
    outside = [float("nan"), float("inf"), -float("inf"), np.float64("nan"), minimum - 1, -1e308, 10**400]
    strategy: st.SearchStrategy[Any] = st.floats(max_value=minimum, exclude_max=True)
    if maximum is not None:
        outside += [maximum + 1, 1e308, 10**30]
        strategy |= st.floats(min_value=maximum, exclude_min=True)
    bad = anything(int, float).only(lambda value: optional and value is None)
    return Bad((True, False, UNPRINTABLE, *outside, *bad.table), strategy | bad.more)


def boolean() -> Bad:
    return anything(bool).also(0, 1)


def choice(*accepted: str) -> Bad:
    return anything().only(lambda value: isinstance(value, str) and value in accepted)


def dtype() -> Bad:
    """What is no dtype that states can have."""
    others = (
        torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn,
        torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.quint8, "float32", float, np.float32,
        np.dtype("float32"),
    )  # fmt: skip
    return anything(torch.dtype).also(*others)


def device() -> Bad:
    """What is no device that can hold data here."""
    names = ("meta", torch.device("meta"), "bogus", "cuda:99", "cpu:x", "xla", "", -1, 99, "hpu", b"cpu")
    return anything(str, torch.device, bytes).also(*names)


def ids(minimum: int = 0, maximum: int | None = None, good: Sequence[int] = (), empty: bool = True) -> Bad:
    """What is no list of integers within [minimum, maximum]; `good` ones stand before a bad entry."""
    entry = integer(minimum, maximum)
    tensors = (
        torch.tensor(1), torch.tensor([[1]]), torch.zeros(2), torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.complex64), meta(2), meta(2, dtype=torch.int64),
        meta(2, 2, dtype=torch.int32), torch.tensor([1, 0]).to_sparse(), torch.zeros(2, dtype=torch.bfloat16),
    )  # fmt: skip
    arrays = (np.array(3), np.array([[1]]), np.array([1.5]), np.array(["1"]))
    table = [None, 1, 1.5, float("nan"), True, "12", "", b"12", ..., Nothing(), int, *tensors, *arrays]
    table += [set(good), frozenset(good), dict.fromkeys(good), dict.fromkeys(good).keys()]  # no order
    table += [dict(enumerate(good)).values(), Counter(good)]
    table += [[*good, value] for value in entry.table] + [(value, *good) for value in entry.table]
    if minimum > -(2**63):
        table += [torch.tensor([minimum - 1]), np.array([minimum - 1])]
    if not empty:
        table += [[], (), torch.zeros(0, dtype=torch.int64), np.array([], dtype=np.int64)]
    more: st.SearchStrategy[Any] = entry.more.map(lambda value: [*good, value])
    more |= st.tuples(st.sampled_from([list, tuple, iter]), entry.more).map(lambda p: p[0]([p[1]]))
    more |= st.one_of(st.text(max_size=3), st.floats(), st.integers(), st.sampled_from(tensors))
    return Bad(tuple(table), more)


def shape(minimum: int) -> Bad:
    """What is no shape of extents within [minimum, 2**31 - 1]."""
    return ids(minimum, INT32_MAX, good=(2,))


def tensor(good: Sequence[int]) -> Bad:
    """What is no tensor of real numbers, of this shape, with data."""
    size = tuple(good)
    wrong = (
        torch.zeros(*size, 1), torch.zeros(0), torch.zeros(*size[:-1], size[-1] + 1), meta(*size),
        torch.zeros(size, dtype=torch.bool),
        torch.zeros(size, dtype=torch.complex64), torch.zeros(size).to_sparse(), np.zeros(size),
        torch.zeros(size).tolist(),
    )  # fmt: skip
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple).filter(lambda s: s != size)
    more = shapes.map(torch.zeros) | shapes.map(lambda s: meta(*s)) | _anything
    return Bad((*anything().table, *wrong), more)


def index_tensor() -> Bad:
    """What is no 1-D tensor of signed integers on the CPU."""
    wrong = (
        torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.complex64), torch.zeros(1, 2, dtype=torch.int64), torch.tensor(0),
        torch.zeros(2, dtype=torch.float8_e4m3fn), meta(2, dtype=torch.int64), meta(0, dtype=torch.int32),
        torch.tensor([0, 1]).to_sparse(), np.array([0, 1]), [0, 1],
    )  # fmt: skip
    return anything(torch.Tensor).also(*wrong)


def salt() -> Bad:
    """What is neither bytes, nor text, nor None; and what is empty."""
    return anything(bytes, str, type(None)).also(bytearray(b"a"), memoryview(b"a"), [b"a"], "\ud800", "", b"")


def plan(block_size_tokens: int) -> Bad:
    """What is no plan for blocks of this size."""
    off = block_size_tokens + 1
    wrong = (
        ms.CheckpointPlan, vars(ms.CheckpointPlan()), "rolling",
        ms.CheckpointPlan(decode=off), ms.CheckpointPlan(prefill_interval=off),
    )  # fmt: skip
    return anything(type(None)).also(*wrong)


def sampling() -> Bad:
    return anything(type(None)).also(ms.SamplingParams, vars(ms.SamplingParams()))


# ---- refusal


def refuse_all(
    target: str,
    bad: Bad,
    call: Callable[[Any], object],
    named: str,
    unchanged: Callable[[], None] = lambda: None,
    error: type[Exception] = ValueError,
    examples: settings | None = None,
) -> None:
    """Every bad value raises an error that names the argument, its value and what is accepted.

    `named`: how the message begins, a regular expression. `unchanged` asserts that nothing was changed: in
    `make test` after all values of the table together, in `make test-long` after each.
    """

    def refused(value: Any) -> None:
        refuse(target, lambda: call(value), named, error)
        unchanged()

    for value in bad.table:
        try:
            refuse(target, lambda: call(value), named, error)  # noqa: B023 - called at once
            if not is_quick():
                unchanged()
        except BaseException as failure:
            failure.add_note(f"bad value: {_shown(value)}")
            raise
    unchanged()
    checked = settings(examples or dear(), database=None)
    checked(given(bad.more)(refused))()


def prepare() -> None:
    """Let hypothesis look through the strategies, 1.5 s of CPU time, before there are forks."""
    settings(dear(), database=None)(given(_anything)(lambda value: None))()


def refuse(target: str, call: Callable[[], object], named: str, error: type[Exception] = ValueError) -> None:
    """One bad call raises exactly this error; a ValueError names the argument and what is accepted."""
    CASES[target] += 1
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    if error is ValueError:
        message = str(caught.value)
        pattern = rf"{named}(\[\d+\])? (is|are|has|have|names|falls) .*; accepted: .+"
        assert re.match(pattern, message, re.DOTALL), f"{message!r} does not begin with {named}"


def _shown(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r}"
    except ValueError:
        return f"{type(value).__name__} that cannot be printed"
