"""Corrections of the host. A correction replaces one method, whose source must be known."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from .versions import GATED_DELTA_NET, KNOWN_SOURCES, KV_ALLOCATOR, SERIES, hashes_in, series_of, source_hash

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
    """One replaced method; `faults` are numbered in docs/megatron.md, and a feature has none."""

    owner: str
    method: str
    faults: tuple[int, ...]
    series: tuple[str, ...]
    replacement: Replacement

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method}"

    def bound(self, original: Any) -> Any:
        """What replaces `original`; contexts on the host's own allocator still get `original`."""
        if isinstance(original, classmethod):
            return classmethod(self.bound(original.__func__))
        replacement = self.replacement

        @functools.wraps(original)
        def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if is_on_stock(owner):
                return original(owner, *args, **kwargs)
            return replacement(original, owner, *args, **kwargs)

        method.__doc__ = replacement.__doc__
        return method


def owner_class(owner: str) -> Any:
    """The class "module:Class" of megatron-core."""
    with warnings.catch_warnings():  # fla warns where there is no GPU
        warnings.simplefilter("ignore")
        return resolve_name(owner)


NOT_SELF_TESTED = ("MambaMixer._ssm_prefill", "DynamicInferenceContext.commit_sampled_tokens")
"""Methods that the self-test does not call: it runs no kernels of the mixer, and no async scheduling."""

REGISTRY: list[Override] = []
"""Every override of a method whose source must be known, in the order of definition."""

ADDITIONS: list[Override] = []
"""Overrides of methods of any source; a host that lacks one of the methods is served without the override."""


def override(
    owner: str, method: str, *, faults: tuple[int, ...] = (), series: tuple[str, ...] = SERIES,
    any_source: bool = False,
) -> Callable[[Replacement], Replacement]:  # fmt: skip
    """Let the decorated function replace `owner`'s method: an entry of REGISTRY, or of ADDITIONS."""

    def add(replacement: Replacement) -> Replacement:
        entries = ADDITIONS if any_source else REGISTRY
        entries.append(Override(owner, method, faults, series, replacement))
        return replacement

    return add


def overrides_for(series: str) -> list[Override]:
    """What is replaced in a host of this series."""
    return [entry for entry in REGISTRY if series in entry.series]


def without_unknown_nets(overrides: Iterable[Override], hashes: Mapping[str, str]) -> list[Override]:
    """The overrides but those of a gated delta net of unknown source, which the host keeps uncached."""
    nets = [entry for entry in overrides if entry.owner == GATED_DELTA_NET]
    are_known = all(hashes.get(entry.name) in KNOWN_SOURCES.get(entry.name, ()) for entry in nets)
    return [entry for entry in overrides if are_known or entry not in nets]


def hashes_of_tree(root: Path) -> tuple[list[Override], dict[str, str]]:
    """What is replaced in the megatron-core in the folder `root`, and override -> hash of what is there."""
    by_owner = {owner: hashes_in(root, owner) for owner in {entry.owner for entry in REGISTRY}}
    overrides = overrides_for(series_of(by_owner[KV_ALLOCATOR]))
    present = [entry for entry in overrides if entry.method in by_owner[entry.owner]]
    return overrides, {entry.name: by_owner[entry.owner][entry.method] for entry in present}


def checked_methods(overrides: Iterable[Override], version: str) -> tuple[dict[Override, Any], list[str]]:
    """Override -> the host's own method, and the methods whose sources are unknown."""
    methods = {entry: vars(owner_class(entry.owner)).get(entry.method) for entry in overrides}
    hashes = {entry.name: source_hash(method) for entry, method in methods.items() if method is not None}
    objections, unknown = unknown_methods(methods, hashes)
    if objections:
        raise UnknownHostError(f"megatron-core {version}: {'; '.join(objections)}")
    return {entry: methods[entry] for entry in without_unknown_nets(methods, hashes)}, unknown


def unknown_methods(overrides: Iterable[Override], hashes: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Why a host is refused (a method is missing, or not self-tested), and what the self-test vouches for."""
    objections: list[str] = []
    self_tested: list[str] = []
    for entry in overrides:
        if entry.owner == GATED_DELTA_NET:
            continue
        digest = hashes.get(entry.name)
        if digest is None:
            objections.append(f"{entry.name} does not exist")
        elif digest not in KNOWN_SOURCES.get(entry.name, ()):
            reasons = objections if entry.name in NOT_SELF_TESTED else self_tested
            reasons.append(f"{entry.name} is not one we know (source {digest})")
    return objections, self_tested


def is_on_stock(owner: Any) -> bool:
    """Whether `owner` is a context that was built before, and has the host's own allocator."""
    slots = owner.__dict__.get("mamba_slot_allocator")  # a module's `getattr` is slow where it finds nothing
    return slots is not None and not isinstance(slots, MambaSlotAllocator)
