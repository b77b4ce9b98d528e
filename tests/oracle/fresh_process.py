"""Code in a process that has imported torch and nothing else: such processes are copies of one that waits.

Importing torch takes seconds, and dozens of tests look at what the first import of a module does. torch
imports neither triton nor a host of this package. Forks of a process that has called `start` share the one.
"""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import TextIO

ROOT = Path(__file__).parents[2]

# For each connection there is a fork, which reads a job a line, {"argv", "code", "env", "out", "err"}, and
# answers with the exit code. The end of standard input ends the process.
WAITS = """
import json, os, runpy, select, socket, sys, traceback
import torch
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    if 0 in select.select([listener, 0], [], [])[0]:
        sys.exit()
    connection, _ = listener.accept()
    if not os.fork():
        break
    connection.close()
listener.close()
jobs = connection.makefile("rw")
for line in jobs:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=jobs, flush=True)
        continue
    status = 1
    try:
        os.close(connection.fileno())
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
def start() -> str:
    """Let the process wait until this one ends; returns the address at which it listens."""
    folder, own = tempfile.mkdtemp(prefix="fresh-"), os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    command = [sys.executable, "-c", WAITS, str(listener.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    listener.close()

    @atexit.register
    def end() -> None:
        if os.getpid() == own:  # no fork of this one
            process.kill()
            process.communicate()
            shutil.rmtree(folder)

    return f"{folder}/socket"


@cache
def _jobs(of: int) -> TextIO:
    """Where this process, `of` this number, writes its jobs."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(start())
        jobs = connection.makefile("rw")
    atexit.register(jobs.close)
    return jobs


def _run(argv: list[str], code: str | None, env: Mapping[str, str] | None) -> CompletedProcess[str]:
    jobs = _jobs(os.getpid())
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {"argv": argv, "code": code, "env": dict(env or os.environ), "out": out.name, "err": err.name}
        print(json.dumps(job), file=jobs, flush=True)
        exit_code = int(jobs.readline())
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
