"""Do kernels read or write what they must not, race, or wait wrongly? compute-sanitizer over tests on a GPU.

Every part is a choice of tests that launch kernels of the project, each tool one of compute-sanitizer's:

kernels     tests of kernels at small shapes, with padding, tails and empty rows, cut into four by file
models      kernel sets in whole forwards, padded and not, with drafts
align       the kernels of vLLM's align mode
graphs      an engine whose pool is so small that states leave for pinned memory and come back while captured
            graphs replay decodes, with drafts and without; its answers are those without cache and graphs

memcheck    accesses out of bounds or misaligned, in global, shared and local memory
racecheck   hazards in shared memory
initcheck   reads of device memory that nobody has written
synccheck   wrong use of barriers

Parts run at once, up to --jobs of them, each in a process of its own under one tool. All but "graphs" run
with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own and an access one
number beyond it is seen; no graph can be captured so. Only the project's own kernels are checked, by their
names; `--all-kernels` checks those of libraries, too. Reports are counted by the kernel that they name.

`sanitized_plants.py` breaks, for each tool, what the tool watches over, in the same run. The script exits
with 1 where a report names a kernel of the project, a test fails, or a planted fault is not reported.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from command_line import add_count, make_parser

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNEL_TESTS = ROOT / "tests/unit/inference/kernels"
NUM_KERNEL_PARTS = 4
MODEL_TESTS = ("test_kernel_sets.py", "test_speculation_kernels.py")
GRAPH_TEST = "tests/unit/inference/engines/test_graphs_over_tier_gpu.py"
PLANTS = "plants"
LEFT_OUT = (
    "to_the_31",
    "31_bits",
    "full_size",
    "wait_for_nothing",
    "nothing_anew",
    "of_a_copy",
    "graph",
    "capture",
)
"""Parts of names of tests: those that take GiBs or minutes, that profile or count, that capture graphs."""

SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: .*")
REPORT = re.compile(
    r"=+ (?:Error: |Warning: )?(Invalid |Uninitialized |Race reported|Potential |Barrier error|Misaligned ).*"
)
AT = re.compile(r"=.* (?:at|access at) (?:0x[0-9a-f]+ in )?(?:[^ ]+:\d+:)?(?:void )?([\w:~]+)")


@dataclass(frozen=True)
class Job:
    """One process: tests under a tool.

    Attributes:
        part, tool: what is run under what; no tool runs the tests alone, which compiles their kernels.
        tests: arguments of pytest.
    """

    part: str
    tool: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.tool or 'alone'} {self.part}"


@dataclass
class Outcome:
    """What a job said.

    Attributes:
        seconds: of the process.
        tests: the last line of pytest.
        summary: the sanitizer's own last line.
        reports: kernel -> how many reports name it.
        status: of the process; None where the time was up.
    """

    job: Job
    seconds: float
    tests: str
    summary: str
    reports: Counter[str] = field(default_factory=Counter)
    status: int | None = 0

    def faults(self, ours: set[str]) -> list[str]:
        """What is wrong here."""
        named = [f"{count} reports name {kernel}" for kernel, count in self.reports.items() if kernel in ours]
        if self.job.part == PLANTS:
            return (
                [] if any("planted" in kernel for kernel in self.reports) else ["the plant is not reported"]
            )
        if self.status is None:
            named.append("the time was up")
        elif re.search(r"\d+ (failed|error)", self.tests) or "passed" not in self.tests:
            named.append(f"tests: {self.tests or 'none ran'}")
        return named


def our_kernels() -> list[str]:
    """The names of the package's functions that triton compiles and that no other such function calls."""
    functions = [
        node
        for path in (ROOT / "core").rglob("*.py")
        if "triton" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    ]
    called = {
        call.func.id
        for function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return sorted({function.name for function in functions} - called)


def tests_by_part() -> dict[str, tuple[str, ...]]:
    """The arguments of pytest for each part."""
    files = sorted(KERNEL_TESTS.glob("test_*.py"), key=lambda path: path.stat().st_size)
    files = [path for path in files if "cuda" in path.read_text()]
    parts = {
        f"kernels {number + 1}": tuple(map(str, files[number::NUM_KERNEL_PARTS]))
        for number in range(NUM_KERNEL_PARTS)
    }
    parts["models"] = tuple(str(ROOT / "tests/unit/models" / name) for name in MODEL_TESTS)
    parts["align"] = (str(ROOT / "tests/unit/vllm/test_align_kernels.py"),)
    parts["graphs"] = (str(ROOT / GRAPH_TEST),)
    return parts


def command(job: Job, sanitizer: str, kernels: Sequence[str], log: Path, keyword: str) -> list[str]:
    """The arguments of the job's process."""
    if job.part == PLANTS:
        run = [sys.executable, str(ROOT / "benchmarks/sanitized_plants.py"), job.tool]
    else:
        run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu and not long"]
        choice = [f"({keyword})"] * bool(keyword)
        choice += [f"not ({' or '.join(LEFT_OUT)})"] * (job.part != "graphs")
        run += [*job.tests, *(["-k", " and ".join(choice)] if choice else [])]
    if not job.tool:
        return run
    checked = [*kernels, "planted"] if kernels else []
    filters = [word for name in checked for word in ("--kernel-name", f"kernel_substring={name}")]
    return [
        sanitizer, "--tool", job.tool, "--launch-timeout", "120", "--print-limit", "200",
        "--error-exitcode", "86", "--log-file", str(log), *filters, *run,
    ]  # fmt: skip


def run_job(
    job: Job, sanitizer: str, kernels: Sequence[str], folder: Path, keyword: str, limit: float
) -> Outcome:
    """Run a job to its end, or for `limit` seconds."""
    stem = folder / job.name.replace(" ", "_")
    log, said = stem.with_suffix(".log"), stem.with_suffix(".out")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'stubs'}:{os.environ.get('PYTHONPATH', '')}"}
    if job.part != "graphs":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.monotonic()
    status: int | None = None
    with said.open("w") as output:
        process = subprocess.Popen(
            command(job, sanitizer, kernels, log, keyword), stdout=output, stderr=subprocess.STDOUT,
            cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = said.read_text(errors="replace").splitlines()
    tests = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    summary = (SUMMARY.findall(text) or ["no summary: " + " | ".join(lines[-2:])[-150:]])[-1].strip("= ")
    return Outcome(job, time.monotonic() - started, tests, summary, Counter(reported(text)), status)


def reported(text: str) -> Iterator[str]:
    """The kernel that each report of a sanitizer's log names."""
    waiting = False
    for line in text.splitlines():
        begins = REPORT.match(line) is not None
        if begins and waiting:
            yield "no kernel named"
        waiting = waiting or begins
        if waiting and (found := AT.match(line)):
            yield found[1]
            waiting = False
    if waiting:
        yield "no kernel named"


def main() -> int:
    """Run all jobs, print what they said, and return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--tools", default=",".join(TOOLS), help="of compute-sanitizer (default: %(default)s)"
    )
    parser.add_argument("--parts", default="", help="beginnings of names of parts, as kernels,graphs")
    parser.add_argument("-k", dest="keyword", default="", help="only tests with this in their names")
    parser.add_argument("--out", type=Path, default=Path("/tmp/sanitized"), help="folder for logs")
    parser.add_argument("--all-kernels", action="store_true", help="check libraries' kernels, too")
    parser.add_argument("--no-warm-up", action="store_true", help="the kernels are compiled already")
    add_count(parser, "--jobs", 8, "processes at once")
    add_count(parser, "--limit", 420, "seconds of a process")
    arguments = parser.parse_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        parser.error("compute-sanitizer is not here; it comes with the CUDA toolkit")
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = tuple(arguments.parts.split(",")) if arguments.parts else ("",)
    parts = {part: tests for part, tests in tests_by_part().items() if part.startswith(wanted)}
    tools = [tool for tool in TOOLS if tool in arguments.tools.split(",")]
    ours = our_kernels()
    kernels = () if arguments.all_kernels else tuple(ours)

    def run_all(jobs: Sequence[Job]) -> list[Outcome]:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            return list(
                pool.map(
                    lambda job: run_job(
                        job, sanitizer, kernels, arguments.out, arguments.keyword, arguments.limit
                    ),
                    jobs,
                )
            )

    outcomes: list[Outcome] = []
    if not arguments.no_warm_up:
        outcomes += run_all([Job(part, "", tests) for part, tests in parts.items()])
    jobs = [Job(part, tool, tests) for tool in tools for part, tests in parts.items()]
    outcomes += run_all([*jobs, *(Job(PLANTS, tool, ()) for tool in tools)])
    return show(outcomes, set(ours))


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is; None where it is nowhere."""
    known = [
        *Path("/usr/local").glob("cuda*/bin/compute-sanitizer"),
        *Path("/opt").glob("*/compute-sanitizer"),
    ]
    return shutil.which("compute-sanitizer") or next(map(str, known), None)


def show(outcomes: Sequence[Outcome], ours: set[str]) -> int:
    """Print each job and what is wrong; the exit status."""
    num_faults = 0
    for outcome in outcomes:
        print(f"{outcome.job.name:24} {outcome.seconds:6.0f} s  {outcome.tests}")
        if outcome.job.tool:
            print(f"    {outcome.summary}")
        for kernel, count in outcome.reports.most_common():
            owner = "planted" if "planted" in kernel else "ours" if kernel in ours else "a library's"
            print(f"    {count} x {kernel} ({owner})")
        for fault in outcome.faults(ours):
            num_faults += 1
            print(f"    FAULT: {fault}")
    checked = [outcome for outcome in outcomes if outcome.job.tool and outcome.job.part != PLANTS]
    planted = [outcome for outcome in outcomes if outcome.job.part == PLANTS]
    for tool in dict.fromkeys(outcome.job.tool for outcome in checked):
        mine = [outcome for outcome in checked if outcome.job.tool == tool]
        counts = sum((outcome.reports for outcome in mine), Counter())
        about_ours = sum(count for kernel, count in counts.items() if kernel in ours)
        done = sum(outcome.status is not None for outcome in mine)
        seen = any(not outcome.faults(ours) for outcome in planted if outcome.job.tool == tool)
        print(
            f"{tool}: {done} of {len(mine)} parts done, {about_ours} reports about the project's kernels, "
            f"{counts.total() - about_ours} about libraries'; the planted fault is "
            f"{'reported' if seen else 'NOT reported'}"
        )
    print("sanitized:", f"{num_faults} faults" if num_faults else "no faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
