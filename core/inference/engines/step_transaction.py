"""A failed step leaves nothing behind, or leaves an engine that says that it is broken."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import KVBlockCapacityError
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.request import DynamicInferenceRequest
from .scheduler import Scheduler

UNRECOVERABLE = "the engine could not recover from a failed step; call reset()"
STEP_FAILED_ON_SPLIT_MODEL = (
    "a step failed on this rank of a split model, and other ranks may have made it; once no rank is in a "
    "step, call reset() on all of them, or start all again"
)


class EngineState:
    """Whether an engine is in a step, usable, or broken."""

    def __init__(self, is_split: bool) -> None:
        """`is_split`: whether other ranks make the same steps."""
        self._is_split = is_split
        self._stepping_thread: int | None = None
        self._broken_by: BaseException | None = None

    @property
    def stepping(self) -> bool:
        return self._stepping_thread is not None

    @property
    def broken(self) -> bool:
        return self._broken_by is not None

    def check_usable(self, call: str) -> None:
        """Raise RuntimeError, naming `call`, during a step and where a step has broken the engine."""
        if self._stepping_thread == threading.get_ident():
            raise RuntimeError(
                f"{call} is called from inside a step of the same engine; call it between steps"
            )
        if self._stepping_thread is not None:
            raise RuntimeError(
                f"{call} is called from one thread while another thread is in a step of the same engine; one "
                "thread at a time calls an engine"
            )
        self.check_not_broken()

    def check_not_broken(self) -> None:
        if self._broken_by is not None:
            message = STEP_FAILED_ON_SPLIT_MODEL if self._is_split else UNRECOVERABLE
            raise RuntimeError(message) from self._broken_by

    def set_broken(self, error: BaseException) -> None:
        self._broken_by = error

    def set_mended(self) -> None:
        self._broken_by = None

    @contextmanager
    def in_step(self, undo: Callable[[], None]) -> Iterator[None]:
        """Run a step inside this context manager, which calls `undo` if the step raises.

        The engine is broken where `undo` raises; a RuntimeError then replaces the step's error. The engine of
        a split model is also broken after every other failed step, except after a KVBlockCapacityError, which
        every rank raises.
        """
        self._stepping_thread = threading.get_ident()
        try:
            yield
        except BaseException as error:
            try:
                undo()
            except BaseException as second:
                self._broken_by = second
                raise RuntimeError(UNRECOVERABLE) from error
            if self._is_split and not isinstance(error, KVBlockCapacityError):
                self._broken_by = error
            raise
        finally:
            self._stepping_thread = None


class StepUndo:
    """Takes a step back. Remembers the requests before the step, and how many tokens each of them had."""

    def __init__(self, context: DynamicInferenceContext, scheduler: Scheduler) -> None:
        self._context = context
        self._scheduler = scheduler
        self._before = [(request, len(request.tokens)) for request in scheduler.requests]

    def __call__(self, requests: dict[int, DynamicInferenceRequest]) -> None:
        """Queue all requests again, with the tokens that they had before the step.

        What the step wrote is not used.

        Args:
            requests: the engine's requests by id, changed in place. Requests that the step ended come back.
                Requests that were added during the step wait behind the others.
        """
        for request, num_tokens in self._before:
            request.cut_to(num_tokens)
        added = dict(requests)
        requests.clear()
        requests.update({request.request_id: request for request, _ in self._before})
        requests.update({request_id: added[request_id] for request_id in added if request_id not in requests})
        self._context.abort_step()
        self._scheduler.restart(requests.values())
