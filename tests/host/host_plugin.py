"""A pytest plugin: megatron-core's own tests on this machine, on stock or with `mambaslots.mcore` installed.

    MAMBASLOTS_HOST=ours MAMBASLOTS_OUTCOMES=out.json pytest -p host.host_plugin --noconftest FOLDER

`host_tests.py` gives the options. The plugin serves the one helper module that the tests import, because
megatron-core's helper needs NCCL and packages for training. Without a GPU, or without packages that
megatron-core uses, `mcore_rig` stands in for them.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mcore_rig
import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

HELPERS = "tests.unit_tests.test_utilities"
_around = ExitStack()
_outcomes: dict[str, dict[str, str]] = {}
_report: dict[str, Any] = {"tests": _outcomes}


class Utils:
    """megatron-core's `tests/unit_tests/test_utilities.py:Utils`, in one process that the rig has set up."""

    world_size = 1
    rank = 0

    @staticmethod
    def initialize_distributed() -> None:
        """The rig has initialised torch.distributed."""

    @staticmethod
    def initialize_model_parallel(*sizes: int, **named: Any) -> None:
        """As megatron-core's; a test that needs more processes is skipped."""
        parallel_state.destroy_model_parallel()
        try:
            parallel_state.initialize_model_parallel(*sizes, **named)
        except RuntimeError as error:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(1, 1)
            pytest.skip(str(error))

    @staticmethod
    def destroy_model_parallel() -> None:
        parallel_state.destroy_model_parallel()


def _serve_helpers() -> None:
    for name in ("tests", "tests.unit_tests", HELPERS):
        sys.modules[name] = ModuleType(name)
    sys.modules[HELPERS].Utils = Utils  # type: ignore[attr-defined]


class _CudaIsCpu(TorchFunctionMode):
    """The device "cuda" is the CPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def on_cpu(value: Any) -> Any:
            return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(on_cpu, args), **named)


def _seed(seed: int, *rest: object, **named: object) -> None:
    torch.manual_seed(seed)


def pytest_configure(config: pytest.Config) -> None:
    """Set the machine up, and install the drop-in where MAMBASLOTS_HOST is "ours"."""
    for mark in ("internal", "asyncio"):
        config.addinivalue_line("markers", f"{mark}: megatron-core's")
    _serve_helpers()
    _around.enter_context(mcore_rig.on_this_machine())
    if not torch.cuda.is_available():
        _around.enter_context(_CudaIsCpu())
        _around.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: False)))
        random.model_parallel_cuda_manual_seed = _seed  # random numbers are those of the CPU
    _report["host"] = f"megatron-core {megatron.core.__version__.partition('+')[0]}"
    if os.environ["MAMBASLOTS_HOST"] == "ours":
        from mambaslots import mcore

        _report["host"] = _around.enter_context(mcore.installed()).describe()


def pytest_unconfigure() -> None:
    Path(os.environ["MAMBASLOTS_OUTCOMES"]).write_text(json.dumps(_report))
    _around.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine to its end, as pytest-asyncio does."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note each test's worst outcome, and the error of its first failing phase."""
    report: pytest.TestReport = yield
    test = _outcomes.setdefault(item.nodeid, {"outcome": "passed", "error": ""})
    if test["outcome"] == "passed" and report.outcome != "passed":
        error = "" if call.excinfo is None else call.excinfo.exconly(tryshort=True)
        test |= {"outcome": report.outcome, "error": error}
    return report
