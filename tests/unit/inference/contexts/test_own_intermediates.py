"""States inside a prefill in a context of one's own: planned, in scratch, committed, restored."""

from types import SimpleNamespace

import mambaslots as ms
import torch


def test_a_state_inside_a_prefill_is_planned_committed_and_restored_without_megatron() -> None:
    kv = ms.KVBlockAllocator(4)
    blocks = kv.allocate_memory_blocks(3)
    context = SimpleNamespace(
        kv_block_allocator=kv,
        mamba_conv_states=torch.zeros(1, 4, 8, 4),
        mamba_ssm_states=torch.zeros(1, 4, 2, 8, 8),
        mamba_metadata=SimpleNamespace(
            request_to_mamba_state_idx=torch.tensor([2, -1]),
            intermediate_count=0,
            per_request_intermediate_counts=[],
        ),
        request_to_kv_block_ids=torch.tensor([blocks, [-1] * 3]),
        paused_request_count=0,
        batch_dimensions=SimpleNamespace(decode_req_count=0, prefill_req_count=1),
        checkpoint_plan=ms.CheckpointPlan(marks=(8,)),
        max_requests=2,
        max_mamba_intermediate_states_per_step=3,
        block_size_tokens=4,
        mamba_chunk_size=4,
    )
    slots = ms.MambaSlotAllocator(context, 3, 1, (8, 4), (2, 8, 8), torch.float32, torch.float32)
    kv.register_chain(b"", blocks, [11, 12, 13], [b"a", b"b", b"c"])
    request = SimpleNamespace(
        prompt_tokens=list(range(12)), finished_chunk_token_count=0, precomputed_block_hashes=[11, 12, 13]
    )
    slots.compute_and_store_offsets(request, 0, 0, 12, 0, [], 3)
    offsets, counts = slots.get_intermediate_cpu_data()
    assert offsets is not None
    assert counts is not None
    planned = offsets[0, : int(counts[0])].tolist()
    assert 8 in planned
    context.mamba_metadata.intermediate_count = len(planned)
    context.mamba_metadata.per_request_intermediate_counts = [len(planned)]
    slots.intermediate_ssm_out[:, planned.index(8)] = 8.0
    context.mamba_ssm_states[:, 2] = 12.0
    slots.commit_intermediate_states()
    slots.register_block_hashes_batch([blocks[1]], [12])
    assert slots.hash_to_block_id[12] == blocks[1]
    assert int(slots.block_to_slot[blocks[1]]) == slots.get_slot(blocks[1]) >= 0
    assert slots.restore_to_live(0, blocks[1])
    assert (context.mamba_ssm_states[:, 2] == 8.0).all()
    assert slots.get_intermediate_cpu_data() == (None, None)
    slots.check_integrity()
    kv.release_memory_blocks(blocks)
    kv.allocate_memory_blocks(4)
    assert slots.hash_to_block_id == {}
