"""From options to a loaded model and an engine."""

import argparse
from dataclasses import dataclass, replace

import torch

from ..config import InferenceConfig
from ..inference.contexts.encoded_states import NUM_STAGING_SLOTS
from ..inference.contexts.input_pool import InputPool
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedModel, load, stored_dtype
from ..pool_sizes import GIGABYTE
from ..state_spec import HybridStateSpec

SMALLEST_BLOCK = {"cpu": 16, "cuda": 64}  # small blocks resume more, large ones are faster to attend to
SHARE_OF_FREE_MEMORY = 0.85  # the rest is for activations, graphs and the libraries' workspaces
MEMORY_GB_ON_CPU = 1.0
CUDA_GRAPHS = 64
_POOL_SIZES = ("num_mamba_slots", "prefix_caching_mamba_gb", "num_kv_blocks", "buffer_size_gb")


def chosen_device(options: argparse.Namespace) -> torch.device:
    """The device of `--device`; sets torch's threads. ValueError where it is "cuda" and there is none."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', and torch sees no GPU; accepted: cpu")
    return torch.device(options.device)


def load_model(options: argparse.Namespace) -> LoadedModel:
    """The model of a command line with `options.add_model`."""
    device = chosen_device(options)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if dtype is None and device.type == "cpu" and stored_dtype(options.model).itemsize == 2:
        dtype = torch.float32
    return load(options.model, device, dtype)


def make_engine(loaded: LoadedModel, options: argparse.Namespace) -> DynamicInferenceEngine:
    """An engine of a command line with `options.add_engine`."""
    spec = loaded.model.state_spec()
    config = inference_config(spec, options, _memory_gb(spec.device, options))
    try:
        return DynamicInferenceEngine(loaded.model, config)
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
    """The configuration that the options name; pools without a size share `memory_gb`."""
    block = options.block_size_tokens or -(-SMALLEST_BLOCK[spec.device.type] // spec.grid) * spec.grid
    caching = not options.no_prefix_caching
    sizes = {name: getattr(options, name) for name in _POOL_SIZES}
    share = all(size is None for size in sizes.values())
    if share:
        sizes |= {"num_kv_blocks": 1, "num_mamba_slots": 1 if caching else None}
    elif sizes["num_kv_blocks"] is None and sizes["buffer_size_gb"] is None:
        raise ValueError(
            "--num-kv-blocks and --buffer-size-gb are missing; accepted: both pools with sizes, or none"
        )
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
        **sizes,
    )
    if not share:
        return config
    pools = Pools.of(spec, memory_gb, config)
    return replace(config, num_kv_blocks=pools.num_kv_blocks, num_mamba_slots=pools.num_mamba_slots)


@dataclass(frozen=True)
class Pools:
    """How many units of the two pools a budget buys.

    Running requests come first: their live states, and the inputs that they keep for replays. Half of what is
    left is for cached states, half for KV, but at least the KV of one longest sequence, and never more of
    either than could be used.
    """

    num_kv_blocks: int
    num_mamba_slots: int | None

    @classmethod
    def of(cls, spec: HybridStateSpec, memory_gb: float, sizes: InferenceConfig) -> "Pools":
        """
        Args:
            spec: the model's states and KV.
            memory_gb: the budget of all pools together.
            sizes: everything but the sizes of the pools.

        Raises:
            ValueError: the budget does not buy what running requests need, one state and the KV of one
                sequence.
        """
        block, longest, caching = (
            sizes.block_size_tokens,
            sizes.max_sequence_length,
            sizes.enable_prefix_caching,
        )
        state, kv_block = spec.durable_slot_bytes(sizes.durable_state_dtype), spec.kv_block_bytes(block)
        running = sizes.max_requests * _bytes_of_a_running_request(spec, sizes)
        if caching and sizes.durable_state_dtype is not None:
            running += NUM_STAGING_SLOTS * spec.slot_bytes
        blocks_of_one = -(-longest // block) + 1
        budget = int(memory_gb * GIGABYTE) - running
        least = blocks_of_one * kv_block + (state if caching else 0)
        if budget < least:
            raise ValueError(
                f"--memory-gb is {memory_gb:.3g}; accepted: at least {(least + running) / GIGABYTE:.3g} for "
                f"{sizes.max_requests} running requests (--max-requests) and the KV of one sequence of "
                f"{longest} tokens (--max-sequence-length)"
            )
        most_blocks = 64 * sizes.max_requests * blocks_of_one
        for_states = max(budget // 2, state) if caching and kv_block else budget if caching else 0
        for_states = min(for_states, budget - blocks_of_one * kv_block)
        slots = min(for_states // state, most_blocks) if state and caching else 1 if caching else None
        left = budget - (slots or 0) * state
        return cls(min(left // kv_block, most_blocks) if kv_block else most_blocks, slots)


def _bytes_of_a_running_request(spec: HybridStateSpec, sizes: InferenceConfig) -> int:
    """Its live states, and its inputs where decodes replay."""
    if not sizes.replays:
        return (1 + sizes.num_speculative_tokens) * spec.slot_bytes
    chunk = spec.chunk_tokens(sizes.block_size_tokens)
    inputs = InputPool(spec.states, 1, chunk, sizes.num_speculative_tokens, torch.device("meta"))
    return spec.slot_bytes + inputs.num_bytes
