"""The benchmark of crowds runs at small sizes and writes what it says; no timing is judged."""

import importlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TARGETS = {
    "queue": [1.5, 3.0, None],
    "generate": [1.3],
    "burst": [5.0, 5.0, None],
    "length": [1.3],
    "drafts": [2.0, None, 2.0, None],
    "sampling": [4.0, 1.3, 5.0],
    "launches": [20],
    "pools": [3.0, None, None, None],
    "long-head": [1.5, None],
}


@pytest.fixture(scope="module")
def crowds():
    """The script as a module: a process of its own would spend most of its time on importing torch."""
    sys.path.insert(0, str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield importlib.import_module("crowds")
    torch.set_num_threads(threads)
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def run(crowds, tmp_path_factory):
    figures = tmp_path_factory.mktemp("crowds") / "figures.json"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", ["crowds.py", "--quick", "--repeats", "1", "--json", str(figures)])
        assert crowds.main() == 0
    return printed.getvalue(), json.loads(figures.read_text())


def test_every_row_is_measured_and_has_its_target(run):
    printed, figures = run
    targets = {case: [row["target"] for row in figures["rows"] if row["case"] == case] for case in TARGETS}
    assert targets == TARGETS
    for row in figures["rows"]:
        assert row["name"] in printed
        if row["note"] != "not measured: no GPU":
            assert row["ratio"] == pytest.approx(row["large"] / row["small"])
            assert row["small"] > 0
            assert (row["met"] is None) == (row["target"] is None)


def test_the_figures_name_machine_versions_commit_and_date(run):
    _, figures = run
    assert figures["quick"] is True
    assert figures["repeats"] == 1
    assert figures["versions"].keys() == {"python", "torch", "numpy"}
    assert figures["machine"]["torch_threads"] == 1
    assert figures["commit"]
    assert figures["date"].startswith("20")


def test_a_ratio_is_judged_and_what_is_not_known_is_not(crowds):
    row = crowds.Row
    assert row("", 2.0, 3.0, 1.5).met is True
    assert row("", 2.0, 3.1, 1.5).met is False
    assert row("", 2.0, 3.0).met is None
    assert row("", None, None, 1.5).met is None
    assert row("", 8, 20, 20, "launches").met is True
    assert row("", 21, 20, 20, "launches").met is False


def test_a_measurement_over_the_budget_ends_and_says_at_least_how_many_times(crowds):
    def small():
        return 1.0

    def large():
        while True:
            pass

    cpu_ms = sys.modules["crowd_rows"].cpu_ms
    bench = crowds.Bench(crowds.QUICK, 3, 0.2)
    row = bench.compare("", small, lambda: cpu_ms(large), 1.5)
    assert row.at_least
    assert ">= " in str(row)
    assert row.ratio > 10
    assert row.met is False
    assert crowds.Row("", 1.0, 1.2, 1.5, at_least=True).met is None


def test_the_rest_of_a_case_over_the_budget_is_left_out(crowds):
    def case(bench):
        yield crowds.Row("first", 1.0, 1.0)
        while True:
            pass

    rows = list(crowds.measured(case, crowds.Bench(crowds.QUICK, 1, 0.2)))
    assert [row.name for row in rows] == ["first", "case: what is left of it"]
    assert rows[1].ratio is None
