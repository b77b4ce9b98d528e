"""The own cache of a replay has the slots that its engine has."""

from dataclasses import replace
from pathlib import Path

import pytest
from mambaslots.named_policies import cache_changes
from mambaslots.replay.compared_caches import DEFAULT_CACHE, OwnCache, pool_counts
from mambaslots.replay.setting import ModelShape, ReplaySetting
from oracle.session_traces import small_trace

SHAPE = ModelShape("small", 1024, 1024, 64, 4, 64, 4, 1, 1, 16)
ENCODED = replace(SHAPE, durable_state_bytes=288)


def setting(shape: ModelShape) -> ReplaySetting:
    gigabytes = 8192 / (1 << 30)
    return ReplaySetting(
        shape,
        state_gb=gigabytes,
        kv_gb=gigabytes * 16,
        max_requests=3,
        max_tokens_per_step=64,
        block_size_tokens=4,
    )


@pytest.mark.parametrize(("shape", "num_lent"), [(SHAPE, 3), (ENCODED, 0)], ids=["as live", "encoded"])
def test_idle_rows_lend_slots_only_to_states_of_the_same_encoding(shape: ModelShape, num_lent: int) -> None:
    trace, given = small_trace(0), setting(shape)
    num_slots, _ = pool_counts(given)
    assert DEFAULT_CACHE.replay(trace, given).state_capacity == num_slots + num_lent


OWN = """
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan

class BranchesOnly(CheckpointPlan):
    def boundaries(self, **step):
        return [each for each in super().boundaries(**step) if each.kind == "branch"]
"""


def test_a_plan_of_ones_own_decides(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    own = OwnCache(plan=f"{path}:BranchesOnly")
    trace, given = small_trace(0), setting(SHAPE)
    assert own.replay(trace, given).num_states_taken < DEFAULT_CACHE.replay(trace, given).num_states_taken
    with pytest.raises(ValueError, match="accepted: a class of"):
        cache_changes(f"{path}:Missing", None)
    with pytest.raises(ValueError, match="with a file that is there"):
        cache_changes(f"{tmp_path}/none.py:A", None)


OWN_LRU = """
import mambaslots as ms

class LRU(ms.EvictionPolicy):
    def __init__(self):
        self.order = {}

    def insert(self, slots):
        self.order.update(dict.fromkeys(slots))

    def use(self, slot):
        del self.order[slot]
        self.order[slot] = None

    def remove(self, slots, remember=True):
        for slot in slots:
            del self.order[slot]

    def clear(self):
        self.order.clear()

    def victims(self, count, evictable):
        return [slot for slot in self.order if evictable(slot)][:count]
"""


def test_a_policy_of_ones_own_decides(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_LRU)
    own, lru = OwnCache(f"{path}:LRU"), OwnCache("lru")
    assert (own.name, lru.name) == ("ours-LRU", "ours-lru")
    trace, given = small_trace(2, num_sessions=12), setting(SHAPE)
    assert own.replay(trace, given) == lru.replay(trace, given)
