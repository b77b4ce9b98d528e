"""Rows of the table that keep KV blocks and states apart, each within its own memory."""

from collections.abc import Callable
from dataclasses import dataclass

from ..setting import GIGABYTE, Progress, ReplayResult, ReplaySetting
from ..trace import Trace
from .block_cache import BlockCache
from .blocks import BlockIndex, block_index
from .loop import RequestLoop
from .plans import StatePlan
from .states import StateSlots

StatesFactory = Callable[[BlockIndex, int], StateSlots]


def num_state_slots(setting: ReplaySetting) -> int:
    """Cached states that `state_gb` holds; live ones come beside it."""
    gigabytes = setting.state_gb if setting.state_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // setting.shape.durable_state_bytes


def num_kv_blocks(setting: ReplaySetting, block_size: int) -> int:
    """Blocks that `kv_gb` holds."""
    gigabytes = setting.kv_gb if setting.kv_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // (setting.shape.kv_bytes_per_token * block_size)


def _half(setting: ReplaySetting) -> float:
    if setting.total_gb is None:
        raise ValueError(f"setting has state_gb={setting.state_gb}, kv_gb={setting.kv_gb}, total_gb=None: "
                         "give both of the first, or total_gb")  # fmt: skip
    return setting.total_gb / 2


@dataclass(frozen=True)
class BlockRow:
    """A row of the table: a plan, slots with a policy, and KV blocks. Of a total, each has half.

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
