"""A step of megatron-core's kernels: rows that plan its states, and the states that become findable."""

from collections import Counter

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from oracle.fake_host import CONV_SHAPE, SSM_SHAPE, Chunk, FakeHost, FakeRequest, durable, same_bytes
from oracle.plans import SwitchedPlan


def make(max_slots=3, **host):
    fake = FakeHost(**host)
    return fake, fake.mcore_allocator(max_slots)


def tokens(count):
    return list(range(count))


def committed(host, slots, *blocks):
    host.kv_block_allocator.register(blocks, [100 + block for block in blocks])
    return slots.commit(slots.reserve(blocks))


def picture(slots):
    """Everything a host can see."""
    return (
        slots.block_to_slot.tolist(),
        slots.slot_to_block.tolist(),
        slots.free_count,
        dict(slots.hash_to_block_id),
        slots.conv_states.tolist(),
        slots.ssm_states.tolist(),
        slots._intermediate_offsets_cpu.tolist(),
        slots._intermediate_counts_cpu.tolist(),
        slots._intermediate_block_ids_cpu.tolist(),
        slots._eos_cache_block_id_cpu.tolist(),
        slots.num_dropped,
    )


def test_the_maps_and_the_scratch_of_a_new_pool():
    host, slots = make(3, dtype=torch.float64)
    assert slots.block_to_slot.tolist() == [-1] * host.num_blocks
    assert slots.slot_to_block.tolist() == [-1] * 3
    assert (slots.block_to_slot.dtype, slots.slot_to_block.dtype) == (torch.int32,) * 2
    scratch = host.max_mamba_intermediate_states_per_step
    assert slots.max_intermediate_count == scratch
    assert slots.intermediate_conv_out.shape == (2, scratch, *CONV_SHAPE)
    assert slots.intermediate_ssm_out.shape == (2, scratch, *SSM_SHAPE)
    assert slots.intermediate_ssm_out.dtype == host.dtype
    assert slots.intermediate_conv_out[1].is_contiguous()
    assert slots.intermediate_ssm_out[1].is_contiguous()
    assert not slots._has_intermediates
    (slot,) = committed(host, slots, 7)
    assert (int(slots.block_to_slot[7]), int(slots.slot_to_block[slot])) == (slot, 7)


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


@pytest.mark.parametrize("inference", [False, True])
def test_rows_that_were_made_in_inference_mode_are_written_outside_of_it(inference):
    with torch.inference_mode(inference):
        _, slots = make()
    slots._intermediate_offsets_cpu.fill_(1)
    slots.intermediate_conv_out.fill_(1)
    slots.reset()
    assert not slots._intermediate_offsets_cpu.any()


# ---- offsets of a prefill chunk


def planned(slots, row=0):
    count = int(slots._intermediate_counts_cpu[row])
    return (
        slots._intermediate_offsets_cpu[row, :count].tolist(),
        slots._intermediate_block_ids_cpu[row, :count].tolist(),
        int(slots._eos_cache_block_id_cpu[row]),
    )


def plan_of(prompt, length=None, skip=0, finished=0, matched=0, **host):
    """Offsets, blocks and chunk-end block of one chunk; block i of the request is block 10 + i."""
    optional = host.pop("optional", {})
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
    kept, slots = plan_of(31, matched=3, optional=plan)
    assert kept == ([4, 20, 28], [10, 14, 16], -1)
    assert slots.num_dropped == 4


# ---- the step's rows


def test_without_prefills_or_checkpoints_there_is_no_step_data():
    host, slots = make()
    host.batch_dimensions.prefill_req_count = 2
    assert slots.get_intermediate_cpu_data() == (None, None)
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [1, 2, 3])
    host.batch_dimensions.prefill_req_count = 0
    assert slots.get_intermediate_cpu_data() == (None, None)


def test_step_data_are_the_rows_of_this_steps_prefills():
    host, slots = make()
    host.paused_request_count, host.batch_dimensions.decode_req_count = 1, 1
    host.batch_dimensions.prefill_req_count = 2
    host.plan(slots, Chunk(FakeRequest(1, tokens(11)), 2, 0, 11), [1, 2, 3])
    host.plan(slots, Chunk(FakeRequest(2, tokens(3)), 3, 0, 3), [4])
    offsets, counts = slots.get_intermediate_cpu_data()
    assert offsets.tolist() == [[8, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [1, 0]
    assert offsets.dtype == counts.dtype == torch.int32


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
    assert slots.num_dropped == 4 - max_slots
    slots.check_integrity()


def test_a_pool_full_of_pinned_states_costs_the_new_states():
    host, slots = make(1)
    slots.pin(committed(host, slots, 9)[0])
    served(host, slots, [Chunk(FakeRequest(1, tokens(12)), 0, 0, 12)], {1: [1, 2, 3]})
    assert slots.hash_to_block_id == {109: 9}
    assert slots.slots.tree.ghosts.has(1003, "refused state")
    assert slots.num_dropped == 2
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
    host.optional["checkpoint_plan"] = data.draw(
        st.builds(
            SwitchedPlan,
            tail=st.booleans(),
            branch=st.booleans(),
            step_ends=st.booleans(),
            prefill_interval=st.sampled_from([None, 4, 8]),
            marks=st.lists(st.integers(0, 40), max_size=2).map(tuple),
        )
    )
    host.paused_request_count = data.draw(st.integers(0, 2))
    slots = host.mcore_allocator(max_slots)
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


def test_pending_rows_can_be_cleared_alone():
    host, slots = make(3)
    host.plan(slots, Chunk(FakeRequest(1, tokens(12)), 0, 0, 12), [5, 6, 7])
    host.batch_dimensions.prefill_req_count = 1
    assert slots._has_intermediates
    slots.commit_intermediate_states()
    assert not slots._has_intermediates
    assert planned(slots) == ([], [], -1)


# ---- allocations that a host asks for in 0.20


def test_in_0_20_no_state_of_a_block_that_a_request_holds_is_freed_for_another():
    host, slots = make(2, names="0.20")
    slots.allocate_slots_batch([0])
    before = picture(slots)
    with pytest.raises(
        ms.MambaSlotCapacityError, match="requires 2 new durable slots, but only 1 free or ev"
    ):
        slots.allocate_slots_batch([1, 2])
    assert picture(slots) == before
    host.kv_block_allocator.block_ref_counts[0] = 0
    assert sorted(slots.allocate_slots_batch([1, 2])) == [0, 1]
    assert not slots.has_state(0)


def test_in_0_20_the_state_of_the_block_that_was_used_longest_ago_goes_first():
    host, slots = make(4, names="0.20")
    slots.allocate_slots_batch([0, 1, 2, 3])
    host.kv_block_allocator.block_ref_counts[:] = 0
    host.kv_block_allocator.block_timestamps[:4] = torch.tensor([40, 10, 30, 20])
    slots.allocate_slots_batch([4, 5, 0])
    assert [block for block in range(6) if slots.has_state(block)] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gdp_num_householder": 2}, "gdp_num_householder is 2; accepted: 0"),
        ({"ssm_chunk_alignment": 3}, "ssm_chunk_alignment is 3; accepted: a multiple of 2"),
    ],
)
def test_kernels_without_states_inside_a_prefill_are_refused(setting, message):
    host = FakeHost(names="0.20")
    vars(host).update(setting)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=message):
            host.mcore_allocator(3)
