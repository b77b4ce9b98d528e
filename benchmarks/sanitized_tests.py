"""Tests until a time is up: `sanitize.py` runs this under compute-sanitizer, whose summary follows.

python benchmarks/sanitized_tests.py SECONDS [argument of pytest ...]
"""

import sys
import time

import pytest

STOPPED = "the time was up"


class Limit:
    """Ends the session behind the test in which the time is up."""

    def __init__(self, seconds: float) -> None:
        self._stop = time.monotonic() + seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and time.monotonic() > self._stop:
            pytest.exit(STOPPED, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] == "--help":
        print(__doc__)
        sys.exit()
    sys.exit(pytest.main(sys.argv[2:], [Limit(float(sys.argv[1]))]))
