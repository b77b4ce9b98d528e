"""A model whose forwards wait for the test, or fail as the test says."""

from collections.abc import Callable
from threading import Event, Semaphore
from typing import Any

import mambaslots as ms

PATIENCE_S = 30.0  # a test that waits longer has failed


class LatchedModel:
    """Takes the place of an engine's model.

    Attributes:
        num_forwards: forwards that have begun.
        errors: what the next forwards raise, in turn; None for a forward that succeeds.
    """

    def __init__(self, engine: ms.DynamicInferenceEngine, *, is_open: bool = False) -> None:
        """`is_open`: whether forwards run without waiting."""
        self._model = engine.model
        self.state_spec = engine.model.state_spec
        self._is_open = is_open
        self._allowed = Semaphore(0)
        self._entered = Event()
        self.num_forwards = 0
        self.errors: list[BaseException | None] = []
        engine.model = self

    def __call__(self, inputs: ms.StepInputs) -> Any:
        self.num_forwards += 1
        self._entered.set()
        if not self._is_open:
            assert self._allowed.acquire(timeout=PATIENCE_S)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return self._model(inputs)

    def wait_for_forward(self) -> None:
        """Wait until a forward has begun that waits for the test."""
        assert self._entered.wait(PATIENCE_S)
        self._entered.clear()

    def allow(self, number: int = 1) -> None:
        """Let the forward that waits go on, or so many forwards."""
        self._allowed.release(number)

    def open(self) -> None:
        """Let all forwards run."""
        self._is_open = True
        self._allowed.release()


def raising_calls(owner: object, name: str, error: Callable[[], BaseException]) -> Callable[[], None]:
    """Let each call of a method of an object raise. Returns what undoes that."""

    def raising(*arguments: Any, **named: Any) -> None:
        raise error()

    setattr(owner, name, raising)
    return lambda: delattr(owner, name)
