"""What Ray raises out of a call of a replica, and what its caller gets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.errors import NoReplicaError
from mambaslots.fleet.answers import AnswerPart, EngineRequest, ReplicaLostError

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
    from mambaslots.fleet.ingress import ReplicaCalls

    handle = Handle(error)

    async def main() -> None:
        async for part in ReplicaCalls(handle).stream(REQUEST):
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
