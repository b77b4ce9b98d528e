"""The bookkeeping benchmark runs, finds both sides agreeing, and writes what it says; no timing is judged."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.inference.contexts.dynamic_context", exc_type=ImportError)

ROOT = Path(__file__).parents[3]
ROWS = [
    "allocate 8 with eviction, 4,096 KV blocks",
    "allocate 8 with eviction, 65,536 KV blocks",
    "allocate 8 with eviction, 524,288 KV blocks",
    "64 has_state, 65,536 KV blocks",
    "64 blocks, a life, full pool of 4,096",
    "64 blocks, a life, full pool of 65,536",
    "64 blocks, a life, free pool of 4,096",
    "64 blocks, a life, free pool of 65,536",
    "one step, room",
    "one step, full",
]


pytestmark = pytest.mark.long
TEXTS = {"some": ["allocate", "has_state", "pool of 4,096", "room"], "all": [""]}
"""Parts of the names of rows: of some that are soon set up, and of all."""


@pytest.fixture(scope="module", params=["some", "all"])
def texts(request):
    return TEXTS[request.param]


@pytest.fixture(scope="module")
def expected_rows(texts):
    return [row for row in ROWS if any(text in row for text in texts)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    figures = tmp_path_factory.mktemp("bookkeeping") / "figures.json"
    command = [sys.executable, "benchmarks/bookkeeping.py", "--repeats", "3", "--json", str(figures)]
    command += ["--rows", *texts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def test_every_row_is_measured_on_both_sides(run, expected_rows):
    _, figures = run
    assert [row["row"] for row in figures["rows"]] == expected_rows
    for row in figures["rows"]:
        stock, ours = row["median_us"]["stock"], row["median_us"]["ours"]
        assert stock.keys() == ours.keys() == row["times"].keys()
        assert min(*stock.values(), *ours.values()) > 0


def test_a_step_is_measured_by_part(run):
    _, figures = run
    steps = [row for row in figures["rows"] if row["row"].startswith("one step")]
    assert steps
    for row in steps:
        assert list(row["times"]) == ["admit", "prepare", "finish", "all"]


def test_the_table_shows_each_row_and_whether_each_requirement_is_met(run, expected_rows):
    printed, figures = run
    table, _, verdicts = printed.partition("\nrequirements\n")
    assert all(row in table for row in expected_rows)
    assert [line.split(maxsplit=1)[0] in ("met", "NOT") for line in verdicts.splitlines()] == [True] * len(
        figures["requirements"]
    )
    assert {requirement["name"] for requirement in figures["requirements"]} > {ROWS[1], ROWS[2], ROWS[3]}


def test_the_figures_name_machine_versions_and_date(run):
    _, figures = run
    assert figures["repeats"] == 3
    assert figures["versions"].keys() == {"python", "megatron-core", "mambaslots", "torch", "numpy"}
    assert figures["machine"]["torch_threads"] == 1
    assert figures["date"].startswith("20")
