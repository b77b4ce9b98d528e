"""Do kernels read or write what they must not, race, or wait wrongly? compute-sanitizer over tests on a GPU.

Every part is a choice of tests that launch kernels of the project, each tool one of compute-sanitizer's:

kernels     tests of kernels at small shapes, with padding, tails and empty rows; a file is one part or more
models      kernel sets in whole forwards, padded and not, with drafts
align       the kernels of vLLM's align mode
graphs      an engine whose pool is so small that states leave for pinned memory and come back while captured
            graphs replay decodes, with drafts and without; its answers are those without cache and graphs

memcheck    accesses out of bounds or misaligned, in global, shared and local memory
racecheck   hazards in shared memory
initcheck   reads of device memory that was never written
synccheck   wrong use of barriers

Parts run at once, up to --jobs of them, each in a process of its own under one tool, and print their lines
when they end. All but "graphs" run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an
allocation of its own and an access one number beyond it is seen; no graph can be captured so. The project's
own kernels alone are checked, by their names; `--all-kernels` checks those of libraries, too. initcheck
always does: it knows of no write of a kernel that it does not check. Reports are counted by the kernel that
they name. Threads of `ssd_update_kernel` store equal sums by one instruction: such write-write pairs of
racecheck are counted apart. Under racecheck a product of 16 bits that is summed in float32 is computed in
float32: there the library's kernel for it ends in an illegal access.

`sanitizing/plants.py` breaks, for each tool, what the tool watches over, in the same run. Its own kernel also
reads what a product of cuBLAS has written: where initcheck reports that, its reports of "models" and
"graphs", whose kernels read such products, say nothing. The script exits with 1 where a report names a
kernel of the project, a test fails, or a planted fault is not reported. A part whose time is up ends behind a
test, and its line says so.
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
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from arguments import add_count, make_parser
from sanitizing.tests import STOPPED

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNEL_TESTS = ROOT / "tests/unit/inference/kernels"
SHARES = {
    "test_attention_segments_gpu.py": 6, "test_attention_gpu.py": 3, "test_gated_delta_rule_gpu.py": 3,
    "test_delta_replay.py": 2, "test_conv_replay.py": 2, "test_ssd_scan.py": 2,
}  # fmt: skip
"""Files whose tests take longer than others' -> into how many parts they are cut."""
MODEL_TESTS = ("test_kernel_sets.py",)
GRAPH_TEST = "tests/unit/inference/engines/test_graphs_over_tier_gpu.py"
PLANTS, PRODUCT = "plants", "product"
GRACE = 45
"""Seconds from the end of a part's time to the end of its process."""
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

SAME_STORE = ("ssd_update_kernel",)
"""Kernels of which several threads store the same sum by one instruction; see docs/gpu.md."""
PAIRS = " (write-write pairs of one instruction)"

SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: .*")
REPORT = re.compile(
    r"=+ (?:Error: |Warning: )?(Invalid |Uninitialized |Race reported|Potential |Barrier error|Misaligned ).*"
)
AT = re.compile(r"=.* (?:at|access at) (?:0x[0-9a-f]+ in )?(?:[^ ]+:\d+:)?(?:void )?([\w:~]+)")


@dataclass(frozen=True)
class Job:
    """One process: tests under a tool.

    Attributes:
        part, tool: what is run under what.
        tests: arguments of pytest.
    """

    part: str
    tool: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.tool} {self.part}"


class Options(NamedTuple):
    """What all jobs share: where logs go, a part of tests' names or "", and seconds of a part."""

    folder: Path
    keyword: str
    limit: int


@dataclass
class Outcome:
    """What a job said.

    Attributes:
        seconds: of the process.
        tests: the last line of pytest.
        summary: the sanitizer's own last line.
        is_whole: whether the time sufficed.
        reports: kernel -> how many reports name it.
        excerpts: the beginnings of reports and of errors of tests.
    """

    job: Job
    seconds: float
    tests: str
    summary: str
    is_whole: bool
    reports: Counter[str] = field(default_factory=Counter)
    excerpts: list[str] = field(default_factory=list)

    def faults(self, ours: set[str]) -> list[str]:
        """What is wrong here."""
        planted = any("planted" in kernel for kernel in self.reports)
        if self.job.part == PRODUCT:
            return []
        if self.job.part == PLANTS:
            return [] if planted else ["the plant is not reported"]
        named = [f"{count} reports name {kernel}" for kernel, count in self.reports.items() if kernel in ours]
        if re.search(r"\d+ (failed|error)", self.tests):
            named.append(f"tests: {self.tests}")
        elif "passed" not in self.tests:
            named.append("no test has passed")
        return named

    def lines(self, ours: set[str]) -> list[str]:
        """What is printed."""
        cut = "" if self.is_whole else "  (the time was up)"
        found = [f"{self.job.name:24} {self.seconds:6.0f} s  {self.tests}{cut}"]
        found.append(f"    {self.summary}")
        for kernel, count in self.reports.most_common():
            owner = "planted" if "planted" in kernel else "a library's"
            owner = "ours" if kernel.removesuffix(PAIRS) in ours else owner
            found.append(f"    {count} x {kernel} ({owner})")
        found += [f"    FAULT: {fault}" for fault in self.faults(ours)]
        if self.job.part not in (PLANTS, PRODUCT):
            found += [f"      {line}" for line in self.excerpts]
        return found


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
    parts: dict[str, tuple[str, ...]] = {}
    for path in files:
        count = SHARES.get(path.name, 1)
        for number in range(count):
            name = f"kernels {path.stem.removeprefix('test_')}" + f" {number + 1}" * (count > 1)
            parts[name] = (str(path), *[f"--share={number}/{count}"] * (count > 1))
    parts["models"] = tuple(str(ROOT / "tests/unit/models" / name) for name in MODEL_TESTS)
    parts["align"] = (str(ROOT / "tests/unit/vllm/test_align_kernels.py"),)
    parts["graphs"] = (str(ROOT / GRAPH_TEST),)
    return parts


def command(job: Job, sanitizer: str, kernels: Sequence[str], log: Path, options: Options) -> list[str]:
    """The arguments of the job's process."""
    scripts = ROOT / "tools/sanitizing"
    if job.part in (PLANTS, PRODUCT):
        run = [
            sys.executable,
            str(scripts / "plants.py"),
            PRODUCT if job.part == PRODUCT else job.tool,
        ]
    else:
        run = [sys.executable, str(scripts / "tests.py"), str(options.limit)]
        run += ["--float32-products"] * (job.tool == "racecheck")
        run += ["-p", "no:cacheprovider", "-m", "gpu and not long"]
        choice = [f"({options.keyword})"] * bool(options.keyword)
        choice += [f"not ({' or '.join(LEFT_OUT)})"] * (job.part != "graphs")
        run += [*job.tests, *(["-k", " and ".join(choice)] if choice else [])]
    checked = [] if job.tool == "initcheck" or not kernels else [*kernels, "planted"]
    filters = [word for name in checked for word in ("--kernel-name", f"kernel_substring={name}")]
    return [
        sanitizer, "--tool", job.tool, "--target-processes", "application-only", "--launch-timeout", "120",
        "--print-limit", "100", "--show-backtrace", "no", "--error-exitcode", "86", "--log-file", str(log),
        *filters, *run,
    ]  # fmt: skip


def run_job(job: Job, sanitizer: str, kernels: Sequence[str], options: Options) -> Outcome:
    """Run a job to its end, or until its time is up."""
    stem = options.folder / job.name.replace(" ", "_")
    log, said = stem.with_suffix(".log"), stem.with_suffix(".out")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'stubs'}:{os.environ.get('PYTHONPATH', '')}"}
    if job.part != "graphs":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started, is_whole = time.monotonic(), True
    with said.open("w") as output:
        process = subprocess.Popen(
            command(job, sanitizer, kernels, log, options), stdout=output, stderr=subprocess.STDOUT,
            cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(options.limit + GRACE)
        except subprocess.TimeoutExpired:
            is_whole = False
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = said.read_text(errors="replace").splitlines()
    tests = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    summary = (SUMMARY.findall(text) or ["no summary: " + " | ".join(lines[-2:])[-150:]])[-1].strip("= ")
    return Outcome(
        job, time.monotonic() - started, tests.strip("= "), summary,
        is_whole and not any(STOPPED in line for line in lines), Counter(reported(text)),
        excerpts_of(text, lines),
    )  # fmt: skip


def excerpts_of(log: str, lines: Sequence[str]) -> list[str]:
    """The beginning of a sanitizer's log, and of what failed tests say."""
    begun = [line for line in log.splitlines()[1:7] if "SUMMARY" not in line]
    return [line[:150] for line in (*begun, *(line for line in lines if line.startswith("E   ")))][:16]


def reported(text: str) -> Iterator[str]:
    """The kernel that each report of a sanitizer's log names; with PAIRS where that is all it reports."""
    lines = text.splitlines()
    waiting = False
    for line, behind in zip(lines, [*lines[1:], ""], strict=True):
        begins = REPORT.match(line) is not None
        if begins and waiting:
            yield "no kernel named"
        waiting = waiting or begins
        if waiting and (found := AT.match(line)):
            yield found[1] + PAIRS * (found[1] in SAME_STORE and _is_pair(line, behind))
            waiting = False
    if waiting:
        yield "no kernel named"


def _is_pair(line: str, behind: str) -> bool:
    """Whether a race is one of two writes by the same instruction."""
    first, second = (part.partition("Write access at ")[2].split(" [")[0] for part in (line, behind))
    return "+0x" in first and first == second


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
    add_count(parser, "--jobs", 8, "processes at once")
    add_count(parser, "--limit", 300, "seconds of a part")
    arguments = parser.parse_args()
    missing = "compute-sanitizer is not here; it comes with the CUDA toolkit"
    sanitizer: str = find_sanitizer() or parser.error(missing)
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = tuple(arguments.parts.split(",")) if arguments.parts else ("",)
    parts = {part: tests for part, tests in tests_by_part().items() if part.startswith(wanted)}
    tools = [tool for tool in TOOLS if tool in arguments.tools.split(",")]
    options = Options(arguments.out, arguments.keyword, arguments.limit)
    ours = our_kernels()
    kernels = () if arguments.all_kernels else tuple(ours)

    def run(job: Job) -> Outcome:
        outcome = run_job(job, sanitizer, kernels, options)
        print(*outcome.lines(set(ours)), sep="\n", flush=True)
        return outcome

    jobs = [Job(PLANTS, tool, ()) for tool in tools]
    jobs += [Job(PRODUCT, "initcheck", ())] * ("initcheck" in tools)
    # Those of one tool first: the kernels that they compile are there for the other tools.
    jobs += [Job(part, tool, tests) for tool in tools for part, tests in reversed(parts.items())]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        return show(list(pool.map(run, jobs)), set(ours))


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is; None where it is nowhere."""
    known = [
        *Path("/usr/local").glob("cuda*/bin/compute-sanitizer"),
        *Path("/opt").glob("*/compute-sanitizer"),
    ]
    return shutil.which("compute-sanitizer") or next(map(str, known), None)


def show(outcomes: Sequence[Outcome], ours: set[str]) -> int:
    """Print a line for each tool; the exit status."""
    blind = any(outcome.job.part == PRODUCT and outcome.reports for outcome in outcomes)
    num_faults = 0
    for tool in dict.fromkeys(outcome.job.tool for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.job.tool == tool]
        checked = [outcome for outcome in mine if outcome.job.part not in (PLANTS, PRODUCT)]
        if tool == "initcheck" and blind:
            print("initcheck does not see what cuBLAS writes: its reports of models and graphs say nothing")
            checked = [outcome for outcome in checked if outcome.job.part not in ("models", "graphs")]
        counts = sum((outcome.reports for outcome in checked), Counter())
        about_ours = sum(count for kernel, count in counts.items() if kernel in ours)
        pairs = sum(count for kernel, count in counts.items() if kernel.endswith(PAIRS))
        seen = any(outcome.job.part == PLANTS and not outcome.faults(ours) for outcome in mine)
        num_faults += sum(len(outcome.faults(ours)) for outcome in checked) + (not seen)
        passed = sum(int(found[1]) for one in checked if (found := re.search(r"(\d+) passed", one.tests)))
        whole = sum(outcome.is_whole for outcome in checked)
        print(
            f"{tool}: {passed} tests passed in {len(checked)} parts, {whole} of them whole; {about_ours} "
            f"reports about the project's kernels, {counts.total() - about_ours - pairs} about libraries'; "
            f"{f'{pairs} write-write pairs of one instruction; ' if pairs else ''}the "
            f"planted fault is {'reported' if seen else 'NOT reported'}"
        )
    print("sanitized:", f"{num_faults} faults" if num_faults else "no faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
