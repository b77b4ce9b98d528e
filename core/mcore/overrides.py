"""The corrections: each replaces one method of the host, and only one whose source is known."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .known_sources import KNOWN_SOURCES, MENDED_SOURCES, source_hash

Replacement = Callable[..., Any]
"""Called as `replacement(original, self, *args, **kwargs)`; `original` is the host's own method."""


class UnknownHostError(RuntimeError):
    """A method that would be replaced is not one of those whose source is known."""


@dataclass(frozen=True)
class Override:
    """One replaced method.

    Attributes:
        owner: "module:Class" in megatron-core.
        method: its name.
        part: overrides of one part work only together: all are applied, or none.
        faults: numbers in the table of docs/megatron.md that it corrects, or lays the ground for.
        replacement: what takes its place; its docstring says what it changes and why.
        optional: older hosts do not have the method, and need no correction.
    """

    owner: str
    method: str
    part: str
    faults: tuple[int, ...]
    replacement: Replacement
    optional: bool = False

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method}"

    def owner_class(self) -> Any:
        module, _, name = self.owner.partition(":")
        return getattr(importlib.import_module(module), name)


REGISTRY: list[Override] = []
"""Every override, in the order of definition."""


def override(
    owner: str, method: str, *, part: str, faults: tuple[int, ...], optional: bool = False
) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of `owner`'s method."""

    def register(replacement: Replacement) -> Replacement:
        REGISTRY.append(Override(owner, method, part, faults, replacement, optional))
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


def apply(overrides: Iterable[Override], version: str, strict: bool) -> list[Applied]:
    """Replace the methods; all or nothing with `strict`, else whole parts with an unknown method are left.

    A method whose source is listed as mended is left to the host. Raises UnknownHostError, with nothing
    changed, for one whose source is not known.
    """
    overrides = list(overrides)
    found = {each: each.owner_class().__dict__.get(each.method) for each in overrides}
    refused = {each: reason for each, method in found.items() if (reason := _objection(each, method))}
    if refused:
        told = "; ".join(f"{each.name} {reason}" for each, reason in refused.items())
        message = f"megatron-core {version}: {told}"
        if strict:
            raise UnknownHostError(f"{message}. Pass strict=False to leave such methods as they are")
        parts = sorted({each.part for each in refused})
        warnings.warn(f"{message}. Left alone: {', '.join(parts)}", stacklevel=4)
    left = {each.part for each in refused}
    applied = []
    for each, method in found.items():
        if each.part in left or method is None or source_hash(method) in MENDED_SOURCES.get(each.name, ()):
            continue
        owner = each.owner_class()
        setattr(owner, each.method, _bound(each, method))
        applied.append(Applied(owner, each.method, method))
    return applied


def _objection(each: Override, method: Callable[..., Any] | None) -> str:
    if method is None:
        return "" if each.optional else "does not exist"
    digest = source_hash(method)
    if digest in KNOWN_SOURCES.get(each.name, {}) or digest in MENDED_SOURCES.get(each.name, ()):
        return ""
    return f"is not one we know (source {digest})"


def _bound(each: Override, original: Any) -> Any:
    if isinstance(original, classmethod):
        return classmethod(_bound(each, original.__func__))
    replacement = each.replacement
    of_any_context = each.part == "metadata"  # buffers that are made with the tensors they describe

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
