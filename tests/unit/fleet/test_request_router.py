"""The request router of Ray Serve that asks one of ours, with replicas that are not there."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.fleet.known_replicas import KnownReplicas
from mambaslots.fleet.replica_answers import EngineRequest
from mambaslots.net.routing.state_events import StateEvents

BLOCK = 16


@dataclass
class FakeReplica:
    """As much of Ray's `RunningReplica` as a request router uses."""

    replica_id: Any
    queue_length: int = 0
    max_ongoing_requests: int = 4
    node_id: str = "node"
    availability_zone: str | None = None
    multiplexed_model_ids: set[str] = field(default_factory=set)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_length


class Rig:
    """A request router over fake replicas, in an event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_replicas: int = 3) -> None:
        from mambaslots.fleet import request_router
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

        monkeypatch.setattr(request_router, "known_replicas_of", lambda application: KnownReplicas())
        deployment = DeploymentID(name="EngineReplica", app_name="test")
        self.router = request_router.FleetRequestRouter(
            deployment_id=deployment,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(application="test")
        self.replicas = [FakeReplica(ReplicaID(name, deployment)) for name in "abc"[:num_replicas]]
        self.router.update_replicas(self.replicas)
        self._num_requests = 0

    def request(self, keys: tuple[int, ...] = (), num_tokens: int = 100) -> Any:
        from ray.serve._private.common import RequestMetadata
        from ray.serve.request_router import PendingRequest

        self._num_requests += 1
        sampling = ms.SamplingParams(max_tokens=10)
        asked = EngineRequest(
            f"r{self._num_requests}", (1,) * num_tokens, 0, sampling, hashes=keys, block_size_tokens=BLOCK
        )
        metadata = RequestMetadata(
            request_id=asked.request_id, internal_request_id=asked.request_id, is_streaming=True
        )
        self.router._known_replicas.begin(asked.request_id)
        return PendingRequest(args=[asked], kwargs={}, metadata=metadata)

    async def order(self, pending: Any) -> str:
        ranks = await self.router.choose_replicas(self.replicas, pending)
        assert all(len(rank) == 1 for rank in ranks)
        return "".join(rank[0].replica_id.unique_id for rank in ranks)

    def holds(self, replica: str, *keys: int, sequence: int = 0) -> None:
        events = StateEvents(replica, 1, sequence, keys, (), is_snapshot=True)
        assert self.router._known_replicas._router.apply(events)


def test_a_request_goes_to_the_replica_with_its_deepest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(monkeypatch)
        rig.holds("a", 1)
        rig.holds("b", 1, 2, 3)
        rig.holds("c", 1, 2)
        assert await rig.order(rig.request((1, 2, 3, 4, 5, 6))) == "bca"

    asyncio.run(scenario())


def test_a_dead_replica_is_forgotten_and_a_full_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(monkeypatch)
        a, b, _ = (replica.replica_id for replica in rig.replicas)
        rig.holds("a", 1, 2)
        rig.router.on_replica_actor_died(a)
        assert rig.router._known_replicas._router.index.replicas == []
        rig.replicas = rig.replicas[1:]
        rig.holds("b", 1, 2, 3)
        rig.router.on_new_queue_len_info(b, 4)
        rig.replicas[0].queue_length = 4
        pending = rig.request((1, 2, 3, 4))
        replica = await asyncio.wait_for(rig.router._choose_replica_for_request(pending), 10)
        assert replica.replica_id.unique_id == "c"
        assert await rig.order(rig.request((1, 2, 3, 4, 5))) == "cb"  # its states are expected there now

    asyncio.run(scenario())


def test_a_silent_replica_gets_nothing_while_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    async def scenario() -> None:
        rig = Rig(monkeypatch)
        rig.router._known_replicas = known = KnownReplicas(lambda: now[0])
        rig.router.update_replicas(rig.replicas)
        rig.holds("a", 1, 2, 3)
        now[0] = 6.0
        assert (await rig.order(rig.request((1, 2, 3, 4))))[0] == "a"  # none answers: all are busy
        for name in "bc":
            known.record_answer(name)
        pending = rig.request((1, 2, 3, 4))
        assert sorted(await rig.order(pending)) == ["b", "c"]
        chosen = await asyncio.wait_for(rig.router._choose_replica_for_request(pending), 10)
        assert known.replica_of(pending.args[0].request_id) == chosen.replica_id.unique_id != "a"
        known.record_answer("a")
        assert sorted(await rig.order(rig.request((1, 2, 3, 4)))) == ["a", "b", "c"]

    asyncio.run(scenario())


def test_each_request_gets_the_replica_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that was chosen for the request in front of it."""

    async def scenario() -> None:
        rig = Rig(monkeypatch)
        for number, name in enumerate("abc"):
            rig.holds(name, *range(10 * number + 1, 10 * number + 7))
        for replica in rig.replicas:
            rig.router.on_new_queue_len_info(replica.replica_id, 0)
        wanted = "cabbca"
        pending = [
            rig.request(tuple(range(10 * "abc".index(name) + 1, 10 * "abc".index(name) + 7)))
            for name in wanted
        ]
        chosen = await asyncio.gather(*(rig.router._choose_replica_for_request(one) for one in pending))
        assert "".join(replica.replica_id.unique_id for replica in chosen) == wanted

    asyncio.run(scenario())


def test_a_burst_is_spread_though_ray_knows_of_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(monkeypatch)
        firsts = [(await rig.order(rig.request(tuple(range(n, n + 6)))))[0] for n in range(1, 600, 10)]
        counts = sorted(firsts.count(one) for one in "abc")
        assert counts[0] >= 10, counts

    asyncio.run(scenario())


def test_what_is_no_request_of_an_engine_goes_to_any_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(monkeypatch)
        question = rig.request()
        for question.args in ([], ["prompt"]):
            assert await rig.order(question) == "abc"
        assert await rig.order(None) == "abc"
        assert await rig.router.choose_replicas([], rig.request()) == []

    asyncio.run(scenario())


def test_a_request_that_waits_for_room_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks again, several times a second, as long as all replicas are full."""

    async def scenario() -> None:
        rig, other = Rig(monkeypatch), Rig(monkeypatch)
        waiting = [rig.request((1, 2, 3)), rig.request((1, 2, 3, 4))]
        others = [other.request((1, 2, 3)), other.request((1, 2, 3, 4))]
        orders = [await rig.order(pending) for pending in waiting]
        assert [await other.order(pending) for pending in others] == orders
        for _ in range(50):
            assert [await rig.order(pending) for pending in waiting] == orders
        for number in range(9):
            keys = (1, 2, 3, 4, number + 9)
            assert await rig.order(rig.request(keys)) == await other.order(other.request(keys))
        rig.replicas = rig.replicas[:2]  # one has gone: the request is routed anew
        assert len(await rig.order(waiting[0])) == 2

    asyncio.run(scenario())
