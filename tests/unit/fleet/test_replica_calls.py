"""What Ray raises out of a call of a replica, which answers come in time, and what a caller gets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.errors import NoReplicaError
from mambaslots.fleet.pulses import Pulses
from mambaslots.fleet.replica_answers import AnswerPart, EngineRequest, ReplicaLostError

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
    from mambaslots.fleet.calls import ReplicaCalls

    handle = Handle(error)

    async def main() -> None:
        async for part in ReplicaCalls(handle, Pulses()).stream(REQUEST):
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


class Answer:
    """One replica's answer to a question to all."""

    def __init__(self, value: Any, after_s: float) -> None:
        self._value, self._after_s = value, after_s

    async def get_async(self) -> Any:
        await asyncio.sleep(self._after_s)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Asked:
    """A handle whose replicas answer with these; an exception: Ray does not name the replicas."""

    def __init__(self, found: list[Answer] | Exception, after_s: float = 0.0) -> None:
        self._found, self._after_s = found, after_s

    def options(self, **options: Any) -> "Asked":
        return self

    def broadcast(self, method: str) -> "Asked":
        return self

    async def _fetch_replica_results_async(self) -> list[Answer]:
        await asyncio.sleep(self._after_s)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_a_replica_that_is_late_or_raises_takes_nothing_from_the_others() -> None:
    """The others' answers come at once; Ray's own call raises one TimeoutError for all."""
    from mambaslots.fleet.calls import replica_answers
    from ray.exceptions import RaySystemError

    async def main() -> None:
        loop = asyncio.get_running_loop()
        replicas = [Answer("late", 60.0), Answer(ValueError("x"), 0.0), Answer("b", 0.02), Answer("a", 0.0)]
        begun_s, came_s = loop.time(), []
        answers = []
        async for answer in replica_answers(Asked(replicas), "status", 0.3):
            answers.append(answer)
            came_s.append(loop.time() - begun_s)
        assert answers == ["a", "b"]
        assert came_s[-1] < 0.25 < 0.29 < loop.time() - begun_s < 5
        for nothing in (Asked([]), Asked(RaySystemError("gone")), Asked(replicas, after_s=60.0)):
            assert [one async for one in replica_answers(nothing, "status", 0.05)] == []
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


class Silent(Handle):
    """A handle whose replica says one part, and then nothing for a while."""

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        yield AnswerPart(replica="a")
        await asyncio.sleep(0.2)
        yield AnswerPart(finish_reason="stop")


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_stream_is_lost_with_a_replica_that_answers_no_question(
    monkeypatch: pytest.MonkeyPatch, others_answer: bool
) -> None:
    """A replica that is busy answers questions; and where no replica answers, none is better."""
    from mambaslots.fleet import calls

    monkeypatch.setattr(calls, "_LOOK_S", 0.02)
    now = [0.0]
    pulses = Pulses(lambda: now[0])
    pulses.expect(["a", "b"])
    pulses.note_sent(REQUEST.request_id, "a")

    async def parts_of(handle: Handle, answering: str) -> int:
        number = 0
        async for _ in calls.ReplicaCalls(handle, pulses).stream(REQUEST):
            number += 1
            now[0] += 6.0
            if answering:
                pulses.note_answer(answering)
            pulses.note_sent(REQUEST.request_id, "a")
        return number

    silent = Silent(RuntimeError())
    if others_answer:
        with pytest.raises(ReplicaLostError, match="replica a answers nothing"):
            asyncio.run(parts_of(silent, "b"))
        assert silent.num_cancels == 1
    else:
        assert asyncio.run(parts_of(silent, "")) == 2
    assert asyncio.run(parts_of(Silent(RuntimeError()), "a")) == 2
    assert pulses.replica_of(REQUEST.request_id) in ("", "a")
