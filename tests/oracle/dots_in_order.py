"""Triton's interpreter with products that add over K in order.

The interpreter multiplies by numpy's matmul. Its bits of a row depend on the rows beside it on some CPUs.
A GPU adds in the same order for each row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np


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
