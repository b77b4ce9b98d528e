"""Damaged input for all that reads input: is each refused with a documented error, in time and in memory?

    python tools/fuzz.py --inputs 20000 --seed 0
    python tools/fuzz.py --targets "traces,plan specs" --inputs 5000
    python tools/fuzz.py --targets traces --seed 0 --only 1234

Each target draws inputs from the seed: good ones, and good ones that are damaged. An input is fed under a
watch (`fuzzing/target.py`). A finding: an error that the docs of the call do not name; a state that changed
though the input was refused; more memory than the size of the input justifies; more than a second. The exit
status is 1 where there is one.

The table has a line for each target; "grown MiB" is by how much the process is larger behind its inputs. Each
finding is shown with the command that repeats it. --only N feeds input N; where a target remembers inputs,
those before it come first.
"""

import json
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzzing import byte_targets as fuzz_bytes
from fuzzing import files as fuzz_files

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from arguments import add_count, make_parser
from fuzzing.target import ACCEPTED, REFUSED, Hang, Target, TooMuchMemory, lacks_memory, resident_mib, watched

SOURCES: list[Callable[[Path], list[Target]]] = [fuzz_files.targets, fuzz_bytes.targets]
"""Where targets come from, each as a function of a folder that they may write to."""
WEIGHTS: dict[str, float] = {**fuzz_files.WEIGHTS, **fuzz_bytes.WEIGHTS}
"""Shares of the inputs of slow targets; 1 for the others."""
REMEMBERING = fuzz_files.REMEMBERING | fuzz_bytes.REMEMBERING
"""Targets for which an input may depend on those before it."""
_SHOWN = 3
"""So many findings of a kind are shown."""


@dataclass
class Finding:
    """One input that did what it should not."""

    target: str
    index: int
    kind: str
    what: str


@dataclass
class Tally:
    """What happened to the inputs of one target."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    grown_mib: float = 0.0


KINDS = ("undocumented error", "state", "memory", "time")


def kind_of(error: BaseException) -> str:
    """Which kind of finding an error is."""
    if isinstance(error, Hang):
        return "time"
    if isinstance(error, TooMuchMemory) or lacks_memory(error):
        return "memory"
    return "state" if isinstance(error, AssertionError) else "undocumented error"


def feed_one(target: Target, seed: int, index: int) -> tuple[str, str]:
    """Feed input `index`: how it ended, and what was found; "" for nothing."""
    drawn = target.draw(Random(f"{seed}/{target.name}/{index}"))
    try:
        with watched(target.size_of(drawn)):
            end = target.feed(drawn)
        assert end in (ACCEPTED, REFUSED), f"feed returned {end!r}"
        return end, ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a SystemExit, which no input may cause
        return kind_of(error), _message_of(error)


def prepare(targets: Sequence[Target]) -> None:
    """Have all targets import and make what they need: the watch could interrupt an import."""
    for target in targets:
        target.draw(Random(0))


def feed_only(target: Target, seed: int, index: int) -> str:
    """Feed input `index`, and raise what it raises; a target that remembers gets those before it first."""
    if target.name in REMEMBERING:
        for before in range(index):
            feed_one(target, seed, before)
    drawn = target.draw(Random(f"{seed}/{target.name}/{index}"))
    print(f"{target.name}: {drawn!r:.4000}".encode("ascii", "backslashreplace").decode())
    with watched(target.size_of(drawn)):
        return target.feed(drawn)


def run(targets: Sequence[Target], num_inputs: int, seed: int, weights: dict[str, float]) -> dict[str, Tally]:
    """Feed all targets, each its share of the inputs."""
    whole = sum(weights.get(target.name, 1.0) for target in targets)
    tallies: dict[str, Tally] = {}
    prepare(targets)
    for target in targets:
        before_mib = resident_mib()
        tally = tallies[target.name] = Tally()
        started_s = time.perf_counter()
        for index in range(max(1, round(num_inputs * weights.get(target.name, 1.0) / whole))):
            end, what = feed_one(target, seed, index)
            tally.ends[end] += 1
            if what:
                tally.findings.append(Finding(target.name, index, end, what))
        tally.seconds = time.perf_counter() - started_s
        tally.grown_mib = resident_mib() - before_mib
        ends = ", ".join(f"{count:,} {end}" for end, count in sorted(tally.ends.items()))
        print(f"{target.name}: {ends}", file=sys.stderr, flush=True)
    return tallies


def all_targets(folder: Path) -> list[Target]:
    """Every target; names are unique."""
    found = [target for source in SOURCES for target in source(folder)]
    names = [target.name for target in found]
    assert len(set(names)) == len(names), f"names twice in {names}"
    return found


def chosen(targets: Sequence[Target], names: str | None) -> list[Target]:
    """The targets that `names` names, separated by commas; all of them for None."""
    if names is None:
        return list(targets)
    wanted = [name.strip() for name in names.split(",")]
    known = {target.name: target for target in targets}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--targets has {unknown[0]!r}; accepted: {', '.join(known)}")
    return [known[name] for name in wanted]


def table(tallies: dict[str, Tally]) -> str:
    """A line for each target, and one for all."""
    heads = (
        "target",
        "inputs",
        ACCEPTED,
        REFUSED,
        *(f"{kind} findings" for kind in KINDS[1:]),
        KINDS[0],
        "grown MiB",
        "s",
    )
    rows = [(name, *_row(tally)) for name, tally in tallies.items()]
    together = Tally()
    for tally in tallies.values():
        together.ends += tally.ends
        together.seconds += tally.seconds
        together.grown_mib += tally.grown_mib
    rows.append(("all", *_row(together)))
    widths = [max(map(len, column)) + 2 for column in zip(heads, *rows, strict=True)]
    lines = [heads, *rows]
    return "\n".join(
        line[0].ljust(widths[0])
        + "".join(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def _row(tally: Tally) -> tuple[str, ...]:
    ends = tally.ends
    counts = (
        ends.total(),
        ends[ACCEPTED],
        ends[REFUSED],
        *(ends[kind] for kind in KINDS[1:]),
        ends[KINDS[0]],
    )
    return *(f"{count:,}" for count in counts), f"{tally.grown_mib:.1f}", f"{tally.seconds:.1f}"


def _message_of(error: BaseException) -> str:
    """An error, and where it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "fuzz" not in frame.filename]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
    return f"{type(error).__name__}: {error!s:.300} ({places or 'in the target'})".encode(
        "ascii", "backslashreplace"
    ).decode()


def show(findings: Sequence[Finding], seed: int) -> None:
    """Print findings, the first of each kind and place."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.target, one.kind, one.what.rpartition("(")[2]), []).append(one)
    for same in alike.values():
        print(f"\n{same[0].target}: {same[0].kind}, {len(same)} inputs")
        for one in same[:_SHOWN]:
            name = shlex.quote(one.target)
            print(f"  {one.what}\n    python tools/fuzz.py --targets {name} --seed {seed} --only {one.index}")


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--inputs", 20_000, "over all targets")
    add_count(parser, "--seed", 0, "of all inputs", at_least=0)
    parser.add_argument("--targets", help="names of targets, separated by commas; default: all")
    parser.add_argument("--only", type=int, help="feed this input of each target, and raise what it raises")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        targets = chosen(all_targets(Path(folder)), options.targets)
        if options.only is not None:
            for target in targets:
                print(feed_only(target, options.seed, options.only))
            return 0
        prepare(targets)
        before = resident_mib()
        tallies = run(targets, options.inputs, options.seed, WEIGHTS)
    findings = [one for tally in tallies.values() for one in tally.findings]
    print(table(tallies))
    print(f"memory: {before:.0f} MiB before the first input, {resident_mib():.0f} MiB behind the last")
    if options.json:
        plain = {
            name: {**tally.ends, "grown_mib": round(tally.grown_mib, 1), "seconds": round(tally.seconds, 1)}
            for name, tally in tallies.items()
        }
        options.json.write_text(json.dumps(plain, indent=1) + "\n")
    show(findings, options.seed)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
