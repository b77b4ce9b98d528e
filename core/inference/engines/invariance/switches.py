"""The settings of torch with which cuBLAS gives a row one sum, however many rows there are."""

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

SWITCHES: dict[str, object] = {
    "preferred_blas_library": "cublaslt", "matmul.allow_bf16_reduced_precision_reduction": (False, False),
    "matmul.allow_fp16_reduced_precision_reduction": (False, False), "matmul.allow_fp16_accumulation": False,
}  # fmt: skip
"""Switches of torch.backends.cuda, and the values with which cuBLAS does not split K: the first entry of a
pair is the reduction's precision, the second is whether K may be split."""


def read_switch(name: str) -> object:
    """The value of a switch, as it is written."""
    if name == "preferred_blas_library":
        return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    matmul, name = torch.backends.cuda.matmul, name.removeprefix("matmul.")
    value = getattr(matmul, name)
    return (value, getattr(matmul, f"{name}_split_k")) if name.endswith("reduction") else value


def write_switches(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name == "preferred_blas_library":
            torch.backends.cuda.preferred_blas_library(value)
        else:
            setattr(torch.backends.cuda.matmul, name.removeprefix("matmul."), value)


def check_switches() -> None:
    """Raise RuntimeError where a switch was changed; for every step, takes a few microseconds."""
    for name, setting in SWITCHES.items():
        if (value := read_switch(name)) != setting:
            raise RuntimeError(
                f"torch.backends.cuda.{name} is {value}; accepted: {setting!r}, for an engine with "
                "batch_invariant, because bits of products depend on the number of rows otherwise"
            )


_lock = threading.RLock()  # a finalizer may run wherever garbage is collected
_num_holders = 0
_before: dict[str, object] = {}


def hold_switches(holder: object) -> Callable[[], object]:
    """Set the switches until `holder` and all other holders are gone; returns what ends it earlier."""
    global _num_holders, _before
    with _lock:
        if not _num_holders:
            _before = {name: read_switch(name) for name in SWITCHES}
        _num_holders += 1
        write_switches(SWITCHES)
    return weakref.finalize(holder, _release_switches)


def _release_switches() -> None:
    global _num_holders
    with _lock:
        _num_holders -= 1
        if not _num_holders:  # what was changed since stays
            ours = {name for name, value in SWITCHES.items() if read_switch(name) == value}
            write_switches({name: value for name, value in _before.items() if name in ours})
