"""A call that fails or is interrupted leaves books that are in order, or that the next call puts in order."""

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from ...errors import KVBlockCapacityError
from .stack_frames import is_on_stack

logger = logging.getLogger(__name__)

UNRECOVERABLE = "the engine could not recover from a failed call; call again, or call reset()"
FAILED_ON_SPLIT_MODEL = (
    "a call failed on this rank of a split model, and other ranks may have made it; once no rank is in a "
    "step, call reset() on all of them, or start all again"
)

Repair = Callable[[], None]


class EngineState:
    """Whether an engine is in a step, whether its books are in order, and how they are repaired.

    A call that changes the books notes its repair first, and drops the note as its last act. Whatever stops
    the call in between, an error or an exception out of a signal handler, leaves the note: the repair runs
    at once, and if the repair is interrupted, too, at the next call. Repairs can be made any number of times.

    Attributes:
        interrupts_break: whether an interrupt between two steps breaks the engine of a split model: where its
            ranks make their calls each by itself.
    """

    def __init__(self, is_split: bool, on_ordered: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            is_split: whether other ranks make the same calls. Then a failed call breaks the engine.
            on_ordered: called where a change or a repair is complete, as a part of it.
        """
        self._is_split = is_split
        self._on_ordered = on_ordered
        self.interrupts_break = is_split
        self._repair: Repair | None = None
        self._step_frame: FrameType | None = None
        self._broken_by: BaseException | None = None

    @property
    def broken(self) -> bool:
        return self._broken_by is not None

    @property
    def stepping(self) -> bool:
        """Whether a step runs now, in any thread.

        An exception can keep a step from noting its end. So what counts is whether the step's frame is on a
        stack.
        """
        return self._step_frame is not None and self._stepping_thread() is not None

    def _stepping_thread(self) -> int | None:
        step = self._step_frame
        for thread, top in sys._current_frames().items():
            if step is not None and is_on_stack(step, top):
                return thread
        self._step_frame = None
        return None

    def check_usable(self, call: str) -> None:
        """Repair what an interrupted call left.

        Raises:
            RuntimeError: a step runs, the repair fails, or the engine of a split model is broken. The message
                names `call`.
        """
        if self._step_frame is not None:
            thread = self._stepping_thread()
            if thread == threading.get_ident():
                raise RuntimeError(
                    f"{call} is called from inside a step of the same engine; call it between steps"
                )
            if thread is not None:
                raise RuntimeError(
                    f"{call} is called from one thread while another thread is in a step of the same engine; "
                    "one thread at a time calls an engine"
                )
        self.check_not_broken()
        if self._repair is not None:
            self.repair()

    def check_not_broken(self) -> None:
        if self._broken_by is not None:
            raise RuntimeError(FAILED_ON_SPLIT_MODEL) from self._broken_by

    def repair(self) -> None:
        """Repair the books, if a call was interrupted.

        Raises:
            RuntimeError: the repair fails. The next call tries again.
        """
        repair = self._repair
        if repair is None:
            return
        if self._is_split:
            self._broken_by = InterruptedError("a call was interrupted")
            self.check_not_broken()
        try:
            repair()
            self._on_ordered()
        except Exception as error:
            raise RuntimeError(UNRECOVERABLE) from error
        self._repair = None

    def changing(self, repair: Repair, *in_order: type[Exception]) -> "Change":
        """A context manager in which the books change; `repair` runs if that fails or is interrupted.

        Inside a step the step's repair stays in force.

        `in_order`: errors that the changes raise only where they leave the books in order.
        """
        return Change(self, repair, in_order)

    def in_step(self, frame: FrameType, repair: Repair) -> "Change":
        """As `changing`, and other calls than `add_request` are refused inside.

        `frame`: the frame that runs the step.
        """
        return Change(self, repair, (), frame)

    def begin(self, repair: Repair, frame: FrameType | None) -> bool:
        """Note a repair, unless one is noted; returns whether it is noted now. For `Change` alone."""
        if frame is not None:
            self._step_frame = frame
        if self._repair is not None:
            return False
        self._repair = repair
        return True

    def end(self, *, ends_step: bool) -> None:
        """Drop the note: the change is complete. For `Change` alone."""
        self._on_ordered()
        self._repair = None
        if ends_step:
            self._step_frame = None

    def repair_after(self, error: BaseException) -> None:
        """Repair after `error`. A KVBlockCapacityError comes on every rank of a split model alike."""
        self._step_frame = None  # other calls may be made by what the repair calls
        self.note_failure(error)
        repair = self._repair
        if repair is None:
            return
        try:
            repair()
            self._on_ordered()
        except Exception as second:
            logger.error("repairing after %r failed", error, exc_info=second)
            raise RuntimeError(UNRECOVERABLE) from error
        self._repair = None

    def note_interrupt(self, error: BaseException) -> None:
        """Break the engine of a split model that is interrupted between two steps.

        ValueError and RuntimeError come on every rank alike.
        """
        if self.interrupts_break and not isinstance(error, (ValueError, RuntimeError)):
            self.note_failure(error)

    def note_failure(self, error: BaseException) -> None:
        """Break the engine of a split model, unless every rank raises `error` alike."""
        if self._is_split and not _is_capacity_error(error):
            self._broken_by = error

    def begin_reset(self, reset: Repair) -> None:
        """A reset replaces every repair, also its own: it can be made any number of times."""
        self._repair = reset

    def end_reset(self) -> None:
        """The engine's books are new."""
        self._on_ordered()
        self._repair = None
        self._broken_by = None


class Change:
    """A change of the books, as a context manager: see `EngineState.changing`.

    This is no generator: an abandoned one would be closed later, in the middle of another call.
    """

    def __init__(
        self,
        state: EngineState,
        repair: Repair,
        in_order: tuple[type[Exception], ...] = (),
        frame: FrameType | None = None,
    ) -> None:
        self._state = state
        self._repair = repair
        self._in_order = in_order
        self._frame = frame
        self._is_outermost = False

    def __enter__(self) -> None:
        self._is_outermost = self._state.begin(self._repair, self._frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_outermost:
            return
        if error is None or isinstance(error, self._in_order):
            self._state.end(ends_step=self._frame is not None)
        else:
            self._state.repair_after(error)


def _is_capacity_error(error: BaseException) -> bool:
    return isinstance(error, KVBlockCapacityError) and error.request_id is not None
