"""Corrections of the host. A correction replaces one method, whose source must be known."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .faults import described_faults
from .known_sources import KNOWN_SOURCES, source_hash

Replacement = Callable[..., Any]
"""Called as `replacement(original, self, *args, **kwargs)`; `original` is the host's own method."""


class MissingHostError(ImportError):
    """megatron-core is not installed."""


class UnknownHostError(RuntimeError):
    """The source of a method that would be replaced is not known."""


class LeftAloneWarning(UserWarning):
    """Methods whose source is not known are left as they are, and their faults come back."""


@dataclass(frozen=True)
class Override:
    """One replaced method.

    Attributes:
        owner: "module:Class" in megatron-core.
        method: the name of the replaced method.
        part: overrides of one part work only together: all are applied, or none.
        faults: the faults that the override helps to correct, as numbered in docs/megatron.md.
        replacement: the new method; the replacement's docstring says what changes and why.
    """

    owner: str
    method: str
    part: str
    faults: tuple[int, ...]
    replacement: Replacement

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method}"


def owner_class(owner: str) -> Any:
    """The class "module:Class" of megatron-core."""
    module, _, name = owner.partition(":")
    return getattr(importlib.import_module(module), name)


REGISTRY: list[Override] = []
"""Every override, in the order of definition."""


def override(
    owner: str, method: str, *, part: str, faults: tuple[int, ...]
) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of `owner`'s method."""

    def register(replacement: Replacement) -> Replacement:
        REGISTRY.append(Override(owner, method, part, faults, replacement))
        return replacement

    return register


@dataclass(frozen=True)
class Applied:
    """A method as it was before its override."""

    owner: Any
    method: str
    original: Callable[..., Any]

    def undo(self) -> None:
        setattr(self.owner, self.method, self.original)


def apply(
    overrides: Iterable[Override], version: str, strict: bool
) -> tuple[list[Applied], Mapping[str, tuple[int, ...]], str]:
    """Replace the methods of all parts without an unknown method.

    Without `strict`, a warning names the parts that are left alone and the faults that come back with them.

    Returns:
        The replaced methods; part -> the faults that its overrides correct, of the parts with an unknown
            method; what was warned of, or "".

    Raises:
        UnknownHostError: a method's source is not known and `strict` is True; nothing is changed.
    """
    overrides = list(overrides)
    found = {entry: owner_class(entry.owner).__dict__.get(entry.method) for entry in overrides}
    refused = {entry: reason for entry, method in found.items() if (reason := _objection(entry, method))}
    if refused:
        reasons = "; ".join(f"{entry.name} {reason}" for entry, reason in refused.items())
        message = f"megatron-core {version}: {reasons}"
        if strict:
            raise UnknownHostError(f"{message}. Pass strict=False to leave such methods as they are")
    left_alone = {
        part: tuple(sorted({fault for entry in overrides if entry.part == part for fault in entry.faults}))
        for part in sorted({entry.part for entry in refused})
    }
    warning = ""
    if refused:
        faults = described_faults(fault for part in left_alone.values() for fault in part)
        warning = f"{message}. Left alone: {', '.join(left_alone)}. These faults come back:\n{faults}"
        warnings.warn(warning, LeftAloneWarning, stacklevel=4)
    applied = []
    for entry, method in found.items():
        if entry.part in left_alone or method is None:
            continue
        owner = owner_class(entry.owner)
        setattr(owner, entry.method, _bound(entry, method))
        applied.append(Applied(owner, entry.method, method))
    return applied, left_alone, warning


def _objection(entry: Override, method: Callable[..., Any] | None) -> str:
    if method is None:
        return "does not exist"
    digest = source_hash(method)
    return "" if digest in KNOWN_SOURCES.get(entry.name, ()) else f"is not one we know (source {digest})"


def _bound(entry: Override, original: Any) -> Any:
    if isinstance(original, classmethod):
        return classmethod(_bound(entry, original.__func__))
    replacement = entry.replacement
    of_any_context = entry.part == "metadata"  # the host makes these buffers before its allocator

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not of_any_context and _is_on_stock(self):
            return original(self, *args, **kwargs)
        return replacement(original, self, *args, **kwargs)

    method.__doc__ = replacement.__doc__
    return method


def _is_on_stock(host: Any) -> bool:
    """Whether `host` is a context that was built before, and has the host's own allocator."""
    slots = getattr(host, "mamba_slot_allocator", None)
    return slots is not None and not isinstance(slots, MambaSlotAllocator)
