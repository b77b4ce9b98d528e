"""Durable slots, by every name a host calls."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.errors import MambaSlotCapacityError
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from mambaslots.inference.contexts.cache.kv_block_allocator import KVBlockAllocator
from mambaslots.inference.contexts.mamba_slot_allocator import (
    MAX_INTERMEDIATE_OFFSETS_PER_REQUEST,
    MambaSlotAllocator,
)
from oracle.fake_host import CONV_SHAPE, SSM_SHAPE, Chunk, FakeHost, FakeRequest, durable, same_bytes


def make(max_slots=3, **host):
    fake = FakeHost(**host)
    return fake, fake.allocator(max_slots, MambaSlotAllocator)


def committed(host, slots, *blocks):
    """States of these blocks, registered in KV under hash 100 + block, through a reservation."""
    host.kv_block_allocator.register(blocks, [100 + block for block in blocks])
    return slots.commit(slots.reserve(blocks))


def picture(slots):
    """Everything a host can see, to show that a failed call changed nothing."""
    return (
        slots.block_to_slot.tolist(),
        slots.slot_to_block.tolist(),
        slots.free_slots[: slots.free_count].tolist(),
        dict(slots.hash_to_block_id),
        dict(slots.slots.reserved),
        dict(slots.slots.pins),
        len(slots.slots.tree.ghosts),
        slots.conv_states.tolist(),
        slots.ssm_states.tolist(),
        slots._intermediate_offsets_cpu.tolist(),
        slots._intermediate_counts_cpu.tolist(),
        slots._intermediate_block_ids_cpu.tolist(),
        slots._eos_cache_block_id_cpu.tolist(),
        slots.num_dropped,
    )


def tokens(count):
    return list(range(count))


# ---- construction


@pytest.mark.parametrize("names", ["0.19", "0.20"])
def test_a_new_pool_is_all_free_for_either_host(names):
    host, slots = make(3, names=names)
    assert (slots.max_slots, slots.num_mamba_layers, slots.free_count) == (3, 2, 3)
    assert slots.block_to_slot.tolist() == [-1] * host.num_blocks
    assert slots.slot_to_block.tolist() == [-1] * 3
    assert slots.free_slots.tolist() == [0, 1, 2]
    assert (slots.block_to_slot.dtype, slots.slot_to_block.dtype, slots.free_slots.dtype) == (
        torch.int32,
    ) * 3
    assert slots.hash_to_block_id == {}
    assert not slots._has_intermediates
    slots.check_integrity()


def test_tensors_have_the_shapes_of_the_arguments():
    host, slots = make(3, dtype=torch.float64)
    assert slots.conv_states.shape == (2, 3, *CONV_SHAPE)
    assert slots.ssm_states.shape == (2, 3, *SSM_SHAPE)
    scratch = host.max_mamba_intermediate_states_per_step
    assert slots.max_intermediate_count == scratch
    assert slots.intermediate_conv_out.shape == (2, scratch, *CONV_SHAPE)
    assert slots.intermediate_ssm_out.shape == (2, scratch, *SSM_SHAPE)
    assert {t.dtype for t in (slots.conv_states, slots.ssm_states, slots.intermediate_ssm_out)} == {
        host.dtype
    }
    assert slots.intermediate_conv_out[1].is_contiguous()
    assert slots.intermediate_ssm_out[1].is_contiguous()


def test_offset_rows_are_three_wide_unless_the_host_says_otherwise():
    assert MAX_INTERMEDIATE_OFFSETS_PER_REQUEST == 3
    _, slots = make()
    assert slots._intermediate_offsets_cpu.shape == slots._intermediate_block_ids_cpu.shape == (4, 3)
    assert slots._intermediate_counts_cpu.shape == slots._eos_cache_block_id_cpu.shape == (4,)
    _, slots = make(optional={"max_intermediate_offsets_per_request": 5})
    assert slots._intermediate_offsets_cpu.shape == slots._intermediate_block_ids_cpu.shape == (4, 5)


def test_rows_that_hosts_index_are_int32_on_the_cpu_and_start_empty():
    _, slots = make()
    for rows, empty in (
        (slots._intermediate_offsets_cpu, 0),
        (slots._intermediate_counts_cpu, 0),
        (slots._intermediate_block_ids_cpu, -1),
        (slots._eos_cache_block_id_cpu, -1),
    ):
        assert rows.dtype == torch.int32
        assert rows.device.type == "cpu"
        assert (rows == empty).all()


def test_an_evicted_state_leaves_a_ghost_until_it_is_taken_again():
    host, slots = make(1)
    committed(host, slots, 1)
    committed(host, slots, 2)
    assert slots.slots.tree.ghosts.has(101, "state")
    committed(host, slots, 1)
    assert not slots.slots.tree.ghosts.has(101, "state")


# ---- the KV side


class Elsewhere(SimpleNamespace):
    """A context of another engine: our two allocators, and live states."""

    def __init__(self, num_blocks):
        live = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, 2)
        super().__init__(
            kv_block_allocator=KVBlockAllocator(num_blocks),
            mamba_conv_states=live[0],
            mamba_ssm_states=live[1],
        )
        self.slots = MambaSlotAllocator(self, 2, 1, (2,), (2, 2), torch.float32, torch.float32)

    def cache(self, *keys):
        """Blocks registered under these hashes, each with a state."""
        kv = self.kv_block_allocator
        blocks = kv.allocate_memory_blocks(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            kv.register_chain(b"%d" % key, [block], [key], [b"x"])
        self.slots.commit(self.slots.reserve(blocks))
        return blocks


def test_a_reused_block_of_our_kv_allocator_has_no_state_of_its_former_prefix():
    context = Elsewhere(2)
    kv, slots = context.kv_block_allocator, context.slots
    blocks = context.cache(11, 12)
    kv.release_memory_blocks(blocks)
    reused = kv.allocate_memory_blocks(2)
    assert sorted(reused) == sorted(blocks)
    assert not any(map(slots.has_state, reused))
    assert (slots.hash_to_block_id, slots.free_count) == ({}, 2)
    slots.check_integrity()


def test_a_hosts_observer_is_kept_where_the_constructor_subscribes():
    received = []
    kv = KVBlockAllocator(2)
    kv.observe_deregistration(lambda blocks, hashes: received.append(hashes))
    host = FakeHost(num_blocks=2)
    host.kv_block_allocator = kv
    host.allocator(1, MambaSlotAllocator)
    kv.register_chain(b"", kv.allocate_memory_blocks(1), [7], [b"x"])
    kv.release_memory_blocks([0], forget=True)
    kv.deregister_all()
    assert {7} in received


def test_megatrons_single_observer_is_the_allocator():
    host = FakeHost()
    host.kv_block_allocator.on_blocks_deregistered = None
    slots = host.allocator(2, MambaSlotAllocator)
    committed(host, slots, 1)
    host.kv_block_allocator.on_blocks_deregistered([1], {101})
    assert not slots.has_state(1)


def test_of_our_kv_allocators_leaves_those_without_a_state_go_first():
    context = Elsewhere(8)
    kv, slots = context.kv_block_allocator, context.slots
    blocks = context.cache(11, 12)
    (plain,) = kv.allocate_memory_blocks(1)
    kv.register_chain(b"13", [plain], [13], [b"x"])
    kv.release_memory_blocks([*blocks, plain])
    slots.invalidate_block(blocks[1])
    assert kv.evict_lru_blocks(3) == [blocks[1], plain, blocks[0]]
    assert slots.free_count == 2
    slots.check_integrity()


@pytest.mark.parametrize("inference", [False, True])
def test_an_allocator_built_in_inference_mode_is_written_outside_of_it(inference):
    with torch.inference_mode(inference):
        _, slots = make()
    slots.conv_states.fill_(1)
    slots._intermediate_offsets_gpu.copy_(slots._intermediate_offsets_cpu.fill_(1))
    slots.reset()
    assert not slots._intermediate_offsets_cpu.any()


def test_hashes_of_a_deregistration_alone_free_nothing():
    host, slots = make(2)
    committed(host, slots, 1)
    slots.on_kv_blocks_deregistered([], {101})
    assert slots.has_state(1)


# ---- states


def patterned(shape, dtype):
    """Random bytes: NaNs with payloads, infinities, denormals."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_stored_layer_by_layer_come_back_to_the_bit(dtype):
    host, slots = make(2, dtype=dtype)
    (slot,) = slots.allocate_slots_batch([1])
    conv, ssm = patterned((2, *CONV_SHAPE), dtype), patterned((2, *SSM_SHAPE), dtype)
    for layer in range(2):
        slots.store_from_tensors(1, layer, ssm[layer], conv[layer])
    assert same_bytes(durable(slots, slot), (conv, ssm))
    assert slots.restore_to_live(2, 1)
    assert same_bytes(host.live(2), (conv, ssm))
    assert same_bytes(durable(slots, slot), (conv, ssm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_live_states_are_stored_to_the_bit_and_nothing_else_is_written(dtype):
    host, slots = make(3, dtype=dtype)
    live = [(patterned((2, *CONV_SHAPE), dtype), patterned((2, *SSM_SHAPE), dtype)) for _ in range(4)]
    for row, state in enumerate(live):
        host.set_live(row, state)
    slots.conv_states.fill_(7)
    slots.ssm_states.fill_(7)
    first, second = slots.allocate_slots_batch([1, 2])
    slots.store_from_live_batch([first, second], [3, 0])
    assert same_bytes(durable(slots, first), live[3])
    assert same_bytes(durable(slots, second), live[0])
    (other,) = {0, 1, 2} - {first, second}
    assert all(part.eq(7).all() for part in durable(slots, other))
    assert all(same_bytes(host.live(row), state) for row, state in enumerate(live))


def test_nothing_is_restored_of_a_block_without_a_state():
    host, slots = make(2)
    host.set_live(0, host.state_after(FakeRequest(1, []), 5))
    before = [part.clone() for part in host.live(0)]
    assert slots.restore_to_live(0, 1) is False
    assert same_bytes(host.live(0), before)


# ---- hashes


def test_a_registered_hash_names_the_block_with_the_state():
    host, slots = make(3)
    host.kv_block_allocator.register([1, 2], [11, 12])
    slots.allocate_slots_batch([1, 2, 3])
    slots.register_block_hashes_batch([1, 2, 3, 3], [11, 12, -1, 0])
    assert slots.hash_to_block_id == {11: 1, 12: 2}
    slots.register_block_hashes_batch([], [])
    slots.check_integrity()


def test_a_duplicate_hash_keeps_naming_the_first_block():
    host, slots = make(3)
    host.kv_block_allocator.register([1, 2], [11, 11])
    slots.allocate_slots_batch([1, 2])
    slots.register_block_hashes_batch([1, 2], [11, 11])
    assert slots.hash_to_block_id == {11: 1}
    slots.invalidate_block(2)
    assert slots.hash_to_block_id == {11: 1}
    slots.check_integrity()


def test_a_block_registered_under_a_new_hash_leaves_the_old_one():
    host, slots = make(2)
    slots.allocate_slots_batch([1])
    for key in (11, 12):
        host.kv_block_allocator.register([1], [key])
        slots.register_block_hashes_batch([1], [key])
        slots.check_integrity()
    assert slots.hash_to_block_id == {12: 1}
    slots.invalidate_block(1)
    assert slots.hash_to_block_id == {}


# ---- offsets of a prefill chunk


def planned(slots, row=0):
    count = int(slots._intermediate_counts_cpu[row])
    return (
        slots._intermediate_offsets_cpu[row, :count].tolist(),
        slots._intermediate_block_ids_cpu[row, :count].tolist(),
        int(slots._eos_cache_block_id_cpu[row]),
    )


def plan_of(prompt, length=None, skip=0, finished=0, matched=0, width=None, **host):
    """Offsets, blocks and chunk-end block of one chunk; block i of the request is block 10 + i."""
    optional = host.pop("optional", {})
    if width is not None:
        optional["max_intermediate_offsets_per_request"] = width
    fake, slots = make(num_blocks=32, optional=optional, **host)
    request = FakeRequest(1, tokens(prompt), finished_chunk_token_count=finished)
    chunk = Chunk(request, 0, skip, prompt - finished if length is None else length)
    fake.plan(slots, chunk, [10 + i for i in range(-(-chunk.stop // 4))], matched)
    return planned(slots), slots


def test_offsets_count_from_the_first_token_a_continuation_chunk_computes():
    assert plan_of(23, finished=10)[0] == ([10], [14], -1)
    assert plan_of(23, finished=12)[0] == ([8], [14], -1)


@pytest.mark.parametrize("names", ["0.19", "0.20"])
def test_either_name_of_the_ssm_chunk_is_read(names):
    assert plan_of(14, finished=2, chunk=2, names=names)[0] == ([10], [12], -1)


def test_a_row_planned_anew_forgets_its_last_plan():
    host, slots = make()
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [1, 2, 3])
    host.plan(slots, Chunk(FakeRequest(2, tokens(3)), 0, 0, 3), [4])
    assert planned(slots) == ([], [], -1)
    assert (slots._intermediate_block_ids_cpu[0] == -1).all()
    assert (slots._intermediate_offsets_cpu[0] == 0).all()


def test_a_long_plan_is_cut_in_the_order_marks_tail_branch_and_the_cut_is_counted():
    plan = {"checkpoint_plan": CheckpointPlan(marks=(4, 20), prefill_interval=4)}
    kept, slots = plan_of(31, matched=3, width=4, optional=dict(plan))
    assert kept == ([4, 12, 20, 28], [10, 12, 14, 16], -1)
    assert slots.num_dropped == 3
    assert plan_of(31, matched=3, width=3, optional=dict(plan))[0][0] == [4, 20, 28]
    assert plan_of(31, matched=3, width=2, optional=dict(plan))[0][0] == [4, 20]


# ---- the step's rows


def test_without_prefills_or_checkpoints_there_is_no_step_data():
    host, slots = make()
    host.batch_dimensions.prefill_req_count = 2
    assert slots.get_intermediate_cpu_data() == (None, None)
    assert slots.get_intermediate_gpu_data() == (None, None)
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [1, 2, 3])
    host.batch_dimensions.prefill_req_count = 0
    assert slots.get_intermediate_cpu_data() == (None, None)
    assert slots.get_intermediate_gpu_data() == (None, None)


@pytest.mark.parametrize("name", ["get_intermediate_cpu_data", "get_intermediate_gpu_data"])
def test_step_data_are_the_rows_of_this_steps_prefills(name):
    host, slots = make()
    host.paused_request_count, host.batch_dimensions.decode_req_count = 1, 1
    host.batch_dimensions.prefill_req_count = 2
    host.plan(slots, Chunk(FakeRequest(1, tokens(11)), 2, 0, 11), [1, 2, 3])
    host.plan(slots, Chunk(FakeRequest(2, tokens(3)), 3, 0, 3), [4])
    offsets, counts = getattr(slots, name)()
    assert offsets.tolist() == [[8, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [1, 0]
    assert offsets.dtype == counts.dtype == torch.int32
    assert offsets.device == counts.device == slots.ssm_states.device


def test_rows_are_transferred_into_buffers_that_never_move():
    host, slots = make()
    host.plan(slots, Chunk(FakeRequest(1, tokens(11)), 1, 0, 11), [1, 2, 3])
    offsets, counts = slots.transfer_intermediate_to_gpu(1, 2)
    assert (offsets.tolist(), counts.tolist()) == ([[8, 0, 0], [0, 0, 0]], [1, 0])
    assert offsets.data_ptr() != slots._intermediate_offsets_cpu[1:].data_ptr()
    again = slots.transfer_intermediate_to_gpu(1, 2)
    assert [t.data_ptr() for t in again] == [offsets.data_ptr(), counts.data_ptr()]
    assert slots.transfer_intermediate_to_gpu(1, 0) == (None, None)
    with pytest.raises(ValueError, match="prefill_count"):
        slots.transfer_intermediate_to_gpu(3, 2)


# ---- commit_intermediate_states


def served(host, slots, chunks, blocks, matched=None):
    """One step: plan, register in KV what the step computes, forward, commit."""
    for chunk in chunks:
        mine = blocks[chunk.request.number]
        host.plan(slots, chunk, mine[: -(-chunk.stop // 4)], (matched or {}).get(chunk.request.number, 0))
        whole = mine[: chunk.stop // 4]
        host.kv_block_allocator.register(whole, [1000 + block for block in whole])
    host.forward(slots, chunks)
    slots.commit_intermediate_states()
    for chunk in chunks:
        chunk.request.finished_chunk_token_count += chunk.length


def test_rows_are_empty_after_a_commit_and_a_second_commit_does_nothing():
    host, slots = make(8)
    served(host, slots, [Chunk(FakeRequest(1, tokens(12)), 0, 0, 12)], {1: [1, 2, 3]})
    before = picture(slots)
    host.mamba_metadata.per_request_intermediate_counts, host.mamba_metadata.intermediate_count = [], 0
    slots.commit_intermediate_states()
    assert picture(slots) == before
    assert planned(slots) == ([], [], -1)


@pytest.mark.parametrize("max_slots", [0, 1, 2])
def test_a_full_pool_costs_states_never_the_step(max_slots):
    host, slots = make(max_slots)
    one, two = FakeRequest(1, tokens(12)), FakeRequest(2, tokens(12))
    served(host, slots, [Chunk(one, 0, 0, 12), Chunk(two, 1, 0, 12)], {1: [1, 2, 3], 2: [4, 5, 6]})
    assert slots.slots.counts.committed == max_slots
    assert not slots._has_intermediates
    for key, block in slots.hash_to_block_id.items():
        request, position = (one, 4 * block) if block <= 3 else (two, 4 * (block - 3))
        assert same_bytes(durable(slots, slots.get_slot(block)), host.state_after(request, position))
        assert not slots.slots.tree.ghosts.has(key, "state")
    for key in {1002, 1003, 1005, 1006} - slots.hash_to_block_id.keys():
        if max_slots:
            assert slots.slots.tree.ghosts.has(key, "refused state")
    slots.check_integrity()


def test_a_pool_full_of_pinned_states_costs_the_new_states():
    host, slots = make(1)
    slots.pin(committed(host, slots, 9)[0])
    served(host, slots, [Chunk(FakeRequest(1, tokens(12)), 0, 0, 12)], {1: [1, 2, 3]})
    assert slots.hash_to_block_id == {109: 9}
    assert slots.slots.tree.ghosts.has(1003, "refused state")
    slots.check_integrity()


def test_rows_a_host_cleared_commit_nothing():
    host, slots = make(8)
    chunks = [Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), Chunk(FakeRequest(2, tokens(12)), 1, 0, 12)]
    for chunk, blocks in zip(chunks, ([1, 2, 3], [4, 5, 6]), strict=True):
        host.plan(slots, chunk, blocks)
    host.kv_block_allocator.register(range(16), range(1000, 1016))
    rows = torch.tensor([0])
    slots._intermediate_counts_cpu[rows] = 0
    slots._intermediate_offsets_cpu[rows] = 0
    slots._intermediate_block_ids_cpu[rows] = -1
    slots._eos_cache_block_id_cpu[rows] = -1
    host.forward(slots, chunks)
    slots.commit_intermediate_states()
    assert slots.hash_to_block_id == {1005: 5, 1006: 6}
    slots.check_integrity()


def test_rows_a_host_clears_after_the_forward_commit_nothing():
    host, slots = make(8)
    chunk = Chunk(FakeRequest(1, tokens(12)), 0, 0, 12)
    host.plan(slots, chunk, [1, 2, 3])
    host.kv_block_allocator.register(range(16), range(1000, 1016))
    host.forward(slots, [chunk])
    slots._intermediate_counts_cpu[:1] = 0
    slots._intermediate_block_ids_cpu[:1] = -1
    slots._eos_cache_block_id_cpu[:1] = -1
    slots.commit_intermediate_states()
    assert slots.slots.counts.committed == 0
    slots.check_integrity()


def test_a_copy_that_fails_leaves_no_reservation():
    host, slots = make(8)
    chunk = Chunk(FakeRequest(1, tokens(12)), 0, 0, 12)
    host.plan(slots, chunk, [1, 2, 3])
    host.kv_block_allocator.register([1, 2, 3], [1, 2, 3])
    host.forward(slots, [chunk])
    del host.mamba_conv_states
    with pytest.raises(AttributeError):
        slots.commit_intermediate_states()
    assert (slots.free_count, len(slots.slots.reserved), slots.slots.counts.committed) == (8, 0, 0)
    slots.check_integrity()


@given(data=st.data(), names=st.sampled_from(["0.19", "0.20"]), max_slots=st.integers(0, 10))
def test_whatever_is_committed_is_the_state_after_the_tokens_of_its_block(data, names, max_slots):
    """Random prompts in random chunks, several a step, rows behind paused and decoding ones."""
    scratch = {"max_mamba_intermediate_states_per_step": data.draw(st.integers(0, 6))}
    chunk = data.draw(st.sampled_from([1, 2, 4]))
    host = FakeHost(num_blocks=24, names=names, chunk=chunk, optional=scratch)
    host.optional["checkpoint_plan"] = host.checkpoint_plan = data.draw(
        st.builds(
            CheckpointPlan,
            tail=st.booleans(),
            branch=st.booleans(),
            chunk_ends=st.booleans(),
            prefill_interval=st.sampled_from([None, 4, 8]),
            marks=st.lists(st.integers(0, 40), max_size=2).map(tuple),
        )
    )
    host.paused_request_count = data.draw(st.integers(0, 2))
    slots = host.allocator(max_slots, MambaSlotAllocator)
    requests = [FakeRequest(n, tokens(data.draw(st.integers(1, 40)))) for n in (1, 2)]
    blocks = {1: list(range(10)), 2: list(range(10, 20))}
    unsalted = {block: (n, 4 * (i + 1)) for n, mine in blocks.items() for i, block in enumerate(mine)}
    wanted = Counter()
    while requests:
        chunks = []
        for row, request in enumerate(requests, start=host.paused_request_count):
            left = len(request.prompt_tokens) - request.finished_chunk_token_count
            chunks.append(Chunk(request, row, 0, data.draw(st.integers(1, left))))
        served(host, slots, chunks, blocks)
        slots.check_integrity()
        wanted.update(chunk.stop for chunk in chunks)
        for key, block in slots.hash_to_block_id.items():
            number, position = unsalted[block]
            assert key == 1000 + block
            expected = host.state_after(FakeRequest(number, []), position)
            assert same_bytes(durable(slots, slots.get_slot(block)), expected)
        requests = [r for r in requests if r.finished_chunk_token_count < len(r.prompt_tokens)]
    assert not slots.slots.reserved


# ---- reset


def test_reset_forgets_states_reservations_pins_plans_and_ghosts():
    host, slots = make(3)
    slots.pin(committed(host, slots, 1)[0])
    slots.reserve([2])
    committed(host, slots, 3)
    committed(host, slots, 4)
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [5, 6, 7])
    slots.intermediate_ssm_out.fill_(1)
    slots.intermediate_conv_out.fill_(1)
    slots.reset()
    counts = slots.slots.counts
    assert (counts.free, counts.reserved, counts.committed, slots.slots.pins) == (3, 0, 0, {})
    assert slots.hash_to_block_id == {}
    assert len(slots.slots.tree.ghosts) == 0
    assert not slots._has_intermediates
    assert planned(slots) == ([], [], -1)
    assert not slots.intermediate_ssm_out.any()
    assert not slots.intermediate_conv_out.any()
    assert sorted(slots.reserve([1, 2, 3])) == [0, 1, 2]
    slots.check_integrity()


def test_pending_rows_can_be_cleared_alone():
    host, slots = make(3)
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [5, 6, 7])
    host.batch_dimensions.prefill_req_count = 1
    assert slots._has_intermediates
    slots._clear_intermediate_state()
    assert not slots._has_intermediates
    assert planned(slots) == ([], [], -1)


# ---- any order of calls, against a model


class SlotMachine(RuleBasedStateMachine):
    """A host does anything, in any order; the model scans dicts and lists.

    The model knows of each slot who has it: a committed block, a reservation (for a block or, once that left,
    for none), or no owner; the committed slots in order of use; and a number that stands for the state in it.
    """

    num_blocks = 10

    @initialize(
        max_slots=st.integers(0, 6),
        policy=st.sampled_from(["lru", "ref_zero"]),
        names=st.sampled_from(["0.19", "0.20"]),
    )
    def start(self, max_slots, policy, names):
        self.host = FakeHost(num_blocks=self.num_blocks, policy=policy, names=names, layers=1)
        self.kv = self.host.kv_block_allocator
        self.slots = self.host.allocator(max_slots, MambaSlotAllocator)
        self.next_key = 1
        self.next_state = 1
        self.forget()

    def forget(self):
        self.block_in = {}  # committed slot -> block
        self.reserved = {}  # slot -> block or None
        self.pins = Counter()
        self.keys = {}  # key -> block
        self.order = []  # committed slots, least recently used first
        self.state = dict.fromkeys(range(self.slots.max_slots), None)  # None: anything

    # ---- the model

    def slot_of(self, block):
        return next((slot for slot, other in self.block_in.items() if other == block), -1)

    def free(self):
        return set(range(self.slots.max_slots)) - self.block_in.keys() - self.reserved.keys()

    def victims(self, keep=()):
        return [slot for slot in self.order if not self.pins[slot] and slot not in keep]

    def take(self, call, count, keep=()):
        """`call` must return `count` slots: free ones, then victims; or fail and change nothing."""
        free, victims = self.free(), self.victims(keep)
        if count > len(free) + len(victims):
            before = picture(self.slots)
            with pytest.raises(MambaSlotCapacityError) as error:
                call()
            assert (error.value.required, error.value.available) == (count, len(free) + len(victims))
            assert picture(self.slots) == before
            return None
        got = call()
        evicted = victims[: max(0, count - len(free))]
        for slot in evicted:
            self.leave(slot)
        return got, free, evicted

    def leave(self, slot):
        block = self.block_in.pop(slot)
        self.order.remove(slot)
        self.keys = {key: other for key, other in self.keys.items() if other != block}

    def enter(self, slot, block):
        self.block_in[slot] = block
        self.order.append(slot)

    def remove(self, block):
        slot = self.slot_of(block)
        if slot >= 0:
            self.leave(slot)
            if self.pins[slot]:
                self.reserved[slot] = None

    def own_reservations(self):
        return sorted(slot for slot in self.reserved if not self.pins[slot])

    def named(self):
        return {self.slot_of(block) for block in self.keys.values()}

    def writable(self):
        unread = {slot for slot in self.block_in if not self.pins[slot]} - self.named()
        return unread.union(self.own_reservations())

    def some(self, data, of, **size):
        return data.draw(st.lists(st.sampled_from(sorted(of)), unique=True, **size)) if of else []

    # ---- what a host does

    @rule(data=st.data())
    def blocks_are_registered_in_kv(self, data):
        for block in self.some(data, range(self.num_blocks), max_size=4):
            if self.kv.block_hashes[block] < 0:
                self.kv.register([block], [self.next_key])
                self.kv.block_ref_counts[block] = 1
                self.next_key += 1

    @rule(data=st.data())
    def references_change(self, data):
        block = data.draw(st.integers(0, self.num_blocks - 1))
        self.kv.block_ref_counts[block] ^= 1

    @rule(data=st.data(), clear_first=st.booleans(), kind=st.sampled_from([list, torch.tensor]))
    def blocks_are_deregistered(self, data, clear_first, kind):
        blocks = self.some(data, range(self.num_blocks), min_size=1, max_size=4)
        callback = self.slots.on_kv_blocks_deregistered
        self.kv.deregister(blocks, lambda left, hashes: callback(kind(left), hashes), clear_first)
        for block in blocks:
            self.remove(block)
            self.reserved = {slot: None if b == block else b for slot, b in self.reserved.items()}

    @rule(data=st.data())
    def blocks_are_invalidated(self, data):
        blocks = self.some(data, range(self.num_blocks), max_size=2)
        for block in blocks:
            self.slots.invalidate_block(block)
            self.remove(block)

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4))
    def slots_are_allocated(self, blocks):
        blocks = [block for block in blocks if block not in self.reserved.values()]
        new = [block for block in dict.fromkeys(blocks) if self.slot_of(block) < 0]
        keep = {self.slot_of(block) for block in blocks}
        taken = self.take(lambda: self.slots.allocate_slots_batch(blocks), len(new), keep)
        if taken is None:
            return
        got, free, evicted = taken
        fresh = [got[blocks.index(block)] for block in new]
        assert set(evicted) <= set(fresh) <= free | set(evicted)
        assert len(set(fresh)) == len(new)
        for block, slot in zip(new, fresh, strict=True):
            self.enter(slot, block)
        assert got == [self.slot_of(block) for block in blocks]
        self.fill(fresh)

    def fill(self, slots):
        """The caller writes a new state into each, one way or another."""
        for i, slot in enumerate(slots):
            row = i % self.host.max_requests
            number = self.next_state
            self.next_state += 1
            state = self.host.state_after(FakeRequest(0, []), number)
            if slot in self.block_in and number % 2:
                conv, ssm = state
                self.slots.store_from_tensors(self.block_in[slot], 0, ssm[0], conv[0])
            else:
                self.host.set_live(row, state)
                self.slots.store_from_live_batch([slot], [row])
            self.state[slot] = number

    @rule(data=st.data())
    def unread_slots_are_written_again(self, data):
        self.fill(self.some(data, self.writable()))

    @precondition(lambda self: self.block_in)
    @rule(data=st.data())
    def hashes_are_registered(self, data):
        blocks = self.some(data, self.block_in.values(), max_size=4)
        hashes = self.kv.block_hashes[blocks].tolist()
        self.slots.register_block_hashes_batch(blocks, hashes)
        self.keys.update({key: block for key, block in zip(hashes, blocks, strict=True) if key > 0})

    @rule(data=st.data())
    def slots_are_reserved(self, data):
        able = set(range(self.num_blocks)) - set(self.block_in.values()) - set(self.reserved.values())
        blocks = self.some(data, able, max_size=4)
        taken = self.take(lambda: self.slots.reserve(blocks), len(blocks))
        if taken is None:
            return
        got, free, evicted = taken
        assert set(evicted) <= set(got) <= free | set(evicted)
        assert len(set(got)) == len(blocks)
        self.reserved.update(zip(got, blocks, strict=True))
        self.fill(got)

    @precondition(lambda self: self.own_reservations())
    @rule(data=st.data(), explicit=st.booleans())
    def reservations_are_committed(self, data, explicit):
        chosen = self.some(data, self.own_reservations(), min_size=1)
        blocks = [self.reserved[slot] for slot in chosen]
        if explicit:
            blocks = [data.draw(st.integers(0, self.num_blocks - 1)) for _ in chosen]
            results = self.slots.commit(chosen, blocks)
        else:
            results = self.slots.commit(chosen)
        for slot, block, result in zip(chosen, blocks, results, strict=True):
            if self.reserved.pop(slot) is None:
                assert result == -1
                continue
            key, earlier = int(self.kv.block_hashes[block]), self.slot_of(block)
            if earlier >= 0 or key < 0:
                assert result == earlier
                continue
            assert result == slot
            self.enter(slot, block)
            self.keys[key] = block

    @precondition(lambda self: self.own_reservations())
    @rule(data=st.data())
    def reservations_are_released(self, data):
        for slot in self.some(data, self.own_reservations()):
            self.slots.release_reservation([slot])
            del self.reserved[slot]

    @precondition(lambda self: self.block_in)
    @rule(data=st.data())
    def a_state_is_pinned(self, data):
        slot = data.draw(st.sampled_from(self.order))
        self.slots.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def a_state_is_unpinned(self, data):
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.slots.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.reserved.pop(slot, None)

    @precondition(lambda self: self.block_in)
    @rule(data=st.data(), restore=st.booleans())
    def a_state_is_used(self, data, restore):
        slot = data.draw(st.sampled_from(self.order))
        if restore:
            assert self.slots.restore_to_live(1, self.block_in[slot])
            expected = self.host.state_after(FakeRequest(0, []), self.state[slot])
            assert same_bytes(self.host.live(1), expected)
        else:
            self.slots.note_use(slot)
        self.order.remove(slot)
        self.order.append(slot)

    @rule(count=st.integers(0, 3))
    def slots_are_evicted_for_a_caller(self, count):
        victims = self.victims()
        if count > len(victims):
            before = picture(self.slots)
            with pytest.raises(MambaSlotCapacityError) as error:
                self.slots._evict_lru_slots_batch(count)
            assert (error.value.required, error.value.available) == (count, len(victims))
            assert picture(self.slots) == before
            return
        assert self.slots._evict_lru_slots_batch(count) == victims[:count]
        for slot in victims[:count]:
            self.leave(slot)
            self.reserved[slot] = None

    @rule(data=st.data())
    def a_bad_call_changes_nothing(self, data):
        slots = self.slots
        calls = [
            (slots.reserve, [self.num_blocks]),
            (slots.allocate_slots_batch, [0, -1]),
            (slots.on_kv_blocks_deregistered, [0, self.num_blocks], set()),
            (slots.pin, slots.max_slots),
            (slots.unpin, [0]),
        ]
        unwritable = set(range(slots.max_slots)) - self.writable()
        calls += [(slots.store_from_live_batch, [slot], [0]) for slot in unwritable]
        calls += [(slots.store_from_live_batch, [slot, slot], [0, 1]) for slot in self.writable()]
        calls += [(slots.allocate_slots_batch, [b]) for b in self.reserved.values() if b is not None]
        calls += [(slots.reserve, [block]) for block in self.block_in.values()]
        calls += [(slots.reserve, [block]) for block in self.reserved.values() if block is not None]
        calls += [(slots.commit, [slot]) for slot in self.block_in]
        calls += [(slots.release_reservation, [slot]) for slot in self.free()]
        calls += [(slots.release_reservation, [slot]) for slot in self.reserved if self.pins[slot]]
        calls += [(slots.pin, slot) for slot in self.reserved]
        calls += [(slots.unpin, slot) for slot in self.free()]
        call, *arguments = data.draw(st.sampled_from(calls))
        before = picture(slots)
        with pytest.raises(ValueError, match="accepted"):
            call(*arguments)
        assert picture(slots) == before

    @rule()
    def all_is_reset(self):
        self.slots.reset()
        self.forget()

    @invariant()
    def the_allocator_agrees_with_the_model(self):
        if not hasattr(self, "slots"):
            return
        slots = self.slots
        slots.check_integrity()
        assert slots.hash_to_block_id == self.keys
        assert slots.free_count == len(self.free())
        assert slots.slots.reserved.keys() == self.reserved.keys()
        assert set(slots.slots.reserved.values()) - {-1} == set(self.reserved.values()) - {None}
        assert slots.slots.counts.committed == len(self.block_in)
        assert slots.slots.num_available == len(self.free()) + len(self.victims())
        assert slots.slots.pins == +self.pins
        assert set(slots.free_slots[: slots.free_count].tolist()) == self.free()
        for block in range(self.num_blocks):
            assert slots.get_slot(block) == int(slots.block_to_slot[block]) == self.slot_of(block)
        for slot, number in self.state.items():
            if number is not None:
                expected = self.host.state_after(FakeRequest(0, []), number)
                assert same_bytes(durable(slots, slot), expected)


TestSlotsInAnyOrder = SlotMachine.TestCase
