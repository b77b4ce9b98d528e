"""torch's switches of matrix products, which are one for the whole process, while engines need them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch


@dataclass(frozen=True)
class Switch:
    """One of torch's switches.

    Attributes:
        name: how torch's documentation names the switch.
        read, write: get and set it.
        needed: its value where products must keep their bits.
        shown: `needed`, as people write it.
    """

    name: str
    read: Callable[[], object]
    write: Callable[[Any], object]
    needed: object
    shown: str


def _reduction(dtype: str) -> Switch:
    name = f"allow_{dtype}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul

    def read() -> object:
        return getattr(matmul, name), getattr(matmul, f"{name}_split_k")

    def write(value: tuple[bool, bool]) -> None:
        setattr(matmul, name, value)

    return Switch(f"torch.backends.cuda.matmul.{name}", read, write, (False, False), "(False, False)")


def _accumulation() -> Switch:
    name, matmul = "allow_fp16_accumulation", torch.backends.cuda.matmul
    return Switch(
        f"torch.backends.cuda.matmul.{name}",
        lambda: getattr(matmul, name),
        lambda value: setattr(matmul, name, value),
        False,
        "False",
    )


SWITCHES = (
    Switch(
        "torch.backends.cuda.preferred_blas_library",
        torch.backends.cuda.preferred_blas_library,
        torch.backends.cuda.preferred_blas_library,
        torch._C._BlasBackend.Cublaslt,
        "'cublaslt'",
    ),
    _reduction("bf16"),
    _reduction("fp16"),
    _accumulation(),
)
"""With these, cuBLAS does not split K: the first entry of a pair is the reduction's precision, the second is
whether K may be split."""


class BlasSwitches:
    """Holds `SWITCHES` while somebody needs them, and puts back what was there before. Any thread may call.

    A switch that somebody else has changed in the meantime is left as it is.
    """

    def __init__(self, switches: tuple[Switch, ...] = SWITCHES) -> None:
        self._switches = switches
        self._lock = RLock()  # a finalizer may run in the thread that holds it
        self._holders = 0
        self._before: tuple[object, ...] = ()

    def hold(self, owner: object) -> Callable[[], object]:
        """Set the switches until the result is called, or `owner` is collected; calling twice is fine.

        Raises:
            RuntimeError: others hold the switches, and somebody has changed one.
        """
        with self._lock:
            self._holders += 1  # first: a finalizer that runs now puts nothing back
            try:
                if self._holders == 1:
                    self._before = tuple(switch.read() for switch in self._switches)
                    for switch in self._switches:
                        switch.write(switch.needed)
                self.check()
                release = weakref.finalize(owner, self._release)
            except BaseException:
                self._release()
                raise
            release.atexit = False
            return release

    def check(self) -> None:
        """Raise RuntimeError where a held switch has another value; takes a few microseconds."""
        for switch in self._switches:
            if switch.read() != switch.needed:
                raise RuntimeError(
                    f"{switch.name} is {switch.read()}; accepted: {switch.shown}, while an engine with "
                    "batch_invariant lives, because bits of products depend on the number of rows otherwise"
                )

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for switch, before in zip(self._switches, self._before, strict=False):
                if switch.read() == switch.needed:
                    switch.write(before)
            self._before = ()


BLAS_SWITCHES = BlasSwitches()
"""The process's one."""
