"""The rows of this package's own cache have the slots that its engine has."""

from dataclasses import replace

import pytest
from mambaslots.replay.ceiling import CEILING
from mambaslots.replay.ours import OURS, pool_counts
from mambaslots.replay.setting import ModelShape, ReplaySetting
from oracle.session_traces import small_trace

SHAPE = ModelShape("small", 1024, 1024, 64, 4, 64, 4, 1, 1, 16)
ENCODED = replace(SHAPE, durable_state_bytes=288)


def setting(shape: ModelShape) -> ReplaySetting:
    gigabytes = 8192 / (1 << 30)
    return ReplaySetting(
        shape, state_gb=gigabytes, kv_gb=gigabytes * 16, max_requests=3, max_tokens=64, block_size_tokens=4
    )


@pytest.mark.parametrize(("shape", "num_lent"), [(SHAPE, 3), (ENCODED, 0)], ids=["as live", "encoded"])
def test_idle_rows_lend_slots_only_to_states_of_the_same_encoding(shape: ModelShape, num_lent: int) -> None:
    trace, given = small_trace(0), setting(shape)
    num_slots = pool_counts(given).num_slots
    assert OURS[0].replay(trace, given).state_capacity == num_slots + num_lent
    for row in CEILING:
        assert row.replay(trace, given, lambda served, requests: None).state_capacity == num_slots + num_lent
