"""The collectives of a split model's groups at the end of a process."""

import signal
import subprocess
import sys

import torch.distributed as dist
from oracle.fresh_process import Begun

RANK = """
import sys, threading, time
import torch.distributed as dist
from mambaslots.parallel_groups import ParallelGroups

rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
groups = ParallelGroups(tensor=dist.group.WORLD)
groups.gather(None)
if rank:
    time.sleep(60)

class Last:
    def __del__(self, say=sys.stdout.write, flush=sys.stdout.flush, sleep=time.sleep):
        say("ending\\n")
        flush()
        sleep(1)

caller = threading.Thread(target=groups.gather, args=[None])
threading.excepthook = lambda raised: print(raised.exc_value)
caller.start()
time.sleep(0.2)
groups.abort("rank 1 is late")
caller.join()
sys.modules["last"] = Last()  # of the interpreter's end, after the last Python code of other threads
"""


def test_no_thread_returns_from_a_collective_while_the_interpreter_ends() -> None:
    """It would abort the process: C++ has no way to end a thread that Python has ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = Begun("1", str(store.port), code=RANK)
    command = [sys.executable, "-c", RANK, "0", str(store.port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = [process.stdout.readline() for _ in range(2)]
        other.signal(signal.SIGKILL)  # ends what the thread waits for
        assert said == ["rank 1 is late\n", "ending\n"], process.stderr.read()
        assert process.wait(60) == 0, process.stderr.read()
    other.close()
