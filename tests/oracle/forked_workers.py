"""Runs tests in forks of the process that collected them: `pytest -p oracle.forked_workers --forks 3`.

Workers of pytest-xdist each import the package, its hosts and all tests, and collect them: 16 s of CPU time a
worker, 25 s where nothing is compiled yet. Forks share what one process collected.

A worker takes tests of one module, up to `SHARE`, whenever it has run its last ones. It takes the next ones
before it ends the last of these, because pytest asks what follows a test.
"""

import fcntl
import gc
import mmap
import os
import signal
import sys
import tempfile
import traceback
import warnings
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

SHARE = 24
"""Tests of one module that a worker takes at once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.getoption("--forks")
    if not number or session.config.option.collectonly or len(session.items) < 2:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    shares = Shares(session.items)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    gc.freeze()
    workers: dict[Connection, Worker] = {}
    ended = set[str]()  # tests
    try:
        for index in range(number):
            inherited = [other.said for other in workers.values()]
            worker = Worker(f"fork{index}", session, shares, ended, inherited)
            workers[worker.said] = worker
        while workers:
            for said in wait(list(workers)):
                if not workers[said].listen():  # type: ignore[index]
                    workers.pop(said).end()  # type: ignore[arg-type]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers.values():
            worker.end(signal.SIGTERM)
        shares.close()
    if num_left := len(session.items) - len(ended):
        session.shouldfail = f"workers ended before they ran {num_left} of their tests"
        raise session.Failed(session.shouldfail)
    return True


class Shares:
    """Which tests are still to be run, for all workers."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._shares: list[list[pytest.Item]] = []
        for _, module in groupby(items, lambda item: item.path):
            tests = list(module)
            self._shares += [tests[i : i + SHARE] for i in range(0, len(tests), SHARE)]
        self._taken = mmap.mmap(-1, 8)
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the workers

    def take(self) -> list[pytest.Item]:
        """The next share; empty: none is left. Locks are of processes, so forks share the file."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            taken = int.from_bytes(self._taken[:])
            self._taken[:] = min(taken + 1, len(self._shares)).to_bytes(8)
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return self._shares[taken] if taken < len(self._shares) else []

    def close(self) -> None:
        self._lock.close()


class Worker:
    """A fork that runs tests, as the process that shows what they report sees it."""

    def __init__(
        self,
        name: str,
        session: pytest.Session,
        shares: Shares,
        ended: set[str],
        inherited: list[Connection],
    ) -> None:
        self._session, self._ended, self._running = session, ended, ""
        self._gateway = SimpleNamespace(gateway=SimpleNamespace(id=name))  # as the terminal knows workers
        self.said, says = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if not self._process:
            for other in [self.said, *inherited]:
                other.close()
            _work(name, session, shares, says)
        says.close()

    def listen(self) -> bool:
        """Pass on what the worker says next; False: it ended."""
        hook = self._session.config.hook
        try:
            what, said = self.said.recv()
        except EOFError:
            return False
        if what == "starts":
            self._running = said
        elif what == "warns":
            hook.pytest_warning_recorded.call_historic(kwargs=said)
        else:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=said)
            report.node = self._gateway
            hook.pytest_runtest_logreport(report=report)
            del report.node
            if report.when == "teardown":
                self._running = ""
                self._ended.add(report.nodeid)
        return True

    def end(self, by: int = 0) -> None:
        self.said.close()
        if by:
            os.kill(self._process, by)
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        if not by and (code or self._running):
            text = f"the worker ended with exit code {code} in {self._running or 'no test'}"
            report = pytest.TestReport(self._running or "worker", ("", None, ""), {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)


def _work(name: str, session: pytest.Session, shares: Shares, says: Connection) -> NoReturn:
    """Be a worker until no test is left."""
    config = session.config
    code = 1
    try:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files have one position for all forks
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Reports(config, says))
        folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / name
        folders._basetemp.mkdir(mode=0o700)
        tests = shares.take()
        while tests:
            following = []
            for number, test in enumerate(tests, 1):
                if number == len(tests):
                    following = shares.take()
                test.config.hook.pytest_runtest_protocol(
                    item=test, nextitem=[*tests[number:], *following, None][0]
                )
            tests = following
        config._ensure_unconfigure()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        says.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Reports:
    """Plugin of a worker's pytest: passes on what else the terminal would show."""

    def __init__(self, config: pytest.Config, says: Connection) -> None:
        self._config, self._says = config, says

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._says.send(("starts", nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_serializable = self._config.hook.pytest_report_to_serializable
        self._says.send(("reports", to_serializable(config=self._config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        known = warning_message.category if warning_message.category.__module__ == "builtins" else UserWarning
        shown = warnings.WarningMessage(
            str(warning_message.message), known, warning_message.filename, warning_message.lineno
        )
        said = {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        self._says.send(("warns", said))
