"""Fault 18 in megatron-core's context: what a turn generated is resumed from by the next."""

from collections.abc import Iterator

import mambaslots as ms
import mambaslots.mcore
import pytest
import torch
from mambaslots.mcore.host_record import RequestTrack
from mambaslots.mcore.recurrence import BLOCK, RecurrenceDriver, make_context, tokens
from mcore.async_host import AsyncHost
from mcore_rig import cpu_as_gpu
from megatron.core.inference.inference_request import compute_block_hashes_batched

PROMPT = tokens(2 * BLOCK + 3, seed=1)


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


def next_turn(host: RecurrenceDriver, said: list[int]) -> int:
    return host.serve(said + tokens(3, seed=2))[0]


@pytest.mark.parametrize("generated", [4, 5, 6, 3 * BLOCK, 3 * BLOCK + 6])
def test_the_next_turn_resumes_at_the_last_boundary_that_was_computed(generated: int) -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        _, said = host.serve(PROMPT, new_tokens=generated)
        computed = len(said) - 1  # the last token was sampled, and not computed
        assert next_turn(host, said) == computed - computed % BLOCK
        host.check_idle()


def test_stock_resumes_within_the_prompt_only() -> None:
    host = RecurrenceDriver(make_context())
    _, said = host.serve(PROMPT, new_tokens=3 * BLOCK)
    assert next_turn(host, said) == 2 * BLOCK


def test_the_switch_turns_it_off() -> None:
    with mambaslots.mcore.installed(cache_answers=False):
        host = RecurrenceDriver(make_context())
        _, said = host.serve(PROMPT, new_tokens=3 * BLOCK)
        assert len(host.context.kv_block_allocator.kv_hash_to_block_id) == 2
        assert next_turn(host, said) == 2 * BLOCK


@pytest.mark.parametrize(("decode", "states"), [("rolling", 2), ("off", 1), (BLOCK, 4), (2 * BLOCK, 3)])
def test_which_states_of_an_answer_are_kept(decode: str | int, states: int) -> None:
    """The prompt's, and those at 3, 4 and 5 blocks: the last, none, all, those at even ones and the last."""
    with mambaslots.mcore.installed(plan=ms.CheckpointPlan(decode=decode)):  # type: ignore[arg-type]
        host = RecurrenceDriver(make_context())
        host.serve(PROMPT, new_tokens=3 * BLOCK)
        assert host.context.mamba_slot_allocator.slots.counts.committed == states


def test_an_older_state_of_an_answer_stays_where_a_request_resumed_from_it() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        first = host.add(PROMPT)
        while len(host.running[first].sequence) <= 3 * BLOCK:
            host.step()
        said = host.running[first].sequence[: 3 * BLOCK]
        other = host.add(said + tokens(4, seed=3))
        assert host.running[other].num_resumed == 3 * BLOCK
        for _ in range(2 * BLOCK):
            host.step()
        host.step(finish=(first, other))
        assert next_turn(host, said) == 3 * BLOCK
        host.check_idle()


def test_a_state_of_an_answer_without_a_slot_counts_as_dropped() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        first = host.add(PROMPT)
        host.step()
        allocator = host.context.mamba_slot_allocator
        slots, before = allocator.slots, allocator.num_dropped
        for slot in slots.cached_states.by_recency():
            slots.pin(slot)
        slots.allocate_live(slots.num_available)
        while len(host.running[first].sequence) <= 4 * BLOCK:
            host.step()
        assert slots.cached_states.turnover.num_refused == allocator.num_dropped - before == 2


def test_two_requests_with_one_answer_share_its_blocks() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        twins = [host.add(PROMPT), host.add(PROMPT)]
        for _ in range(2 * BLOCK):
            host.step()
        table = host.context.request_to_kv_block_ids
        assert torch.equal(table[0, :4], table[1, :4])
        assert host.context.kv_block_allocator.block_ref_counts[table[0, 3].long()] == 2
        host.step(finish=tuple(twins))
        host.check_idle()


def test_a_short_prompt_counts_too() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        _, said = host.serve(tokens(3, seed=4), new_tokens=2 * BLOCK)
        assert next_turn(host, said) == 2 * BLOCK


def test_with_async_scheduling_a_state_waits_for_its_last_token() -> None:
    with mambaslots.mcore.installed():
        host = AsyncHost(make_context())
        slots = host.context.mamba_slot_allocator
        host.async_step(admit=lambda: host.add(PROMPT))
        host.async_step()
        (one,) = host.running.values()
        while len(one.sequence) <= 4 * BLOCK + 2:
            host.overlapped_step()
            assert not slots.slots.reserved  # settled as soon as the token came
        said = list(one.sequence)
        host.async_step(finish=(0,))
        assert slots.slots.counts.committed == 2
        host.check_idle()
        assert next_turn(host, said) == 4 * BLOCK


def test_with_async_scheduling_a_request_that_ends_on_a_boundary_leaves_no_reservation() -> None:
    with mambaslots.mcore.installed():
        host = AsyncHost(make_context())
        host.async_step(admit=lambda: host.add(PROMPT))
        host.async_step()
        (one,) = host.running.values()
        while len(one.sequence) % BLOCK:
            host.overlapped_step()
        host.overlapped_step(finish=(0,))
        host.check_idle()


def test_with_drafts_answers_are_left_alone() -> None:
    with mambaslots.mcore.installed():
        context = make_context(num_speculative_tokens=2, max_requests=2)
        slots = context.mamba_slot_allocator
        context.batch_dimensions = context.batch_dimensions.__class__(3, 0, 1)
        assert slots.answers.find_crossings() == {}


def test_answers_are_hashed_as_the_host_hashes_prompts() -> None:
    said = tokens(4 * BLOCK, seed=5)
    prompt = torch.tensor(said[: BLOCK + 3])
    track = RequestTrack(prompt, compute_block_hashes_batched(prompt, BLOCK), BLOCK, said[BLOCK + 3 :])
    expected = compute_block_hashes_batched(torch.tensor(said), BLOCK)
    assert track.hashes_to(2) == expected[:2]
    assert track.hashes_to(4) == expected


def test_the_prompt_is_fetched_once_to_be_hashed() -> None:
    class OnDevice(torch.Tensor):
        fetched = 0

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            OnDevice.fetched += 1
            return self.as_subclass(torch.Tensor)

    said = tokens(4 * BLOCK, seed=5)
    prompt = torch.tensor(said[: 3 * BLOCK])
    keys = compute_block_hashes_batched(prompt, BLOCK)
    track = RequestTrack(prompt.as_subclass(OnDevice), keys, BLOCK, said[3 * BLOCK :])
    assert track.hashes_to(3) == keys
    assert track.hashes_to(4) == compute_block_hashes_batched(torch.tensor(said), BLOCK)
    assert OnDevice.fetched == 1


def test_another_way_of_hashing_is_noticed() -> None:
    prompt = torch.tensor(tokens(BLOCK + 3, seed=6))
    assert RequestTrack(prompt, [123], BLOCK, tokens(BLOCK, seed=7)).hashes_to(2) is None
