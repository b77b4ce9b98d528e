"""Where megatron-core 0.19's own slot allocator is right, ours returns and stores the same."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.fake_host import CONV_SHAPE, SSM_SHAPE, Chunk, FakeHost, FakeRequest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    stock = pytest.importorskip("megatron.core.inference.contexts.mamba_slot_allocator", exc_type=ImportError)
    from megatron.core.inference.config import PrefixCachingEvictionPolicy


@pytest.fixture(autouse=True, scope="module")
def _the_gpu_is_a_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        yield


class Both:
    """Ours and the stock one, each with its own host in the same condition."""

    def __init__(self, max_slots, **host):
        policy = PrefixCachingEvictionPolicy.LRU
        self.hosts = [FakeHost(policy=policy, **host) for _ in range(2)]
        ours, theirs = self.hosts
        self.slots = [ours.mcore_allocator(max_slots), theirs.allocator(max_slots, stock.MambaSlotAllocator)]
        self.clock = 0

    def __getattr__(self, name):
        """A call of both, which must return the same."""

        def call(*arguments):
            ours, theirs = (getattr(slots, name)(*arguments) for slots in self.slots)
            assert type(ours) is type(theirs)
            assert ours == theirs
            self.compare()
            return ours

        return call

    def register_in_kv(self, blocks, hashes):
        for host in self.hosts:
            host.kv_block_allocator.register(blocks, hashes)

    def record_use(self, block):
        """The stock one evicts by the KV's clock, of blocks without references."""
        self.clock += 1
        for host in self.hosts:
            host.kv_block_allocator.block_timestamps[block] = self.clock
            host.kv_block_allocator.block_ref_counts[block] = 0

    def compare(self):
        ours, theirs = self.slots
        for name in ("max_slots", "num_mamba_layers", "free_count", "max_intermediate_count"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.hash_to_block_id == theirs.hash_to_block_id
        assert ours._has_intermediates == theirs._has_intermediates
        for name in (
            "block_to_slot",
            "slot_to_block",
            "conv_states",
            "ssm_states",
            "intermediate_conv_out",
            "intermediate_ssm_out",
            "_intermediate_counts_cpu",
            "_eos_cache_block_id_cpu",
        ):
            self.equal(getattr(ours, name), getattr(theirs, name))
        assert ours.slots.free_slots == theirs.free_slots[: ours.free_count].tolist()
        for row, count in enumerate(ours._intermediate_counts_cpu.tolist()):
            for name in ("_intermediate_offsets_cpu", "_intermediate_block_ids_cpu"):
                self.equal(getattr(ours, name)[row, :count], getattr(theirs, name)[row, :count])
        for name in ("mamba_conv_states", "mamba_ssm_states"):
            self.equal(*(getattr(host, name) for host in self.hosts))
        ours.check_integrity()

    @staticmethod
    def equal(ours, theirs):
        assert ours.dtype == theirs.dtype
        assert ours.device == theirs.device
        assert torch.equal(ours, theirs)


def test_new_allocators_look_alike():
    Both(3).compare()
    assert stock.MAX_INTERMEDIATE_OFFSETS_PER_REQUEST == 3


@given(data=st.data(), max_slots=st.integers(1, 5))
def test_any_calls_both_do_right_have_the_same_outcome(data, max_slots):
    both = Both(max_slots, num_blocks=8)
    next_key = 1
    for _ in range(data.draw(st.integers(1, 15))):
        have = [block for block in range(8) if both.has_state(block)]
        lack = sorted({*range(8)} - {*have})
        call = data.draw(
            st.sampled_from(["allocate", "register", "deregister", "invalidate", "states", "reset"])
        )
        if call == "allocate" and lack:
            blocks = data.draw(st.lists(st.sampled_from(lack), max_size=max_slots))
            both.allocate_slots_batch(blocks)
            for block in dict.fromkeys(blocks):
                both.record_use(block)
        elif call == "register" and have:
            blocks = data.draw(st.lists(st.sampled_from(have), unique=True))
            fresh = [b for b in blocks if both.hosts[0].kv_block_allocator.block_hashes[b] < 0]
            hashes = list(range(next_key, next_key + len(fresh)))
            next_key += len(fresh)
            both.register_in_kv(fresh, hashes)
            both.register_block_hashes_batch([*fresh, *have], [*hashes, *[-1] * len(have)])
        elif call == "deregister":
            known = sorted(both.slots[0].hash_to_block_id.values())
            if known:  # without one hash in its index the stock one frees nothing
                blocks = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
                hashes = set(both.hosts[0].kv_block_allocator.block_hashes[blocks].tolist())
                both.on_kv_blocks_deregistered(blocks, hashes)
                both.register_in_kv(blocks, [-1] * len(blocks))
        elif call == "invalidate":
            unknown = [b for b in range(8) if both.hosts[0].kv_block_allocator.block_hashes[b] < 0]
            if unknown:  # the stock one keeps the index key
                both.invalidate_block(data.draw(st.sampled_from(unknown)))
        elif call == "states":
            block = data.draw(st.integers(0, 7))
            number = data.draw(st.integers(1, 99))
            for host in both.hosts:
                host.set_live(1, host.state_after(FakeRequest(number, []), 4))
            if block in have and block not in both.slots[0].hash_to_block_id.values():  # ours refuses
                both.store_from_live_batch([both.get_slot(block)], [1])
                both.store_from_tensors(block, 1, torch.full(SSM_SHAPE, 7.0), torch.full(CONV_SHAPE, number))
            if block in have:
                both.record_use(block)
            both.restore_to_live(2, block)
        elif call == "reset":
            both.reset()
            both.register_in_kv(range(8), [-1] * 8)


@given(data=st.data())
def test_a_chunk_that_ends_its_prompt_has_the_same_rows(data):
    both = Both(6, chunk=data.draw(st.sampled_from([1, 2, 4])))
    prompt = data.draw(st.integers(1, 40))
    blocks = data.draw(st.permutations(range(16)))
    finished = data.draw(st.sampled_from([0, 0, data.draw(st.integers(0, prompt - 1))]))
    matched = 0 if finished else data.draw(st.integers(0, prompt // 4))
    skip = 4 * data.draw(st.integers(0, min(matched, (prompt - 1) // 4)))
    for host, slots in zip(both.hosts, both.slots, strict=True):
        request = FakeRequest(1, list(range(prompt)), finished_chunk_token_count=finished)
        host.batch_dimensions.prefill_req_count = 1
        host.plan(slots, Chunk(request, 0, skip, prompt - finished), blocks[: -(-prompt // 4)], matched)
    both.compare()
    count = int(both.slots[0]._intermediate_counts_cpu[0])
    ours, theirs = (slots.get_intermediate_cpu_data() for slots in both.slots)
    assert (ours[0] is None) == (theirs[0] is None)
    if ours[0] is not None:
        assert [t.shape for t in ours] == [t.shape for t in theirs]
        both.equal(ours[0][0, :count], theirs[0][0, :count])
        both.equal(ours[1], theirs[1])


def test_a_step_commits_the_same_states_to_the_same_slots():
    both = Both(8)
    for host, slots in zip(both.hosts, both.slots, strict=True):
        chunks = [
            Chunk(FakeRequest(1, list(range(11))), 0, 0, 11),
            Chunk(FakeRequest(2, list(range(12))), 1, 0, 12),
        ]
        for chunk, blocks in zip(chunks, ([1, 2, 3], [4, 5, 6]), strict=True):
            host.plan(slots, chunk, blocks)
        host.kv_block_allocator.register([1, 2, 4, 5, 6], [11, 12, 14, 15, 16])
        host.forward(slots, chunks)
    assert both.commit_intermediate_states() is None
    assert both.slots[0].hash_to_block_id == {12: 2, 15: 5, 16: 6}
    assert both.slots[0].free_count == 5
