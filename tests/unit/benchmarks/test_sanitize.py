"""What `benchmarks/sanitize.py` reads from a sanitizer's log, and which kernels it calls the project's."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at planted_kernel+0xa0 in sanitized_plants.py:17
=========     by thread (127,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at write_kv_kernel+0x90 in write_kv.py:150
========= Error: Race reported between Write access at planted_race+0xb0
=========     and Read access at planted_race+0xc0 [256 hazards]
========= Barrier error detected. Divergent thread(s) in warp.
=========     at planted_barrier+0x70
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::vectorized_gather_kernel<(int)16, long>(char *, char *)+0x170
========= ERROR SUMMARY: 5 errors
"""


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    import sanitize

    return sanitize


def test_each_report_names_one_kernel(sanitize: Any) -> None:
    found = ("planted_kernel", "write_kv_kernel", "planted_race", "planted_barrier")
    assert Counter(sanitize.reported(LOG)) == Counter((*found, "at::native::vectorized_gather_kernel"))


def test_the_projects_kernels_and_the_tests_that_launch_them(sanitize: Any) -> None:
    kernels = sanitize.our_kernels()
    assert {"write_kv_kernel", "move_states", "chunk_scan_kernel"} <= set(kernels)
    assert "softplus" not in kernels, "another kernel's part"
    parts = list(sanitize.tests_by_part().values())
    files = {name for tests in parts for name in tests if not name.startswith("--share=")}
    assert len(parts) == len(set(parts)) > len(files) > 20
    assert all(Path(name).is_file() for name in files)
    assert set(sanitize.SHARES) <= {Path(name).name for name in files}


@pytest.mark.parametrize(
    ("kernel", "second", "is_pair"),
    [
        ("update_kernel", "Write access at update_kernel+0x8d0 in selective_state_update.py:119", True),
        ("update_kernel", "Write access at update_kernel+0x8e0 in selective_state_update.py:119", False),
        ("update_kernel", "Read access at update_kernel+0x8d0 in selective_state_update.py:119", False),
        ("chunk_scan_kernel", "Write access at chunk_scan_kernel+0x8d0 in ssd_output.py:119", False),
    ],
)
def test_pairs_of_writes_of_one_instruction_are_counted_apart(
    sanitize: Any, kernel: str, second: str, is_pair: bool
) -> None:
    file = "ssd_output" if kernel == "chunk_scan_kernel" else "selective_state_update"
    log = (
        f"========= Error: Race reported between Write access at {kernel}+0x8d0 in {file}.py:119\n"
        f"=========     and {second} [104 hazards]\n"
    )
    assert list(sanitize.reported(log)) == [kernel + sanitize.PAIRS * is_pair]


@pytest.mark.parametrize(
    ("tests", "reports", "fault"),
    [
        ("3 passed in 2 s", {}, ""),
        ("3 passed in 2 s", {"vectorized_gather_kernel": 2}, ""),
        ("3 passed in 2 s", {"write_kv_kernel": 2}, "2 reports name write_kv_kernel"),
        ("1 failed, 3 passed in 2 s", {}, "tests: 1 failed, 3 passed in 2 s"),
        ("", {}, "no test has passed"),
    ],
)
def test_faults(sanitize: Any, tests: str, reports: dict[str, int], fault: str) -> None:
    job = sanitize.Job("kernels 1", "memcheck", ())
    outcome = sanitize.Outcome(job, 1.0, tests, "", True, Counter(reports))
    assert outcome.faults({"write_kv_kernel"}) == [fault] * bool(fault)
