"""Putting our slot allocator and the corrections into megatron-core, and taking them out again."""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.eviction import EvictionPolicy, PolicyChoice, checked_policy
from ..named_policies import shown_plan
from ..validation import boolean, instance, refused, shown
from ..version import VERSION
from . import cached_answers, gated_delta_net, lifecycle, mixer, prefill_chunks, stages
from .built_contexts import built_contexts, refuse_to_serve
from .overrides import (
    ADDITIONS,
    MissingHostError,
    OtherSettingsError,
    Override,
    UnknownHostError,
    checked_methods,
    hashes_of_tree,
    overrides_for,
    owner_class,
    unknown_methods,
)
from .slot_allocator import HostCapacityError, HostSlotAllocator, Settings
from .versions import DYNAMIC_CONTEXT, KV_ALLOCATOR, TESTED_VERSIONS, series_of, version_of_tree

CORRECTIONS = (cached_answers, gated_delta_net, lifecycle, mixer, prefill_chunks, stages)
"""The modules whose overrides are in REGISTRY; their import registers them."""

_logger = logging.getLogger(__package__)
_replaced: list[tuple[Any, str, Any]] = []
"""A class or module, a name in it, and what was there before: the arguments of `setattr` that undo."""


@dataclass(frozen=True)
class Installation:
    """What `install` returns: the host's version, the number of replaced methods, and the settings."""

    megatron_core: str
    num_methods: int
    settings: Settings

    def describe(self) -> str:
        """One line: the versions, what was replaced, the plan."""
        answers = "" if self.settings.cache_answers else "; answers are not cached"
        return (
            f"{shown_versions(self.megatron_core)}: {self.num_methods} methods and the allocator "
            f"replaced; plan: {shown_plan(self.settings.plan)}{answers}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "versions": versions(self.megatron_core),
            "num_replaced_methods": self.num_methods,
            "plan": shown_plan(self.settings.plan),
            "eviction": getattr(self.settings.eviction, "__name__", self.settings.eviction),
            "cache_answers": self.settings.cache_answers,
        }


def versions(megatron_core: str | None = None) -> dict[str, str]:
    """Package -> version. Imports no megatron-core; `megatron_core` None asks the installed package."""
    if megatron_core is None:
        try:
            megatron_core = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            megatron_core = "not installed"
    return {"mambaslots": VERSION, "megatron-core": megatron_core, "torch": torch.__version__}


def shown_versions(megatron_core: str | None = None) -> str:
    """The versions of mambaslots, megatron-core and torch, for a line of text."""
    return ", ".join(f"{name} {version}" for name, version in versions(megatron_core).items())


def install(
    plan: CheckpointPlan | None = None, eviction: PolicyChoice | None = None, cache_answers: bool = True
) -> Installation:
    """Let megatron-core's `DynamicInferenceContext` run on our slot allocator, with its faults corrected.

    Before any context is built; one that exists stays on megatron-core's own until its tensors are built
    anew (resuming from a suspend with RECOMPUTE). Where it is installed already with the same settings, also
    by `mambaslots run`, the call changes nothing; one `uninstall` reverses all.

    Args:
        plan: which states are taken; None for `CheckpointPlan()`. Building a context raises ValueError where
            the plan's intervals are no multiples of its block.
        eviction: "value", "lru" or a subclass of `EvictionPolicy`; None: what the host's configuration says.
        cache_answers: also hash and register what is generated, and take its states, for the next turn.

    Returns:
        What was replaced; `describe()` says it in one line. A warning on the logger "mambaslots.mcore" names
            a version that the tests do not run on.

    Raises:
        RuntimeError: it is installed with other settings; the message names those that differ.
            UnknownHostError, which is one: a method to be corrected is missing; or the source of one is not
            known, and the self-test, which then provokes some of the faults in about a second, fails. Nothing
            is changed.
        ImportError: megatron-core is missing.
    """
    plan = instance("plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
    if eviction is not None:
        eviction = checked_policy("eviction", eviction)
        if isinstance(eviction, EvictionPolicy):
            raise refused("eviction", eviction, "its class, called for each context")
    boolean("cache_answers", cache_answers)
    settings = Settings(plan, eviction, cache_answers)
    version = _host_version()
    name = version.partition("+")[0]
    overrides = overrides_for(series_of(vars(owner_class(KV_ALLOCATOR))))
    installation = Installation(name, len(overrides), settings)
    if _replaced:
        _require_same(HostSlotAllocator.settings, settings)
        return installation
    methods, unknown = checked_methods(overrides, version)
    try:
        _replace_all(methods)
        if unknown:
            _self_test_host(version, unknown)
        HostSlotAllocator.settings = settings
    except BaseException:
        _restore()
        raise
    finally:
        built_contexts.clear()
    if name not in TESTED_VERSIONS and not unknown:
        _logger.warning(
            "megatron-core %s is not among the tested versions (%s); all replaced methods have known sources",
            name,
            ", ".join(TESTED_VERSIONS),
        )
    return installation


def _replace_all(methods: dict[Override, Any]) -> None:
    allocator_module = importlib.import_module("megatron.core.inference.contexts.mamba_slot_allocator")
    additions = {entry: getattr(owner_class(entry.owner), entry.method, None) for entry in ADDITIONS}
    for entry, method in (methods | additions).items():
        if method is not None:
            _replace(owner_class(entry.owner), entry.method, entry.bound(method))
    for module in (allocator_module, importlib.import_module(DYNAMIC_CONTEXT.partition(":")[0])):
        _replace(module, "MambaSlotAllocator", HostSlotAllocator)
    if hasattr(allocator_module, "MambaSlotCapacityError"):
        _replace(allocator_module, "MambaSlotCapacityError", HostCapacityError)


def _self_test_host(version: str, unknown: list[str]) -> None:
    """Provoke the faults on a host whose sources are not known; UnknownHostError where one is there."""
    try:
        failures = importlib.import_module(f"{__package__}.reproductions").failures()
    except Exception as error:
        failures = [f"it does not start ({type(error).__name__}: {error})"]
    methods = "; ".join(unknown)
    if failures:
        shown_failures = ", ".join(failures[:3])
        raise UnknownHostError(f"megatron-core {version}: {methods}; its self-test fails: {shown_failures}")
    _logger.warning("megatron-core %s: %s; its self-test passes with what replaces them", version, methods)


def _require_same(installed_settings: Settings, settings: Settings) -> None:
    names = [field.name for field in fields(Settings)]
    names = [name for name in names if getattr(installed_settings, name) != getattr(settings, name)]
    if names:
        new_settings = ", ".join(f"{name} is {shown(getattr(settings, name))}" for name in names)
        accepted = ", ".join(f"{name}={shown(getattr(installed_settings, name))}" for name in names)
        raise OtherSettingsError(
            f"{new_settings}; accepted: {accepted}, with which mambaslots.mcore was installed first, or "
            "uninstall() before this call"
        )


def describe_outlook() -> str:
    """One line: what `install` would do with the installed megatron-core, which is read and not imported."""
    spec = importlib.util.find_spec("megatron")
    folders = spec.submodule_search_locations if spec is not None else None
    roots = [Path(folder).parent for folder in folders or ()]
    root = next((root for root in roots if (root / "megatron" / "core").is_dir()), None)
    if root is None:
        return "nothing: megatron-core is not installed"
    name = version_of_tree(root)
    overrides, hashes = hashes_of_tree(root)
    objections, unknown = unknown_methods(overrides, hashes)
    if objections:
        return f"refuse megatron-core {name}: {'; '.join(objections)}"
    if unknown:
        return f"install on megatron-core {name} if its self-test passes: {'; '.join(unknown)}"
    tested = "tested" if name in TESTED_VERSIONS else f"not tested; tested are {', '.join(TESTED_VERSIONS)}"
    sources = f"the sources of all {len(overrides)} replaced methods are known"
    return f"install on megatron-core {name} ({tested}): {sources}"


def _host_version() -> str:
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        message = "megatron-core is not installed; `pip install 'mambaslots[megatron]'` installs it"
        raise MissingHostError(message) from error


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, inspect.getattr_static(owner, name)))
    setattr(owner, name, replacement)


def _restore() -> None:
    while _replaced:
        setattr(*_replaced[-1])
        _replaced.pop()
    HostSlotAllocator.settings = Settings()


def uninstall() -> None:
    """Give megatron-core its own methods and its own class back; RuntimeError unless installed.

    Contexts that were built in between raise RuntimeError when they are to serve.
    """
    if not _replaced:
        raise RuntimeError("mambaslots.mcore is not installed")
    _restore()
    refuse_to_serve()


@contextmanager
def installed(
    plan: CheckpointPlan | None = None, eviction: PolicyChoice | None = None, cache_answers: bool = True
) -> Iterator[Installation]:
    """Installed within the block; see `install`. Where it is installed already, it stays so afterwards."""
    was_installed = bool(_replaced)
    installation = install(plan, eviction, cache_answers)
    try:
        yield installation
    finally:
        if not was_installed:
            uninstall()
