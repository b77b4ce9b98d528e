"""Size, reset, suspend and resume in megatron-core's context: faults 6, 7, 8, 14, 19 and 22."""

import weakref
from collections.abc import Iterator
from typing import Any

import mambaslots.mcore
import pytest
import torch
from mambaslots.mcore.mixer import checkpoint_rows
from mambaslots.mcore.recurrence import BLOCK, MODES, STATE_BYTES, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu
from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaMetadata
from torch.utils._python_dispatch import TorchDispatchMode

PROMPT = tokens(3 * BLOCK + 2, seed=1)


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


@pytest.fixture
def _ours() -> Iterator[None]:
    with mambaslots.mcore.installed():
        yield


def resumes_stale_states(host: RecurrenceDriver) -> None:
    """After the KV was forgotten, the states must be, too."""
    host.serve(PROMPT)
    host.context.reset_metadata()
    slots = host.context.mamba_slot_allocator
    assert not slots.hash_to_block_id
    assert slots.free_count == slots.max_slots


def test_fault_06_forgetting_the_kv_forgets_the_states() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        resumes_stale_states(host)
        assert [host.serve(PROMPT)[0] for _ in range(2)] == [0, 3 * BLOCK]
        host.check_idle()
    with pytest.raises(AssertionError):
        resumes_stale_states(RecurrenceDriver(make_context()))


@pytest.mark.usefixtures("_ours")
def test_fault_06_an_idle_dummy_step_keeps_both() -> None:
    host = RecurrenceDriver(make_context())
    host.serve(PROMPT)
    host.context.initialize_attention_state(is_expert_parallel_dummy_cuda_graph_step=True)
    host.context.reset(preserve_prefix_cache=True, preserve_counters=True)
    assert host.serve(PROMPT)[0] == 3 * BLOCK
    host.check_idle()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("_ours")
def test_fault_07_a_reset_leaves_nothing_pending(keep: bool) -> None:
    host = RecurrenceDriver(make_context())
    host.serve(PROMPT)
    host.add(PROMPT)
    host.add(tokens(5, seed=2))
    host.context.reset(preserve_prefix_cache=keep)
    assert host.context._pending_mamba_restores == host.context._pending_mamba_zeros == []
    slots = host.context.mamba_slot_allocator
    assert not slots.slots.pins
    assert not slots._has_intermediates
    host.running.clear()
    live = host.context.mamba_ssm_states.fill_(7)
    host.context.initialize_attention_state()
    assert bool((live == 7).all())


def test_fault_07_stock_keeps_them() -> None:
    host = RecurrenceDriver(make_context())
    host.add(PROMPT)
    host.context.reset()
    assert host.context._pending_mamba_zeros


@pytest.mark.usefixtures("_ours")
def test_fault_08_a_live_slot_number_does_not_change_after_it_was_given() -> None:
    metadata = make_context().mamba_metadata
    first, batch = metadata.allocate_slot(), metadata.batch_allocate_slots(2)
    kept = (int(first), batch.tolist())
    metadata.mamba_state_free_slots.fill_(-5)
    assert (int(first), batch.tolist()) == kept


# ---- suspend and resume


def suspended(host: RecurrenceDriver) -> Any:
    host.context.deallocate_inference_state_buffers()
    return host.context.mamba_slot_allocator


@pytest.mark.usefixtures("_ours")
def test_fault_14_recompute_frees_the_pool_and_comes_back_empty() -> None:
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.RECOMPUTE))
    host.serve(PROMPT)
    slots = host.context.mamba_slot_allocator
    committed = slots.slots.counts.committed_total
    assert committed > 0
    gone = [weakref.ref(slots.conv_states), weakref.ref(slots.intermediate_ssm_out)]
    del slots
    assert suspended(host) is None
    assert [ref() for ref in gone] == [None, None]
    host.context.reinitialize_inference_state_buffers()
    assert [host.serve(PROMPT)[0] for _ in range(2)] == [0, 3 * BLOCK]
    host.check_idle()
    assert mambaslots.mcore.stats(host.context).num_states_committed == 2 * committed


def test_fault_14_stock_keeps_the_pool_while_suspended() -> None:
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.RECOMPUTE))
    pool = weakref.ref(host.context.mamba_slot_allocator.conv_states)
    suspended(host)
    assert pool() is not None


@pytest.mark.usefixtures("_ours")
def test_fault_14_offload_moves_the_pool_and_brings_it_back_as_it_was() -> None:
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.OFFLOAD))
    host.serve(PROMPT)
    before, scratch = host.context.mamba_slot_allocator.ssm_states.clone(), host.context.mamba_slot_allocator
    address = scratch.intermediate_ssm_out.data_ptr()
    slots = suspended(host)
    assert slots.ssm_states.numel() == slots.conv_states.numel() == 0
    host.context.reinitialize_inference_state_buffers()
    assert torch.equal(slots.ssm_states, before)
    assert slots.intermediate_ssm_out.data_ptr() == address
    assert host.serve(PROMPT)[0] == 3 * BLOCK
    host.check_idle()


@pytest.mark.usefixtures("_ours")
def test_fault_14_persist_keeps_everything() -> None:
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.PERSIST))
    host.serve(PROMPT)
    suspended(host)
    host.context.reinitialize_inference_state_buffers()
    assert host.serve(PROMPT)[0] == 3 * BLOCK
    host.check_idle()


@pytest.mark.usefixtures("_ours")
def test_fault_14_with_memory_kept_in_place_the_pool_is_freed_and_scratch_stays() -> None:
    """As with torch_memory_saver or unified memory: addresses that graphs use stay."""
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.RECOMPUTE))
    host.context.unified_memory_level = 1
    host.serve(PROMPT)
    slots = host.context.mamba_slot_allocator
    address = slots.intermediate_conv_out.data_ptr()
    assert suspended(host) is slots
    assert slots.conv_states.numel() == 0
    host.context.reinitialize_inference_state_buffers()
    assert slots.intermediate_conv_out.data_ptr() == address
    assert [host.serve(PROMPT)[0] for _ in range(2)] == [0, 3 * BLOCK]
    host.check_idle()


@pytest.mark.usefixtures("_ours")
def test_a_request_that_restarts_is_counted_twice() -> None:
    host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.RECOMPUTE))
    number = host.add(PROMPT)
    host.step()
    suspended(host)
    host.context.reinitialize_inference_state_buffers()
    host.running.clear()
    host.next_id = number
    host.add(PROMPT)
    stats = mambaslots.mcore.stats(host.context)
    assert (stats.num_requests, stats.num_prompt_tokens) == (2, 2 * len(PROMPT))


# ---- size


@pytest.mark.usefixtures("_ours")
def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_caching_mamba_gb is"):
        make_context(prefix_caching_mamba_gb=2 * STATE_BYTES / 2**30)


@pytest.mark.usefixtures("_ours")
@pytest.mark.parametrize("enabled", [False, True])
def test_the_batch_invariant_mode_is_said_not_to_cover_mamba_layers(
    enabled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    monkeypatch.setattr(batch_invariant_kernels, "_batch_invariant_MODE", enabled)
    make_context()
    assert ("batch_invariant_mode is on, and does not cover Mamba layers" in caplog.text) == enabled


@pytest.mark.usefixtures("_ours")
def test_fault_19_a_kv_match_does_not_refresh_a_state() -> None:
    """Two states; KV of the older one is matched without using it; the older one goes."""
    long, other = tokens(4 * BLOCK + 1, seed=3), tokens(2 * BLOCK + 1, seed=4)
    host = RecurrenceDriver(make_context(slots=2))
    for prompt in (long, other):
        host.serve(prompt)
    host.serve(long[: 2 * BLOCK + 3])  # matches two blocks of the first, which have no state
    slots, named = host.context.mamba_slot_allocator, host.context.kv_block_allocator.kv_hash_to_block_id
    assert host.serve(other)[0] == 2 * BLOCK
    assert len(named) >= 6
    assert slots.max_slots == 2


# ---- fault 22


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_ours")
def test_fault_22_the_checkpoint_rows_are_sent_and_nothing_waits() -> None:
    host = RecurrenceDriver(make_context())
    host.add(PROMPT)
    host.context.initialize_attention_state()
    metadata, planned = host.context.mamba_metadata, host.context.mamba_slot_allocator
    with Operations() as operations:
        metadata._update_intermediate_metadata(
            *planned.get_intermediate_cpu_data(), 1, 1, cu_seqlens_gpu=metadata.cu_seqlens
        )
    views = {
        "aten.full.default",
        "aten.lift_fresh.default",
        "aten.detach.default",
        "aten.slice.Tensor",
        "aten.view.dtype",
    }
    assert set(operations.names) <= {"aten._to_copy.default"} | views
    assert sum("copy" in name for name in operations.names) <= 1
    assert metadata.intermediate_count == 1


@pytest.mark.usefixtures("_ours")
@pytest.mark.parametrize("graph", [False, True])
def test_fault_22_the_rows_are_those_the_host_would_compute(graph: bool) -> None:
    """A step that replays a graph has the host's rows of padding, too; another step has none."""
    host = RecurrenceDriver(make_context())
    context = host.context
    for seed, length in enumerate((3 * BLOCK + 2, 5, 2 * BLOCK + 7)):
        host.add(tokens(length, seed=seed + 10))
    context.initialize_attention_state()
    metadata, stock = context.mamba_metadata, MambaMetadata._update_intermediate_metadata.__wrapped__
    offsets, counts = context.mamba_slot_allocator.get_intermediate_cpu_data()
    rows = offsets, counts, 3, context.padded_batch_dimensions.prefill_req_count, metadata.cu_seqlens
    metadata._mambaslots_graph = graph
    metadata._update_intermediate_metadata(*rows)
    fields = ("intermediate_chunk_indices", "intermediate_abs_positions", "intermediate_real_count")
    buffers = [getattr(metadata, f"_{name}_buffer") for name in fields]
    sent = [getattr(metadata, name) for name in fields]
    is_buffer = [mine.data_ptr() == buffer.data_ptr() for mine, buffer in zip(sent, buffers, strict=True)]
    assert is_buffer == [graph] * 3  # a graph reads where it was captured
    ours = [mine.clone() for mine in sent]
    metadata._intermediate_chunk_indices_buffer.fill_(-1)
    stock(metadata, *rows)
    assert len(ours[0]) == (metadata.max_intermediate_count if graph else metadata.intermediate_count)
    for name, mine in zip(fields, ours, strict=True):
        torch.testing.assert_close(getattr(metadata, name)[: len(mine)], mine)


@pytest.mark.usefixtures("_ours")
def test_a_step_without_checkpoints_launches_nothing_for_them() -> None:
    """The mixers' kernels of checkpoints launch a program a row."""
    host = RecurrenceDriver(make_context())
    host.add(tokens(5, seed=1))
    host.context.initialize_attention_state()
    metadata = host.context.mamba_metadata
    with Operations() as operations:
        metadata._update_intermediate_metadata(None, None, 1, 1, cu_seqlens_gpu=metadata.cu_seqlens)
    assert set(operations.names) <= {"aten.slice.Tensor"}
    assert not len(metadata.intermediate_chunk_indices)
    assert not len(metadata.intermediate_abs_positions)


def test_chunk_indices_start_anew_with_every_sequence() -> None:
    rows = checkpoint_rows([0, 10, 10, 30], [[4, 8, 0], [0, 0, 0], [16, 0, 0]], [2, 0, 1], 4)
    assert rows == ([0, 1, 3 + 1 + 3], [4, 8, 26])
