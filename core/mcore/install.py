"""Putting our slot allocator and the corrections into megatron-core, and taking them out again."""

import functools
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config import shown_plan
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.eviction import EvictionPolicy, PolicyChoice, checked_policy
from ..validation import boolean, instance, shown
from ..version import VERSION
from . import admission, cached_answers, lifecycle, mixer, stages
from .host_record import NO_SLOTS, HostStats, record_of
from .overrides import (
    MissingHostError,
    Original,
    OtherSettingsError,
    UnknownHostError,
    apply,
    hashes_of_tree,
    overrides_for,
    owner_class,
    unknown_methods,
)
from .slot_allocator import HostCapacityError, HostSlotAllocator, Settings
from .versions import DYNAMIC_CONTEXT, KV_ALLOCATOR, TESTED_VERSIONS, series_of, version_of_tree

_ALLOCATOR_MODULE = "megatron.core.inference.contexts.mamba_slot_allocator"
CORRECTIONS = (admission, cached_answers, lifecycle, mixer, stages)
"""The modules whose overrides are in REGISTRY; their import registers them."""

_logger = logging.getLogger(__package__)
_applied: list[Original] = []


@dataclass(frozen=True)
class Installation:
    """What `install` returns.

    Attributes:
        megatron_core: the host's version.
        num_methods: replaced methods.
        settings: plan, eviction and whether answers are cached.
    """

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
    plan: CheckpointPlan | None = None,
    eviction: PolicyChoice | None = None,
    cache_answers: bool = True,
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
            known, and the self-test, which then replays the faults in about a second, fails. Nothing is
            changed.
        ImportError: megatron-core is missing.
    """
    plan = instance("plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
    plan.check_useful()
    if eviction is not None:
        eviction = checked_policy("eviction", eviction)
        if isinstance(eviction, EvictionPolicy):
            raise ValueError(f"eviction is {shown(eviction)}; accepted: its class, called for each context")
    boolean("cache_answers", cache_answers)
    settings, version = Settings(plan, eviction, cache_answers), _host_version()
    name = version.partition("+")[0]
    overrides = overrides_for(series_of(vars(owner_class(KV_ALLOCATOR))))
    installation = Installation(name, len(overrides), settings)
    if _applied:
        _require_same(HostSlotAllocator.settings, settings)
        return installation
    built_contexts.clear()
    applied, unknown = apply(overrides, version)
    _applied.extend(applied)
    for module in (_ALLOCATOR_MODULE, DYNAMIC_CONTEXT.partition(":")[0]):
        _replace(importlib.import_module(module), "MambaSlotAllocator", HostSlotAllocator)
    if hasattr(own := importlib.import_module(_ALLOCATOR_MODULE), "MambaSlotCapacityError"):
        _replace(own, "MambaSlotCapacityError", HostCapacityError)
    context = owner_class(DYNAMIC_CONTEXT)
    _replace(context, "initialize_all_tensors", _noting(context.initialize_all_tensors))
    if unknown:
        _vouch(version, unknown)
    HostSlotAllocator.settings = settings
    if name not in TESTED_VERSIONS and not unknown:
        _logger.warning(
            "megatron-core %s is not among the tested versions (%s); all replaced methods have known sources",
            name, ", ".join(TESTED_VERSIONS),
        )  # fmt: skip
    return installation


def _vouch(version: str, unknown: list[str]) -> None:
    """Replay the faults on a host whose sources are not known; uninstalls and raises where one is there."""
    try:
        failures = importlib.import_module(f"{__package__}.self_test").failures()
    except Exception as error:
        failures = [f"it does not start ({type(error).__name__}: {error})"]
    built_contexts.clear()
    if failures or not __debug__:
        uninstall()
        found = ", ".join(failures[:3]) or "python -O runs none of its checks"
        raise UnknownHostError(f"megatron-core {version}: {'; '.join(unknown)}; its self-test fails: {found}")
    _logger.warning(
        "megatron-core %s: %s; its self-test passes with what replaces them", version, "; ".join(unknown)
    )


def _require_same(first: Settings, now: Settings) -> None:
    names = [each.name for each in fields(Settings)]
    differing = [name for name in names if getattr(first, name) != getattr(now, name)]
    if differing:
        given = ", ".join(f"{name} is {shown(getattr(now, name))}" for name in differing)
        accepted = ", ".join(f"{name}={shown(getattr(first, name))}" for name in differing)
        raise OtherSettingsError(
            f"{given}; accepted: {accepted}, with which mambaslots.mcore was installed first, or uninstall() "
            "before this call"
        )


def describe_outlook() -> str:
    """One line: what `install` would do with the installed megatron-core, which is read and not imported."""
    spec = importlib.util.find_spec("megatron")
    folders = spec.submodule_search_locations if spec is not None else None
    roots = [Path(folder).parent for folder in folders or ()]
    root = next((root for root in roots if (root / "megatron" / "core").is_dir()), None)
    if root is None:
        return "nothing: megatron-core is not installed"
    name, (overrides, hashes) = version_of_tree(root), hashes_of_tree(root)
    objections, unknown = unknown_methods(overrides, hashes)
    if objections:
        return f"refuse megatron-core {name}: {'; '.join(objections)}"
    if unknown:
        return f"install on megatron-core {name} if its self-test passes: {'; '.join(unknown)}"
    tested = "tested" if name in TESTED_VERSIONS else f"not tested; tested are {', '.join(TESTED_VERSIONS)}"
    known = f"the sources of all {len(overrides)} replaced methods are known"
    return f"install on megatron-core {name} ({tested}): {known}"


def _host_version() -> str:
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MissingHostError(
            "megatron-core is not installed; `pip install 'mambaslots[megatron]'` installs it"
        ) from error


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _applied.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def uninstall() -> None:
    """Give megatron-core its own methods and its own class back; RuntimeError unless installed.

    Contexts that were built in between raise RuntimeError when they are to serve.
    """
    if not _applied:
        raise RuntimeError("mambaslots.mcore is not installed")
    while _applied:
        setattr(*_applied.pop())
    HostSlotAllocator.settings = Settings()
    for context in filter(None, (built.context for built in built_contexts)):
        for name in _SERVING:  # megatron-core's own methods would read the context's cache wrongly
            setattr(context, name, _refuse)


@contextmanager
def installed(
    plan: CheckpointPlan | None = None,
    eviction: PolicyChoice | None = None,
    cache_answers: bool = True,
) -> Iterator[Installation]:
    """Installed within the block; see `install`. Where it is installed already, it stays so afterwards."""
    nested = bool(_applied)
    installation = install(plan, eviction, cache_answers)
    try:
        yield installation
    finally:
        if not nested:
            uninstall()


# ---- the contexts that were built under the drop-in: their counts, and why one caches nothing

SETTINGS = "pass enable_prefix_caching=True and a prefix_caching_mamba_gb to its InferenceConfig"
_SERVING = ("add_request", "initialize_attention_state")


def stats(context: Any) -> HostStats:
    """The counts of a context that was built after `install`; ValueError for any other."""
    if "mamba_slot_allocator" not in getattr(context, "__dict__", ()):
        raise ValueError(f"context is {type(context).__name__}; accepted: a DynamicInferenceContext")
    slots = context.mamba_slot_allocator
    if slots is None:
        return HostStats.of(record_of(context), NO_SLOTS, 0)
    if not isinstance(slots, HostSlotAllocator):
        raise ValueError("context is on megatron-core's own allocator; accepted: one built after install()")
    return HostStats.of(record_of(context), slots.slots.counts, slots.num_dropped)


class BuiltContext:
    """One context, which may be gone.

    Attributes:
        number: 1 for the first context.
        idle_reason: why the context caches no state, as a sentence; "" where it does.
    """

    def __init__(self, context: Any, number: int) -> None:
        self.number, self.idle_reason = number, idle_reason(context)
        self._context = weakref.ref(context)
        self._record = record_of(context)

    @property
    def context(self) -> Any:
        """The context, or None once it is gone."""
        return self._context()

    @property
    def stats(self) -> HostStats:
        """The context's counts; of a context that is gone the counts of slots are those of its last step."""
        if (context := self.context) is not None:
            return stats(context)
        return HostStats.of(self._record, self._record.slots, self._record.dropped)


built_contexts: list[BuiltContext] = []
"""All contexts that were built since the last `install`, in their order."""


def idle_reason(context: Any) -> str:
    """Why no state of this context is cached, with what to change, or "" where states are cached."""
    if not context.enable_prefix_caching:
        return f"enable_prefix_caching is False, so mambaslots has nothing to do; {SETTINGS}"
    if not context.is_hybrid_model:
        return "its model has no Mamba layers, so megatron-core's own KV cache serves it"
    if context.mamba_slot_allocator is None:
        budget = context.config.prefix_caching_mamba_gb
        return (
            f"prefix_caching_mamba_gb is {budget}, so every prompt token is computed, and only KV blocks are "
            f"shared; {SETTINGS}"
        )
    return ""


def _noting(initialize_all_tensors: Callable[..., None]) -> Callable[..., None]:
    """The host's method that ends the building of a context; a warning says why nothing is cached."""

    @functools.wraps(initialize_all_tensors)
    def initialize(context: Any, *args: Any, **kwargs: Any) -> None:
        initialize_all_tensors(context, *args, **kwargs)
        if all(each.context is not context for each in built_contexts):
            built = BuiltContext(context, len(built_contexts) + 1)
            built_contexts.append(built)
            if built.idle_reason:
                _logger.warning("context %d caches no states: %s", built.number, built.idle_reason)

    return initialize


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "this context was built while mambaslots.mcore was installed, and uninstall() has been called since: "
        "megatron-core's own methods would answer wrongly from its cache; build a new context and engine"
    )
