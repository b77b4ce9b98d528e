"""What a router reads of a `StateChannel`."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ..net.routing.state_events import decode_events
from ..net.routing.state_router import StateRouter
from .state_channel import News, StateChannel

logger = logging.getLogger(__name__)

NAMESPACE = "mambaslots"
"""Ray's namespace of the channels' actors."""
_READ_S = 10.0
_RETRY_S = 0.5
_MAX_READERS = 1000


def open_channel(name: str) -> Any:
    """The actor of a channel; made where there is none. It ends with the process that made it.

    Returns at once: the actor may still be starting.
    """
    actor = ray.remote(StateChannel).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,  # it begins empty, and asks all replicas for snapshots
        max_concurrency=_MAX_READERS,
    )
    return actor.remote()


def find_channel(name: str) -> Any | None:
    """The actor of a channel; None where nobody has made it yet."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


class ChannelReader:
    """Gives a router the events of a channel, as they come. A lost channel is opened again.

    Args:
        name: the channel's.
        router: takes the events.
        open_actor: makes or finds the channel's actor.
    """

    def __init__(
        self, name: str, router: StateRouter, open_actor: Callable[[str], Any] = open_channel
    ) -> None:
        self._name = name
        self._router = router
        self._open_actor = open_actor
        self._instance, self._version = "", 0
        self._known: set[str] = set()

    async def run(self) -> None:
        """Read until the task is cancelled; raises nothing else."""
        actor: Any = None  # who made the actor must not let go of it
        while True:
            try:
                actor = actor or self._open_actor(self._name)
                while True:
                    self.take(await actor.read.remote(self._instance, self._version, _READ_S))
            except ActorUnavailableError as error:
                logger.warning("mambaslots: the channel of states begins anew: %s", _first_line(error))
            except RayError as error:
                logger.warning("mambaslots: the channel of states is lost: %s", _first_line(error))
                actor = None
            except Exception:
                logger.exception("mambaslots: the channel of states was not read")
            await asyncio.sleep(_RETRY_S)

    def take(self, news: News) -> None:
        """Give the router what it has not heard, and let it forget replicas that the channel forgot."""
        self._instance, self._version = news.instance, news.version
        for encoded in news.events:
            if not self._router.apply(decode_events(encoded)):
                self._instance = ""  # the next read gives snapshots
        replicas = set(news.replicas)
        for gone in self._known - replicas:
            self._router.forget(gone)
        self._known = replicas


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
