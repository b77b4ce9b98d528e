"""The errors of served models of transformers, in a table at the end."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

PARITY = "parity"
"""The property of a test: (architecture, column, error)."""

Record = Callable[[str, str, float], None]


@pytest.fixture
def record_error(record_property: Callable[[str, object], None]) -> Record:
    """Record an error of an architecture, for the table."""

    def record(architecture: str, column: str, error: float) -> None:
        record_property(PARITY, (architecture, column, error))

    return record


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> Iterator[None]:
    """transformers logs once for each kernel that it computes with torch; here it does so on purpose."""
    logging = pytest.importorskip("transformers").utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest error of each architecture, by column."""
    largest: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last of a test, with all its properties
                for name, value in report.user_properties:
                    if name == PARITY:
                        architecture, column, error = value
                        row = largest[architecture]
                        row[column] = max(error, row.get(column, 0.0))
    if not largest:
        return
    columns = list(dict.fromkeys(column for row in largest.values() for column in row))
    width = max(map(len, largest))
    terminalreporter.section("largest errors beside transformers")
    terminalreporter.line(" " * width + "".join(f"{column:>12}" for column in columns))
    for architecture, row in sorted(largest.items()):
        cells = (f"{row[column]:12.1e}" if column in row else " " * 12 for column in columns)
        terminalreporter.line(f"{architecture:{width}}" + "".join(cells))
