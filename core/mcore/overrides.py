"""Corrections of the host. A correction replaces one method, whose source must be known."""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .versions import (
    KNOWN_SOURCES,
    KV_ALLOCATOR,
    MAMBA_MIXER,
    SERIES,
    hashes_in,
    series_of,
    source_hash,
)

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
        series: of megatron-core, those with the faults.
        replacement: the new method; the replacement's docstring says what changes and why.
    """

    owner: str
    method: str
    faults: tuple[int, ...]
    series: tuple[str, ...]
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
    owner: str, method: str, *, faults: tuple[int, ...], series: tuple[str, ...] = SERIES
) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of `owner`'s method."""

    def register(replacement: Replacement) -> Replacement:
        REGISTRY.append(Override(owner, method, faults, series, replacement))
        return replacement

    return register


def overrides_for(series: str) -> list[Override]:
    """What is replaced in a host of this series."""
    return [entry for entry in REGISTRY if series in entry.series]


def hashes_of_tree(root: Path) -> tuple[list[Override], dict[str, str]]:
    """What is replaced in the megatron-core in the folder `root`, and override -> hash of what is there."""
    by_owner = {owner: hashes_in(root, owner) for owner in {entry.owner for entry in REGISTRY}}
    overrides = overrides_for(series_of(by_owner[KV_ALLOCATOR]))
    found = [entry for entry in overrides if entry.method in by_owner[entry.owner]]
    return overrides, {entry.name: by_owner[entry.owner][entry.method] for entry in found}


Original = tuple[Any, str, Callable[..., Any]]
"""A class or module, a name in it, and what was there before: the arguments of `setattr` that undo."""


def apply(overrides: Iterable[Override], version: str) -> tuple[list[Original], list[str]]:
    """Replace the methods.

    Returns:
        What undoes it, and for each method whose source is not known: its name, and the source.

    Raises:
        UnknownHostError: a method is missing, or would have to be known; nothing is changed.
    """
    found = {entry: owner_class(entry.owner).__dict__.get(entry.method) for entry in overrides}
    hashes = {entry.name: source_hash(method) for entry, method in found.items() if method is not None}
    objections, unknown = unknown_methods(found, hashes)
    if objections:
        raise UnknownHostError(f"megatron-core {version}: {'; '.join(objections)}")
    applied: list[Original] = []
    for entry, method in found.items():
        owner = owner_class(entry.owner)
        applied.append((owner, entry.method, method))
        setattr(owner, entry.method, _bound(entry, method))
    return applied, unknown


def unknown_methods(overrides: Iterable[Override], hashes: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Why a host is refused, and which methods a self-test has to vouch for; `hashes`: name -> hash.

    Refused are missing methods, and unknown ones of the mixer, whose kernels the self-test does not run.
    """
    refused: list[str] = []
    vouched: list[str] = []
    for entry in overrides:
        digest = hashes.get(entry.name)
        if digest is None:
            refused.append(f"{entry.name} does not exist")
        elif digest not in KNOWN_SOURCES.get(entry.name, ()):
            names = refused if entry.owner == MAMBA_MIXER else vouched
            names.append(f"{entry.name} is not one we know (source {digest})")
    return refused, vouched


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
