"""From options to a loaded model and an engine."""

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import InferenceConfig
from ..engine_sizes import context_length, largest_fitting_config, served_dtype
from ..inference.contexts.step_inputs import Model
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedModel, load
from ..parallel_groups import ParallelGroups
from ..state_spec import HybridStateSpec
from .options import naming_options

logger = logging.getLogger(__name__)

_SAME_NAMES = (
    "num_mamba_slots", "num_kv_blocks", "block_size_tokens", "max_requests", "max_tokens_per_step",
    "max_sequence_length", "num_speculative_tokens", "durable_state_dtype", "batch_invariant", "free_memory",
    "enable_prefix_caching",
)  # fmt: skip
"""Options that are called as the fields of `InferenceConfig`."""


def chosen_device(options: argparse.Namespace) -> torch.device:
    """The device of `--device`; sets torch's threads. ValueError where it is "cuda" and there is none."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', and torch sees no GPU; accepted: cpu")
    return torch.device(options.device)


def load_model(
    options: argparse.Namespace, folder: Path, groups: ParallelGroups | None = None
) -> LoadedModel:
    """The model of a command line with `options.add_model`; with `groups`, this rank's part of it."""
    device = chosen_device(options)
    dtype = getattr(torch, options.dtype) if options.dtype else served_dtype(folder, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    dtype_name = "its own dtype" if dtype is None else str(dtype).removeprefix("torch.")
    logger.info("loading %s to %s (%s) in %s", options.model, device, name, dtype_name)
    return load(folder, device, dtype, groups=groups)


def make_engine(
    loaded: LoadedModel,
    options: argparse.Namespace,
    cache: Mapping[str, Any],
    kind: Callable[[Model, InferenceConfig], DynamicInferenceEngine] = DynamicInferenceEngine,
) -> DynamicInferenceEngine:
    """An engine of a command line with `options.add_engine` and `cache_changes`; `kind` makes it."""
    config = inference_config(loaded.model.state_spec(), options, context_length(loaded.folder), cache)
    try:
        return kind(loaded.model, config)
    except (RuntimeError, MemoryError) as error:  # torch has no class of errors for a CPU's memory
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        message = "the pools do not fit into memory; accepted: less --memory-gb, or smaller pools"
        raise ValueError(message) from error


def inference_config(
    spec: HybridStateSpec, options: argparse.Namespace, context: int | None, cache: Mapping[str, Any]
) -> InferenceConfig:
    """The configuration that the options name; `largest_fitting_config` chooses what they leave out."""
    settings = {name: getattr(options, name) for name in _SAME_NAMES}
    if options.num_mamba_slots is options.num_kv_blocks is None:
        settings["total_gb"] = options.memory_gb
    with naming_options():
        return largest_fitting_config(
            spec, context, host_cache_gb=options.host_gb, disk_cache=options.disk, **settings, **cache
        )
