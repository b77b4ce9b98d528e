"""The tier that a configuration asks for: its sizes, its memory and its directory."""

from ...config import InferenceConfig
from ...state_spec import HybridStateSpec
from ...validation import INT32_MAX
from .cache.host_tier import HostTier
from .host_copies import HostCopies
from .pool_sizes import GIGABYTE
from .state_files import StateFiles
from .state_pool import StatePool


def tier_of(config: InferenceConfig, spec: HybridStateSpec, pool: StatePool) -> HostTier | None:
    """Host memory and files for the durable states of a pool; None without `host_cache_gb`.

    Books alone for a pool whose slots have no bytes. That of a `BooksOnlyContext` counts the bytes of the
    model's states; that of a pipeline stage without states has as many slots as the other stages afford.

    A collective: all ranks of `spec.groups` make this call. Synchronises the ranks.

    Raises:
        ValueError: a budget buys no state on some rank, or its memory or directory cannot be had. All ranks
            raise the same error.
    """
    state_bytes = pool.memory.shape[1] or spec.slot_bytes
    disk_path, disk_gb = config.disk_cache or ("", 0.0)
    budgets = {"host_cache_gb": config.host_cache_gb, "disk_cache[1]": disk_gb}
    sizes, refused = [], ""
    for name, gb in budgets.items():
        affordable = int(min(gb * GIGABYTE, INT32_MAX * max(1, state_bytes))) // max(1, state_bytes)
        if gb and not affordable:
            refused = f"{name} is {gb}; accepted: at least {state_bytes / GIGABYTE:.3g}, one state"
        sizes.append(affordable if state_bytes or not gb else INT32_MAX)
    ranks = spec.groups.gather((*sizes, refused, state_bytes > 0), spec.device)
    refused = next(filter(None, (rank[2] for rank in ranks)), "")
    num_slots, num_files = (min(rank[tier] for rank in ranks) for tier in (0, 1))
    has_states = any(rank[3] for rank in ranks)  # a stage without states affords any number
    if not ((num_slots and has_states) or refused):
        return None
    copies = None
    if pool.memory.shape[1] and not refused:
        try:
            copies = _copies(config, spec, pool, num_slots, num_files, disk_path)
        except (OSError, MemoryError, RuntimeError) as error:
            refused = f"host_cache_gb is {config.host_cache_gb}, disk_cache is {config.disk_cache}; "
            refused += f"accepted: what this machine has room for: {error}"
    refused = next(filter(None, spec.groups.gather(refused, spec.device)), "")
    if refused:
        raise ValueError(refused)
    groups, device = spec.groups, spec.device
    return HostTier(
        num_slots,
        copies,
        num_files=num_files,
        agree=lambda good: bool(groups.least(int(good), device)),
        scrubs=config.free_memory == "zero",
    )


def _copies(
    config: InferenceConfig,
    spec: HybridStateSpec,
    pool: StatePool,
    num_slots: int,
    num_files: int,
    disk_path: str,
) -> HostCopies:
    state_bytes, files, scrubs = pool.memory.shape[1], None, config.free_memory == "zero"
    if num_files:
        model = f"{spec.model} {pool.states} {spec.shard} {config.block_size_tokens}"
        files = StateFiles(disk_path, state_bytes, model, scrubs)
    return HostCopies(
        num_slots, state_bytes, lambda slot: pool.memory[pool.durable_index(slot)], spec.device, files,
        scrubs,
    )  # fmt: skip
