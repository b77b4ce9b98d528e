"""Places inside the package where something may happen: its lines, and its allocations of tensors."""

import gc
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

    def _listening(self) -> AbstractContextManager[Any]:
        sys.monitoring.restart_events()
        return nullcontext()

    def line(self, code: CodeType, number: int) -> Any:
        """What the interpreter calls before each line."""
        if self.thread is None or not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE  # until `watched` begins again
        self.passed()
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


@contextmanager
def monitored() -> Iterator[Callable[[], Lines]]:
    """Inside, a call of the result gives `Lines` that the interpreter reports to from then on.

    What there is when this begins counts as no garbage, so that looking for garbage takes little time.
    """
    current = [Lines()]

    def new() -> Lines:
        current[0] = Lines()
        return current[0]

    monitoring = sys.monitoring
    monitoring.use_tool_id(TOOL, "interrupts")
    monitoring.register_callback(TOOL, monitoring.events.LINE, lambda *line: current[0].line(*line))
    monitoring.set_events(TOOL, monitoring.events.LINE)
    gc.collect()
    gc.freeze()
    try:
        with patch.object(sys, "unraisablehook", lambda unraisable: None):  # what comes out of a `__del__`
            yield new
    finally:
        gc.unfreeze()
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.LINE, None)
        monitoring.free_tool_id(TOOL)
