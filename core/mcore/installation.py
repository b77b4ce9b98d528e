"""What an `install` has replaced, and with which settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from ..inference.contexts.cache.checkpoint_plan import shown_plan
from ..version import VERSION
from .known_sources import TESTED_VERSIONS
from .slot_allocator import Settings


@dataclass(frozen=True)
class Installation:
    """What `install` returns.

    Attributes:
        megatron_core: the host's version.
        num_methods: replaced methods.
        left_alone: part -> its faults, which come back; only with `strict=False`.
        warning: which methods are not known, and the sentences of the faults that come back; "" without any.
        settings: plan, eviction and whether answers are cached.
    """

    megatron_core: str
    num_methods: int
    left_alone: Mapping[str, tuple[int, ...]]
    warning: str
    settings: Settings

    @property
    def untested(self) -> str:
        """A sentence where the tests do not run on the host's version, else ""."""
        if self.megatron_core in TESTED_VERSIONS:
            return ""
        sources = (
            "some replaced methods have unknown sources"
            if self.left_alone
            else "all replaced methods have known sources"
        )
        tested = ", ".join(TESTED_VERSIONS)
        return f"megatron-core {self.megatron_core} is not among the tested versions ({tested}); {sources}"

    def describe(self) -> str:
        """One line: the versions, what was replaced, the plan."""
        left = f"; left alone: {', '.join(self.left_alone)}" if self.left_alone else ""
        answers = "" if self.settings.cache_answers else "; answers are not cached"
        return (
            f"{shown_versions(self.megatron_core)}: {self.num_methods} methods and the allocator "
            f"replaced{left}; plan: {shown_plan(self.settings.plan)}{answers}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "versions": versions(self.megatron_core),
            "num_replaced_methods": self.num_methods,
            "left_alone": {part: list(faults) for part, faults in self.left_alone.items()},
            "plan": shown_plan(self.settings.plan),
            "eviction": self.settings.eviction,
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
