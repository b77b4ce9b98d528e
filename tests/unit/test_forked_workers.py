"""Tests in forks of one process: each runs once, failures are shown, and a worker that ends is a failure."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeini("[pytest]")  # no other's, of a folder above
    options = ("-p", "no:cacheprovider", "-p", "oracle.forked_workers", "--forks", "2")
    return lambda *more: pytester.runpytest_subprocess(*options, *more)


def test_each_test_runs_once_and_failures_are_shown(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        test_one="def test_a(tmp_path): (tmp_path / 'x').touch()\ndef test_b(): pass",
        test_two="import warnings\ndef test_c(): warnings.warn('odd')\ndef test_d(): assert 1 == 2",
    )
    result = run()  # type: ignore[operator]
    result.assert_outcomes(passed=3, failed=1, warnings=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*", "*UserWarning: odd*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_worker_that_ends_is_a_failure_of_its_test(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        test_one="import os\ndef test_a(): os._exit(3)",
        test_two="def test_b(): pass",
        test_three="def test_c(): pass",
    )
    result = run()  # type: ignore[operator]
    passed = result.parseoutcomes().get("passed", 0)
    assert passed in (1, 2)  # the worker had taken one more, or the other one was faster
    result.assert_outcomes(passed=passed, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the worker ended with exit code 3 in test_one.py::test_a*",
            f"*workers ended before they ran {3 - passed} of their tests*",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_tests_that_no_worker_is_left_for_fail_the_run(pytester: pytest.Pytester, run: object) -> None:
    ends = "import os\ndef test_a(): os._exit(3)"
    pytester.makepyfile(test_one=ends, test_two=ends, test_three="def test_c(): pass")
    result = run()  # type: ignore[operator]
    result.stdout.fnmatch_lines(["*workers ended before they ran * of their tests*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_a_module_leaves_undone_is_torn_down_before_the_next(
    pytester: pytest.Pytester, run: object
) -> None:
    fixture = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module", autouse=True)
def opened(request):
    yield
    Path(f"{request.module.__name__} ended").touch()

def test_a(): pass
def test_b(): pass
"""
    pytester.makepyfile(**{f"test_{i}": fixture for i in range(5)})
    run().assert_outcomes(passed=10)  # type: ignore[operator]
    assert len(list(pytester.path.glob("* ended"))) == 5
