"""What megatron-core's own context tests ask of the drop-in; `make test-host` runs the tests themselves."""

from collections.abc import Iterator

import mambaslots.mcore
import pytest
from mambaslots.mcore.recurrence import BLOCK, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu(), mambaslots.mcore.installed():
        yield


def test_a_budget_without_room_for_a_state_is_named_as_the_host_names_it() -> None:
    with pytest.raises(ValueError, match=r"prefix_caching_mamba_gb is 1e-10; .*prefix cache budget"):
        make_context(prefix_caching_mamba_gb=1e-10)


def test_a_block_that_is_registered_without_a_slot_gets_one_with_a_zero_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = make_context(slots=2).mamba_slot_allocator
    for states in (slots.conv_states, slots.ssm_states):
        states.fill_(1)
    (held,) = slots.allocate_slots_batch([3])
    slots.register_block_hashes_batch([3, 4, 4, 5, 6], [13, 14, 14, -1, 13])
    assert slots.hash_to_block_id == {13: 3, 14: 4}
    assert slots.get_slot(3) == held
    assert float(slots.ssm_states[:, held].min()) == 1
    assert not slots.ssm_states[:, slots.get_slot(4)].any()
    assert not slots.conv_states[:, slots.get_slot(4)].any()
    assert not slots.has_state(5)
    assert "[4] are registered without a state" in caplog.text


def test_no_state_is_evicted_for_a_block_that_is_registered_without_one() -> None:
    slots = make_context(slots=1).mamba_slot_allocator
    (slot,) = slots.allocate_slots_batch([3])
    slots.register_block_hashes_batch([3, 4], [13, 14])
    assert slots.hash_to_block_id == {13: 3}
    assert slots.get_slot(3) == slot


def test_a_host_can_say_that_states_are_pending() -> None:
    context = make_context()
    slots = context.mamba_slot_allocator
    assert slots._has_intermediates is False
    slots._has_intermediates = True
    assert slots._has_intermediates is True
    host = RecurrenceDriver(context)
    host.serve(tokens(2 * BLOCK, seed=1))
    assert slots._has_intermediates is False


@pytest.mark.parametrize("named", [{"parent_hashes": [1, 2]}, {"block_hashes": [5, 6]}])
def test_lists_of_other_lengths_raise_what_the_host_raises_and_what_we_raise(
    named: dict[str, list[int]],
) -> None:
    kv = make_context().kv_block_allocator
    (name, listed) = next(iter(named.items()))
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=rf"{name} has {len(listed)} entries; accepted: 1, as block_ids"):
            kv.register_kv_block_hashes(**{"block_ids": [5], "block_hashes": [5]} | named)
    assert not kv.kv_hash_to_block_id
    slots = make_context().mamba_slot_allocator
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="hashes has 2 entries; accepted: 1, as block_ids"):
            slots.register_block_hashes_batch([5], [7, 8])
