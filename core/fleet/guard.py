"""A small process for each process of the fleet, which kills it where it is stopped.

SIGKILL reaches a stopped process. Ray's own end of an actor is a call that a stopped process does not answer:
Ray takes it for dead, while it keeps its memory, and its share of the CPUs and GPUs.
"""

import os
import subprocess
import sys
import threading
import time

_BEAT_S = 1.0
_GUARD = """
import os, select, sys
process, seconds, missed = int(sys.argv[1]), float(sys.argv[2]), 0
while missed < seconds:  # by seconds in which this process ran: a machine may sleep
    if not select.select([0], [], [], 1.0)[0]:
        missed += 1
    elif os.read(0, 4096):
        missed = 0
    else:
        sys.exit()
if os.getppid() == process:
    os.kill(process, 9)
"""


def kill_when_stalled(seconds: float) -> None:
    """Have this process killed once it has run nothing for so long; a guard ends with its process."""
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(seconds)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def beat() -> None:
        assert guard.stdin is not None
        while True:
            try:
                os.write(guard.stdin.fileno(), b".")
            except OSError:  # the guard has been ended
                guard.wait()
                return
            time.sleep(_BEAT_S)

    threading.Thread(target=beat, name="mambaslots-guard", daemon=True).start()
