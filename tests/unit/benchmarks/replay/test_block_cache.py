"""Caches of blocks and states, against a cache of plain prefix sets; and their indices after every step."""

import pytest
from block_cache import BlockCache, CoverageSlots, KVRecencySlots, PathCapSlots, StateSlots, TakenStates
from block_rows import StockStates
from blocks import BlockIndex
from hypothesis import given
from hypothesis import strategies as st
from loop import RequestLoop
from mambaslots.replay.setting import ReplaySetting
from marconi_row import MarconiCache, MarconiSlots
from oracle.prefix_cache_sets import PrefixSets
from oracle.short_traces import BLOCK, SMALL, request_lists, trace
from sglang_row import SGLangCache
from vllm_row import VLLMCache

Requests = list[tuple[list[int], list[int]]]
MAX_BLOCKS = 16
ONE_BY_ONE = ReplaySetting(SMALL, max_requests=1, max_tokens_per_step=100)


def resumed_of_each(cache: BlockCache, index: BlockIndex, requests: Requests) -> list[int]:
    """Tokens that each request resumes, one after another."""
    resumed = []
    before = 0
    for count in range(1, len(requests) + 1):
        fresh = RequestLoop(trace(requests[:count]), index.paths, cache, ONE_BY_ONE)
        for number in range(count - 1):
            fresh._arrivals.take_due(1 << 60)
            fresh._arrivals.schedule_next(number, 0)
        fresh._num_ended = count - 1
        resumed.append(fresh.run().resumed_tokens)
        before += resumed[-1]
    return resumed


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("branch", [False, True])
@given(requests=request_lists(), num_slots=st.integers(0, 4), num_kv=st.integers(MAX_BLOCKS, 2 * MAX_BLOCKS))
def test_resumes_what_plain_sets_resume(
    decode: bool, branch: bool, requests: Requests, num_slots: int, num_kv: int
) -> None:
    def plan(resumed: int, cached: int, num_prompt: int) -> list[int]:
        tail = num_prompt // BLOCK * BLOCK
        wanted = {tail, cached} if branch else {tail}
        return sorted(length for length in wanted if length > resumed)

    index = BlockIndex(trace(requests).requests, BLOCK)
    taken = TakenStates(tail=True, branch=branch, decode=decode)
    cache = BlockCache(index, num_kv, StateSlots(index, num_slots), taken)
    oracle = PrefixSets(BLOCK, num_kv, num_slots, plan, decode)
    expected = [oracle.serve(prompt, answer) for prompt, answer in requests]
    assert resumed_of_each(cache, index, requests) == expected
    assert cache.states.num_taken >= len(cache.states.slots) == len(oracle.states)
    assert cache.kv.num_cached == len(oracle.kv)


CACHES = {
    "lru": lambda index, kv, slots: BlockCache(
        index, kv, StateSlots(index, slots), TakenStates(tail=True, branch=True, step_ends=True, decode=True)
    ),
    "every": lambda index, kv, slots: BlockCache(
        index, kv, StateSlots(index, slots), TakenStates(every=True)
    ),
    "cap": lambda index, kv, slots: BlockCache(
        index, kv, PathCapSlots(index, slots, 2), TakenStates(every=True)
    ),
    "stock": lambda index, kv, slots: BlockCache(
        index, kv, KVRecencySlots(index, slots), StockStates(), answers=False, stateless_first=False
    ),
    "coverage": lambda index, kv, slots: BlockCache(
        index, kv, CoverageSlots(index, slots), TakenStates(every=True)
    ),
    "marconi": lambda index, kv, slots: MarconiCache(
        index, kv, MarconiSlots(index, slots, SMALL, [(0, 0.5)]), TakenStates()
    ),
    "sglang": lambda index, kv, slots: SGLangCache(index, kv, StateSlots(index, slots), 0),
    "sglang-live": lambda index, kv, slots: SGLangCache(index, kv, StateSlots(index, slots + 3), 3),
    "vllm": lambda index, kv, slots: VLLMCache(index, kv + 2 * slots, 1, 2),
}  # fmt: skip


class CheckedLoop(RequestLoop):
    """Checks the cache's indices after each step."""

    def _step(self) -> None:
        super()._step()
        self._cache.check_integrity()
        assert len(self._running) <= self._setting.max_requests


@pytest.mark.parametrize("name", CACHES)
@given(
    requests=request_lists(),
    num_slots=st.integers(0, 5),
    num_kv=st.integers(1, 2 * MAX_BLOCKS),
    max_requests=st.integers(1, 4),
    max_tokens_per_step=st.integers(4, 12),
    sessions=st.integers(0, 3),
    gap_s=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_integrity_holds_after_every_step(
    name: str,
    requests: Requests,
    num_slots: int,
    num_kv: int,
    max_requests: int,
    max_tokens_per_step: int,
    sessions: int,
    gap_s: float,
) -> None:
    served = trace(requests, gap_s=gap_s, sessions=sessions)
    index = BlockIndex(served.requests, BLOCK)
    cache = CACHES[name](index, num_kv, num_slots)
    num_blocks = cache.num_blocks if isinstance(cache, VLLMCache) else 0
    setting = ReplaySetting(SMALL, max_requests=max_requests, max_tokens_per_step=max_tokens_per_step)
    result = CheckedLoop(served, index.paths, cache, setting).run()
    assert result.num_requests == len(requests)
    assert 0 <= result.resumed_tokens <= result.prompt_tokens == sum(len(prompt) for prompt, _ in requests)
    if isinstance(cache, VLLMCache):
        assert cache.num_blocks == num_blocks
    else:
        assert cache.kv.num_private == cache.kv.num_held == 0
