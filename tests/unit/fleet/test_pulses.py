"""Which replicas count as there, by when they answered, and what is known of their states."""

import asyncio
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
from mambaslots.fleet.pulses import Pulses, pulses_of
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_router import ReplicaLoad, RouteRequest
from oracle.serving import random_tokens
from oracle.transfers import engine_of


def test_a_replica_is_silent_where_another_one_answers() -> None:
    now = [0.0]
    pulses = Pulses(lambda: now[0])
    assert pulses.num_serving == 0
    pulses.expect(["a", "b"])
    assert pulses.num_serving == 2
    for now[0] in (1.0, 2.0, 3.0, 4.0, 5.0):
        pulses.note_answer("a")
    assert (pulses.num_serving, pulses.is_silent("a"), pulses.is_silent("b")) == (1, False, True)
    assert not pulses.is_silent("never named")
    pulses.note_answer("b")  # it continues
    assert (pulses.num_serving, pulses.is_silent("b")) == (2, False)
    pulses.expect(["b", "c"])
    pulses.note_answer("a")  # late: Ray has dropped it
    assert pulses.num_serving == 2
    pulses.forget("c")
    assert pulses.num_serving == 1


def test_where_none_answers_none_is_silent_and_all_count_for_ten_seconds() -> None:
    now = [0.0]
    pulses = Pulses(lambda: now[0])
    pulses.expect(["a", "b"])
    now[0] = 9.0
    assert (pulses.num_serving, pulses.is_silent("a")) == (2, False)
    now[0] = 10.0
    assert (pulses.num_serving, pulses.is_silent("a")) == (0, False)


def test_where_requests_are() -> None:
    pulses = Pulses()
    assert pulses.replica_of("one") == ""
    pulses.note_sent("one", "a")
    pulses.note_sent("one", "b")
    assert pulses.replica_of("one") == "b"
    pulses.note_ended("one")
    pulses.note_ended("one")
    assert pulses.replica_of("one") == ""


def test_a_process_has_one_for_each_application() -> None:
    assert pulses_of("a-states") is pulses_of("a-states") is not pulses_of("b-states")


def test_a_replica_says_all_that_it_holds_where_something_is_missing() -> None:
    """New, after a gap, after an answer that was late, and where Ray named it anew."""
    pulses = Pulses()
    pulses.note_answer("a", StateEvents("a", 1, 0, (1,)))  # unknown
    pulses.expect(["a", "b"])
    assert pulses.without_states == {"a", "b"}
    pulses.note_answer("a")
    assert pulses.without_states == {"a", "b"}
    pulses.note_answer("a", StateEvents("a", 1, 0, (1, 2), is_snapshot=True))
    pulses.note_answer("a", StateEvents("a", 1, 1, (3,)))
    assert pulses.without_states == {"b"}
    request, loads = RouteRequest((1, 2, 3), 60, 16), [ReplicaLoad("a", 0), ReplicaLoad("b", 0)]
    assert pulses.choose(request, loads) == ["a", "b"]
    pulses.note_answer("a", StateEvents("a", 1, 3, (5,)))  # 2 was lost
    assert pulses.without_states == {"a", "b"}
    pulses.note_answer("a", StateEvents("a", 1, 3, (1,), is_snapshot=True))
    pulses.note_late(["a"])
    assert pulses.without_states == {"a", "b"}
    pulses.note_answer("a", StateEvents("a", 1, 3, (1,), is_snapshot=True))
    pulses.expect(["b"])
    pulses.expect(["a", "b"])
    assert pulses.without_states == {"a", "b"}


def test_looks_bring_all_changes_though_a_caller_waits_for_none() -> None:
    from mambaslots.fleet.replica import StateLooks

    engine, pulses = engine_of(), Pulses()
    pulses.expect(["a"])

    async def main() -> None:
        async with ms.AsyncEngine(engine) as server:
            looks = StateLooks(server, msd.StatePublisher(engine, "a"))

            async def asked() -> Any:
                events = looks.next("a" in pulses.without_states)
                pulses.note_answer("a", events)
                await server.call(lambda engine: None)  # the look has ended
                await asyncio.sleep(0)
                return events

            async def changes() -> Any:
                while (events := await asked()) is None:
                    await asyncio.sleep(0.01)
                return events

            async with asyncio.timeout(30):
                assert await asked() is None
                assert (await changes()).is_snapshot
                assert not pulses.without_states
                for seed in range(2):
                    await server.generate(random_tokens(60, seed))
                    while (events := await changes()).is_snapshot:  # of a look that had begun before
                        pass
                    assert events.inserted
                tree = engine.context.prefix_cache.tree
                while pulses._router.index.keys_of("a") != set(tree.hash_to_block_id):
                    await asked()

    asyncio.run(main())
