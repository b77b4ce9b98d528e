"""Argument checks: what passes, and what the message of a refusal says."""

import re
import time
from array import array
from collections import Counter, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from mambaslots import validation


def refusal(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_an_integer_of_any_integer_type_passes_as_an_int(value):
    number = validation.integer("n", value, 0, 3)
    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize("value", [1.0, "1", None, True, np.float32(1), torch.tensor(1), [1]])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(ValueError, match=r"^n is .*; accepted: an integer$"):
        validation.integer("n", value)


def test_a_refused_integer_is_answered_with_its_bounds():
    with refusal("n is -1; accepted: an integer >= 0"):
        validation.integer("n", -1, 0)
    with refusal("n is 4; accepted: an integer from 0 to 3"):
        validation.integer("n", 4, 0, 3)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float64(0.5)])
def test_a_finite_number_within_its_bounds_is_real(value):
    number = validation.real("x", value, 0, 1)
    assert (type(number), number) == (float, float(value))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, True])
def test_what_is_no_finite_number_within_bounds_is_refused(value):
    with pytest.raises(ValueError, match=r"^x is .*; accepted: a finite number >= 0$"):
        validation.real("x", value, 0)


def test_an_integer_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match="accepted: a finite number"):
        validation.real("x", 10**400, 0)


def test_a_refused_number_is_answered_with_both_bounds():
    with refusal("x is 2; accepted: a finite number from 0 to 1"):
        validation.real("x", 2, 0, 1)


def test_a_boolean_is_true_or_false_and_nothing_like_it():
    assert validation.boolean("b", True) is True
    for value in (1, None, "True"):
        with pytest.raises(ValueError, match=r"^b is .*; accepted: True or False$"):
            validation.boolean("b", value)


def test_one_of_names_what_is_accepted():
    assert validation.one_of("p", "lru", ("lru", "fifo")) == "lru"
    for value in ("LRU", None, ["lru"]):
        with pytest.raises(ValueError, match=r"^p is .*; accepted: one of 'lru', 'fifo'$"):
            validation.one_of("p", value, ("lru", "fifo"))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8), torch.tensor([1, 2]),
        iter([1, 2]), deque([1, 2]), array("i", [1, 2]), np.array([1, 2], dtype=object),
    ],
)  # fmt: skip
def test_integers_come_from_any_iterable_as_a_new_list(values):
    result = validation.integers("ids", values, 1, 2)
    assert result == [1, 2]
    assert all(type(value) is int for value in result)
    assert result is not values


def test_a_refused_entry_is_named_by_its_place():
    with refusal("ids[1] is 5; accepted: an integer from 0 to 4"):
        validation.integers("ids", [0, 5], 0, 4)
    with refusal("ids[0] is True; accepted: an integer"):
        validation.integers("ids", [True])


@pytest.mark.parametrize(
    "values",
    [
        {1, 2}, frozenset({1, 2}), {1: 0, 2: 0}, {1: 0}.keys(), {0: 1}.values(), {}.items(), set(),
        Counter([1, 2]), MappingProxyType({1: 0}),
    ],
)  # fmt: skip
def test_what_has_no_order_is_no_list(values):
    with pytest.raises(
        ValueError, match=r"^ids is .*; accepted: a list of integers or a 1-D integer tensor$"
    ):
        validation.integers("ids", values)
    with pytest.raises(
        ValueError, match=r"^ids is .*; accepted: a list of integers or a 1-D integer tensor$"
    ):
        validation.checked_integers("ids", values, 0, 9)


def test_an_array_costs_about_as_much_as_a_list():
    """Numpy's own integers take eight times the time of ints."""
    numbers = np.arange(200_000, dtype=np.int32)
    ids = numbers.tolist()

    def seconds(values):
        times = []
        for _ in range(7):
            begin = time.process_time()
            assert validation.integers("ids", values, 0, 200_000) == ids
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(numbers) <= 3 * seconds(ids)


@pytest.mark.parametrize("values", ["12", b"12", 12, None, np.array(3)])
def test_what_is_no_list_is_refused(values):
    with pytest.raises(
        ValueError, match=r"^ids is .*; accepted: a list of integers or a 1-D integer tensor$"
    ):
        validation.integers("ids", values)


@pytest.mark.parametrize(
    "values", [torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros(1, 1, dtype=int)]
)
def test_a_tensor_of_anything_else_is_refused(values):
    with pytest.raises(ValueError, match=r"^ids is a torch\..* tensor of shape .*; accepted: a 1-D integer"):
        validation.integers("ids", values)


def test_a_float_dtype_is_a_torch_dtype_of_floats():
    assert validation.float_dtype("d", torch.bfloat16) is torch.bfloat16
    for value in (torch.int32, torch.complex64, torch.float8_e5m2, "float32", float):
        with pytest.raises(
            ValueError, match=r"^d is .*; accepted: torch\.float16, bfloat16, float32 or float64$"
        ):
            validation.float_dtype("d", value)
