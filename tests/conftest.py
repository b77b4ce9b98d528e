from collections import Counter

import pytest
import torch

# Several threads help none of these small shapes, and make every test crawl on a busy machine.
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The cases that tests recorded as their property "cases", {what: how many}, added up."""
    cases: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last of a test, with all its properties
                cases.update(dict(report.user_properties).get("cases", {}))
    if cases:
        terminalreporter.section("cases")
        for what, count in sorted(cases.items()):
            terminalreporter.line(f"{count:7d}  {what}")
        terminalreporter.line(f"{cases.total():7d}  in all")
