import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import oracle.audit_hook  # noqa: F401 - before what imports filelock
import pytest
import torch
from hypothesis import settings
from oracle import fresh_process
from oracle.budget import mark_long
from oracle.interpreter import accept_masks_of_any_integer, add_products_in_order, prepare_launches_once
from oracle.model_kinds import KINDS, kind_of_model

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")):
    names = gpus.split(",")  # each worker computes on another one: it comes first
    first = int(worker.removeprefix("gw")) % len(names)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])

if not torch.cuda.is_available():  # read by triton, and by megatron-core's kernels, when they are imported
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["MAMBA_DETERMINISTIC"] = "1"  # one autotuning configuration: nothing is timed
    accept_masks_of_any_integer()
    add_products_in_order()
    prepare_launches_once()

# torch's TCPStore looks up names: at each connection a name server that does not answer costs 1 s, not 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Several threads help none of these small shapes, and make every test crawl on a busy machine.
torch.set_num_threads(1)


settings.load_profile("quick")  # `--hypothesis-profile long` comes after it
POISON = pytest.StashKey[tuple[tuple[str, ...], AbstractContextManager[None]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--poison", action="store_true", help="poison memory that may not be read: oracle/poisoned_session.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--poison"):
        _start_poison(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if POISON in config.stash:
        config.stash[POISON][1].__exit__(None, None, None)


def _start_poison(config: pytest.Config, test_id: str = "") -> None:
    from oracle.poisoned_session import left_out, poisoned

    without = left_out(test_id)
    if POISON in config.stash:
        before, poison = config.stash[POISON]
        if before == without:
            return
        poison.__exit__(None, None, None)
    config.stash[POISON] = without, poisoned(without)
    config.stash[POISON][1].__enter__()


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may build engines
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--poison`, some tests run with less of it; see `oracle.poisoned_session.EXCEPTIONS`."""
    if POISON in item.config.stash:
        _start_poison(item.config, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests are thousands of objects that all stay: looking for garbage among them takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before there are forks
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly and "WORLD_SIZE" not in os.environ:
        fresh_process.start_warm()  # of a process in which no test has run
        if session.config.getoption("--forks", 0):
            fresh_process.start()
            if bad_values := sys.modules.get("oracle.bad_values"):
                bad_values.prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no GPU, tests marked `gpu` deselect themselves."""
    mark_long(items)
    if torch.cuda.is_available():
        return
    deselected = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The cases that tests recorded as their property "cases", {what: how many}, added up."""
    cases: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last of a test, with all its properties
                cases.update(dict(report.user_properties).get("cases", {}))
    if cases:
        terminalreporter.section("cases")
        for what, count in sorted(cases.items()):
            terminalreporter.line(f"{count:7d}  {what}")
        terminalreporter.line(f"{cases.total():7d}  in all")


@pytest.fixture(scope="module", autouse=True)
def _frozen_objects() -> None:
    """The objects of collected tests and earlier modules are searched for garbage once, not by each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_logs() -> Iterator[None]:
    """pytest keeps records, whose tracebacks hold requests, and rows that are pinned."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with each kind of model: `oracle.serving.small_model()` is of this one."""
    with kind_of_model(request.param):
        yield request.param


@pytest.fixture(scope="module")
def one_fla_configuration() -> Iterator[None]:
    """See `oracle.fla_stages`, which imports fla-core."""
    from oracle.fla_stages import one_configuration

    with one_configuration():
        yield


@pytest.fixture
def needs_gpu_memory() -> Callable[[float], None]:
    """Skips a test with the figure where fewer GiB of the GPU are free than the test says it needs."""

    def check(gib: float) -> None:
        if torch.cuda.mem_get_info()[0] < gib * 2**30:  # memory that torch keeps for later is free, too
            gc.collect()
            torch.cuda.empty_cache()
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        if free < gib:
            pytest.skip(f"needs {gib:g} GiB of GPU memory; {free:.1f} of {total:.1f} GiB are free")

    return check


@pytest.fixture(autouse=True)
def _gpu_memory(request: pytest.FixtureRequest, needs_gpu_memory: Callable[[float], None]) -> None:
    """Every test on a GPU needs room for small models, their graphs and the libraries' workspaces."""
    if request.node.get_closest_marker("gpu"):
        needs_gpu_memory(2)
