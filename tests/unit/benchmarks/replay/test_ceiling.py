"""Rows that know the trace, against all choices that there are."""

from itertools import combinations

from blocks import BlockIndex
from clairvoyant import CEILING, KnownFuture, planned_uses
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.replay.setting import ReplaySetting
from mambaslots.replay.trace import Trace
from oracle.short_traces import BLOCK, SMALL, request_lists, trace
from rows import PEERS

Requests = list[tuple[list[int], list[int]]]


def setting(num_slots: int, **changes: int) -> ReplaySetting:
    """One request after another, KV for everything, prompts in one step."""
    limits = {"max_requests": 1, "max_tokens_per_step": 200} | changes
    return ReplaySetting(SMALL, state_gb=4.0 * num_slots, kv_gb=1000.0, block_size_tokens=BLOCK, **limits)


def exact_optimum(served: Trace, block_size: int, num_slots: int) -> int:
    """The most tokens that any choice of states resumes, one request after another, with KV for all.

    Every choice is tried: where to resume, and which states to keep of those that are cached or computed.
    """
    index = BlockIndex(served.requests, block_size)
    useful: list[set[int]] = [set() for _ in range(len(served.requests) + 1)]
    for number in range(len(served.requests) - 1, -1, -1):
        reach = (len(served.requests[number].prompt) - 1) // block_size
        useful[number] = useful[number + 1] | set(index.paths[number][:reach])
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for number, (request, path) in enumerate(zip(served.requests, index.paths, strict=True)):
        following: dict[frozenset[int], int] = {}
        reach = (len(request.prompt) - 1) // block_size
        for cached, resumed in best.items():
            starts = [depth for depth in range(1, min(reach, len(path)) + 1) if path[depth - 1] in cached]
            for start in (0, *starts):
                there = (cached | set(path[start:])) & useful[number + 1]
                for kept in combinations(sorted(there), min(num_slots, len(there))):
                    key, total = frozenset(kept), resumed + start * block_size
                    if total > following.get(key, -1):
                        following[key] = total
        best = following
    return max(best.values())


def unlimited(requests: Requests) -> int:
    """Tokens that are resumed where every state stays: by all pairs of requests."""
    total = 0
    for number, (prompt, _) in enumerate(requests):
        deepest = 0
        for before, answer in requests[:number]:
            known = (before + answer)[:-1]
            same = 0
            while same < min(len(known), len(prompt) - 1) and known[same] == prompt[same]:
                same += 1
            deepest = max(deepest, same // BLOCK * BLOCK)
        total += deepest
    return total


@given(requests=request_lists(max_requests=6), num_slots=st.integers(0, 2))
def test_no_row_beats_the_best_choice(requests: Requests, num_slots: int) -> None:
    served = trace(requests)
    optimum = exact_optimum(served, BLOCK, num_slots)
    assert optimum <= unlimited(requests)
    for row in (*CEILING, *PEERS):
        if row.name != "vllm":
            assert row.replay(served, setting(num_slots)).resumed_tokens <= optimum, row.name


@given(requests=request_lists())
def test_all_is_resumed_where_all_states_fit(requests: Requests) -> None:
    served = trace(requests)
    for row in CEILING:
        assert row.replay(served, setting(200)).resumed_tokens == unlimited(requests)
    every = next(row for row in PEERS if row.name == "every-block")
    assert every.replay(served, setting(200)).resumed_tokens == unlimited(requests)


def test_belady_keeps_what_comes_again() -> None:
    often, once = [1, 1, 1, 1, 1], [[0, 0, 0, 0, token] for token in (0, 1)]
    requests = [(often, [0]), (once[0], [0]), (often, [0]), (once[1], [0]), (often, [0])]
    best = max(row.replay(trace(requests), setting(1)).resumed_tokens for row in CEILING)
    assert best == exact_optimum(trace(requests), BLOCK, 1) == 8
    tail = next(row for row in PEERS if row.name == "tail")
    assert tail.replay(trace(requests), setting(1)).resumed_tokens == 0


@given(requests=request_lists(), num_slots=st.integers(1, 4))
def test_planned_states_fit(requests: Requests, num_slots: int) -> None:
    index = BlockIndex(trace(requests).requests, BLOCK)
    future = KnownFuture(trace(requests), index)
    kept = planned_uses(future, num_slots)
    for now in range(len(requests)):
        assert sum(future.in_hand[number] <= now < number for number in kept) <= num_slots
