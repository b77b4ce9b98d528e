"""Code in a process that has imported torch and nothing else: such processes are copies of one that waits.

Importing torch takes seconds, and dozens of tests look at what the first import of a module does. torch
imports neither triton nor a host of this package.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).parents[2]

# Each line that it reads is a job: {"argv", "code", "env", "out", "err"}. It answers with the exit code.
WAITS = """
import json, os, runpy, sys, traceback
import torch
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    status = 1
    try:
        for path, number in (("/dev/null", 0), (job["out"], 1), (job["err"], 2)):
            os.dup2(os.open(path, os.O_RDWR), number)
        os.environ.clear()
        os.environ.update(job["env"])
        named = job["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in named if path and path not in sys.path]
        sys.stdin, sys.argv, code = open(0), job["argv"], job["code"]
        if code is None:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""


@cache
def _waiting() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # it ends at the end of its input
    return process


def _run(argv: list[str], code: str | None, env: Mapping[str, str] | None) -> CompletedProcess[str]:
    process = _waiting()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {"argv": argv, "code": code, "env": dict(env or os.environ), "out": out.name, "err": err.name}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        exit_code = int(process.stdout.readline())
        return CompletedProcess(argv, exit_code, out.read(), err.read())


def run_code(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """As `python -c code arguments` in the repository's root; `env` replaces the environment."""
    return _run(["-c", *arguments], code, env)


def printed_by(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What `run_code` prints; AssertionError, with what it says of that, where it fails."""
    done = run_code(code, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """As `python script arguments` in the repository's root."""
    return _run([script, *arguments], None, env)
