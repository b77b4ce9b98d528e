"""Where the router by states sends requests."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from mambaslots.net.routing import state_router
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_router import (
    ExpectedStates,
    RecentWork,
    ReplicaLoad,
    RouteRequest,
    StateRouter,
)

BLOCK = 100
NAMES = ["a", "b", "c", "d"]
IDLE = [ReplicaLoad(name, 0) for name in NAMES]


def prompt(*texts: int, tail: int = 50, answer: int = 0) -> RouteRequest:
    """A prompt of a block for each text; a hash stands for all texts before it."""
    keys = [abs(hash(texts[: i + 1])) % (2**62) + 1 for i in range(len(texts))]
    return RouteRequest(keys, len(texts) * BLOCK + tail, BLOCK, answer)


def hold(router: StateRouter, replica: str, *requests: RouteRequest) -> None:
    """The replica publishes that it can resume after these prompts, and after nothing else."""
    keys = tuple(dict.fromkeys(request.hashes[-1] for request in requests))
    router.remove(replica)
    assert router.apply(StateEvents(replica, 1, 0, keys, (), is_snapshot=True))


def loads(**num_requests: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(name, num_requests.get(name, 0)) for name in NAMES]


def sent(
    router: StateRouter, requests: Sequence[RouteRequest], at: Sequence[ReplicaLoad] = IDLE
) -> Counter[str]:
    return Counter(router.choose(request, at)[0] for request in requests)


# ---- all of them


# ---- by state


def test_a_request_goes_to_the_deepest_state_whatever_longer_kv_is_elsewhere() -> None:
    router = StateRouter(0)
    hold(router, "a", prompt(1))
    hold(router, "b", prompt(1, 2, 3))
    hold(router, "c", prompt(1, 2))
    assert router.choose(prompt(1, 2, 3, 4), IDLE) == ["b", "c", "a", "d"]
    assert router.choose(prompt(1, 2, 9), IDLE)[:2] in (["c", "b"], ["c", "a"])


def test_a_state_behind_the_whole_prompt_is_of_no_use() -> None:
    router = StateRouter(0)
    hold(router, "a", prompt(1, 2))
    hold(router, "b", prompt(1))
    assert router.choose(prompt(1, 2, tail=0), IDLE)[0] == "b"
    assert router.choose(prompt(1, 2, tail=1), IDLE)[0] == "a"
    assert RouteRequest([], 0, BLOCK).num_resumable_blocks == 0


def test_what_has_left_counts_no_more() -> None:
    router = StateRouter(0)
    hold(router, "a", prompt(1, 2))
    hold(router, "b", prompt(1))
    (key,) = prompt(1, 2).hashes[-1:]
    assert router.apply(StateEvents("a", 1, 1, (), (key,)))
    assert not router.apply(StateEvents("a", 1, 3)), "a message is missing"
    assert router.choose(prompt(1, 2, 3), IDLE)[0] == "b"


def test_a_long_history_stays_at_a_busy_replica_and_a_short_one_leaves() -> None:
    router = StateRouter(0)
    sent(router, [prompt(100 + number, tail=100) for number in range(40)])  # requests of 200 tokens
    long, short = prompt(*range(30)), prompt(1)
    hold(router, "a", long, short)
    busy = loads(a=5)  # 1,000 tokens wait
    assert router.choose(prompt(*range(31)), busy)[0] == "a"
    assert router.choose(prompt(1, 2), busy)[0] != "a"


def test_a_head_of_all_prompts_spreads_to_all_replicas() -> None:
    """At most ten times of 1,000 the head of 2,000 tokens is computed beyond once a replica."""
    router, num_computed = StateRouter(0), 0
    found: Counter[str] = Counter()
    head = tuple(range(20))
    knows: set[str] = set()
    for number in range(1000):
        (first, *_) = router.choose(prompt(*head, 1000 + number, answer=200), IDLE)
        found[first] += 1
        if first not in knows:
            knows.add(first)
            num_computed += 1
            assert router.apply(StateEvents(first, 1, 0, (prompt(*head).hashes[-1],), (), True))
    assert max(found.values()) < 1.25 * 250
    assert num_computed <= 14


def test_a_burst_of_one_new_prefix_goes_to_one_replica() -> None:
    router = StateRouter(0)
    sent(router, [prompt(100 + number) for number in range(200)])
    head = tuple(range(40))
    found = [router.choose(prompt(*head, 1000 + number), IDLE)[0] for number in range(6)]
    assert len(set(found)) == 1


def test_a_burst_leaves_a_replica_that_it_overloads() -> None:
    router = StateRouter(0)
    sent(router, [prompt(100 + number) for number in range(200)])
    queue, found = Counter[str](), []
    for number in range(200):
        first = router.choose(prompt(*range(10), 1000 + number, answer=100), loads(**queue))[0]
        queue[first] += 1
        found.append(first)
    assert len(set(found[:3])) == 1
    assert max(queue.values()) < 1.25 * 50


def test_a_replica_that_joins_gets_its_share_and_no_more() -> None:
    router = StateRouter(0)
    sent(router, [prompt(number) for number in range(300)], IDLE[:3])
    found = sent(router, [prompt(1000 + number) for number in range(200)])
    assert 40 <= found["d"] <= 60


def test_a_replica_that_is_gone_is_expected_to_hold_nothing() -> None:
    router = StateRouter(0)
    history = prompt(*range(30))
    first = router.choose(history, IDLE)[0]
    assert router.choose(history, IDLE)[0] == first
    router.remove(first)
    assert router.choose(history, [load for load in IDLE if load.replica != first])[0] != first


def test_answers_count_up_to_a_length_that_is_usual() -> None:
    """A conversation whose caller allows 100,000 tokens does not drive itself away."""
    router = StateRouter(0)
    sent(router, [prompt(100 + number, answer=16) for number in range(200)])
    talk = prompt(*range(30), answer=100_000)
    first = router.choose(talk, IDLE)[0]
    for number in range(10):
        sent(router, [prompt(1000 + 8 * number + other, answer=16) for other in range(8)])
        assert router.choose(talk, IDLE)[0] == first


def test_a_small_excess_moves_no_request() -> None:
    """One conversation has no more than a tenth more work than the others, and stays."""
    router = StateRouter(0)
    talks = [tuple(range(100 * number, 100 * number + 3)) for number in range(4)]
    homes = [router.choose(prompt(*talk), IDLE)[0] for talk in talks]
    for home, talk in zip(homes, talks, strict=True):
        hold(router, home, prompt(*talk))
    draws = Random(0)
    for _ in range(100):
        for home, talk in zip(homes, talks, strict=True):
            if home == homes[0] or draws.random() < 0.95:
                assert router.choose(prompt(*talk, tail=60), IDLE)[0] == home


# ---- what the router by state remembers


def test_recent_work_is_that_of_the_last_requests() -> None:
    work = RecentWork()
    for _ in range(2000):
        work.add("a", 100)
        work.add("b", 300)
    of = work.tokens.copy()
    assert of["a"] == pytest.approx(100 * state_router.REMEMBERED_REQUESTS, rel=0.02)
    assert of["b"] == pytest.approx(300 * state_router.REMEMBERED_REQUESTS, rel=0.02)
    assert work.mean_request == pytest.approx(200, rel=0.02)
    work.insert("abc")
    assert work.tokens["c"] == pytest.approx(sum(of.values()) / 2)
    for _ in range(20 * state_router.REMEMBERED_REQUESTS):
        work.add("c", 100)
    assert work.tokens["a"] < 10
    work.remove("c")
    work.remove("unknown")
    work.insert("c")
    assert work.tokens["c"] == 0


def test_a_state_is_expected_for_a_while() -> None:
    waiting = ExpectedStates()
    waiting.add([1, 2, 3], "a")
    assert waiting.deepest([1, 2, 9]) == ("a", 2)
    waiting.add([1, 2, 4], "b")
    assert waiting.deepest([1, 2, 3]) == ("a", 3)
    assert waiting.deepest([1, 2, 9]) == ("b", 2)
    for number in range(state_router.WAITING_REQUESTS - 1):
        waiting.add([100 + number], "a")
    assert waiting.deepest([1, 2, 3]) == ("a", 3)
    waiting.add([99], "a")
    assert waiting.deepest([1, 2, 3]) == ("b", 2)
    assert waiting.deepest([8]) == ("", 0)


def test_a_state_that_has_come_or_gone_is_expected_no_more() -> None:
    waiting = ExpectedStates()
    waiting.add([1, 2], "a")
    waiting.remove_published([1, 2], "b")
    assert waiting.deepest([1, 2]) == ("a", 2)
    waiting.remove_published([2, 7], "a")
    assert waiting.deepest([1, 2]) == ("a", 1)
    waiting.remove("a")
    assert len(waiting) == 0


def test_prospects_are_bounded() -> None:
    waiting = ExpectedStates()
    for number in range(40):
        waiting.add(range(number * 5000, number * 5000 + 5000), str(number))
        assert len(waiting) <= state_router.MAX_EXPECTED_HASHES
    assert waiting.deepest([39 * 5000]) == ("39", 1)


@pytest.mark.parametrize("answer", [60, 512])
def test_a_conversation_stays_with_its_state_while_no_other_comes(answer: int) -> None:
    """However long an answer may become, and though all that was sent went to one replica."""
    router, homes = StateRouter(), []
    for turn in range(1, 7):
        request = prompt(*range(turn), answer=answer)
        homes.append(router.choose(request, IDLE)[0])
        assert router.apply(StateEvents(homes[-1], turn, 0, tuple(request.hashes), (), is_snapshot=True))
    assert len(set(homes)) == 1
