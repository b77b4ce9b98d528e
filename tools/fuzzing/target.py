"""What a fuzzer feeds, how it damages input, and how it watches a call."""

import faulthandler
import gc
import json
import math
import resource
import signal
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Protocol

import numpy as np

ACCEPTED = "accepted"
REFUSED = "refused"


class Target(Protocol):
    """One thing that takes input from outside."""

    name: str
    documented: tuple[type[BaseException], ...]

    def draw(self, random: Random) -> object:
        """One input: mostly a good one that is damaged, sometimes a good one. Equal `random`, equal input."""

    def feed(self, drawn: object) -> str:
        """Feed an input; ACCEPTED or REFUSED. Every error that is not documented escapes."""

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


HUGE = (2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, 10**400)
NUMBERS = (
    0, 1, 2, -1, -2, -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308,
    math.nan, math.inf, -math.inf, *HUGE,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "None", "nan", "-1", "1e999", "\x00", "\ud800", "\udcff", "\u202e", "é", "\U0001f600",
    "a" * 5000,
    "../../etc/passwd", "/etc/passwd", "%s%n", "{0}", "\r\n", "1" * 5000, "٣", "²",
)  # fmt: skip
_DEEP = (200, 3_000, 60_000)


class OddInt(int):
    """A subclass of int, as enums and numpy-like libraries make them."""


class OddStr(str):
    """A subclass of str."""


def any_json(random: Random, depth: int = 0) -> Any:
    """Any value that JSON, as Python writes it, can say."""
    kind = random.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return random.choice((None, True, False))
    if kind in (1, 2):
        return random.choice(NUMBERS)
    if kind == 3:
        return random.choice(TEXTS)
    if kind == 4:
        return random.randrange(-4, 300)
    if kind == 5:
        return random.choice(([], {}, [[]], {"": None}, [None], [0] * 100))
    if kind == 6:
        return [any_json(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(TEXTS): any_json(random, depth + 1) for _ in range(random.randrange(4))}


def any_value(random: Random) -> Any:
    """Any value that a caller could pass, other types and classes included."""
    kind = random.randrange(10)
    if kind < 4:
        return any_json(random)
    if kind < 6:
        number = random.choice((0, 1, 2, 7, 16, 256, -1, 2**31 - 1))
        types = (np.int64, np.float32, np.float64, np.bool_, OddInt, float, complex, str, np.array, bytes_of)
        return random.choice(types)(number)
    if kind == 6:
        return random.choice(
            (OddStr("value"), OddStr(""), b"bytes", bytearray(b"\xff"), object(), int, print, ...)
        )
    if kind == 7:
        return random.choice(
            (set(), {1}, frozenset((2, 3)), (), (1,), range(3), iter([1]), {}.keys(), slice(1))
        )
    if kind == 8:
        arrays = (np.zeros(0), np.arange(3), np.zeros((2, 2), np.int8), np.array(["a"]), np.array([None]))
        return random.choice(arrays)
    return random.choice(NUMBERS)


def bytes_of(number: int) -> bytes:
    return str(number).encode()


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """`content`, damaged once or a few times."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        content = _damaged_once(random, content)
    return content


def _damaged_once(random: Random, content: bytes) -> bytes:
    kind = random.randrange(9)
    place = random.randrange(len(content) + 1)
    stop = min(len(content), place + random.choice((1, 2, 8, 64)))
    if kind == 0:
        return content[:place]
    if kind == 1 and content:
        flipped = bytearray(content)
        for _ in range(random.choice((1, 1, 8))):
            flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return content[:place] + random.randbytes(random.choice((1, 4, 30))) + content[place:]
    if kind == 3:
        return content[:place] + content[stop:]
    if kind == 4:
        return (
            content[:place] + random.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\x80")) + content[stop:]
        )
    if kind == 5:
        number = random.choice((*NUMBERS, *TEXTS))
        return content[:place] + str(number).encode("utf-8", "surrogatepass") + content[stop:]
    if kind == 6:
        deep = random.choice(_DEEP)
        opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return content[:place] + opening * deep + b"0" + closing * random.choice((deep, 0)) + content[stop:]
    if kind == 7:
        return content[:place] + content[place:stop] * random.choice((2, 50)) + content[stop:]
    return random.choice((b"", b"\n", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + content, content + content))


def damaged_json(random: Random, value: Any) -> Any:
    """A copy of the JSON value `value` with one or a few damages: of values, types and fields."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _value_damaged(random, value)
    return value


def _value_damaged(random: Random, value: Any) -> Any:
    """`value`, damaged somewhere inside, or as a whole."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(sorted(value))
        kind = random.randrange(8)
        if kind == 0:
            del value[name]
        elif kind == 1:
            value[random.choice((*TEXTS, name + "s", name.upper()))] = any_json(random)
        elif kind == 2:
            value[name] = value[random.choice(sorted(value))]
        elif kind == 3:
            value[name] = _similar(random, value[name])
        else:
            value[name] = _value_damaged(random, value[name])
        return value
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        kind = random.randrange(5)
        if kind == 0:
            del value[place]
        elif kind == 1:
            value.insert(place, any_json(random))
        elif kind == 2:
            value += value
        else:
            value[place] = _value_damaged(random, value[place])
        return value
    return _similar(random, value) if random.random() < 0.5 else any_json(random)


def _similar(random: Random, value: Any) -> Any:
    """A value of nearly the right kind: what a typing error or another version makes of it."""
    if isinstance(value, bool) or value is None:
        return random.choice((0, 1, "true", None, not value))
    if isinstance(value, (int, float)):
        numbers = (-value, value + 1, value - 1, 2 * value, str(value), f"{value}.0", [value], 0, True)
        return random.choice((*numbers, *NUMBERS))
    if isinstance(value, str):
        letter = random.choice(string.printable)
        return random.choice((value + letter, value[1:], value.upper(), [value], "", 0, None, letter))
    return random.choice((None, [value], {}, [], str(value)[:50]))


def json_bytes(random: Random, value: Any) -> bytes:
    """`value` as JSON; sometimes with a field said twice, in another encoding, or with other line ends."""
    kind = random.randrange(20)
    text = json.dumps(value, ensure_ascii=kind != 0)
    if kind == 1 and isinstance(value, dict) and value:
        name = random.choice(sorted(value))
        again = json.dumps({name: any_json(random)})
        text = text[:-1] + ", " + again[1:]
    if kind == 2:
        return text.encode("utf-16")
    return text.encode("utf-8", "surrogatepass")


MIB = 1 << 20
FREE_MIB = 64
"""What a call may take whatever its input: arenas of malloc, caches, modules that are imported late."""
ADDRESSES_MIB = 2048
"""Addresses for the stacks and arenas of threads that a call starts."""
BYTES_PER_BYTE = 256
"""What a byte of input may become: a digit and a comma of JSON are an int object in a list."""
LIMIT_S = 1.0
PATIENCE = 15
LAST_S = 120

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Hang(BaseException):
    """An input took longer than it may. No `except Exception` catches it."""


class TooMuchMemory(BaseException):
    """An input took more memory than its size justifies."""


def budget_of(size: int) -> int:
    """Bytes that an input of `size` bytes may take."""
    return FREE_MIB * MIB + BYTES_PER_BYTE * size


@contextmanager
def watched(size: int, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Watch what is done inside, for an input of `size` bytes."""
    before = _prepare()
    budget = budget_of(size)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, _raise_hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    faulthandler.dump_traceback_later(LAST_S, exit=True)
    started_s = time.process_time()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + budget + ADDRESSES_MIB * MIB, hard))
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE * limit_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    taken_s = time.process_time() - started_s
    if taken_s > 2 * limit_s:  # in a call that held the interpreter
        raise Hang(f"{taken_s:.1f} s")
    grown = _memory()["VmHWM"] - before["VmRSS"]
    if grown > budget:
        raise TooMuchMemory(f"{grown / MIB:,.0f} MiB for an input of {size:,} bytes")


def resident_mib() -> float:
    """What the process holds now, in MiB."""
    gc.collect()
    return _memory()["VmRSS"] / MIB


def _prepare() -> dict[str, int]:
    _CLEAR.write_text("5")
    return _memory()


def _memory() -> dict[str, int]:
    """Bytes by the names of /proc/self/status."""
    found = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "VmSize"):
            found[name] = int(value.split()[0]) << 10
    return found


def _raise_hang(number: int, frame: FrameType | None) -> None:
    place = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    raise Hang(f"longer than {LIMIT_S} s{place}")
