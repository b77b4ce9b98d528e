"""Putting our slot allocator and the corrections into megatron-core, and taking them out again."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..inference.policies.checkpoint_plan import CheckpointPlan
from ..inference.policies.slot_eviction import EVICTION_POLICIES
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
from .host_record import DYNAMIC_CONTEXT
from .overrides import REGISTRY, Applied, apply
from .slot_allocator import HostSlotAllocator, Settings

_ALLOCATOR_MODULE = "megatron.core.inference.contexts.mamba_slot_allocator"
_CORRECTIONS = (
    admission, answers, attention_bound, checkpoint_metadata, conv_window, kv_index, lifecycle, paused,
    stages,
)  # fmt: skip
"""The modules whose overrides are in REGISTRY, which they enter when they are imported."""

_applied: list[Applied] = []


def install(
    plan: CheckpointPlan | None = None,
    eviction: str | None = None,
    cache_answers: bool = True,
    strict: bool = True,
) -> None:
    """Let megatron-core's `DynamicInferenceContext` run on our slot allocator, with its faults corrected.

    Before any context is built; one that exists stays on megatron-core's own until its tensors are built
    anew (resuming from a suspend with RECOMPUTE).

    Args:
        plan: which states are taken; None for `CheckpointPlan()`. Building a context raises ValueError where
            the plan's intervals are no multiples of its block.
        eviction: "lru" or "ref_zero" for states; None: what the host's configuration says.
        cache_answers: also hash and register what is generated, and take its states, for the next turn.
        strict: raise UnknownHostError, with nothing changed, where a method to be corrected is not one we
            know; False warns, and leaves alone what belongs together with that method.

    Raises RuntimeError where it is installed already, and ImportError where megatron-core is missing.
    """
    plan = instance("plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
    plan.check_useful()
    if plan.max_states_per_path is not None:
        raise ValueError(
            f"plan.max_states_per_path is {plan.max_states_per_path}; accepted: None, in megatron-core"
        )
    if eviction is not None:
        eviction = one_of("eviction", eviction, EVICTION_POLICIES)
    boolean("cache_answers", cache_answers)
    boolean("strict", strict)
    if _applied:
        raise RuntimeError("mambaslots.mcore is installed already; uninstall() first to change its settings")
    _applied.extend(apply(REGISTRY, _host_version(), strict))
    for module in (_ALLOCATOR_MODULE, DYNAMIC_CONTEXT.partition(":")[0]):
        _replace_class(importlib.import_module(module))
    follows_answers = any(each.method == "update_requests" for each in _applied)
    HostSlotAllocator.settings = Settings(plan, eviction, cache_answers and follows_answers)


def _host_version() -> str:
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise ImportError(
            "megatron-core is not installed; `pip install 'mambaslots[megatron]'` installs it"
        ) from error


def _replace_class(module: Any) -> None:
    stock = module.MambaSlotAllocator
    _applied.append(Applied(module, "MambaSlotAllocator", stock))
    module.MambaSlotAllocator = HostSlotAllocator


def uninstall() -> None:
    """Give megatron-core its own methods and its own class back; RuntimeError unless installed.

    Contexts that were built in between are not to be used any more.
    """
    if not _applied:
        raise RuntimeError("mambaslots.mcore is not installed")
    while _applied:
        _applied.pop().undo()
    HostSlotAllocator.settings = Settings()


@contextmanager
def installed(
    plan: CheckpointPlan | None = None,
    eviction: str | None = None,
    cache_answers: bool = True,
    strict: bool = True,
) -> Iterator[None]:
    """Installed within the block; see `install`."""
    install(plan, eviction, cache_answers, strict)
    try:
        yield
    finally:
        uninstall()
