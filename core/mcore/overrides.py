"""Corrections of the host. A correction replaces one method, whose source must be known."""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .versions import KNOWN_SOURCES, source_hash

Replacement = Callable[..., Any]
"""Called as `replacement(original, self, *args, **kwargs)`; `original` is the host's own method."""


class MissingHostError(ImportError):
    """megatron-core is not installed."""


class UnknownHostError(RuntimeError):
    """The source of a method that would be replaced is not known."""


class OtherSettingsError(RuntimeError):
    """The drop-in is installed already, with other settings."""


@dataclass(frozen=True)
class Override:
    """One replaced method.

    Attributes:
        owner: "module:Class" in megatron-core.
        method: the name of the replaced method.
        faults: the faults that the override helps to correct, as numbered in docs/megatron.md.
        replacement: the new method; the replacement's docstring says what changes and why.
    """

    owner: str
    method: str
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


def override(owner: str, method: str, *, faults: tuple[int, ...]) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of `owner`'s method."""

    def register(replacement: Replacement) -> Replacement:
        REGISTRY.append(Override(owner, method, faults, replacement))
        return replacement

    return register


Original = tuple[Any, str, Callable[..., Any]]
"""A class or module, a name in it, and what was there before: the arguments of `setattr` that undo."""


def apply(overrides: Iterable[Override], version: str) -> list[Original]:
    """Replace the methods. UnknownHostError, with nothing changed, where the source of one is not known."""
    found = {entry: owner_class(entry.owner).__dict__.get(entry.method) for entry in overrides}
    refused = {entry: reason for entry, method in found.items() if (reason := _objection(entry, method))}
    if refused:
        reasons = "; ".join(f"{entry.name} {reason}" for entry, reason in refused.items())
        raise UnknownHostError(f"megatron-core {version}: {reasons}")
    applied: list[Original] = []
    for entry, method in found.items():
        owner = owner_class(entry.owner)
        applied.append((owner, entry.method, method))
        setattr(owner, entry.method, _bound(entry, method))
    return applied


def _objection(entry: Override, method: Callable[..., Any] | None) -> str:
    if method is None:
        return "does not exist"
    digest = source_hash(method)
    return "" if digest in KNOWN_SOURCES.get(entry.name, ()) else f"is not one we know (source {digest})"


def _bound(entry: Override, original: Any) -> Any:
    if isinstance(original, classmethod):
        return classmethod(_bound(entry, original.__func__))
    replacement = entry.replacement

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_on_stock(self):
            return original(self, *args, **kwargs)
        return replacement(original, self, *args, **kwargs)

    method.__doc__ = replacement.__doc__
    return method


def _is_on_stock(host: Any) -> bool:
    """Whether `host` is a context that was built before, and has the host's own allocator."""
    slots = getattr(host, "mamba_slot_allocator", None)
    return slots is not None and not isinstance(slots, MambaSlotAllocator)
