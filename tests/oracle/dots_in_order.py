"""Products of a CPU that add over K in order: those of Triton's interpreter, and those of torch.

The interpreter multiplies by numpy's matmul. Its bits of a row, as torch's, depend on the rows beside it on
some CPUs.
A GPU adds in the same order for each row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from mambaslots.inference.engines.product_check import DecomposingMode, operator_name
from torch import Tensor


def _dot(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    left, right = a.astype(dtype or a.dtype), b.astype(dtype or b.dtype)
    total = np.zeros((*left.shape[:-1], right.shape[-1]), left.dtype)
    for k in range(left.shape[-1]):
        total += left[..., k : k + 1] * right[..., k : k + 1, :]
    return total


@contextmanager
def dots_in_order() -> Iterator[None]:
    """Within it, an element of a product depends on its row and its column alone."""
    with patch("triton.runtime.interpreter.np.matmul", _dot):
        yield


class ProductsInOrder(DecomposingMode):  # type: ignore[no-untyped-call]
    """While it is the current mode, torch's products of matrices add as `dots_in_order` does."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operator_name(func)
        if name == "aten.mm":
            return _product(*args)
        if name == "aten.addmm" and not kwargs:
            bias, a, b = args
            return _product(a, b) + bias
        return func(*args, **kwargs)


def _product(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(len(a), b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k]
    return total
