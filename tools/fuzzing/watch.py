"""Watches one call: the memory that it takes, and its time.

Memory is watched in two ways, and both see what torch, numpy, safetensors and Python allocate:

- the peak of the resident memory (`VmHWM`, set back before each call by /proc/self/clear_refs) sees all that
  is written to;
- the limit of the address space (`RLIMIT_AS`), which is lowered to what the process has, the budget of the
  input and `ADDRESSES_MIB`, sees what is allocated and never written to: the allocation fails.

Time is the process's own (`ITIMER_PROF`), so that a loaded machine shows no hang that is none, and a wall
clock of `PATIENCE` times the limit for calls that wait. A call that never comes back to Python ends the
process after `LAST_S` with the stacks of its threads.
"""

import faulthandler
import gc
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
    """Watch what is done inside, for an input of `size` bytes.

    Raises:
        Hang: it took longer than `limit_s` seconds of the process, or much longer by the clock.
        TooMuchMemory: it wrote to more memory than `budget_of(size)`.
        MemoryError, RuntimeError: it allocated far more than that.
    """
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
