"""The ingress: the server's application, in a process that Ray Serve starts."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, cast

from fastapi import FastAPI

from ..inference.contexts.cache.hashing import SaltKey
from ..loaded_model import LoadedText
from ..serve.app import make_app_over
from ..serve.gate import add_host_check
from ..serve.generation import EngineFacts
from ..serve.service import Service
from ..serve.settings import ServerSettings
from . import FleetSettings
from .calls import ReplicaCalls, replica_answers
from .figures import ReplicaReport
from .fleet_engine import FleetEngine
from .guard import kill_when_still
from .pulses import pulses_of

_PULSE_S = 0.25
"""Between two questions which states the replicas hold, and whether they are there."""
_LONGEST_PULSE_S = 10.0
"""An answer that took so long says nothing."""
_REPORT_S = 5.0
_FIRST_S = 2.0


class Ingress:
    """What Ray Serve deploys as the application's ingress: the server over a `FleetEngine`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        replicas: Any,
        load_text: Callable[[], LoadedText],
        salt_key: bytes,
        server: ServerSettings,
        settings: FleetSettings,
    ) -> None:
        """`replicas`: the handle of their deployment. `load_text` loads text and defaults of the model."""
        kill_when_still(settings.still_s)
        self._pulses = pulses_of(settings.name)
        self._replicas = replicas
        self._load_text = load_text
        self._salt_key = SaltKey(salt_key)
        self._server = server
        self._settings = settings

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray calls this after the constructor."""
        facts = await self._facts()
        self._listening = asyncio.create_task(self._listen())
        engine = FleetEngine(
            facts,
            self._salt_key,
            ReplicaCalls(self._replicas, self._pulses).stream,
            num_replicas=lambda: self._pulses.num_serving,
            reports=self._reports,
            max_waiting_requests=self._server.max_waiting_requests,
        )
        app = make_app_over(engine, self._load_text(), self._server)
        self._service: Service = app.state.service
        add_host_check(app, self._server)
        return app

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the others as long as the settings say."""
        return await self._service.drain()

    async def _reports(self) -> list[ReplicaReport]:
        return [one async for one in replica_answers(self._replicas, "report", _REPORT_S)]

    async def _facts(self) -> EngineFacts:
        """Those of the first replica that answers."""
        while True:
            async with aclosing(replica_answers(self._replicas, "facts", _FIRST_S)) as answers:
                async for facts in answers:
                    return cast(EngineFacts, facts)
            await asyncio.sleep(_PULSE_S)

    async def _listen(self) -> None:
        """Ask every replica again and again for its states; a slow answer delays no question."""
        asking: set[asyncio.Task[None]] = set()
        while True:
            task = asyncio.create_task(self._hear())
            asking.add(task)
            task.add_done_callback(asking.discard)
            await asyncio.sleep(_PULSE_S)

    async def _hear(self) -> None:
        wanting_all, late = self._pulses.without_states, set(self._pulses.replicas)
        async for status in replica_answers(self._replicas, "status", _LONGEST_PULSE_S, wanting_all):
            self._pulses.note_answer(status.replica, status.events)
            late.discard(status.replica)
        self._pulses.note_late(late)
