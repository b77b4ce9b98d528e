"""What Ray raises out of a call of a replica, which answers come in time, and what a caller gets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.errors import NoReplicaError
from mambaslots.fleet.known_replicas import KnownReplicas
from mambaslots.fleet.replica_answers import AnswerPart, EngineRequest, ReplicaLostError
from mambaslots.fleet.replica_questions import IngressQuestion

REQUEST = EngineRequest("one", (1, 2), 0, ms.SamplingParams(seed=1))


class Handle:
    """A deployment handle of Ray Serve whose replica says one part, and raises then."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.num_cancels = 0

    def options(self, **options: Any) -> "Handle":
        return self

    def remote(self, request: EngineRequest) -> "Handle":
        return self

    def cancel(self) -> None:
        self.num_cancels += 1

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        yield AnswerPart(replica="a")
        raise self._error


def raised(error: Exception) -> BaseException:
    from mambaslots.fleet.replica_calls import ReplicaCalls

    handle = Handle(error)

    async def main() -> None:
        async for part in ReplicaCalls(handle, KnownReplicas()).stream(REQUEST):
            assert part.replica == "a"

    with pytest.raises(Exception) as found:  # noqa: PT011
        asyncio.run(main())
    assert handle.num_cancels == 1
    return found.value


@pytest.mark.parametrize(
    "name",
    ["ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError", "OutOfMemoryError",
     "OwnerDiedError", "ObjectLostError", "LocalRayletDiedError"],
)  # fmt: skip
def test_what_is_gone_is_a_loss(name: str) -> None:
    """Another replica may answer."""
    import ray.exceptions

    kind = getattr(ray.exceptions, name)
    text = {"__init__": lambda self: None, "__str__": lambda self: "Traceback\n  it is gone\n"}
    found = raised(type(name, (kind,), text)())
    assert isinstance(found, ReplicaLostError)
    assert str(found) == "it is gone"


def test_errors_of_ray_serve_and_of_the_replica() -> None:
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

    deployment = DeploymentID(name="EngineReplica", app_name="test")
    assert isinstance(raised(DeploymentUnavailableError(deployment)), NoReplicaError)
    assert isinstance(raised(ReplicaUnavailableError("a")), ReplicaLostError)
    assert isinstance(raised(KeyError("a mistake")), KeyError)
    for error in (ConnectionError("reset"), TimeoutError("late")):  # of the way to the replica
        assert isinstance(raised(error), ReplicaLostError)


class Asked:
    """As much of Ray's `RunningReplica` as a question uses: it answers with a value, or raises it."""

    def __init__(self, value: Any, after_s: float) -> None:
        self._value, self._after_s = value, after_s
        self.num_open = self.most_open = 0

    def try_send_request(self, question: Any, with_rejection: bool) -> "Asked":
        assert not with_rejection  # a replica whose queue is full answers, too
        self.arguments = question.metadata.call_method, *question.args
        return self

    async def get_async(self) -> Any:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self._after_s)
        finally:
            self.num_open -= 1
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def test_a_replica_that_is_late_or_raises_takes_nothing_from_the_others() -> None:
    from mambaslots.fleet.replica_calls import answers_of

    async def main() -> None:
        loop = asyncio.get_running_loop()
        replicas = [Asked("late", 60.0), Asked(ValueError("x"), 0.0), Asked("b", 0.02), Asked("a", 0.0)]
        begun_s = loop.time()
        assert await answers_of(replicas[1:], "status", 60.0, 1) == ["b", "a"]
        assert loop.time() - begun_s < 5
        assert await answers_of(replicas, "status", 0.3) == ["b", "a"]
        assert 0.29 < loop.time() - begun_s < 5
        assert await answers_of([], "status", 60.0) == []
        assert replicas[3].arguments == ("status",)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_an_ingress_asks_a_replica_again_once_it_has_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow replica has one open question, and delays none of the others; silence is by its last answer.

    An answer that is lost, by whatever error, may have had changes: the replica then says all that it holds.
    """
    from mambaslots.fleet import ingress
    from ray.exceptions import ActorDiedError, RaySystemError

    monkeypatch.setattr(ingress, "_QUESTION_INTERVAL_S", 0.01)
    quick, slow = Asked(SimpleNamespace(events=None), 0.0), Asked(SimpleNamespace(events=None), 60.0)
    failing, dead = Asked(RaySystemError("cut"), 0.0), Asked(ActorDiedError(), 0.0)
    cut = Asked(ConnectionError("reset"), 0.0)
    known = KnownReplicas()
    answers: Counter[str] = Counter()
    monkeypatch.setattr(known, "record_answer", lambda name, events: answers.update([name]))

    async def main() -> None:
        asking = ingress.Ingress.__new__(ingress.Ingress)
        asking._known_replicas, asking._failing = known, set()
        asking._engine = SimpleNamespace(name="one", counts={"requests": 3})  # type: ignore[assignment]
        known.set_replicas({"quick": quick, "slow": slow, "failing": failing, "dead": dead, "cut": cut})
        known._complete_replicas |= {"slow", "failing"}
        listening = asyncio.create_task(asking._listen())
        async with asyncio.timeout(30):
            while answers["quick"] < 20 or "dead" in known.replicas:
                await asyncio.sleep(0.01)
        listening.cancel()

    asyncio.run(main())
    assert answers.keys() == {"quick"}
    assert [one.most_open for one in (quick, slow, failing, dead)] == [1, 1, 1, 1]
    assert quick.arguments == ("status", IngressQuestion("one", True, {"requests": 3}))
    assert sorted(known.replicas) == ["cut", "failing", "quick", "slow"]
    assert [name for name in ("slow", "failing", "cut") if known.lacks_states(name)] == ["failing", "cut"]
    assert [record.getMessage() for record in caplog.records] == ["mambaslots: no answer of replica cut"]
    assert caplog.records[0].exc_info is not None


class Silent(Handle):
    """A handle whose replica says one part, and then nothing for a while."""

    known: KnownReplicas

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        self.known.record_sent(REQUEST, "a")
        yield AnswerPart(replica="a")
        await asyncio.sleep(0.2)
        yield AnswerPart(finish_reason="stop")


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_stream_is_lost_with_a_replica_that_answers_no_question(
    monkeypatch: pytest.MonkeyPatch, others_answer: bool
) -> None:
    """A replica that is busy answers questions; and where no replica answers, none is better."""
    from mambaslots.fleet import replica_calls

    monkeypatch.setattr(replica_calls, "_POLL_INTERVAL_S", 0.02)
    now = [0.0]
    known = KnownReplicas(lambda: now[0])
    known.set_replicas({"a": None, "b": None})

    async def parts_of(handle: Handle, answering: str) -> int:
        number, handle.known = 0, known
        async for _ in replica_calls.ReplicaCalls(handle, known).stream(REQUEST):
            number += 1
            now[0] += 6.0
            if answering:
                known.record_answer(answering)
        return number

    silent = Silent(RuntimeError())
    if others_answer:
        with pytest.raises(ReplicaLostError, match="replica a answers nothing"):
            asyncio.run(parts_of(silent, "b"))
        assert silent.num_cancels == 1
    else:
        assert asyncio.run(parts_of(silent, "")) == 2
    assert asyncio.run(parts_of(Silent(RuntimeError()), "a")) == 2
    assert known.replica_of(REQUEST.request_id) == ""
