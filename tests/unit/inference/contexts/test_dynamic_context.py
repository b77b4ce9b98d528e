"""The context: admission is all or nothing, every chunk is matched, a step commits or leaves no trace."""

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest
from oracle.context_driver import BLOCK, make_context, make_request, prefill, run, schedule
from oracle.plans import SwitchedPlan
from oracle.serving import random_tokens, small_model

pytestmark = pytest.mark.usefixtures("kind")


def test_a_later_chunk_jumps_ahead_to_a_state_that_another_request_committed_meanwhile() -> None:
    context, prompt = make_context(), random_tokens(60, seed=1)
    tail_only = SwitchedPlan(step_ends=False, branch=False)
    slow, fast = make_request(prompt, tail_only), make_request(prompt, tail_only)
    run(context, schedule(context, slow, budget=16))
    prefill(context, fast)

    chunk = schedule(context, slow)

    assert (chunk.start, chunk.num_resumed, chunk.stop) == (56, 40, 60)
    assert slow.allocation.path.blocks[:7] == fast.allocation.path.blocks[:7]
    jumped = run(context, chunk)
    assert slow.ledger.resumed == 40
    assert slow.ledger.computed.total() == 20
    expected = prefill(make_context(), make_request(prompt))
    torch.testing.assert_close(jumped, expected, rtol=0, atol=1e-9)


def test_a_later_chunk_does_not_skip_on_a_kv_match_without_a_state() -> None:
    """Fault 2 of the stock context."""
    context, prompt = make_context(), random_tokens(60, seed=1)
    no_state_inside = SwitchedPlan(step_ends=False, branch=False)
    prefill(context, make_request([*prompt, 1], no_state_inside))
    request = make_request(prompt[:57], SwitchedPlan(step_ends=False))
    first = schedule(context, request, budget=16)
    assert (first.start, first.stop) == (56, 57)
    context.begin_step([first])
    context.abort_step()
    state_block = context.admission.match(request).blocks[6]
    context.prefix_cache.slots.remove([state_block])

    first = schedule(context, request, budget=16)
    run(context, first)
    second = schedule(context, request, budget=16)
    assert (first.start, first.stop, second.start, second.num_resumed) == (0, 16, 16, 0)


def test_recomputed_tokens_in_shared_blocks_do_not_write_their_kv_again() -> None:
    context, prompt = make_context(), random_tokens(40, seed=1)
    first = make_request(prompt)
    prefill(context, first)
    sibling = make_request(prompt[:20] + random_tokens(20, seed=2))
    chunk = schedule(context, sibling)
    assert sibling.allocation.path.blocks[:2] == first.allocation.path.blocks[:2]
    inputs = context.begin_step([chunk])
    assert chunk.start == 0
    assert inputs.kv_write_tokens.tolist() == list(range(16, 40))
    context.abort_step()


def test_twins_computed_in_the_same_step_end_up_sharing_the_blocks_registered_first() -> None:
    context, prompt = make_context(), random_tokens(33, seed=1)
    requests = [make_request(prompt), make_request(prompt)]
    run(context, *[schedule(context, request) for request in requests])
    assert requests[0].allocation.path.blocks[:4] == requests[1].allocation.path.blocks[:4]
    assert requests[0].allocation.path.blocks[4] != requests[1].allocation.path.blocks[4]
    assert context.prefix_cache.kv_blocks.num_held == 6


def test_admission_without_enough_blocks_changes_nothing() -> None:
    context = make_context(num_kv_blocks=10)
    held = make_request(random_tokens(40, seed=1))
    prefill(context, held)
    finished = make_request(random_tokens(24, seed=2))
    prefill(context, finished)
    context.release(finished)
    stats, order = context.cache_stats(), sorted(context.prefix_cache.kv_blocks.tree.block_of_hash.items())

    sharing_and_too_long = make_request(finished.prompt_tokens + random_tokens(30, seed=3))
    assert context.admission.schedule_request(sharing_and_too_long, 64) is None

    assert context.cache_stats() == stats
    assert sorted(context.prefix_cache.kv_blocks.tree.block_of_hash.items()) == order
    assert sharing_and_too_long.allocation is None
    context.check_integrity()


def test_a_step_that_ends_on_a_boundary_writes_the_durable_slot_and_is_read_from_there() -> None:
    context, prompt = make_context(), random_tokens(16, seed=1)
    request = make_request(prompt)
    chunk = schedule(context, request)
    inputs = context.begin_step([chunk])
    written = int(inputs.state_destinations[0])
    slots, live = context.prefix_cache.slots, chunk.allocation.live_slots
    assert written in map(context.memory.state_pool.durable_index, slots.reserved)
    assert slots.live_slots == set(live)
    with torch.inference_mode():
        small_model()(inputs)
    context.end_step()
    request.append([7], [None], 0.0)
    step = schedule(context, request)
    inputs = context.begin_step([step])
    assert int(inputs.state_sources[0]) == written
    assert int(inputs.state_destinations[0]) == live[0]
    context.abort_step()


def test_a_resumed_request_reads_its_durable_slot_which_stays_pinned_until_the_step_is_launched() -> None:
    context, prompt = make_context(), random_tokens(20, seed=1)
    prefill(context, make_request(prompt))
    request = make_request(prompt)
    chunk = schedule(context, request)
    slots = context.prefix_cache.slots
    slot = request.allocation.path.state_slot
    assert slots.pins == {slot: 1}
    inputs = context.begin_step([chunk])
    assert inputs.state_sources.tolist() == [context.memory.state_pool.durable_index(slot)]
    with torch.inference_mode():
        small_model()(inputs)
    context.end_step()
    assert slots.pins == {}


def test_an_aborted_step_leaves_what_was_cached_and_nothing_else() -> None:
    context, prompt = make_context(), random_tokens(40, seed=1)
    finished = make_request(prompt[:20])
    prefill(context, finished)
    context.release(finished)
    before = context.cache_stats()
    request = make_request(prompt)
    context.begin_step([schedule(context, request)])
    context.abort_step()
    context.check_integrity()
    after = context.cache_stats()
    assert (after.num_committed_slots, after.num_reserved_slots, after.num_free_slots) == (
        before.num_committed_slots, before.num_reserved_slots, before.num_free_slots,
    )  # fmt: skip
    assert after.num_held_kv_blocks == 0
    assert after.num_prompt_tokens == before.num_prompt_tokens


def test_checkpoints_inside_a_chunk_hold_the_state_after_exactly_those_tokens() -> None:
    from oracle.recurrent_lm import RecurrentLM

    context, prompt = make_context(), random_tokens(40, seed=1)
    request = make_request(prompt, ms.CheckpointPlan(prefill_interval=BLOCK))
    prefill(context, request)
    pool, oracle = context.memory.state_pool, RecurrentLM(small_model())
    for depth in range(1, 6):
        slot = context.prefix_cache.slots.cached_states.slot_of(request.allocation.path.blocks[depth - 1])
        for name, expected in oracle.states_after(prompt[: depth * BLOCK]).items():
            torch.testing.assert_close(pool.durable(name)[:, slot], expected, rtol=0, atol=1e-10)


def test_a_new_state_while_decoding_replaces_the_older_unless_a_request_resumed_from_it() -> None:
    def decode(context: DynamicInferenceContext, request: DynamicInferenceRequest, steps: int) -> None:
        for token in range(steps):
            request.tokens.append(token)
            run(context, schedule(context, request))

    def depths_with_state(context: DynamicInferenceContext, request: DynamicInferenceRequest) -> list[int]:
        slots = context.prefix_cache.slots
        return [
            i + 1
            for i, block in enumerate(request.allocation.path.blocks)
            if block in slots.cached_states.slot_of_block
        ]

    context = make_context()
    request = make_request(random_tokens(12, seed=1))
    prefill(context, request)
    decode(context, request, 14)
    assert depths_with_state(context, request) == [1, 3]
    reader = make_request(request.tokens[:25])
    prefill(context, reader)
    assert reader.ledger.resumed == 24
    decode(context, request, 16)
    assert depths_with_state(context, request) == [1, 3, 5]


@pytest.mark.parametrize("kind", ["Mamba-2"], indirect=True)
def test_a_block_that_the_ssd_chunk_does_not_divide_is_refused(kind: str) -> None:
    """Fault 20 of the stock context: no hit would ever be possible."""
    with pytest.raises(ValueError, match="block_size_tokens is 6; accepted: a multiple of 4, because"):
        make_context(block_size_tokens=6)


def test_the_start_up_line_says_what_the_bytes_went_to() -> None:
    line = make_context().memory.summary()
    for part in ("live states 3 x", "cached states 20 x", "KV 40 blocks of 8 tokens", "total", "cpu"):
        assert part in line


def test_reset_drops_requests_prefixes_and_counts() -> None:
    context = make_context()
    prefill(context, make_request(random_tokens(40, seed=1)))
    context.begin_step([schedule(context, make_request(random_tokens(20, seed=2)))])
    context.reset()
    context.check_integrity()
    stats = context.cache_stats()
    assert (
        stats.num_requests,
        stats.num_prompt_tokens,
        stats.num_committed_slots,
        stats.num_free_kv_blocks,
    ) == (0, 0, 0, 40)
    assert context.requests == []
