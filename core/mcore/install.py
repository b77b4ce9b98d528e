"""Putting our slot allocator and the corrections into megatron-core, and taking them out again."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.slot_eviction import EVICTION_POLICIES
from ..validation import boolean, instance, one_of
from . import (
    admission,
    answers,
    attention_bound,
    checkpoint_metadata,
    conv_window,
    kv_index,
    lifecycle,
    paused,
    stages,
)
from .built_contexts import BuiltContexts
from .host_record import DYNAMIC_CONTEXT
from .installation import Installation
from .overrides import REGISTRY, Applied, MissingHostError, apply, owner_class
from .slot_allocator import HostSlotAllocator, Settings

_ALLOCATOR_MODULE = "megatron.core.inference.contexts.mamba_slot_allocator"
_CORRECTIONS = (
    admission, answers, attention_bound, checkpoint_metadata, conv_window, kv_index, lifecycle, paused,
    stages,
)  # fmt: skip
"""The modules whose overrides are in REGISTRY, which they enter when they are imported."""

_logger = logging.getLogger(__package__)
_applied: list[Applied] = []
built_contexts = BuiltContexts()
"""The contexts that were built since `install`."""


def install(
    plan: CheckpointPlan | None = None,
    eviction: str | None = None,
    cache_answers: bool = True,
    strict: bool = True,
) -> Installation:
    """Let megatron-core's `DynamicInferenceContext` run on our slot allocator, with its faults corrected.

    Before any context is built; one that exists stays on megatron-core's own until its tensors are built
    anew (resuming from a suspend with RECOMPUTE).

    Args:
        plan: which states are taken; None for `CheckpointPlan()`. Building a context raises ValueError where
            the plan's intervals are no multiples of its block.
        eviction: "value" or "lru" for states; None: what the host's configuration says.
        cache_answers: also hash and register what is generated, and take its states, for the next turn.
        strict: raise UnknownHostError, with nothing changed, where a method to be corrected is not one we
            know; False warns, names the faults that come back, and leaves alone what belongs together with
            that method.

    Returns:
        What was replaced; `describe()` says it in one line. A warning on the logger "mambaslots.mcore" names
            a version that the tests do not run on.

    Raises:
        RuntimeError: it is installed already.
        ImportError: megatron-core is missing.
    """
    plan = instance("plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
    plan.check_useful()
    if eviction is not None:
        eviction = one_of("eviction", eviction, EVICTION_POLICIES)
    boolean("cache_answers", cache_answers)
    boolean("strict", strict)
    if _applied:
        raise RuntimeError("mambaslots.mcore is installed already; uninstall() first to change its settings")
    version = _host_version()
    parts = apply(REGISTRY, version, strict)
    _applied.extend(parts.applied)
    for module in (_ALLOCATOR_MODULE, DYNAMIC_CONTEXT.partition(":")[0]):
        _replace(importlib.import_module(module), "MambaSlotAllocator", HostSlotAllocator)
    context = owner_class(DYNAMIC_CONTEXT)
    _replace(context, "initialize_all_tensors", built_contexts.noting(context.initialize_all_tensors))
    follows_answers = any(each.method == "update_requests" for each in _applied)
    settings = HostSlotAllocator.settings = Settings(plan, eviction, cache_answers and follows_answers)
    installation = Installation(
        version.partition("+")[0], len(parts.applied), parts.left_alone, parts.warning, settings
    )
    if installation.untested:
        _logger.warning("%s", installation.untested)
    return installation


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
    _applied.append(Applied(owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def uninstall() -> None:
    """Give megatron-core its own methods and its own class back; RuntimeError unless installed.

    Contexts that were built in between raise RuntimeError when they are to serve.
    """
    if not _applied:
        raise RuntimeError("mambaslots.mcore is not installed")
    while _applied:
        _applied.pop().undo()
    HostSlotAllocator.settings = Settings()
    built_contexts.retire()


@contextmanager
def installed(
    plan: CheckpointPlan | None = None,
    eviction: str | None = None,
    cache_answers: bool = True,
    strict: bool = True,
) -> Iterator[Installation]:
    """Installed within the block; see `install`."""
    installation = install(plan, eviction, cache_answers, strict)
    try:
        yield installation
    finally:
        uninstall()
