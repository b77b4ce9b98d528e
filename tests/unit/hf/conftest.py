"""The errors of served models of transformers, in tables at the end."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

PARITY = "parity"
"""The property of a test: (precision, architecture, column, error)."""

Record = Callable[[str, str, str, float], None]


@pytest.fixture
def record_error(record_property: Callable[[str, object], None]) -> Record:
    """Record an error of an architecture in a column of the table of a precision."""

    def record(precision: str, architecture: str, column: str, error: float) -> None:
        record_property(PARITY, (precision, architecture, column, error))

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
    """The largest error of each architecture, one table a precision."""
    tables: defaultdict[str, defaultdict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last of a test, with all its properties
                for name, value in report.user_properties:
                    if name == PARITY:
                        precision, architecture, column, error = value
                        row = tables[precision][architecture]
                        row[column] = max(error, row.get(column, 0.0))
    for precision, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        width = max(map(len, rows))
        terminalreporter.section(f"largest errors beside transformers, {precision}")
        terminalreporter.line(" " * width + "".join(f"{column:>10}" for column in columns))
        for architecture, row in sorted(rows.items()):
            cells = (f"{row[column]:10.1e}" if column in row else " " * 10 for column in columns)
            terminalreporter.line(f"{architecture:{width}}" + "".join(cells))
