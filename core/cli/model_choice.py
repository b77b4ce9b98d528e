"""Mistakes in a command line with a model, said before torch is imported, which takes seconds."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..files import CONFIG, check_served, model_folder
from ..named_policies import cache_changes

_OPTIONS_BY_FIELD = {
    "total_gb": "--memory-gb",
    "max_requests": "--max-requests",
    "max_sequence_length": "--max-sequence-length",
    "policy is": "--eviction is",
    "plan is": "--plan is",
    "plan has": "--plan has",
}


def chosen_model(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The model's folder, perhaps downloaded, and the `cache_changes` of --eviction and --plan, new objects.

    Raises:
        ValueError: a pool lacks its size, the policy or the plan is unknown, or the model is not served.
        OSError: the model is to be downloaded, and the hub cannot be reached.
    """
    if options.num_kv_blocks is None and options.num_mamba_slots is not None:
        raise ValueError("--num-kv-blocks is missing; accepted: both pools with sizes, or none")
    with naming_options():
        cache = cache_changes(options.eviction, options.plan)
    folder = model_folder("MODEL", options.model)
    check_served(folder / CONFIG)
    return folder, cache


@contextmanager
def naming_options() -> Iterator[None]:
    """Let a ValueError that names fields of `InferenceConfig` name the options of the command line."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for field, option in _OPTIONS_BY_FIELD.items():
            message = message.replace(field, option)
        raise ValueError(message) from error
