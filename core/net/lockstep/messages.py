"""What the leading rank and its followers send each other.

A call is one byte for its name, and the pickle of its arguments where it has some. Pickle runs what it reads,
so messages are read from connections alone whose other side has proved that it is a rank of the same replica.
"""

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...validation import shown

LEFT = b"\0"
"""The first byte of a follower's last message; the reason follows."""
_ANSWER = b"\1"
CLOSE = "close"
_NAMES = (
    "step", "add", "end", "pin", "unpin", "reset_prefix_cache", "set_weights_version", "suspend", "resume",
    "reset", "load", "run", CLOSE,
)  # fmt: skip
_CODES: Mapping[str, bytes] = {name: bytes([code]) for code, name in enumerate(_NAMES)}


class Outcome(NamedTuple):
    """How a call ended on a rank.

    Attributes:
        kind: the name of the error's class; empty where the call returned.
        text: the error's message.
        broken: whether the rank's engine is broken now.
    """

    kind: str = ""
    text: str = ""
    broken: bool = False

    @classmethod
    def of(cls, error: BaseException | None, broken: bool = False) -> "Outcome":
        if error is None:
            return cls(broken=broken)
        return cls(type(error).__name__, str(error)[:2000], broken)

    def __str__(self) -> str:
        """A text that follows "rank 3 "."""
        return f"raised {self.kind}: {self.text}" if self.kind else "made the call"


def call_message(name: str, told: tuple[object, ...]) -> bytes:
    """A call and its arguments.

    Raises:
        ValueError: an argument cannot be pickled.
    """
    if not told:
        return _CODES[name]
    try:
        return _CODES[name] + pickle.dumps(told, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} gets an argument that cannot be pickled: {error}") from error


def read_call(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """The name and the arguments in a `call_message` of a rank of this replica."""
    name = _NAMES[message[0]]
    return name, pickle.loads(message[1:]) if len(message) > 1 else ()


def outcome_message(outcome: Outcome) -> bytes:
    """A follower's answer to a call; empty where the call went well."""
    return b"" if outcome == Outcome() else _ANSWER + pickle.dumps(tuple(outcome))


def read_outcome(message: bytes) -> Outcome:
    """The outcome in an `outcome_message` of a rank of this replica."""
    return Outcome(*pickle.loads(message[1:])) if message else Outcome()


def left_message(error: BaseException) -> bytes:
    """A follower's last message: what ended it."""
    return LEFT + f"ended with {shown(error)[:500]}".encode()
