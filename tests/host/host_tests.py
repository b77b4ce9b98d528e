"""megatron-core's own tests of its inference contexts, on stock and with `mambaslots.mcore` installed.

    make test-host MEGATRON=CHECKOUT

CHECKOUT is a checkout of the public repository NVIDIA/Megatron-LM at the branch of the installed version, for
0.19 core_r0.19.0. Its tests run on the megatron-core that is installed: first on stock, then with the drop-in.
The exit code is 1 where a test that passes on stock does not pass with the drop-in.
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
    """Run the checkout's context tests on "stock" or on "ours"; name -> its outcome and error."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        paths = [str(ROOT / "stubs"), str(ROOT / "tests"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
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
        if not outcomes.is_file() or not (found := json.loads(outcomes.read_text())):
            raise SystemExit(f"no test of {checkout / CONTEXTS} ran:\n{done.stdout}{done.stderr}")
    return found  # type: ignore[no-any-return]
