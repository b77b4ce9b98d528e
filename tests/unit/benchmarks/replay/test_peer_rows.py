"""What each row emulates: numbers from the systems' sources, and small traces whose outcome is known."""

from dataclasses import replace

import pytest
from block_cache import KVPool
from block_rows import StockRow, StockStates, num_scratch_slots
from blocks import BlockIndex
from hypothesis import given
from hypothesis import strategies as st
from loop import RunningRequest
from mambaslots.replay.setting import ModelShape, ReplaySetting
from marconi_row import MarconiSlots, flops_saved
from oracle.short_traces import BLOCK, SMALL, request_lists, trace
from rows import PEERS
from vllm_row import group_layers, page_tokens

STATE_BYTES = 24 * (128 * 64 * 128 * 4 + 10240 * 3 * 2)
NEMOTRON_H_8B = ModelShape("nemotron-h-8b", STATE_BYTES, STATE_BYTES, 16384, 128, 4096, 24, 4, 24, 128)
ROWS = {row.name: row for row in PEERS}

Requests = list[tuple[list[int], list[int]]]


def test_vllm_raises_the_attention_block_to_the_page_of_a_state() -> None:
    assert page_tokens(NEMOTRON_H_8B) == 1040
    assert group_layers(NEMOTRON_H_8B) == 4
    assert group_layers(replace(NEMOTRON_H_8B, num_attention_layers=20)) == 24


def test_stock_takes_scratch_out_of_the_budget() -> None:
    setting = ReplaySetting(NEMOTRON_H_8B, state_gb=2.0, kv_gb=20.0, max_tokens_per_step=8192)
    assert num_scratch_slots(setting) == 32
    assert num_scratch_slots(replace(setting, max_requests=4)) == 12
    assert num_scratch_slots(replace(setting, max_tokens_per_step=2048)) == 8
    requests = [([1] * 600, [0]), ([1] * 600, [0])]
    result = StockRow().replay(trace(requests), setting)
    assert result.state_capacity == result.resumed_tokens == 0
    result = StockRow().replay(trace(requests), replace(setting, state_gb=8.0))
    assert (result.state_capacity, result.resumed_tokens) == (52, 512)


def test_marconi_counts_flops_as_published() -> None:
    """One layer of each kind, D = 8, N = 4, a span of 2 tokens that ends at 6."""
    mamba = 12 * 2 * 64 + 16 * 2 * 8 * 4 + 10 * 2 * 8
    attention = (8 * 6 * 64 + 4 * 36 * 8) - (8 * 4 * 64 + 4 * 16 * 8)
    mlp = 16 * 2 * 64
    assert flops_saved(replace(SMALL, num_recurrent_layers=1), 4, 6) == mamba + attention + mlp


def test_marconi_weighs_age_against_flops() -> None:
    """Two states behind the root, one deep and old, one shallow and recent; a third one needs a slot."""
    prompts = [[1] * 21, [0, 1, 1], [0, 0, 1]]
    index = BlockIndex(trace([(prompt, [0]) for prompt in prompts]).requests, BLOCK)
    deep, shallow, third = (path[-1] for path in index.paths)
    for weight, victim in ((0.0, deep), (2.0, shallow)):
        slots = MarconiSlots(index, 2, SMALL, [(0, weight)])
        slots.bind(KVPool(index, 100))
        for number, node in enumerate((deep, shallow)):
            slots.came(number)
            assert slots.store(node)
        slots.came(2)
        assert slots.victim(third) == victim


def request(num_prompt: int, matched: int = 0) -> RunningRequest:
    return RunningRequest(0, [], num_prompt, num_prompt, num_prompt, matched=matched)


@pytest.mark.parametrize(
    ("num_prompt", "matched", "start", "end", "depths"),
    [
        (10, 0, 0, 10, [2]),  # the last boundary, 8, is also the one before the end
        (8, 0, 0, 8, [1, 2]),  # the prompt's end is a boundary; 4 is the one before it
        (30, 3, 4, 16, [3]),  # the end of cached KV, 12; the step's end, 16, is never taken
        (30, 0, 0, 16, [3]),  # a part of a prompt: the boundary before its end
        (18, 0, 16, 18, []),  # the last boundary, 16, is where the last step begins: it is lost
    ],
)
def test_stock_takes_its_three_boundaries(
    num_prompt: int, matched: int, start: int, end: int, depths: list[int]
) -> None:
    assert StockStates().of_prefill(request(num_prompt, matched), start, end, 4) == depths


def test_stock_caches_no_answers() -> None:
    turns = [([1, 1, 1], [0] * 6), ([1, 1, 1, *[0] * 6, 1], [0])]
    setting = ReplaySetting(SMALL, state_gb=100.0, kv_gb=100.0, block_size_tokens=BLOCK, max_requests=1)
    assert StockRow().replay(trace(turns), setting).resumed_tokens == 2
    assert ROWS["used-node"].replay(trace(turns), setting).resumed_tokens == 8


def test_a_branch_is_stored_by_the_second_and_used_by_the_third() -> None:
    shared = [1, 1, 1, 1]
    prompts = [([*shared, *ends], [0]) for ends in ([0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0])]
    setting = ReplaySetting(SMALL, state_gb=100.0, kv_gb=100.0, block_size_tokens=BLOCK, max_requests=1)
    for name in ("used-node", "sglang", "megatron-core"):
        assert ROWS[name].replay(trace(prompts), setting).resumed_tokens == 4, name
    assert ROWS["tail"].replay(trace(prompts), setting).resumed_tokens == 0


@pytest.mark.parametrize("name", ROWS)
@given(
    requests=request_lists(),
    budget=st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 40.0)),
    max_requests=st.integers(1, 4),
)
def test_two_replays_are_equal_and_leave_their_arguments(
    name: str, requests: Requests, budget: tuple[float, float], max_requests: int
) -> None:
    state_gb, kv_gb = budget
    apart = ReplaySetting(SMALL, state_gb, kv_gb, None, max_requests, 8, BLOCK)
    total = replace(apart, state_gb=None, kv_gb=None, total_gb=state_gb + kv_gb)
    for setting in (apart, total):
        first, second = (ROWS[name].replay(trace(requests), setting) for _ in range(2))
        assert first == second
        assert first.num_requests == len(requests)
        assert first.resumed_tokens <= first.prompt_tokens


def test_models_without_attention_have_states_only() -> None:
    bare = replace(SMALL, kv_bytes_per_token=0, num_attention_layers=0)
    setting = ReplaySetting(bare, state_gb=40.0, kv_gb=0.0, block_size_tokens=BLOCK, max_requests=1)
    served = trace([([1, 1, 1], [0]), ([1, 1, 1], [0])])
    for name, row in ROWS.items():
        if name == "vllm":
            with pytest.raises(ValueError, match="no attention"):
                row.replay(served, setting)
        else:
            assert row.replay(served, setting).resumed_tokens == 2, name


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_given(name: str) -> None:
    with pytest.raises(ValueError, match="total_gb"):
        ROWS[name].replay(trace([([1], [0])]), ReplaySetting(SMALL, block_size_tokens=BLOCK))
