"""What the fuzz feeds: the face of a target, and how a call's end is told."""

from collections.abc import Callable
from random import Random
from typing import Protocol

ACCEPTED = "accepted"
REFUSED = "refused"


class Target(Protocol):
    """One thing that takes input from outside.

    Attributes:
        name: what the table calls it.
        documented: the errors that its docs name.
    """

    name: str
    documented: tuple[type[BaseException], ...]

    def draw(self, random: Random) -> object:
        """One input: mostly a good one that is damaged, sometimes a good one. Equal `random`, equal input."""

    def feed(self, drawn: object) -> str:
        """Feed an input; ACCEPTED or REFUSED. Every error that is not documented escapes.

        Raises:
            AssertionError: the state changed though the input was refused, or what was accepted contradicts
                itself.
        """

    def size_of(self, drawn: object) -> int:
        """Bytes of the input."""


def end_of(call: Callable[[], object], documented: tuple[type[BaseException], ...]) -> str:
    """How `call` ended: ACCEPTED, or REFUSED with a documented error that says something.

    A documented error that hides an allocation that failed is raised again as a MemoryError: the memory watch
    made it fail.
    """
    refused: BaseException | None = None
    try:
        call()
    except documented as error:
        hidden: BaseException | None = error
        refused = error
        while hidden is not None:
            if lacks_memory(hidden):
                raise MemoryError(f"{type(error).__name__} hides {hidden!r:.300}") from error
            hidden = hidden.__cause__ or (None if hidden.__suppress_context__ else hidden.__context__)
    if refused is None:
        return ACCEPTED
    assert str(refused), f"{type(refused).__name__} says nothing"
    return REFUSED


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, numpy's, torch's or the system's."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "emory allocation" in text
