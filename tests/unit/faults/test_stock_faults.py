"""The first 23 faults of the table in docs/megatron.md, each shown absent from ours.

Numbers and order are the table's. Fault 15 (pipeline stages that size their pools alone) needs
several ranks: it is in tests/net. `test_put_back.py` shows that each test here fails when its fault
is put back.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.hosts.step_plan import WrittenStates
from mambaslots.inference.kernels import state_copy
from mambaslots.mcore.slot_allocator import HostSlotAllocator, Settings
from oracle.context_driver import BLOCK, make_context, make_request, prefill, run, schedule
from oracle.plans import SwitchedPlan
from oracle.serving import random_tokens, serve_checked, small_engine
from torch.utils._python_dispatch import TorchDispatchMode

# ---- wrong output


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_fault_01_a_repeat_of_length_1_mod_block_resumes_from_a_boundary_that_has_a_state(
    blocks: int,
) -> None:
    engine, prompt = small_engine(), random_tokens(blocks * BLOCK + 1, seed=blocks)
    serve_checked(engine, [prompt])
    (again,) = serve_checked(engine, [prompt])
    assert again.num_resumed_tokens == blocks * BLOCK


@pytest.mark.usefixtures("kind")
def test_fault_02_a_continuation_chunk_skips_no_token_on_a_kv_match_alone() -> None:
    context, prompt = make_context(), random_tokens(60, seed=1)
    tail_only = SwitchedPlan(step_ends=False, branch=False)
    prefill(context, make_request(prompt, tail_only))
    request = make_request(prompt[:50], tail_only)  # its blocks are known, no state lies within them
    chunks = [schedule(context, request, budget=16)]
    while run(context, chunks[-1]) is not None and not chunks[-1].samples_token:
        chunks.append(schedule(context, request, budget=16))
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 16), (16, 32), (32, 48), (48, 50)]


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("suffix", [1, 2, 3])
def test_fault_03_a_suffix_shorter_than_the_convolution_carries_the_window_before_it(suffix: int) -> None:
    engine, prompt = small_engine(), random_tokens(4 * BLOCK, seed=1)
    serve_checked(engine, [prompt])
    (resumed,) = serve_checked(engine, [prompt + random_tokens(suffix, seed=2)])
    assert resumed.num_resumed_tokens == 4 * BLOCK  # the tokens are held against the recurrence


@pytest.mark.usefixtures("kind")
def test_fault_04_a_state_that_left_since_it_was_matched_is_not_resumed_from() -> None:
    context, prompt = make_context(), random_tokens(41, seed=1)
    expected = prefill(context, make_request(prompt))
    request = make_request(prompt)
    match = context.admission.match(request)
    context.prefix_cache.slots.remove([match.blocks[4]])
    chunk = context.admission.schedule_request(request, 64)
    assert chunk is not None
    assert chunk.start == 0
    torch.testing.assert_close(run(context, chunk), expected, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("kind")
def test_fault_05_a_prefix_registered_twice_keeps_naming_the_block_that_has_the_state() -> None:
    context, prompt = make_context(), random_tokens(17, seed=1)
    first, twin = make_request(prompt), make_request(prompt)
    chunks = [schedule(context, first), schedule(context, twin)]
    run(context, *chunks)
    assert context.admission.match(make_request(prompt)).resume_tokens == 16
    context.release(twin)
    context.check_integrity()
    assert context.admission.match(make_request(prompt)).blocks == tuple(first.allocation.path.blocks[:2])


@pytest.mark.usefixtures("kind")
def test_fault_06_forgetting_the_kv_prefixes_forgets_the_states() -> None:
    context, prompt = make_context(), random_tokens(41, seed=1)
    prefill(context, make_request(prompt))
    context.reset_prefix_cache()
    states = context.prefix_cache.cached_states
    assert states.state_block_of_hash == {}
    assert states.slot_of_block == {}
    assert context.admission.match(make_request(prompt)).resume_tokens == 0


def test_fault_07_after_a_reset_nothing_that_was_pending_is_done() -> None:
    context, prompt = make_context(max_requests=1), random_tokens(41, seed=1)
    prefill_of = make_request(prompt)
    prefill(context, prefill_of)
    context.release(prefill_of)
    context.begin_step([schedule(context, make_request(prompt))])  # a restore, and a reservation, under way
    context.reset()
    context.check_integrity()
    assert context.batch == ()
    fresh = make_request(prompt)
    inputs = context.begin_step([schedule(context, fresh)])
    assert inputs.state_sources.tolist() == [-1]


def test_fault_08_a_live_slot_number_does_not_change_after_it_was_given() -> None:
    context = make_context(max_requests=2)
    first, *others = (make_request(random_tokens(20, seed=seed)) for seed in range(3))
    schedule(context, first)
    (kept,) = map(int, first.allocation.live_slots)
    for other in others:
        schedule(context, other)
        context.release(other)
    assert first.allocation.live_slots == (kept,)
    assert type(first.allocation.live_slots[0]) is int
    context.check_integrity()


# ---- leaks and crashes


class Allocator(HostSlotAllocator):
    settings = Settings(cache_answers=False)


def host_allocator(
    slots: int = 4,
    blocks: int = 64,
    scratch: int = 8,
    device: str = "cpu",
    **context: Any,
) -> Any:
    """The allocator on a host that is nothing but the names it reads; block i has hash 100 + i."""
    host = SimpleNamespace(
        kv_block_allocator=SimpleNamespace(
            total_count=blocks,
            block_hashes=torch.arange(100, 100 + blocks),
            block_ref_counts=torch.ones(blocks, dtype=torch.int32),
        ),
        mamba_ssm_states=torch.zeros(2, 4, 3, device=device),
        mamba_conv_states=torch.zeros(2, 4, 2, device=device),
        mamba_metadata=SimpleNamespace(
            request_to_mamba_state_idx=torch.arange(4),
            intermediate_count=0,
            per_request_intermediate_counts=[],
        ),
        max_requests=4,
        max_mamba_intermediate_states_per_step=scratch,
        block_size_tokens=4,
        mamba_chunk_size=2,
        paused_request_count=0,
        batch_dimensions=SimpleNamespace(prefill_req_count=1, decode_req_count=0),
        request_to_kv_block_ids=torch.arange(blocks).expand(4, blocks),
        **context,
    )
    return Allocator(host, slots, 2, (2,), (3,), torch.float32, torch.float32)


def host_request(prompt: int, finished: int = 0, hashes: tuple[int, ...] = (1,)) -> Any:
    return SimpleNamespace(
        prompt_tokens=range(prompt), finished_chunk_token_count=finished, precomputed_block_hashes=hashes
    )


def commit_step(slots: HostSlotAllocator) -> None:
    counts = slots._intermediate_counts_cpu[:1].tolist()
    slots.context.mamba_metadata.intermediate_count = sum(counts)
    slots.context.mamba_metadata.per_request_intermediate_counts = counts
    slots.commit_intermediate_states()
    slots.check_integrity()


def test_fault_09_deregistration_frees_slots_whatever_the_hashes() -> None:
    slots = host_allocator()
    slots.allocate_slots_batch([1, 2, 3])
    slots.register_block_hashes_batch([1], [101])
    slots.on_kv_blocks_deregistered([2, 3], {102})
    assert slots.free_count == 3
    slots.check_integrity()


def test_fault_10_requests_without_hashes_take_no_state() -> None:
    slots = host_allocator()
    slots.compute_and_store_offsets(host_request(12, hashes=()), 0, 0, 12, 0, [], 3)
    commit_step(slots)
    assert slots.slots.counts.committed == 0


def test_fault_11_evicting_a_block_with_a_duplicate_hash_keeps_the_other_blocks_entry() -> None:
    slots = host_allocator()
    slots.context.kv_block_allocator.block_hashes[2] = 101
    slots.allocate_slots_batch([1, 2])
    slots.register_block_hashes_batch([1, 2], [101, 101])
    slots.invalidate_block(2)
    assert slots.hash_to_block_id == {101: 1}
    slots.check_integrity()


def test_fault_12_a_failing_batch_allocation_consumes_no_free_slot() -> None:
    slots = host_allocator(slots=4)
    pinned = slots.allocate_slots_batch([1, 2])
    for slot in pinned:
        slots.pin(slot)
    with pytest.raises(ms.MambaSlotCapacityError):
        slots.allocate_slots_batch([5, 6, 7])
    assert slots.free_count == 2
    slots.check_integrity()


def test_fault_12_states_of_blocks_in_use_can_be_evicted() -> None:
    slots = host_allocator(slots=2)
    slots.allocate_slots_batch([1, 2])  # every block has a reference
    assert len(slots.allocate_slots_batch([3])) == 1


def test_fault_12_a_pool_smaller_than_the_steps_checkpoints_costs_states_and_not_the_step() -> None:
    slots = host_allocator(slots=1)
    slots.compute_and_store_offsets(host_request(14), 0, 0, 14, 1, [1], 4)
    assert int(slots._intermediate_counts_cpu[0]) == 2
    commit_step(slots)
    assert slots.slots.counts.committed == 1
    engine = small_engine(num_mamba_slots=1, checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK))
    serve_checked(engine, [random_tokens(60, seed=1), random_tokens(60, seed=2)])


@pytest.mark.usefixtures("kind")
def test_fault_13_an_admission_that_fails_leaves_no_reference_and_no_block_behind() -> None:
    context = make_context(num_kv_blocks=10)
    finished = make_request(random_tokens(24, seed=1))
    prefill(context, finished)
    context.release(finished)
    prefill(context, make_request(random_tokens(40, seed=2)))
    kv = context.prefix_cache.kv_blocks
    free, held = kv.total_avail, kv.num_held
    assert (
        context.admission.schedule_request(
            make_request(finished.prompt_tokens + random_tokens(40, seed=3)), 64
        )
        is None
    )
    assert (kv.total_avail, kv.num_held) == (free, held)
    context.check_integrity()


def test_fault_14_a_suspended_context_holds_no_pool_and_a_resumed_one_holds_one() -> None:
    context = make_context()
    tensors = [
        ref(context.memory.state_pool["ssm"]),
        ref(context.memory.state_pool["conv"]),
        ref(context.memory.kv_cache),
    ]
    prefill(context, make_request(random_tokens(20, seed=1)))
    context.suspend()
    assert [tensor() for tensor in tensors] == [None, None, None]
    assert context.memory.state_pool["ssm"].numel() == context.memory.kv_cache.numel() == 0
    context.resume()
    prefill(context, make_request(random_tokens(20, seed=1)))
    durable = context.memory.state_pool.durable("ssm")
    assert durable.untyped_storage().data_ptr() == context.memory.state_pool.memory.data_ptr()


# ---- lost hits


@pytest.mark.usefixtures("kind")
def test_fault_16_a_boundary_that_is_a_chunk_end_is_captured() -> None:
    context, prompt = make_context(), random_tokens(44, seed=1)
    prefill(context, make_request(prompt, SwitchedPlan(tail=False, branch=False)), budget=16)
    assert context.admission.match(make_request([*prompt[:32], 1])).resume_tokens == 32
    slots = host_allocator()
    slots.compute_and_store_offsets(host_request(14), 0, 0, 8, 0, [], 2)
    assert int(slots._eos_cache_block_id_cpu[0]) == 1


def test_fault_17_the_divergence_counts_the_blocks_of_earlier_chunks() -> None:
    slots = host_allocator()
    slots.compute_and_store_offsets(host_request(40, finished=16), 0, 0, 16, 2, [4, 5], 8)
    assert slots._intermediate_block_ids_cpu[0, 0] == 5  # position 24 = 16 before + 2 matched blocks
    assert slots._intermediate_offsets_cpu[0, 0] == 8


@pytest.mark.usefixtures("kind")
def test_fault_18_what_an_answer_computed_is_there_for_the_next_turn() -> None:
    engine, prompt = small_engine(), random_tokens(12, seed=1)
    (first,) = serve_checked(engine, [prompt], length=30)
    history = prompt + first.tokens
    (second,) = serve_checked(engine, [[*history, 1, 2]])
    assert second.num_resumed_tokens == (len(history) - 1) // BLOCK * BLOCK


@pytest.mark.usefixtures("kind")
def test_fault_19_a_kv_match_refreshes_no_state_that_was_not_consumed() -> None:
    context = make_context(num_mamba_slots=2, max_requests=4, eviction_policy="lru")
    plan = SwitchedPlan(step_ends=False, branch=False, decode="off")
    shallow, other = random_tokens(9, seed=1), random_tokens(9, seed=2)
    prefill(context, make_request(shallow, plan))
    prefill(context, make_request(other, plan))
    # Matches the KV of `shallow`, but computes every token: no state is consumed.
    unresumed = make_request(shallow, plan)
    unresumed.sampling = ms.SamplingParams(skip_prompt_log_probs=False)
    prefill(context, unresumed)
    prefill(context, make_request(random_tokens(9, seed=3), plan))
    assert (
        context.admission.match(make_request(shallow)).resume_tokens == 0
    )  # the least recently used state went
    assert context.admission.match(make_request(other)).resume_tokens == 8


def test_fault_20_a_block_that_is_no_multiple_of_the_ssd_chunk_is_not_passed_over_in_silence() -> None:
    with pytest.raises(ValueError, match="accepted: a multiple of 4, because"):
        make_context(block_size_tokens=6)
    with pytest.warns(UserWarning, match="no multiple of the SSD chunk"):
        host_allocator(ssm_chunk_alignment=6)


# ---- cost, by counting


class CountOps(TorchDispatchMode):
    """Counts the tensor operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_ops(call: Callable[[], object]) -> Counter[str]:
    with CountOps() as mode:
        call()
    return mode.counts


@pytest.mark.usefixtures("kind")
def test_fault_21_resuming_and_committing_copy_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    original = state_copy.copy_states
    for module in list(sys.modules.values()):
        if vars(module).get("copy_states") is original:
            monkeypatch.setattr(module, "copy_states", lambda *args: copies.append(1) or original(*args))
    engine = small_engine(checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK))
    prompts = [random_tokens(40, seed=1), random_tokens(24, seed=2)]
    for _ in range(2):
        results = serve_checked(engine, prompts, length=20)
    assert all(result.num_resumed_tokens for result in results)
    assert copies == []


def test_fault_21_a_hosts_commit_is_the_same_few_copies_for_one_state_or_many() -> None:
    def copies(states: int) -> Counter[str]:
        slots = host_allocator(slots=20)
        marks = tuple(4 * (i + 1) for i in range(states))
        slots._plan = SwitchedPlan(tail=False, step_ends=False, branch=False, marks=marks)
        slots.compute_and_store_offsets(host_request(40), 0, 0, 40, 0, [], 10)
        counts = slots._intermediate_counts_cpu[:1].tolist()
        slots.context.mamba_metadata.intermediate_count = sum(counts)
        slots.context.mamba_metadata.per_request_intermediate_counts = counts
        ops = count_ops(slots.commit_intermediate_states)
        assert slots.slots.counts.committed == states
        return Counter(
            {name: n for name, n in ops.items() if name in ("index", "index_put_", "copy_", "index_put")}
        )

    assert copies(1) == copies(3)
    assert copies(3)["index_put_"] == 2  # one for each of the two state tensors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fault_21_the_drop_in_commits_in_one_launch_and_restores_in_one(device: str) -> None:
    slots = host_allocator(slots=20, device=device)
    blocks, live = [5, 9, 2, 7, 11, 30, 8, 3], [2, 0, 3, 1]
    for scratch in (slots.intermediate_conv_out, slots.intermediate_ssm_out):
        scratch.copy_(torch.rand(scratch.shape))
    written = WrittenStates(blocks, list(range(len(blocks))), [], [], [100 + block for block in blocks])
    slots._collect_commit_data = lambda: written  # type: ignore[method-assign]

    def commit() -> None:
        slots.slots.remove(blocks)
        slots.commit_intermediate_states()

    commit()
    pending = list(zip(blocks[2:6], live, strict=True))
    slots.restore_batch(pending)
    for restored, scratch in (
        (slots.context.mamba_conv_states, slots.intermediate_conv_out),
        (slots.context.mamba_ssm_states, slots.intermediate_ssm_out),
    ):
        assert torch.equal(restored[:, live], scratch[:, 2:6])
    if device == "cuda":
        for call in (commit, lambda: slots.restore_batch(pending)):
            torch.cuda.synchronize()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
            ) as profile:
                call()
                torch.cuda.synchronize()
            on_device = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
            transfers = [name for name in on_device if name.startswith("Memcpy")]  # the list of states
            assert len(on_device) - len(transfers) == 1, on_device
            assert len(transfers) <= 1, on_device


def test_fault_22_a_steps_metadata_needs_no_synchronisation_and_the_same_operations_for_any_batch() -> None:
    def ops(requests: int, interval: int | None) -> Counter[str]:
        context = make_context(num_kv_blocks=100, max_requests=8, max_tokens_per_step=400)
        plan = ms.CheckpointPlan(prefill_interval=interval)
        chunks = [
            schedule(context, make_request(random_tokens(41, seed), plan), 400) for seed in range(requests)
        ]
        counts = count_ops(lambda: context.begin_step(chunks))
        context.abort_step()
        return counts

    one, many = ops(1, None), ops(8, BLOCK)
    for synchronising in ("_local_scalar_dense", "item", "nonzero", "equal"):
        assert one[synchronising] == many[synchronising] == 0
    assert one == many


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that run, this module's own excluded."""
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return lines


def test_fault_23_eviction_looks_at_slots_and_not_at_kv_blocks() -> None:
    def cost(blocks: int) -> tuple[int, int]:
        slots = host_allocator(slots=16, blocks=blocks)
        slots.allocate_slots_batch(list(range(16)))
        largest = 0

        class Largest(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                sizes = [arg.numel() for arg in args if isinstance(arg, torch.Tensor)]
                largest = max([largest, *sizes])
                return func(*args, **(kwargs or {}))

        with Largest():
            lines = lines_run(lambda: slots.allocate_slots_batch(list(range(16, 24))))
        return lines, largest

    assert cost(100) == cost(100_000)
