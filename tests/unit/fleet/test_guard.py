"""A process that stands still is killed by its guard; guards end with their processes."""

import signal
import subprocess
import sys
import time

STARTED = """
import subprocess, sys, time
from mambaslots.fleet import guard
Popen = subprocess.Popen
def kept(*arguments, **options):
    made = Popen(*arguments, **options)
    print(made.pid, flush=True)
    return made
guard.subprocess.Popen = kept
guard.kill_when_stalled(2.0)
time.sleep(60)
"""


def start() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", STARTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def ended(pid: int) -> bool:
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_stopped_process_is_killed_and_one_that_runs_is_not() -> None:
    process, guard = start()
    with process:
        try:
            time.sleep(3.5)
            assert process.poll() is None
            process.send_signal(signal.SIGSTOP)
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
    assert ended(guard)


def test_a_guard_ends_with_its_process() -> None:
    process, guard = start()
    with process:
        process.kill()
    assert ended(guard)
