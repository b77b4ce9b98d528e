"""Where routers send requests."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net import ROUTERS, ReplicaLoad, Router, RouteRequest, StateEvents
from mambaslots.net.routing import prefix_router, prospects, recent_work
from mambaslots.net.routing.prefix_router import PrefixRouter
from mambaslots.net.routing.prospects import Prospects
from mambaslots.net.routing.recent_work import RecentWork
from mambaslots.net.routing.state_router import StateRouter

BLOCK = 100
NAMES = ["a", "b", "c", "d"]
IDLE = [ReplicaLoad(name, 0) for name in NAMES]

every_router = pytest.mark.parametrize("name", ROUTERS)


def prompt(*texts: int, tail: int = 50, answer: int = 0) -> RouteRequest:
    """A prompt of a block for each text; a hash stands for all texts before it."""
    keys = [abs(hash(texts[: i + 1])) % (2**62) + 1 for i in range(len(texts))]
    return RouteRequest(keys, len(texts) * BLOCK + tail, BLOCK, answer)


def hold(router: Router, replica: str, *requests: RouteRequest) -> None:
    """The replica tells that it can resume behind these prompts, and behind nothing else."""
    keys = tuple(dict.fromkeys(request.keys[-1] for request in requests))
    router.forget(replica)
    assert router.apply(StateEvents(replica, 1, 0, keys, (), is_snapshot=True))


def loads(**num_requests: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(name, num_requests.get(name, 0)) for name in NAMES]


def sent(router: Router, requests: Sequence[RouteRequest], at: Sequence[ReplicaLoad] = IDLE) -> Counter[str]:
    return Counter(router.choose(request, at)[0] for request in requests)


# ---- all of them


@every_router
@given(seed=st.integers(0, 100), data=st.data())
def test_each_replica_is_named_once_and_equal_seeds_choose_alike(
    name: str, seed: int, data: st.DataObject
) -> None:
    routers = [ROUTERS[name](seed) for _ in range(2)]
    for number in range(8):
        names = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
        busy = [ReplicaLoad(one, data.draw(st.integers(0, 5)), number) for one in names]
        texts = data.draw(st.lists(st.integers(0, 2), max_size=4))
        request = prompt(*texts, tail=data.draw(st.sampled_from([0, 1, 50])) + (not texts))
        chosen, again = (router.choose(request, busy) for router in routers)
        assert list(chosen) == list(again)
        assert sorted(chosen) == sorted(names)
        for router in routers:
            if number % 3 == 0:
                router.note_routed(request, chosen[-1])
                router.apply(StateEvents(chosen[-1], 1, number, tuple(request.keys[-1:]), (), True))
            if number % 7 == 6:
                router.forget(chosen[0])


@every_router
@pytest.mark.parametrize("wrong", [[], [ReplicaLoad("a", 0), ReplicaLoad("a", 1)]], ids=["none", "twice"])
def test_replicas_that_cannot_be_told_apart_are_refused(name: str, wrong: list[ReplicaLoad]) -> None:
    with pytest.raises(ValueError, match="loads names"):
        ROUTERS[name](0).choose(prompt(1), wrong)


@every_router
def test_prompts_that_share_nothing_spread(name: str) -> None:
    found = sent(ROUTERS[name](3), [prompt(number, tail=30) for number in range(400)])
    assert max(found.values()) <= 1.25 * 100
    assert len(found) == 4


def test_only_the_router_by_state_reads_events() -> None:
    assert [name for name in ROUTERS if ROUTERS[name](0).reads_events] == ["state"]


def test_round_robin_takes_turns_when_replicas_come_and_go() -> None:
    router = ROUTERS["round-robin"](0)
    turns = [router.choose(prompt(1), IDLE)[0] for _ in range(6)]
    turns += [router.choose(prompt(1), IDLE[:2])[0] for _ in range(3)]
    assert "".join(turns) == "abcdab" + "aba"


def test_power_of_two_takes_the_shorter_queue_of_two() -> None:
    router = ROUTERS["power-of-two"](0)
    found = sent(router, [prompt(1)] * 600, loads(a=9, b=1, c=1, d=1))
    assert found["a"] == 0
    assert min(found[name] for name in "bcd") > 150


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
    (key,) = prompt(1, 2).keys[-1:]
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
            assert router.apply(StateEvents(first, 1, 0, (prompt(*head).keys[-1],), (), True))
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
    router.forget(first)
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


def test_a_small_excess_moves_nobody() -> None:
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
    of = work.of("ab")
    assert of["a"] == pytest.approx(100 * recent_work.REMEMBERED_REQUESTS, rel=0.02)
    assert of["b"] == pytest.approx(300 * recent_work.REMEMBERED_REQUESTS, rel=0.02)
    assert work.mean_request == pytest.approx(200, rel=0.02)
    assert work.of("abc")["c"] == pytest.approx(sum(of.values()) / 2)
    for _ in range(20 * recent_work.REMEMBERED_REQUESTS):
        work.add("c", 100)
    assert work.of("a")["a"] < 10
    work.forget("c")
    work.forget("unknown")
    assert work.of("c")["c"] == 0


def test_a_state_is_expected_for_a_while() -> None:
    waiting = Prospects()
    waiting.add([1, 2, 3], "a")
    assert waiting.deepest([1, 2, 9]) == ("a", 2)
    waiting.add([1, 2, 4], "b")
    assert waiting.deepest([1, 2, 3]) == ("a", 3)
    assert waiting.deepest([1, 2, 9]) == ("b", 2)
    for number in range(prospects.WAITING_REQUESTS - 1):
        waiting.add([100 + number], "a")
    assert waiting.deepest([1, 2, 3]) == ("a", 3)
    waiting.add([99], "a")
    assert waiting.deepest([1, 2, 3]) == ("b", 2)
    assert waiting.deepest([8]) == ("", 0)


def test_a_state_that_has_come_or_gone_is_expected_no_more() -> None:
    waiting = Prospects()
    waiting.add([1, 2], "a")
    waiting.settle([1, 2], "b")
    assert waiting.deepest([1, 2]) == ("a", 2)
    waiting.settle([2, 7], "a")
    assert waiting.deepest([1, 2]) == ("a", 1)
    waiting.forget("a")
    assert len(waiting) == 0


def test_prospects_are_bounded() -> None:
    waiting = Prospects()
    for number in range(40):
        waiting.add(range(number * 5000, number * 5000 + 5000), str(number))
        assert len(waiting) <= prospects.MAX_KEYS
    assert waiting.deepest([39 * 5000]) == ("39", 1)


# ---- by prefix, as Ray Serve does


def test_the_prefix_router_follows_what_was_sent_even_if_it_is_gone() -> None:
    router = PrefixRouter(0)
    first = router.choose(prompt(1, 2, 3), IDLE)[0]
    assert router.choose(prompt(1, 2, 3, 4), loads(**{first: 50}))[0] == first
    router.note_routed(prompt(1, 2, 3, 4), "d")
    assert router.choose(prompt(1, 2, 3, 4), loads(**{first: 1}))[0] == "d"
    router.forget("d")
    assert router.choose(prompt(1, 2, 3, 4), IDLE)[0] == first


def test_the_prefix_router_sends_little_known_prompts_to_who_was_sent_least() -> None:
    router = PrefixRouter(0)
    for name, number in zip(NAMES, (3, 1, 2, 3), strict=True):
        router.note_routed(prompt(*range(100 * number, 101 * number)), name)
    router.note_routed(prompt(7), "a")
    assert router.choose(prompt(7, *range(1000, 1011)), IDLE)[0] == "b", "one block of eleven and a half"
    assert router.choose(prompt(7, *range(2000, 2008)), IDLE)[0] == "a", "one of nine and a half"


def test_the_prefix_router_looks_at_queues_where_they_differ_too_much() -> None:
    router = PrefixRouter(0, imbalanced_threshold=3)
    first = router.choose(prompt(1, 2), IDLE)[0]
    assert router.choose(prompt(1, 2), loads(**{first: 3}))[0] == first
    others = [name for name in NAMES if name != first]
    found = sent(router, [prompt(1, 2)] * 60, loads(**{first: 4}))
    assert found[first] == 0
    assert set(found) == set(others)


def test_the_prefix_router_is_bounded() -> None:
    router = PrefixRouter(0)
    with patch.object(prefix_router, "MAX_BLOCKS", 5):
        router.note_routed(prompt(1, 2, 3), "d")
        router.note_routed(prompt(4, 5, 6, 7), "d")
        assert router.choose(prompt(1, 8, 9), IDLE)[0] == "d", "its deepest blocks are forgotten"
        assert router.choose(prompt(4, 5, 6, 7), IDLE)[0] == "d"


@pytest.mark.long
def test_the_prefix_router_chooses_as_ray_does() -> None:
    """The tree is Ray's own; what surrounds it follows `_prefix_match_best_replicas`."""
    tree_of_ray = pytest.importorskip("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree")
    for seed in range(20):
        draws, tree, router = Random(seed), tree_of_ray.PrefixTree(), PrefixRouter(seed)
        tree.add_tenants(NAMES, 0.0)
        for number in range(200):
            texts = [draws.randrange(3) for _ in range(draws.randint(1, 14))]
            busy = loads(**{name: draws.randrange(3) for name in NAMES})
            text = "".join(chr(65 + one) for one in texts)
            matched, tenants = tree.prefix_match(text, NAMES)
            if len(matched) / len(text) < 0.1:
                tenants = tree.get_smallest_tenants()
            candidates = [load for load in busy if load.replica in tenants]
            expected = min(candidates, key=lambda load: load.num_requests).replica
            chosen = router.choose(prompt(*texts, tail=0), busy)[0]
            assert chosen == expected, (seed, number)
            tree.insert(text, chosen, float(number + 1))


@pytest.mark.parametrize("answer", [60, 512])
def test_a_conversation_stays_with_its_state_while_nobody_else_comes(answer: int) -> None:
    """However long an answer may become, and though all that was sent went to one replica."""
    router, homes = StateRouter(), []
    for turn in range(1, 7):
        request = prompt(*range(turn), answer=answer)
        homes.append(router.choose(request, IDLE)[0])
        assert router.apply(StateEvents(homes[-1], turn, 0, tuple(request.keys), (), is_snapshot=True))
    assert len(set(homes)) == 1
