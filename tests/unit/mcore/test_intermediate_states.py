"""The rows that plan a step's checkpoints, and what becomes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from oracle.fake_host import Chunk, FakeHost, FakeRequest, durable, same_bytes
from oracle.plans import SwitchedPlan


def make(max_slots=8, **host):
    fake = FakeHost(**host)
    slots = fake.mcore_allocator(max_slots)
    return fake, slots


def prompt(number, tokens, finished=0):
    return FakeRequest(number, list(range(tokens)), finished_chunk_token_count=finished)


def test_a_chunk_of_no_tokens_plans_nothing():
    host, slots = make()
    host.plan(slots, Chunk(prompt(1, 12), 0, 12, 12), [1, 2, 3])
    assert not slots._has_intermediates
    assert slots._eos_cache_block_id_cpu.tolist() == [-1] * 4


def test_offsets_of_a_row_ascend_whatever_their_worth():
    host, slots = make(optional={"checkpoint_plan": CheckpointPlan(marks=(16, 4))})
    host.plan(slots, Chunk(prompt(1, 31), 0, 0, 31), list(range(8)), matched=3)
    assert slots._intermediate_offsets_cpu[0].tolist() == [4, 16, 28]
    assert slots._intermediate_block_ids_cpu[0].tolist() == [0, 3, 6]


def test_what_a_row_has_no_room_for_is_counted():
    plan = CheckpointPlan(prefill_interval=4)
    host, slots = make(optional={"checkpoint_plan": plan})
    host.plan(slots, Chunk(prompt(1, 31), 0, 0, 31), list(range(8)), matched=3)
    assert slots._intermediate_offsets_cpu[0].tolist() == [4, 12, 28]
    assert slots.num_dropped == 4


def test_boundaries_off_the_ssd_chunk_are_counted_among_the_dropped():
    host, slots = make(optional={"checkpoint_plan": CheckpointPlan(marks=(4, 8))})
    request = prompt(1, 15, finished=3)
    host.plan(slots, Chunk(request, 0, 0, 12), [0, 1, 2, 3])
    assert slots._intermediate_counts_cpu.tolist() == [0, 0, 0, 0]
    assert slots.num_dropped == 3
    assert not slots._has_intermediates


def test_rows_of_a_step_share_its_scratch_first_come_first_served():
    optional = {
        "checkpoint_plan": CheckpointPlan(marks=(4,)),
        "max_mamba_intermediate_states_per_step": 3,
    }
    host, slots = make(optional=optional)
    chunks = [Chunk(prompt(n, 12), row, 0, 12) for row, n in enumerate((1, 2, 3))]
    blocks = {1: [1, 2, 3], 2: [4, 5, 6], 3: [7, 8, 9]}
    for chunk in chunks:  # each wants positions 4 and 8 in scratch, and 12 from its live slot
        host.plan(slots, chunk, blocks[chunk.request.number])
    assert slots._intermediate_counts_cpu.tolist() == [2, 1, 0, 0]
    assert slots.num_dropped == 3
    host.kv_block_allocator.register(range(1, 10), range(11, 20))
    host.forward(slots, chunks)
    slots.commit_intermediate_states()
    assert set(slots.hash_to_block_id.values()) == {1, 2, 3, 4, 6, 9}
    for block, slot in enumerate(slots.block_to_slot.tolist()):
        if slot >= 0:
            number, position = (block + 2) // 3, 4 * ((block - 1) % 3 + 1)
            expected = host.state_after(FakeRequest(number, []), position)
            assert same_bytes(durable(slots, slot), expected)


def test_scratch_is_free_again_after_a_commit_and_for_a_row_planned_anew():
    host, slots = make(optional={"max_mamba_intermediate_states_per_step": 1})
    chunk = Chunk(prompt(1, 11), 0, 0, 11)
    for _ in range(2):
        for _ in range(2):
            host.plan(slots, chunk, [1, 2, 3])
            assert slots._intermediate_counts_cpu.tolist() == [1, 0, 0, 0]
        host.forward(slots, [chunk])
        slots.commit_intermediate_states()
    assert slots.num_dropped == 0


@pytest.mark.parametrize("names", ["0.19", "0.20"])
def test_a_host_whose_blocks_are_off_its_ssd_chunk_is_warned_once_and_served(names):
    host = FakeHost(chunk=3, names=names)
    with pytest.warns(
        UserWarning, match=r"block_size_tokens is 4, no multiple of the SSD chunk \(3\)"
    ) as said:
        slots = host.mcore_allocator(4)
    assert len(said) == 1
    host.plan(slots, Chunk(prompt(1, 14), 0, 0, 14), [1, 2, 3, 4])
    assert slots._intermediate_offsets_cpu[0].tolist() == [12, 0, 0]
    slots.reset()


def test_a_plan_without_step_ends_still_keeps_the_end_of_its_prompt():
    host, slots = make(optional={"checkpoint_plan": SwitchedPlan(step_ends=False)})
    request = prompt(1, 12)
    for length, block in ((4, -1), (4, 2), (4, 3)):  # boundary 4 is no one's, 8 and 12 are the tail
        host.plan(slots, Chunk(request, 0, 0, length), [1, 2, 3])
        assert int(slots._eos_cache_block_id_cpu[0]) == block
        request.finished_chunk_token_count += length


def test_collected_scratch_rows_follow_the_kernels_order():
    host, slots = make(optional={"checkpoint_plan": CheckpointPlan(marks=(4,))})
    chunks = [Chunk(prompt(n, 12), row, 0, 12) for row, n in enumerate((1, 2))]
    host.plan(slots, chunks[0], [1, 2, 3])
    host.plan(slots, chunks[1], [4, 5, 6])
    host.kv_block_allocator.register(range(1, 7), range(11, 17))
    host.forward(slots, chunks)
    inner, ends = ([1, 2, 4, 5], [0, 1, 2, 3]), ([3, 6], [0, 1])
    assert slots._collect_commit_data() == (*inner, *ends, [11, 12, 14, 15, 13, 16])


def test_there_is_nothing_to_collect_without_prefills_or_plans():
    host, slots = make()
    assert slots._collect_commit_data() == ([], [], [], [], [])
    host.batch_dimensions.prefill_req_count = 2
    assert slots._collect_commit_data() == ([], [], [], [], [])


def test_a_commit_clears_the_rows_of_this_steps_prefills_alone():
    host, slots = make()
    host.plan(slots, Chunk(prompt(1, 12), 0, 0, 12), [1, 2, 3])
    host.plan(slots, Chunk(prompt(2, 12), 2, 0, 12), [4, 5, 6])
    host.forward(slots, [Chunk(prompt(1, 12), 0, 0, 12)])
    slots.commit_intermediate_states()
    assert slots._intermediate_counts_cpu.tolist() == [0, 0, 1, 0]
    assert slots._eos_cache_block_id_cpu.tolist() == [-1, -1, 6, -1]


def test_where_slots_are_short_the_first_state_that_was_planned_is_kept():
    host, slots = make(1, optional={"checkpoint_plan": CheckpointPlan(marks=(4,))})
    chunk = Chunk(prompt(1, 12), 0, 0, 12)
    host.plan(slots, chunk, [1, 2, 3])
    host.kv_block_allocator.register([1, 2, 3], [11, 12, 13])
    host.forward(slots, [chunk])
    slots.commit_intermediate_states()
    assert slots.hash_to_block_id == {11: 1}


INTERVALS = CheckpointPlan(prefill_interval=4)


def test_the_worth_of_a_boundary_ends_with_its_row():
    host, slots = make(1, optional={"checkpoint_plan": INTERVALS})
    host.plan(slots, Chunk(prompt(1, 12), 0, 0, 12), [1, 2, 3])
    host.plan(slots, Chunk(prompt(2, 3), 0, 0, 3), [4])
    slots._intermediate_counts_cpu[0] = 1  # by the host, which names no kind
    slots._intermediate_block_ids_cpu[0, 0] = 1
    slots._eos_cache_block_id_cpu[0] = 9
    host.batch_dimensions.prefill_req_count = 1
    host.mamba_metadata.intermediate_count = 1
    host.mamba_metadata.per_request_intermediate_counts = [1]
    host.kv_block_allocator.register([1, 9], [11, 19])
    slots.commit_intermediate_states()
    assert slots.hash_to_block_id == {11: 1}


def test_a_boundary_of_two_rows_has_the_worth_of_the_worthier():
    host, slots = make(1, optional={"checkpoint_plan": INTERVALS})
    chunks = [Chunk(prompt(1, 8), 0, 0, 8), Chunk(prompt(2, 31), 1, 0, 31)]
    for chunk in chunks:  # 4 is a tail of the first prompt, and an interval of the second, whose tail is 28
        host.plan(slots, chunk, list(range(1, 9)))
    host.kv_block_allocator.register(range(1, 9), range(11, 19))
    host.forward(slots, chunks)
    slots.commit_intermediate_states()
    assert slots.hash_to_block_id == {11: 1}


def test_a_block_with_a_reservation_is_left_to_its_owner():
    host, slots = make()
    host.kv_block_allocator.register([1, 2, 3], [11, 12, 13])
    reserved = slots.reserve([2])
    chunk = Chunk(prompt(1, 12), 0, 0, 12)
    host.plan(slots, chunk, [1, 2, 3])
    host.forward(slots, [chunk])
    slots.commit_intermediate_states()
    assert slots.hash_to_block_id == {13: 3}
    assert set(slots.slots.reserved.values()) == {2}
    assert not slots.slots.tree.ghosts.has(12, "refused state")
    slots.check_integrity()
    assert slots.commit(reserved) == reserved
    assert slots.hash_to_block_id == {12: 2, 13: 3}


def test_reset_zeroes_scratch_and_rows():
    host, slots = make()
    host.plan(slots, Chunk(prompt(1, 12), 3, 0, 12), [1, 2, 3])
    slots.intermediate_conv_out.fill_(1)
    slots.intermediate_ssm_out.fill_(1)
    slots.reset()
    assert not slots._has_intermediates
    assert not slots.intermediate_conv_out.any()
    assert not slots.intermediate_ssm_out.any()
    assert not slots._intermediate_counts_cpu.any()
    assert (slots._intermediate_block_ids_cpu == -1).all()
    assert (slots._eos_cache_block_id_cpu == -1).all()


@given(data=st.data())
def test_a_row_is_the_plans_boundaries_on_the_kernels_grid(data):
    """The plan, cut to the grid, the width and what other rows left of the scratch."""
    grid = data.draw(st.sampled_from([1, 2, 4]))
    plan = data.draw(
        st.builds(
            SwitchedPlan,
            tail=st.booleans(),
            branch=st.booleans(),
            step_ends=st.booleans(),
            prefill_interval=st.sampled_from([None, 4, 8]),
            marks=st.lists(st.integers(0, 50), max_size=2).map(tuple),
        )
    )
    scratch = data.draw(st.integers(0, 9))
    optional = {
        "checkpoint_plan": plan,
        "max_mamba_intermediate_states_per_step": scratch,
    }
    host, slots = make(chunk=grid, optional=optional, names=data.draw(st.sampled_from(["0.19", "0.20"])))
    host.plan(slots, Chunk(prompt(2, 31), 1, 0, 31), list(range(8)))
    elsewhere, dropped = int(slots._intermediate_counts_cpu[1]), slots.num_dropped
    pending = slots._has_intermediates
    total = data.draw(st.integers(1, 50))
    finished = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(1, total - finished))
    stop = finished + length
    before = -(-finished // 4)
    matched = data.draw(st.integers(0, max(0, stop // 4 - before)))
    blocks = data.draw(st.permutations(range(16)))[: -(-stop // 4)]
    skip = 0 if finished % 4 else 4 * data.draw(st.integers(0, min(matched, (length - 1) // 4)))
    host.plan(slots, Chunk(prompt(1, total, finished), 2, skip, length), blocks, matched)

    start = finished + skip
    wanted = plan.boundaries(
        start=start,
        stop=stop,
        prompt_tokens=total,
        block_size_tokens=4,
        branch_tokens=4 * (before + matched) if matched else 0,
    )
    inside = [b.position for b in wanted if b.position < stop]
    reachable = [position for position in inside if (position - start) % grid == 0]
    kept = sorted(reachable[: min(3, scratch - elsewhere)])
    assert slots._intermediate_counts_cpu.tolist() == [0, elsewhere, len(kept), 0]
    assert slots._intermediate_offsets_cpu[2].tolist() == [p - start for p in kept] + [0] * (3 - len(kept))
    assert slots._intermediate_block_ids_cpu[2].tolist() == [blocks[p // 4 - 1] for p in kept] + [-1] * (
        3 - len(kept)
    )
    ends = stop in {b.position for b in wanted}
    assert slots._eos_cache_block_id_cpu[2] == (blocks[stop // 4 - 1] if ends else -1)
    assert slots._has_intermediates == bool(pending or kept or ends)
    assert slots.num_dropped - dropped == len(inside) - len(kept)
