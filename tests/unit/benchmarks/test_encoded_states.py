"""The benchmark of encoded states runs without a GPU, and says whether what is required is met."""

import json
from pathlib import Path

import pytest
from oracle.fresh_process import run_script


@pytest.mark.long
def test_all_parts_run_and_what_is_required_is_met(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = (
        "--files",
        "2",
        "--calls",
        "1",
        "--parts",
        "quality",
        "slots",
        "times",
        "--json",
        str(figures),
    )
    done = run_script("benchmarks/encoded_states.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert found["missed"] == []
    assert {row["stored_as"] for row in found["quality"]} == {"as live", "bfloat16", "int8"}
    exact = [row for row in found["quality"] if row["stored_as"] == "as live"]
    assert all(row["share_same"] == 1 and row["largest_kl"] < 1e-5 for row in exact)
    assert {row["what"] for row in found["times"]} == {"encode", "decode"}
