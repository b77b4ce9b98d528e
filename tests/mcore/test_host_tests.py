"""What `make test-host` says of two runs of megatron-core's own tests, which themselves need a checkout."""

import subprocess
import sys
from pathlib import Path

import pytest
from host.host_tests import Outcomes, compared

PASSED, FAILED, SKIPPED = (
    {"outcome": outcome, "error": f"error of {outcome}"} for outcome in ("passed", "failed", "skipped")
)


@pytest.mark.parametrize(
    ("ours", "good"),
    [
        ({"a": PASSED, "b": FAILED, "c": SKIPPED}, True),
        ({"a": PASSED, "b": PASSED, "c": SKIPPED}, True),
        ({"a": FAILED, "b": PASSED, "c": SKIPPED}, False),
        ({"a": SKIPPED, "b": FAILED, "c": PASSED}, False),
        ({"b": PASSED, "c": PASSED}, False),
    ],
)
def test_a_test_that_no_longer_passes_is_named_and_fails_the_run(ours: Outcomes, good: bool) -> None:
    lines, result = compared({"a": PASSED, "b": FAILED, "c": SKIPPED}, ours)
    assert result is good
    number = lines.index(f"pass on stock and not with mambaslots: {0 if good else 1}")
    if not good:
        assert lines[number + 1] == f"  a\n    {ours.get('a', {'error': 'was not run'})['error']}"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "host" / "host_tests.py"
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "has no tests/unit_tests/inference/contexts" in done.stderr
