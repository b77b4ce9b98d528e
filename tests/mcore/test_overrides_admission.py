"""Admission in megatron-core's context: faults 1 to 5, 13, 17 and 21, each held against a recurrence."""

from collections.abc import Iterator
from typing import Any

import mambaslots as ms
import mambaslots.mcore
import pytest
import torch
from mambaslots.inference.contexts.hosts import states as host_states
from mambaslots.mcore import mixer
from mambaslots.mcore.mixer import SequenceStarts, carried_windows
from mambaslots.mcore.recurrence import BLOCK, WIDTH, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu, free_blocks
from mcore_rig.cuda_on_cpu import kernels_on_cpu
from megatron.core.inference.contexts import dynamic_context
from oracle.plans import SwitchedPlan
from torch import Tensor


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


def serve_on(allocator: str, prompts: list[list[int]], **sizes: Any) -> list[int]:
    """Resumed tokens of each; every state and key is checked on the way."""
    if allocator == "stock":
        host = RecurrenceDriver(make_context(**sizes))
        return [host.serve(prompt)[0] for prompt in prompts]
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context(**sizes))
        resumed = [host.serve(prompt)[0] for prompt in prompts]
        host.check_idle()
    return resumed


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_fault_01_a_repeat_of_length_1_mod_block_resumes_at_its_last_block(blocks: int) -> None:
    prompt = tokens(blocks * BLOCK + 1, seed=blocks)
    assert serve_on("ours", [prompt, prompt]) == [0, blocks * BLOCK]
    if blocks > 1:
        with pytest.raises(AssertionError):
            serve_on("stock", [prompt, prompt])


def test_fault_01_a_query_of_one_token_is_no_decode_step_to_the_attention_kernels() -> None:
    prompt = tokens(2 * BLOCK + 1, seed=1)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        host.add(prompt)
        host.context.initialize_attention_state()
        assert host.context.active_token_count == 1
        assert host.context.cu_query_lengths()[1] == 2
        assert not host.context.is_decode_only()


def no_state_beyond_the_first_block(host: RecurrenceDriver, prompt: list[int]) -> None:
    slots = host.context.mamba_slot_allocator
    host.serve(prompt)
    for block in list(slots.hash_to_block_id.values()):
        slots.invalidate_block(block)


def test_fault_02_a_continuation_chunk_skips_nothing_on_a_kv_match_alone() -> None:
    prompt = tokens(6 * BLOCK, seed=2)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        no_state_beyond_the_first_block(host, prompt)
        assert host.serve(prompt + tokens(3, seed=3), chunk=2 * BLOCK)[0] == 0
        host.check_idle()


def test_fault_02_a_continuation_chunk_resumes_where_there_is_a_state() -> None:
    """The prompt's states are at 5 and 6 blocks: within the third chunk, and not at its end."""
    prompt = tokens(6 * BLOCK, seed=2)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        assert host.serve(prompt + tokens(3, seed=3), chunk=2 * BLOCK)[0] == BLOCK
        host.check_idle()


def serve_twice_from_memory_only() -> RecurrenceDriver:
    prompt = tokens(6 * BLOCK + 2, seed=5)
    host = RecurrenceDriver(make_context(prefix_caching_mamba_gb=None))
    assert [host.serve(prompt, chunk=2 * BLOCK)[0] for _ in range(2)] == [0, 0]
    return host


def test_fault_02_memory_only_mode_skips_nothing() -> None:
    with mambaslots.mcore.installed():
        host = serve_twice_from_memory_only()
        assert int(host.context.kv_block_allocator.block_ref_counts.sum()) == 0
    with pytest.raises(AssertionError):
        serve_twice_from_memory_only()


def test_fault_04_a_restore_that_finds_no_state_is_an_error_and_copies_nothing() -> None:
    prompt = tokens(3 * BLOCK + 2, seed=6)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        host.add(prompt)
        slots = host.context.mamba_slot_allocator
        ((_, block, _),) = host.context._pending_mamba_restores
        slots.invalidate_block(block)
        with pytest.raises(RuntimeError, match="were to be restored, and have no state"):
            host.context.initialize_attention_state()


def test_fault_04_a_state_that_waits_to_be_restored_is_not_evicted() -> None:
    prompt = tokens(3 * BLOCK + 2, seed=6)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context(slots=2))
        host.serve(prompt)
        host.add(prompt)
        slots = host.context.mamba_slot_allocator
        with pytest.raises(ms.MambaSlotCapacityError):
            slots.allocate_slots_batch([50, 51])
        host.step(finish=(1,))
        host.check_idle()


def test_fault_05_a_prefix_registered_twice_keeps_naming_the_block_that_has_the_state() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        prompt = tokens(2 * BLOCK, seed=7)
        host.serve(prompt + tokens(3, seed=8))
        kv = host.context.kv_block_allocator
        before = dict(kv.kv_hash_to_block_id)
        (key, block), *_ = before.items()
        kv.register_kv_block_hashes([40], [key], [0])
        assert kv.kv_hash_to_block_id == before
        assert int(kv.block_hashes[40]) == -1
        kv.register_kv_block_hashes([block], [key], [0])
        assert int(kv.block_child_count[block]) == 1


def test_fault_05_a_block_completed_twice_gives_way_to_the_registered_one() -> None:
    """Two requests prefill the same prompt, cut within a block, so that neither finds the other's."""
    prompt = tokens(2 * BLOCK + 3, seed=9)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        first = host.add(prompt, chunk=BLOCK + 3)
        host.step()
        context = host.context
        partial = int(context.request_to_kv_block_ids[context.total_request_count, 1])
        kv = context.kv_block_allocator
        key = host.running[first].request.precomputed_block_hashes
        twin = int(kv.allocate_memory_blocks(1))
        context.memory_buffer[0, 0, twin, :, 0, 0] = torch.tensor(prompt[BLOCK : 2 * BLOCK]).float()
        kv.register_kv_block_hashes([twin], [key[1]], [key[0]])
        host.add_chunk(first)
        assert int(context.request_to_kv_block_ids[0, 1]) == twin != partial
        assert int(kv.block_ref_counts[partial]) == 0
        host.step(finish=(first,))
        kv.release_memory_blocks(torch.tensor([twin], dtype=torch.int32))
        host.check_idle()


def test_tokens_recomputed_in_shared_blocks_do_not_write_their_kv_again() -> None:
    prompt = tokens(3 * BLOCK + 2, seed=10)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        no_state_beyond_the_first_block(host, prompt)
        before = host.context.memory_buffer.clone()
        number = host.add(prompt[: 3 * BLOCK] + tokens(2, seed=11), chunk=2 * BLOCK + 3)
        shared = host.context.request_to_kv_block_ids[0, :3].clone()
        dummy = host.context.kv_block_allocator.dummy_block_idx
        assert host.context.token_to_block_idx[: 2 * BLOCK + 3].tolist() == [dummy] * (2 * BLOCK + 3)
        host.step()
        host.add_chunk(number)  # goes on within the third shared block
        host.step(finish=(number,))
        now, then = host.context.memory_buffer[:, :, shared], before[:, :, shared]
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))  # the host's new memory may be NaN
        host.check_idle()


# ---- capacity


@pytest.mark.parametrize("what", ["rows", "tokens", "live slots", "blocks"])
def test_fault_13_a_request_that_does_not_fit_leaves_nothing_behind(what: str) -> None:
    prompt = tokens(3 * BLOCK + 2, seed=12)
    sizes = {"rows": {"max_requests": 1}, "blocks": {"blocks": 5}}
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context(**sizes.get(what, {})))
        context, kv = host.context, host.context.kv_block_allocator
        host.serve(prompt)
        running = 6 * BLOCK if what == "tokens" else BLOCK + 5
        host.add(tokens(running, seed=13))
        if what == "live slots":
            while context.mamba_metadata.allocate_slot() is not None:
                pass
        error = {
            "rows": dynamic_context.RequestOverflowError,
            "tokens": dynamic_context.TokenOverflowError,
            "live slots": dynamic_context.ContextOverflowError,
            "blocks": dynamic_context.BlockOverflowError,
        }[what]
        before = picture(context)
        with pytest.raises(error):
            host.add(prompt[: 2 * BLOCK] + tokens(3 * BLOCK, seed=14))
        assert picture(context) == before
        assert int(kv.block_ref_counts.sum()) == -(-running // BLOCK)


def picture(context: Any) -> list[Any]:
    kv, slots = context.kv_block_allocator, context.mamba_slot_allocator
    return [
        free_blocks(context),
        kv.block_ref_counts.tolist(),
        dict(kv.kv_hash_to_block_id),
        slots.free_count,
        dict(slots.hash_to_block_id),
        dict(slots.slots.pins),
        context.total_request_count,
        context.active_token_count,
        context.mamba_metadata.mamba_state_free_slot_count,
        list(context._pending_mamba_restores),
        len(context._pending_mamba_zeros),
        context.prefix_cache_hits,
        mambaslots.mcore.stats(context),
    ]


def test_stock_leaks_what_such_a_request_had_taken() -> None:
    host = RecurrenceDriver(make_context(max_requests=1))
    host.add(tokens(BLOCK + 5, seed=13))
    with pytest.raises(dynamic_context.RequestOverflowError):
        host.add(tokens(3 * BLOCK, seed=14))
    assert int(host.context.kv_block_allocator.block_ref_counts.sum()) == 5


# ---- checkpoints


def test_fault_16_the_end_of_a_chunk_on_a_boundary_is_captured() -> None:
    prompt = tokens(4 * BLOCK + 3, seed=15)
    branch = prompt[: 2 * BLOCK] + tokens(5, seed=16)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt, chunk=2 * BLOCK)
        assert host.serve(branch)[0] == 2 * BLOCK
    stock = RecurrenceDriver(make_context())
    stock.serve(prompt, chunk=2 * BLOCK)
    assert stock.serve(branch)[0] == BLOCK


def test_fault_17_the_divergence_counts_blocks_of_earlier_chunks() -> None:
    plan = SwitchedPlan(tail=False, step_ends=False, decode="off")
    prompt = tokens(6 * BLOCK, seed=17)
    branch = prompt[: 5 * BLOCK] + tokens(2 * BLOCK, seed=18)
    with mambaslots.mcore.installed(plan=plan):
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        host.serve(branch, chunk=3 * BLOCK)
        assert host.serve(branch)[0] == 5 * BLOCK


def test_a_short_pool_keeps_the_states_that_the_plan_values_most() -> None:
    plan = ms.CheckpointPlan(prefill_interval=BLOCK, decode="off")
    prompt = tokens(6 * BLOCK + 3, seed=19)
    with mambaslots.mcore.installed(plan=plan):
        host = RecurrenceDriver(make_context(slots=1, max_requests=1))
        host.serve(prompt)
        assert host.serve(prompt)[0] == 6 * BLOCK
        host.check_idle()


def test_fault_21_a_step_restores_in_one_copy_and_commits_in_one_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []

    def counted(source: Any, read: Any, destination: Any, write: Any) -> None:
        copies.append(len(read))
        real(source, read, destination, write)

    real = host_states.copy_states
    monkeypatch.setattr(host_states, "copy_states", counted)
    prompts = [tokens(2 * BLOCK + i, seed=20 + i) for i in range(3)]
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        for prompt in prompts:
            host.serve(prompt)
        for prompt in prompts:
            host.add(prompt + tokens(2 * BLOCK - len(prompt) % BLOCK, seed=len(prompt)))
        copies.clear()
        host.step()
        assert copies[0] == 3
        assert len(copies) <= 3  # with one commit from scratch and one from live slots


def test_prompt_log_probs_need_every_token() -> None:
    prompt = tokens(3 * BLOCK, seed=30)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        number = host.add(prompt, return_log_probs=True, skip_prompt_log_probs=False)
        assert host.running[number].num_resumed == 0
        host.step(finish=(number,))
        number = host.add(prompt, return_log_probs=True, skip_prompt_log_probs=True)
        assert host.running[number].num_resumed == 2 * BLOCK


def test_requests_without_hashes_share_nothing() -> None:
    prompt = tokens(3 * BLOCK + 1, seed=31)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        for _ in range(2):
            number = host.add(prompt, hashed=False)
            assert host.running[number].num_resumed == 0
            host.step(finish=(number,))
        assert host.context.mamba_slot_allocator.slots.counts.committed == 0
        host.check_idle()


# ---- fault 3


@pytest.mark.parametrize("lengths", [[1, 2, 3, 4, 5], [0, 7, 0, 2]])
def test_fault_03_short_sequences_carry_the_window_before_them(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    count = len(lengths)
    before = torch.randn(count, 3, WIDTH, generator=generator)
    inputs = torch.randn(3, sum(lengths), generator=generator)
    starts = [sum(lengths[:i]) for i in range(count + 1)]
    after = torch.zeros_like(before)  # as the host leaves it: zeros on the left
    for i in range(count):
        kept = inputs[:, starts[i] : starts[i + 1]][:, -WIDTH:]
        after[i, :, WIDTH - kept.shape[1] :] = kept
    windows = carried_windows(before, after, torch.tensor(starts, dtype=torch.int32))
    for i in range(count):
        history = torch.cat([before[i], inputs[:, starts[i] : starts[i + 1]]], dim=1)
        assert torch.equal(windows[i], history[:, -WIDTH:])


@pytest.mark.parametrize(("lengths", "listed", "corrected"), [
    ([WIDTH, 9], True, False),
    ([9, WIDTH - 1], True, True),
    ([WIDTH, 9], False, True),
])  # fmt: skip
def test_fault_03_steps_without_short_sequences_correct_nothing(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], listed: bool, corrected: bool
) -> None:
    generator, calls = torch.Generator().manual_seed(2), []
    states = torch.randn(3, 4, WIDTH, generator=generator)
    rows, starts = torch.tensor([2, 0], dtype=torch.int32), [0, lengths[0], sum(lengths)]
    inputs = [torch.randn(4, length, generator=generator) for length in lengths]
    histories = [torch.cat([states[row], new], 1) for row, new in zip(rows.tolist(), inputs, strict=True)]
    kept = states[1].clone()

    def stock(*_: Any, **named: Any) -> Tensor:
        for row, new in zip(named["batch_indices"].tolist(), inputs, strict=True):
            states[row] = torch.cat([torch.zeros(4, WIDTH), new], 1)[:, -WIDTH:]
        return states

    def windows(*tensors: Tensor) -> Tensor:
        calls.append(len(tensors))
        return carried_windows(*tensors)

    monkeypatch.setattr(mixer, "carried_windows", windows)
    with kernels_on_cpu():
        mixer.ssm_prefill(
            stock, None, states, states, None, seq_idx=rows, batch_indices=rows,
            cu_seqlens=torch.tensor(starts, dtype=torch.int32),
            cu_seqlens_list=SequenceStarts(starts) if listed else None,
        )  # fmt: skip
    assert len(calls) == corrected
    assert torch.equal(states[1], kept)
    for row, history in zip(rows.tolist(), histories, strict=True):
        assert torch.equal(states[row], history[:, -WIDTH:])
