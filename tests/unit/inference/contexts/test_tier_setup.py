"""The tier that the ranks of a split model agree on."""

import threading
from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.state_tiers import StateCopies, StateTiers
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.contexts.tier_copies import HostCopies, tiers_of
from mambaslots.parallel_groups import ParallelGroups
from oracle.serving import small_model


class Stages(ParallelGroups):
    """Two ranks, which are threads of this process."""

    def gather(self, value: Any, device: object = None) -> list[Any]:
        rank = int(threading.current_thread().name)
        GIVEN[rank] = value
        BARRIER.wait()
        values = list(GIVEN)
        BARRIER.wait()
        return values


GIVEN: list[Any] = [None, None]
BARRIER = threading.Barrier(2, timeout=20)


@pytest.mark.parametrize("num_slots", [5, 0])
def test_a_stage_without_states_takes_the_slots_of_the_others(num_slots: int) -> None:
    whole = small_model().state_spec()
    nothing = tuple(replace(tensor, num_layers=0, split=None) for tensor in whole.states)
    without = replace(whole, states=nothing)
    gb = (num_slots + 0.5) * whole.slot_bytes / (1 << 30) if num_slots else 0.0
    config = ms.InferenceConfig(
        block_size_tokens=8, max_requests=2, max_tokens_per_step=16, max_sequence_length=64, num_kv_blocks=20,
        num_mamba_slots=3, host_cache_gb=gb,
    )  # fmt: skip
    tiers: dict[int, StateTiers | None] = {}

    def rank(number: int) -> None:
        spec = replace((whole, without)[number], groups=Stages())
        tiers[number] = tiers_of(config, spec, StatePool(spec.states, 0, 3))

    threads = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not num_slots:
        assert tiers == {0: None, 1: None}
        return
    first, second = tiers[0], tiers[1]
    assert first is not None
    assert second is not None
    assert first.host.num_slots == second.host.num_slots == num_slots
    assert isinstance(first.copies, HostCopies)
    assert type(second.copies) is StateCopies
