"""Rows of the table that keep KV blocks and states apart, each within its own memory."""

from collections.abc import Callable
from dataclasses import dataclass

from ...pool_sizes import GIGABYTE
from ..setting import Progress, ReplayResult, ReplaySetting
from ..trace import Trace
from .block_cache import BlockCache
from .blocks import BlockIndex, block_index
from .loop import RequestLoop
from .plans import StatePlan
from .states import StateSlots

MOST_BLOCKS = 1 << 40
StatesFactory = Callable[[BlockIndex, int], StateSlots]


def num_state_slots(setting: ReplaySetting) -> int:
    """Cached states that `state_gb` holds; live ones come beside it."""
    gigabytes = setting.state_gb if setting.state_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // setting.shape.durable_state_bytes


def num_kv_blocks(setting: ReplaySetting, block_size: int) -> int:
    """Blocks that `kv_gb` holds; without attention they are names only, and as many as wanted."""
    if not setting.shape.kv_bytes_per_token:
        return MOST_BLOCKS
    gigabytes = setting.kv_gb if setting.kv_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // (setting.shape.kv_bytes_per_token * block_size)


def missing_memory(setting: ReplaySetting) -> ValueError:
    """The error of a setting that gives no memory."""
    return ValueError(
        f"state_gb is {setting.state_gb} and kv_gb is {setting.kv_gb}; accepted: both, or total_gb"
    )


def _half(setting: ReplaySetting) -> float:
    if setting.total_gb is None:
        raise missing_memory(setting)
    live_gb = setting.max_requests * setting.shape.state_bytes / GIGABYTE
    return max(0.0, setting.total_gb - live_gb) / 2


@dataclass(frozen=True)
class BlockRow:
    """A row of the table: a plan, slots with a policy, and KV blocks.

    Of a total, live states come first; states and KV have half each of what is left.

    Attributes:
        name, source: see `ReplayRow`.
        plan: which states are taken.
        slots: makes the slots.
    """

    name: str
    source: str
    plan: StatePlan
    slots: StatesFactory = StateSlots

    def replay(self, trace: Trace, setting: ReplaySetting, progress: Progress) -> ReplayResult:
        """See `ReplayRow.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        states = self.slots(index, num_state_slots(setting))
        cache = BlockCache(index, num_kv_blocks(setting, index.block_size), states, self.plan)
        return RequestLoop(trace, index.paths, cache, setting, progress).run()
