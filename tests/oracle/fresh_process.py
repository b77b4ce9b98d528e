"""Code in a process that has imported torch and nothing else: such processes are copies of one that waits.

Importing torch takes seconds, and dozens of tests look at what the first import of a module does. torch
imports neither triton nor a host of this package. Forks of a process that has called `start` share the one.

Where a test looks at no import, its process is a copy of one that has imported what tests do: `warm`.
"""

import atexit
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]

# For each connection there is a fork, which reads a job a line, {"argv", "code", "env", "out", "err"}, and
# answers with the number of its process, and later with the exit code. The end of standard input ends the
# process.
WAITS = """
import atexit, json, os, runpy, select, socket, sys, threading, traceback
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
        print(child, file=jobs, flush=True)
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
    finally:  # as an interpreter ends: it waits for threads, and runs what was registered
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""


@cache
def start() -> str:
    """Let the process wait until this one ends; returns the address at which it listens."""
    folder, own = tempfile.mkdtemp(prefix="fresh-"), os.getpid()
    listener = _listener(folder)
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
def start_warm() -> str:
    """As `start`, but the process that waits is a fork of this one."""
    folder, own = tempfile.mkdtemp(prefix="warm-"), os.getpid()
    listener = _listener(folder)
    stdin, stays = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads, which a fork does not have
        process = os.fork()
    if not process:
        try:
            os.chdir(ROOT)
            os.dup2(stdin, 0)
            os.close(stays)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            logging.getLogger().handlers.clear()  # pytest's, as are its filters
            warnings.resetwarnings()
            sys.argv = ["", str(listener.fileno())]
            exec(WAITS, {"__name__": "waits"})
        finally:
            os._exit(0)
    os.close(stdin)
    listener.close()

    @atexit.register
    def end() -> None:
        if os.getpid() == own:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            shutil.rmtree(folder)

    return f"{folder}/socket"


def _listener(folder: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    return listener


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


@cache
def _jobs(of: int, warm: bool) -> TextIO:
    """Where this process, `of` this number, writes its jobs."""
    with _connected(start_warm() if warm else start()) as connection:
        jobs = connection.makefile("rw")
    atexit.register(jobs.close)
    return jobs


def _begin(jobs: TextIO, argv: list[str], code: str | None, env: Any, out: str, err: str) -> None:
    """Its answer is the number of the process that does the job."""
    job = {"argv": argv, "code": code, "env": dict(env or os.environ), "out": out, "err": err}
    print(json.dumps(job), file=jobs, flush=True)


def _run(
    argv: list[str], code: str | None, env: Mapping[str, str] | None, warm: bool = False
) -> CompletedProcess[str]:
    jobs = _jobs(os.getpid(), warm)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        _begin(jobs, argv, code, env, out.name, err.name)
        _, exit_code = jobs.readline(), int(jobs.readline())
        return CompletedProcess(argv, exit_code, out.read(), err.read())


class Begun:
    """A process that a warm one has begun, `python script arguments` or `python -c code arguments`."""

    def __init__(self, *command: str, code: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self._out, self._err = (tempfile.NamedTemporaryFile("r") for _ in range(2))  # noqa: SIM115
        self._connection = _connected(start_warm())
        argv = list(command) if code is None else ["-c", *command]
        with self._connection.makefile("w") as jobs:
            _begin(jobs, argv, code, env, self._out.name, self._err.name)
        self.pid = self._number()
        self._status: int | None = None

    @property
    def said(self) -> str:
        """All of its standard output."""
        return Path(self._out.name).read_text()

    @property
    def errors(self) -> str:
        return Path(self._err.name).read_text()

    def first_line(self) -> str:
        """Waits for it; what there is where the process ends before."""
        while not (said := self.said).endswith("\n") and self.is_alive():
            time.sleep(0.01)
        return said.partition("\n")[0]

    def is_alive(self) -> bool:
        return self._status is None and not select.select([self._connection], [], [], 0)[0]

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None if the process has not ended."""
        if self._status is None and select.select([self._connection], [], [], timeout_s)[0]:
            self._status = self._number()
        return self._status

    def _number(self) -> int:
        """The next line, and no byte behind it: what is not read can be waited for."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._connection.recv(1) or b"\n"
        return int(line)

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it if it has not ended."""
        self.signal(signal.SIGKILL)
        self.wait(60)
        for end in (self._connection, self._out, self._err):
            end.close()


def run_code(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, warm: bool = False
) -> CompletedProcess[str]:
    """As `python -c code arguments` in the repository's root; `env` replaces the environment."""
    return _run(["-c", *arguments], code, env, warm)


def printed_by(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What `run_code` prints; AssertionError, with what it says of that, where it fails."""
    done = run_code(code, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(
    script: str, *arguments: str, env: Mapping[str, str] | None = None, warm: bool = False
) -> CompletedProcess[str]:
    """As `python script arguments` in the repository's root."""
    return _run([script, *arguments], None, env, warm)
