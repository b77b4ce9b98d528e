"""The sizes of an engine that are not given: by its model, the device and the memory that is there."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import InferenceConfig
from .devices import available_gb
from .files import CONFIG, read_object
from .inference.contexts.pool_sizes import PoolSizes
from .loaded_model import stored_dtype
from .state_spec import HybridStateSpec
from .validation import ceil_div

logger = logging.getLogger(__name__)

SMALLEST_BLOCK = {"cpu": 16, "cuda": 64}  # small blocks resume more, large ones are faster to attend to
MAX_REQUESTS = {"cpu": 32, "cuda": 128}
CUDA_GRAPHS = 64
SHORTEST_CONTEXT = 8192  # contexts are not lowered below it before rows are
SHARE_OF_ROWS = 0.5
"""What running requests and one sequence of the whole context may take of the memory; the rest caches."""


def served_dtype(folder_or_name: str | Path, device: torch.device) -> torch.dtype | None:
    """None for the model's own dtype; float32 for 16-bit weights on a CPU."""
    if device.type == "cpu" and stored_dtype(folder_or_name).itemsize == 2:
        return torch.float32
    return None


def context_length(folder: Path) -> int | None:
    """The longest sequence that a model's config names; None where it names none."""
    config = read_object(folder / CONFIG)
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 1 else None


def largest_fitting_config(
    spec: HybridStateSpec,
    context: int | None,
    *,
    total_gb: float | None = None,
    max_requests: int | None = None,
    max_sequence_length: int | None = None,
    block_size_tokens: int | None = None,
    **settings: Any,
) -> InferenceConfig:
    """The `InferenceConfig` that serves a model on its device: sizes that are None are chosen.

    Rows (32 on a CPU, 128 on a GPU) and the context (the model's own, `context`) are halved until running
    requests and one sequence of the whole context take at most half of the memory: the context to no less
    than 8,192, then the rows, then the context again to 512. Where that is not enough, they may take all of
    the memory. What was lowered is logged as a warning.

    Example: 2 GB, 51.5 MB a state, a context of 262,144 with 32 KB of KV a token: 8 requests of 16,384.

    Raises:
        ValueError: not even one request fits, or a setting is none that `InferenceConfig` accepts.
    """
    kind = spec.device.type
    block = block_size_tokens or ceil_div(SMALLEST_BLOCK[kind], spec.grid) * spec.grid
    pools_are_given = any(settings.get(pool) is not None for pool in ("num_kv_blocks", "num_mamba_slots"))
    if not pools_are_given and total_gb is None:
        total_gb = available_gb(spec.device)
    settings.setdefault("num_cuda_graphs", CUDA_GRAPHS if kind == "cuda" else None)
    step_tokens = settings.pop("max_tokens_per_step", None)

    def config(rows: int, length: int, gb: float | None) -> InferenceConfig:
        return InferenceConfig(
            block_size_tokens=block, max_requests=rows, max_sequence_length=length, total_gb=gb,
            max_tokens_per_step=max(2048, rows, block) if step_tokens is None else step_tokens, **settings,
        )  # fmt: skip

    rows = MAX_REQUESTS[kind] if max_requests is None else max_requests
    length = (context or SHORTEST_CONTEXT) if max_sequence_length is None else max_sequence_length
    if pools_are_given or total_gb is None:
        return config(rows, length, total_gb)
    config(rows, length, total_gb)  # wrong values are refused here
    fewest = 1 if max_requests is None else rows
    shortest = min(length, SHORTEST_CONTEXT) if max_sequence_length is None else length
    sizes = [(rows, each) for each in _halved(length, shortest)]
    sizes += [(each, shortest) for each in _halved(rows, fewest)][1:]
    least = 512 if max_sequence_length is None else length
    sizes += [(fewest, each) for each in _halved(shortest, least)][1:]
    error: ValueError | None = None
    for share in (SHARE_OF_ROWS, 1.0):
        for chosen in sizes:
            try:
                PoolSizes.of(_with_inputs(config(*chosen, total_gb * share), spec), spec)
            except ValueError as refused:
                error = refused
                continue
            if chosen != (rows, length):
                logger.warning(
                    "%.3g GB hold %d requests at once (of %d) and a context of %s tokens (of %s)",
                    total_gb, chosen[0], rows, f"{chosen[1]:,}", f"{length:,}",
                )  # fmt: skip
            found = config(*chosen, total_gb)
            log_room(_with_inputs(found, spec), spec)
            return found
    assert error is not None  # `sizes` is not empty
    raise error


def _with_inputs(config: InferenceConfig, spec: HybridStateSpec) -> InferenceConfig:
    """With the memory that `batch_invariant` takes, where a check of the model will decide."""
    return replace(config, batch_invariant=True) if config.why_not_invariant(spec.device) is None else config


def log_room(config: InferenceConfig, spec: HybridStateSpec) -> None:
    """Say how many conversations of 4,096 tokens the pools hold: KV and two states each."""
    sizes, tokens = PoolSizes.of(config, spec), min(4096, config.max_sequence_length)
    blocks = ceil_div(tokens, config.block_size_tokens)
    if sizes.division is not None:
        units = sizes.division.num_units
        room = units // (2 + ceil_div(blocks, max(1, sizes.num_kv_blocks // units)))
    else:
        room = min(sizes.num_kv_blocks // blocks, max(1, sizes.num_mamba_slots // 2))
    logger.info(
        "%d requests at once, a context of %s tokens, room for about %s conversations of %s tokens",
        config.max_requests, f"{config.max_sequence_length:,}", f"{room:,}", f"{tokens:,}",
    )  # fmt: skip


def _halved(start: int, end: int) -> Iterator[int]:
    """`start`, its halves above `end`, and `end`."""
    while start > end:
        yield start
        start //= 2
    yield end
