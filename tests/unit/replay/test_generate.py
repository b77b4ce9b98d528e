"""Generated traces: seeded, in order, and of the shapes that their names say."""

import hashlib
from itertools import groupby, pairwise

import numpy as np
import pytest
from mambaslots.replay.generate import KINDS, generate
from mambaslots.replay.trace import Trace, TraceRequest


def digest(trace: Trace) -> str:
    hashed = hashlib.sha256()
    for request in trace.requests:
        hashed.update(f"{request.arrival_s:.6f} {request.session} {len(request.prompt)};".encode())
        hashed.update(request.prompt.astype("<i4").tobytes())
        hashed.update(request.answer.astype("<i4").tobytes())
    return hashed.hexdigest()[:16]


def common(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter


def sessions(trace: Trace) -> list[list[TraceRequest]]:
    ordered = sorted(trace.requests, key=lambda request: (request.session, request.arrival_s))
    return [list(group) for _, group in groupby(ordered, key=lambda request: request.session)]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_arguments_give_equal_traces(kind: str) -> None:
    trace = generate(kind, 3, scale=0.05)
    assert digest(trace) == digest(generate(kind, 3, scale=0.05))
    assert digest(trace) != digest(generate(kind, 4, scale=0.05))


@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_in_order_with_int32_tokens(kind: str) -> None:
    trace = generate(kind, 0, scale=0.05)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace.requests))
    assert trace.requests[0].arrival_s >= 0.0
    for request in trace.requests:
        assert request.prompt.dtype == request.answer.dtype == np.int32
        assert min(len(request.prompt), len(request.answer)) >= 1
        assert request.prompt.min() >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_of_scale_one_has_enough_requests(kind: str) -> None:
    assert 1500 <= len(generate(kind, 1).requests) <= 3000


def test_a_longer_trace_begins_like_a_shorter_one() -> None:
    short, long = generate("unique", 2, scale=0.01), generate("unique", 2, scale=0.02)
    for few, many in zip(short.requests, long.requests, strict=False):
        assert few.arrival_s == many.arrival_s
        assert np.array_equal(few.prompt, many.prompt)


def test_a_chat_sends_its_whole_history_again() -> None:
    for session in sessions(generate("chat", 0, scale=0.05)):
        for before, after in pairwise(session):
            history = np.concatenate([before.prompt, before.answer])
            assert common(history, after.prompt) == len(history) < len(after.prompt)


def test_an_agent_parts_in_the_middle_once_observations_are_removed() -> None:
    for session in sessions(generate("agent", 0, scale=0.05)):
        for turn, (before, after) in enumerate(pairwise(session)):
            extends = common(before.prompt, after.prompt) == len(before.prompt)
            assert extends == (turn < 5)
            assert common(before.prompt, after.prompt) >= 2000


def test_questions_about_a_document_share_the_document_alone() -> None:
    for session in sessions(generate("documents", 0, scale=0.1)):
        shared = [common(session[0].prompt, one.prompt) for one in session[1:]]
        assert len(set(shared)) <= 1
        assert all(4000 <= tokens <= 32000 for tokens in shared)
        lengths = [len(one.prompt) for one in session[1:]]
        assert all(30 <= length - tokens <= 300 for length, tokens in zip(lengths, shared, strict=True))


def test_a_fork_goes_on_begins_again_or_turns_back() -> None:
    ways = {"on": 0, "again": 0, "back": 0}
    for session in sessions(generate("fork", 0, scale=0.3)):
        for before, after in pairwise(session):
            if np.array_equal(before.prompt, after.prompt):
                ways["again"] += 1
            elif common(before.prompt, after.prompt) == len(before.prompt):
                ways["on"] += 1
            else:
                ways["back"] += 1
    assert ways["on"] > ways["back"] > 0
    assert ways["again"] > 0


def test_unique_prompts_share_nothing() -> None:
    firsts = [tuple(request.prompt[:4]) for request in generate("unique", 0).requests]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("talk", 0), "kind is 'talk'; accepted: one of 'chat', 'agent', 'documents', 'fork', 'unique'"),
        (("chat", -1), "seed is -1"),
        (("chat", 0.5), "seed is 0.5"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(*arguments)


def test_a_bad_scale_is_named() -> None:
    with pytest.raises(ValueError, match="scale is nan"):
        generate("chat", 0, scale=float("nan"))
