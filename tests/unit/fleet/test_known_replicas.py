"""Which replicas count as there, by when they answered, and what is known of their states."""

import asyncio
from dataclasses import replace
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
from mambaslots.fleet.known_replicas import KnownReplicas, known_replicas_of
from mambaslots.fleet.replica_answers import EngineRequest
from mambaslots.net.routing.state_events import StateEvents
from oracle.serving import random_tokens
from oracle.state_channel import keys_of
from oracle.transfers import engine_of

REQUEST = EngineRequest("one", (1,) * 60, 0, ms.SamplingParams(), hashes=(1, 2, 3), block_size_tokens=16)


def expect(known: KnownReplicas, names: list[str]) -> None:
    known.set_replicas({name: f"Ray's {name}" for name in names})


def test_a_replica_is_silent_where_another_one_answers() -> None:
    now = [0.0]
    known = KnownReplicas(lambda: now[0])
    assert known.num_serving == 0
    expect(known, ["a", "b"])
    assert known.num_serving == 2
    for now[0] in (1.0, 2.0, 3.0, 4.0, 5.0):
        known.record_answer("a")
    assert (known.num_serving, known.is_silent("a"), known.is_silent("b")) == (1, False, True)
    assert known.answering == ["Ray's a"]
    assert not known.is_silent("never named")
    known.record_answer("b")  # it continues
    assert (known.num_serving, known.is_silent("b")) == (2, False)
    expect(known, ["b", "c"])
    known.record_answer("a")  # late: Ray has dropped it
    assert known.num_serving == 2
    known.remove("c")
    assert known.num_serving == 1


def test_where_none_answers_none_is_silent_and_all_count_for_ten_seconds() -> None:
    now = [0.0]
    known = KnownReplicas(lambda: now[0])
    expect(known, ["a", "b"])
    now[0] = 9.0
    assert (known.num_serving, known.is_silent("a")) == (2, False)
    now[0] = 10.0
    assert (known.num_serving, known.is_silent("a")) == (0, False)


def test_where_requests_are() -> None:
    known = KnownReplicas()
    expect(known, ["a", "b"])
    known.record_sent(REQUEST, "a")  # its caller has left before it was sent
    assert known.replica_of("one") == ""
    known.begin("one")
    first = known.ranked(REQUEST, {"a": 0, "b": 0})[0]
    assert known.replica_of("one") == ""
    for name in ("a", "b", first):
        known.record_sent(REQUEST, name)
        assert known.replica_of("one") == name
    known.end("one")
    known.end("one")
    assert known.replica_of("one") == ""


def test_loads_count_what_is_chosen_until_it_ends() -> None:
    known = KnownReplicas()
    expect(known, ["a", "b"])
    requests = [replace(REQUEST, request_id=str(number), hashes=()) for number in range(4)]
    for request in requests:
        known.begin(request.request_id)
    firsts = [known.ranked(request, {"a": None, "b": None})[0] for request in requests]
    assert sorted(firsts) == ["a", "a", "b", "b"]
    for request in requests:
        known.record_sent(request, "b")  # "a" has no room
    other = replace(REQUEST, request_id="other", hashes=())
    assert known.ranked(other, {"a": 2, "b": 0}) == ("a", "b")
    assert known.ranked(other, {"a": 5, "b": 0}) == ("b", "a")
    for request in requests:
        known.end(request.request_id)
    assert known.ranked(other, {"a": 1, "b": 0}) == ("b", "a")


def test_a_replica_that_a_request_has_lost_is_tried_last() -> None:
    known = KnownReplicas()
    expect(known, ["a", "b"])
    known.record_answer("a", StateEvents("a", 1, 0, (1, 2), is_snapshot=True))
    assert known.ranked(REQUEST, {"a": 0, "b": 0}) == ("a", "b")
    assert known.ranked(replace(REQUEST, lost=("a",)), {"a": 0, "b": 0}) == ("b", "a")
    assert sorted(known.ranked(replace(REQUEST, lost=("a", "b")), {"a": 0, "b": 0})) == ["a", "b"]


def test_a_process_has_one_for_each_application() -> None:
    assert known_replicas_of("a-states") is known_replicas_of("a-states") is not known_replicas_of("b-states")


def test_a_replica_says_all_that_it_holds_where_something_is_missing() -> None:
    """New, after a gap, after an answer that was lost, and where Ray named it anew."""
    known = KnownReplicas()

    def lacking() -> set[str]:
        return {name for name in known.replicas if known.lacks_states(name)}

    known.record_answer("a", StateEvents("a", 1, 0, (1,)))  # unknown
    expect(known, ["a", "b"])
    assert lacking() == {"a", "b"}
    known.record_answer("a")
    assert lacking() == {"a", "b"}
    known.record_answer("a", StateEvents("a", 1, 0, (1, 2), is_snapshot=True))
    known.record_answer("a", StateEvents("a", 1, 1, (3,)))
    assert lacking() == {"b"}
    assert known.ranked(REQUEST, {"a": 0, "b": 0}) == ("a", "b")
    known.record_answer("a", StateEvents("a", 1, 3, (5,)))  # 2 was lost
    assert lacking() == {"a", "b"}
    known.record_answer("a", StateEvents("a", 1, 3, (1,), is_snapshot=True))
    known.mark_incomplete("a")
    assert lacking() == {"a", "b"}
    known.record_answer("a", StateEvents("a", 1, 3, (1,), is_snapshot=True))
    expect(known, ["b"])
    expect(known, ["a", "b"])
    assert lacking() == {"a", "b"}


def test_each_ingress_learns_all_changes_and_waits_for_none() -> None:
    from mambaslots.fleet.replica_questions import Ingresses, IngressQuestion

    engine, known_by = engine_of(), {"one": KnownReplicas(), "two": KnownReplicas()}
    for known in known_by.values():
        expect(known, ["a"])

    async def main() -> None:
        async with ms.AsyncEngine(engine) as server:
            ingresses = Ingresses(server.call, lambda: msd.StatePublisher(engine, "a"))

            async def asked(ingress: str) -> Any:
                known = known_by[ingress]
                events = ingresses.answer(IngressQuestion(ingress, known.lacks_states("a"), {}))
                known.record_answer("a", events)
                await server.call(lambda engine: None)  # the poll has ended
                await asyncio.sleep(0)
                return events

            async def changes(ingress: str) -> Any:
                while (events := await asked(ingress)) is None:
                    await asyncio.sleep(0.01)
                return events

            async with asyncio.timeout(30):
                for ingress, known in known_by.items():
                    assert await asked(ingress) is None
                    assert (await changes(ingress)).is_snapshot
                    assert not known.lacks_states("a")
                for seed in range(2):
                    await server.generate(random_tokens(60, seed))
                    for ingress in known_by:
                        while (events := await changes(ingress)).is_snapshot:  # of a look begun before
                            pass
                        assert events.inserted
                states = engine.context.prefix_cache.cached_states
                for ingress, known in known_by.items():
                    while keys_of(known._router.index, "a") != set(states.state_block_of_hash):
                        await asked(ingress)

    asyncio.run(main())
