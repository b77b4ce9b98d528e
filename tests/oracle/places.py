"""Places inside the package where something may happen: lines, returns of calls, allocations of tensors."""

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import mambaslots as ms
from torch.overrides import TorchFunctionMode

PACKAGE = str(Path(ms.__file__).parent)
TOOL = 4  # one that neither debuggers nor coverage take
Action = Callable[[], None]


class Places:
    """Counts the places that a thread passes, and does something at some of them.

    Attributes:
        num_passed: how many places the thread has passed inside `watched`.
        actions: what is done at the places with these numbers, from 1 on. What an action raises comes out of
            its place.
    """

    def __init__(self) -> None:
        self.num_passed = 0
        self.actions: dict[int, Action] = {}
        self.thread: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count in here."""
        with self._listening():
            self.thread = threading.get_ident()
            try:
                yield
            finally:
                self.thread = None

    def _listening(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def passed(self) -> None:
        """The thread is at a place."""
        if self.thread != threading.get_ident():
            return
        self.num_passed += 1
        action = self.actions.pop(self.num_passed, None)
        if action is not None:
            self.thread = -1  # what an action runs does not count
            try:
                action()
            finally:
                self.thread = threading.get_ident()


class Lines(Places):
    """The lines of the package. A line counts each time that it begins to run."""

    events = sys.monitoring.events.LINE

    def _listening(self) -> AbstractContextManager[Any]:
        monitoring = sys.monitoring
        if monitoring.get_events(TOOL) != self.events:
            monitoring.set_events(TOOL, self.events)
        monitoring.restart_events()
        return nullcontext()

    def at(self, code: CodeType, *where: Any) -> Any:
        """What the interpreter calls at each place."""
        if self.thread is None or not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE  # until `watched` begins again
        self.passed()
        return None


class Returns(Lines):
    """Where the package's calls of builtin functions have returned, and nothing is done with the values yet.

    There the interpreter looks for signals, too.
    """

    events = sys.monitoring.events.CALL  # with it come the returns

    def calls(self, code: CodeType, *where: Any) -> Any:
        """What the interpreter calls before each call."""
        if self.thread is None or not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        return None


class Allocations(Places):
    """The calls of torch, made by the package, that take memory for a tensor."""

    def _listening(self) -> AbstractContextManager[Any]:
        return _AllocationMode(self.passed)


ALLOCATING = frozenset(
    {
        "arange", "cat", "clone", "contiguous", "copy_", "cumsum", "double", "empty", "empty_like", "flatten",
        "full", "full_like", "gather", "index_select", "log_softmax", "long", "masked_fill", "new_empty",
        "new_full", "new_tensor", "new_zeros", "ones", "repeat_interleave", "softmax", "sort", "stack",
        "tensor", "to", "topk", "where", "zeros", "zeros_like",
    }
)  # fmt: skip


class _AllocationMode(TorchFunctionMode):
    def __init__(self, passed: Action) -> None:
        super().__init__()
        self._passed = passed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE) and getattr(func, "__name__", "") in ALLOCATING:
            self._passed()
        return func(*args, **(kwargs or {}))


class Monitor:
    """What the interpreter reports to: the `Lines` or `Returns` that were made last."""

    def __init__(self) -> None:
        self._current: Lines = Lines()

    def lines(self) -> Lines:
        self._current = Lines()
        return self._current

    def returns(self) -> Returns:
        self._current = returns = Returns()
        return returns

    def line(self, *where: Any) -> Any:
        return self._current.at(*where)

    def call(self, *where: Any) -> Any:
        return self._current.calls(*where) if isinstance(self._current, Returns) else sys.monitoring.DISABLE

    def c_return(self, *where: Any) -> Any:
        if isinstance(self._current, Returns) and self._current.thread is not None:
            self._current.at(*where)


@contextmanager
def monitored() -> Iterator[Monitor]:
    """Inside, the interpreter reports to the result.

    What there is when this begins counts as no garbage, so that looking for garbage takes little time.
    """
    monitor, monitoring = Monitor(), sys.monitoring
    callbacks = {
        monitoring.events.LINE: monitor.line,
        monitoring.events.CALL: monitor.call,
        monitoring.events.C_RETURN: monitor.c_return,
    }
    monitoring.use_tool_id(TOOL, "interrupts")
    for event, callback in callbacks.items():
        monitoring.register_callback(TOOL, event, callback)
    logger = logging.getLogger("mambaslots")
    level = logger.level
    logger.setLevel(logging.ERROR)  # engines warn of each interrupt
    gc.collect()
    gc.freeze()
    try:
        with patch.object(sys, "unraisablehook", lambda unraisable: None):  # what comes out of a `__del__`
            yield monitor
    finally:
        logger.setLevel(level)
        gc.unfreeze()
        monitoring.set_events(TOOL, 0)
        for event in callbacks:
            monitoring.register_callback(TOOL, event, None)
        monitoring.free_tool_id(TOOL)
