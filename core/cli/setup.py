"""From options to a loaded model and an engine."""

import argparse
from collections.abc import Callable

import torch

from ..config import InferenceConfig
from ..inference.contexts.pool_sizes import GIGABYTE, PoolSizes
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.runner import Model
from ..loaded_model import LoadedModel, load, stored_dtype
from ..parallel_groups import ParallelGroups
from ..replay.ours import OursRow
from ..state_spec import HybridStateSpec

SMALLEST_BLOCK = {"cpu": 16, "cuda": 64}  # small blocks resume more, large ones are faster to attend to
SHARE_OF_FREE_MEMORY = 0.85  # the rest is for activations, graphs and the libraries' workspaces
MEMORY_GB_ON_CPU = 1.0
CUDA_GRAPHS = 64
_OPTIONS_BY_FIELD = {
    "total_gb": "--memory-gb",
    "max_requests": "--max-requests",
    "max_sequence_length": "--max-sequence-length",
}
_POOL_SIZES = ("num_mamba_slots", "num_kv_blocks")


def chosen_device(options: argparse.Namespace) -> torch.device:
    """The device of `--device`; sets torch's threads. ValueError where it is "cuda" and there is none."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', and torch sees no GPU; accepted: cpu")
    return torch.device(options.device)


def load_model(options: argparse.Namespace, groups: ParallelGroups | None = None) -> LoadedModel:
    """The model of a command line with `options.add_model`; with `groups`, this rank's part of it."""
    device = chosen_device(options)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if dtype is None and device.type == "cpu" and stored_dtype(options.model).itemsize == 2:
        dtype = torch.float32
    return load(options.model, device, dtype, groups=groups)


def make_engine(
    loaded: LoadedModel,
    options: argparse.Namespace,
    kind: Callable[[Model, InferenceConfig], DynamicInferenceEngine] = DynamicInferenceEngine,
) -> DynamicInferenceEngine:
    """An engine of a command line with `options.add_engine`; `kind` makes it."""
    spec = loaded.model.state_spec()
    config = inference_config(spec, options, _memory_gb(spec.device, options))
    try:
        return kind(loaded.model, config)
    except (RuntimeError, MemoryError) as error:  # torch has no class of errors for a CPU's memory
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise ValueError(
            "the pools do not fit into memory; accepted: less --memory-gb, or smaller pools"
        ) from error


def _memory_gb(device: torch.device, options: argparse.Namespace) -> float:
    if options.memory_gb is not None:
        return float(options.memory_gb)
    if device.type == "cpu":
        return MEMORY_GB_ON_CPU
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return SHARE_OF_FREE_MEMORY * free / GIGABYTE


def inference_config(spec: HybridStateSpec, options: argparse.Namespace, memory_gb: float) -> InferenceConfig:
    """The configuration that the options name; where no pool has a size, all share `memory_gb`."""
    block = options.block_size_tokens or -(-SMALLEST_BLOCK[spec.device.type] // spec.grid) * spec.grid
    caching = not options.no_prefix_caching
    sizes = {name: getattr(options, name) for name in _POOL_SIZES}
    share = all(size is None for size in sizes.values())
    if share:
        sizes["total_gb"] = memory_gb
    elif sizes["num_kv_blocks"] is None:
        raise ValueError("--num-kv-blocks is missing; accepted: both pools with sizes, or none")
    config = InferenceConfig(
        block_size_tokens=block,
        max_requests=options.max_requests,
        max_tokens=max(options.max_tokens_per_step, options.max_requests, block),
        max_sequence_length=options.max_sequence_length,
        enable_prefix_caching=caching,
        num_cuda_graphs=CUDA_GRAPHS if spec.device.type == "cuda" else None,
        num_speculative_tokens=options.num_speculative_tokens,
        durable_state_dtype=options.durable_state_dtype,
        batch_invariant=options.batch_invariant,
        free_memory=options.free_memory,
        host_cache_gb=options.host_gb,
        disk_cache=options.disk,
        **sizes,
        **OursRow(options.eviction, options.plan).changes(),
    )
    if share:
        try:
            PoolSizes.of(config, spec)
        except ValueError as error:
            raise ValueError(_in_options(str(error))) from error
    return config


def _in_options(message: str) -> str:
    """A message of the pools that names the options of a command line."""
    for field, option in _OPTIONS_BY_FIELD.items():
        message = message.replace(field, option)
    return message
