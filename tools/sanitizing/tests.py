"""Tests until a time is up: `sanitize.py` runs this under compute-sanitizer, whose summary follows.

python tools/sanitizing/tests.py SECONDS [--share=K/N] [--float32-products] [argument of pytest ...]

`--share=K/N`: each N-th of the chosen tests alone, from the K-th on, K from 0.
`--float32-products`: what torch multiplies in 16 bits and sums in float32 is multiplied in float32.
"""

import functools
import sys
import time
from typing import Any

import pytest
import torch

STOPPED = "the time was up"


class Limit:
    """Ends the session behind the test in which the time is up."""

    def __init__(self, seconds: float) -> None:
        self._stop = time.monotonic() + seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and time.monotonic() > self._stop:
            pytest.exit(STOPPED, 0)


class Share:
    """Leaves out the tests of other shares."""

    def __init__(self, share: str) -> None:
        self._number, self._count = map(int, share.split("/"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._number :: self._count]


def multiply_in_float32() -> None:
    """Replace torch's products that have an `out_dtype`."""
    for name in ("mm", "bmm"):
        setattr(torch, name, _in_float32(getattr(torch, name)))


def _in_float32(multiply: Any) -> Any:
    @functools.wraps(multiply)  # inductor registers both by their names
    def product(*operands: Any, out_dtype: torch.dtype | None = None, **others: Any) -> Any:
        if out_dtype is None:
            return multiply(*operands, **others)
        return multiply(*(operand.to(out_dtype) for operand in operands), **others)

    return product


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] == "--help":
        print(__doc__)
        sys.exit()
    arguments = [word for word in sys.argv[2:] if word != "--float32-products"]
    if len(arguments) < len(sys.argv) - 2:
        multiply_in_float32()
    shares = [word for word in arguments if word.startswith("--share=")]
    plugins = [Limit(float(sys.argv[1])), *(Share(word.partition("=")[2]) for word in shares)]
    sys.exit(pytest.main([word for word in arguments if word not in shares], plugins))
