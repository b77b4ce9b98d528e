"""Where the routers send requests that the router by states is compared with."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from unittest.mock import patch

import pytest
import routers
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_router import ReplicaLoad, RouteRequest
from routers import ROUTERS, PrefixRouter, Router

BLOCK = 100
NAMES = ["a", "b", "c", "d"]
IDLE = [ReplicaLoad(name, 0) for name in NAMES]

every_router = pytest.mark.parametrize("name", ROUTERS)


def prompt(*texts: int, tail: int = 50, answer: int = 0) -> RouteRequest:
    """A prompt of a block for each text; a hash stands for all texts before it."""
    keys = [abs(hash(texts[: i + 1])) % (2**62) + 1 for i in range(len(texts))]
    return RouteRequest(keys, len(texts) * BLOCK + tail, BLOCK, answer)


def loads(**num_requests: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(name, num_requests.get(name, 0)) for name in NAMES]


def sent(router: Router, requests: Sequence[RouteRequest], at: Sequence[ReplicaLoad] = IDLE) -> Counter[str]:
    return Counter(router.choose(request, at)[0] for request in requests)


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
                router.record_routed(request, chosen[-1])
                router.apply(StateEvents(chosen[-1], 1, number, tuple(request.hashes[-1:]), (), True))
            if number % 7 == 6:
                router.remove(chosen[0])


@every_router
@pytest.mark.parametrize("wrong", [[], [ReplicaLoad("a", 0), ReplicaLoad("a", 1)]], ids=["none", "twice"])
def test_replicas_that_cannot_be_distinguished_are_refused(name: str, wrong: list[ReplicaLoad]) -> None:
    with pytest.raises(ValueError, match="loads names"):
        ROUTERS[name](0).choose(prompt(1), wrong)


@every_router
def test_prompts_that_share_nothing_spread(name: str) -> None:
    found = sent(ROUTERS[name](3), [prompt(number, tail=30) for number in range(400)])
    assert max(found.values()) <= 1.25 * 100
    assert len(found) == 4


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


# ---- by prefix, as Ray Serve does


def test_the_prefix_router_follows_what_was_sent_even_if_it_is_gone() -> None:
    router = PrefixRouter(0)
    first = router.choose(prompt(1, 2, 3), IDLE)[0]
    assert router.choose(prompt(1, 2, 3, 4), loads(**{first: 50}))[0] == first
    router.record_routed(prompt(1, 2, 3, 4), "d")
    assert router.choose(prompt(1, 2, 3, 4), loads(**{first: 1}))[0] == "d"
    router.remove("d")
    assert router.choose(prompt(1, 2, 3, 4), IDLE)[0] == first


def test_the_prefix_router_sends_little_known_prompts_to_who_was_sent_least() -> None:
    router = PrefixRouter(0)
    for name, number in zip(NAMES, (3, 1, 2, 3), strict=True):
        router.record_routed(prompt(*range(100 * number, 101 * number)), name)
    router.record_routed(prompt(7), "a")
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
    with patch.object(routers, "MAX_BLOCKS", 5):
        router.record_routed(prompt(1, 2, 3), "d")
        router.record_routed(prompt(4, 5, 6, 7), "d")
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
