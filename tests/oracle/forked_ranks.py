"""Runs pytest as several ranks, like torchrun: `python -P tests/oracle/forked_ranks.py 2 4 -- tests/net`.

One run for each number of ranks, all at once, because ranks wait for one another half of their time. A run
is a fork of a process that has imported what all of them import, 12 s of CPU time; it collects the tests, and
its ranks are forks of it. Forks use no GPU. A rank that fails ends the others of its run. What ranks say goes
to files, because other tests may run and speak meanwhile: a run that has ended shows what rank 0 said, and
the ends of the others' where it failed.
"""

import gc
import os
import signal
import socket
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

IMPORTED = ("oracle.audit_hook", "hypothesis.stateful", "mambaslots.hf.load", "oracle.distributed_world")
ARCHITECTURES = (
    "bamba", "granitemoehybrid", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
"""What each rank would import: of transformers, the files of these."""
NUM_LINES = 60
"""Shown of what a silent rank said, where a run fails."""


def main() -> int:
    end = sys.argv.index("--")
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in IMPORTED:
        import_module(name)
    from oracle.hf_models import without_kernel_packages

    with without_kernel_packages():
        for name in ARCHITECTURES:
            import_module(f"transformers.models.{name}.modeling_{name}")
    gc.freeze()
    said: dict[int, Path] = {}  # process of a run -> what it says
    for number in sys.argv[1:end]:
        log = Path(tempfile.mkstemp(prefix="ranks-")[1])
        agent = os.fork()
        if not agent:
            code = 1
            try:
                say_into(log)
                code = run(int(number), sys.argv[end + 1 :])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        said[agent] = log
    worst = 0
    while said:
        agent, status = os.wait()
        log = said.pop(agent)
        worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
        print(f"\n== tests on several ranks\n{log.read_text(errors='replace')}", end="", flush=True)
        log.unlink()
    return worst


def say_into(log: Path) -> None:
    """Let this process write into a file what it would print."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)


def run(number: int, arguments: list[str]) -> int:
    """The largest exit code of so many ranks, or that of the collection."""
    os.environ |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    options = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", *arguments]
    return int(pytest.main(options, plugins=[Ranks(number)]))


class Ranks:
    """Plugin of a run's pytest: forks run the tests that it has collected."""

    def __init__(self, number: int) -> None:
        self._number = number

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Returns in each rank alone."""
        if not session.items or session.testsfailed or session.config.option.collectonly:
            return
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        said = Path(tempfile.mkdtemp(prefix="ranks-"))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        os.environ["MASTER_PORT"] = str(port)
        ranks: dict[int, int] = {}  # process -> rank
        for rank in range(self._number):
            process = os.fork()
            if not process:
                listener.close()
                be(rank, said / f"{rank}.log", session.config)
                return
            ranks[process] = rank
        os._exit(end_of(ranks, said, listener))


def be(rank: int, log: Path, config: pytest.Config) -> None:
    """Let this process be the rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files have one position for all forks
    if rank:
        say_into(log)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def end_of(ranks: dict[int, int], said: Path, listener: socket.socket) -> int:
    """The largest exit code of the ranks, which meet at the listener; others end with one that fails."""
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    number, worst = len(ranks), 0
    while ranks:
        process, status = os.wait()
        code, rank = os.waitstatus_to_exitcode(status), ranks.pop(process)
        if code and not worst:
            worst = abs(code)
            print(f"rank {rank} of {number} ended with exit code {code}", flush=True)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    del store
    for log in sorted(said.iterdir()):
        if worst:
            lines = log.read_text(errors="replace").splitlines()
            print(f"== {log}", *lines[-NUM_LINES:], sep="\n", flush=True)
        else:
            log.unlink()
    if not worst:
        said.rmdir()
    return worst


if __name__ == "__main__":
    sys.exit(main())
