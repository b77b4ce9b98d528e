"""Rows that know the trace, against all choices that there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.replay.ceiling import CEILING, best_of, exact_optimum
from mambaslots.replay.peers import PEERS
from mambaslots.replay.peers.blocks import BlockIndex
from mambaslots.replay.peers.future import KnownFuture, planned_uses
from mambaslots.replay.setting import ReplaySetting
from oracle.short_traces import BLOCK, SMALL, request_lists, trace

Requests = list[tuple[list[int], list[int]]]


def quiet(served: int, requests: int) -> None:
    assert 0 < served <= requests


def setting(num_slots: int, **changes: int) -> ReplaySetting:
    """One request after another, KV for everything, prompts in one step."""
    limits = {"max_requests": 1, "max_tokens": 200} | changes
    return ReplaySetting(SMALL, state_gb=4.0 * num_slots, kv_gb=1000.0, block_size_tokens=BLOCK, **limits)


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
            assert row.replay(served, setting(num_slots), quiet).resumed_tokens <= optimum, row.name


@given(requests=request_lists())
def test_all_is_resumed_where_all_states_fit(requests: Requests) -> None:
    served = trace(requests)
    for row in CEILING:
        assert row.replay(served, setting(200), quiet).resumed_tokens == unlimited(requests)
    every = next(row for row in PEERS if row.name == "every-block")
    assert every.replay(served, setting(200), quiet).resumed_tokens == unlimited(requests)


def test_belady_keeps_what_comes_again() -> None:
    often, once = [1, 1, 1, 1, 1], [[0, 0, 0, 0, token] for token in (0, 1)]
    requests = [(often, [0]), (once[0], [0]), (often, [0]), (once[1], [0]), (often, [0])]
    _, result = best_of(CEILING, trace(requests), setting(1), lambda served, total: None)
    assert result.resumed_tokens == exact_optimum(trace(requests), BLOCK, 1) == 8
    tail = next(row for row in PEERS if row.name == "tail")
    assert tail.replay(trace(requests), setting(1), quiet).resumed_tokens == 0


@given(requests=request_lists(), num_slots=st.integers(1, 4))
def test_planned_states_fit(requests: Requests, num_slots: int) -> None:
    index = BlockIndex(trace(requests).requests, BLOCK)
    future = KnownFuture(trace(requests), index)
    kept = planned_uses(future, num_slots)
    for now in range(len(requests)):
        assert sum(future.in_hand[number] <= now < number for number in kept) <= num_slots


def test_progress_of_several_rows_counts_on() -> None:
    seen: list[tuple[int, int]] = []
    requests = [([1, 1, 1], [0]), ([1, 1, 0], [0])]
    best_of(CEILING[:2], trace(requests), setting(1), lambda served, total: seen.append((served, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bad_arguments_are_named() -> None:
    served = trace([([1, 1], [0])])
    with pytest.raises(ValueError, match="rows is empty"):
        best_of((), served, setting(1), quiet)
    with pytest.raises(ValueError, match="num_slots=9"):
        exact_optimum(served, BLOCK, 9)
