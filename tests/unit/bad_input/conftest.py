from collections.abc import Callable, Iterator

import pytest
from oracle.bad_values import CASES


@pytest.fixture(autouse=True)
def _count_cases(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """How many bad calls a test made, by target; `tests/conftest.py` adds them up."""
    before = CASES.copy()
    yield
    record_property("cases", {f"bad calls of {target}": n for target, n in (CASES - before).items()})
