"""megatron-core's own tests of its inference contexts, on stock and with `mambaslots.mcore` installed.

    make test-host MEGATRON=CHECKOUT

CHECKOUT is a checkout of the public repository NVIDIA/Megatron-LM, at core_r0.19.0 or on its main branch. Its
tests run on its own megatron-core, first on stock and then with the drop-in. The exit code is 1 where a test
that passes on stock does not pass with the drop-in.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTEXTS = Path("tests/unit_tests/inference/contexts")
Outcomes = dict[str, dict[str, str]]


def run(checkout: Path, host: str, options: list[str]) -> Outcomes:
    """Run the checkout's context tests on "stock" or on "ours", and print its versions; name -> outcome."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        paths = [
            str(ROOT / "stubs"),
            str(ROOT / "tests"),
            str(ROOT / "examples"),
            str(checkout),
            os.environ.get("PYTHONPATH", ""),
        ]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MAMBASLOTS_HOST": host,
            "MAMBASLOTS_OUTCOMES": str(outcomes),
        }
        command = [
            *(sys.executable, "-W", "ignore", "-m", "pytest"),
            *("-p", "host.host_plugin", "-p", "no:cacheprovider", "--noconftest", "--import-mode=importlib"),
            *("-c", os.devnull, "--rootdir", str(checkout), "-q", "--tb=no", "--no-summary", *options),
            str(checkout / CONTEXTS),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=os.environ | settings, cwd=folder, capture_output=True, text=True, check=False
        )
        report = json.loads(outcomes.read_text()) if outcomes.is_file() else {"tests": {}}
    if not report["tests"]:
        raise SystemExit(f"no test of {checkout / CONTEXTS} ran:\n{done.stdout}{done.stderr}")
    print(f"{host}: {report['host']}", flush=True)
    return report["tests"]  # type: ignore[no-any-return]


def compared(stock: Outcomes, ours: Outcomes) -> tuple[list[str], bool]:
    """Lines that say how often which outcome came, and every difference; whether nothing became worse."""
    lines = [f"{'':12}  stock  with mambaslots"]
    counts = [Counter(test["outcome"] for test in outcomes.values()) for outcomes in (stock, ours)]
    lines += [
        f"{name:12}  {counts[0][name]:5}  {counts[1][name]:15}" for name in ("passed", "failed", "skipped")
    ]
    lost = [name for name in stock if stock[name]["outcome"] == "passed" != _outcome(ours, name)]
    gained = [name for name in stock if stock[name]["outcome"] != "passed" == _outcome(ours, name)]
    for title, names in (
        ("pass on stock and not with mambaslots", lost),
        ("pass with mambaslots only", gained),
    ):
        lines.append(f"{title}: {len(names)}")
        lines += [f"  {name}\n    {ours.get(name, {}).get('error', 'was not run')}" for name in names]
    return lines, not lost


def _outcome(outcomes: Outcomes, name: str) -> str:
    return outcomes.get(name, {}).get("outcome", "not run")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    if not (checkout / CONTEXTS).is_dir():
        parser.error(f"{args.checkout} has no {CONTEXTS}; make test-host MEGATRON=CHECKOUT names a checkout")
    stock, ours = (run(checkout, host, args.pytest) for host in ("stock", "ours"))
    lines, good = compared(stock, ours)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
