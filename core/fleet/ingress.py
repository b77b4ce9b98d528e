"""An ingress: the server's application, in a process that Ray Serve starts."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import RayServeException

from ..inference.contexts.cache.hashing import SaltKey
from ..loaded_model import LoadedText
from ..serve.app import make_app_over
from ..serve.middleware import add_host_header_check
from ..serve.served_engine import EngineFacts
from ..serve.server_settings import ServerSettings
from ..serve.service import Service
from .fleet_engine import FleetEngine
from .fleet_settings import FleetSettings
from .guard import kill_when_stalled
from .known_replicas import known_replicas_of
from .replica_calls import ReplicaCalls, answer_of, answers_of
from .replica_questions import IngressQuestion

logger = logging.getLogger(__name__)

_QUESTION_INTERVAL_S = 0.25
"""Between two questions which states the replicas hold, and whether they are there."""
_REPORT_TIMEOUT_S = 5.0
_FACTS_TIMEOUT_S = 2.0


class Ingress:
    """What Ray Serve deploys as the application's ingresses: the server over a `FleetEngine`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        replicas: Any,
        load_text: Callable[[], LoadedText],
        salt_key: bytes,
        server: ServerSettings,
        settings: FleetSettings,
    ) -> None:
        """`replicas`: the handle of their deployment. `load_text` loads text and defaults of the model."""
        kill_when_stalled(settings.stall_s)
        self._known_replicas = known_replicas_of(settings.name)
        self._calls = ReplicaCalls(replicas, self._known_replicas)
        self._load_text = load_text
        self._salt_key = SaltKey(salt_key)
        self._server = server
        self._engine: FleetEngine | None = None
        self._failing: set[str] = set()  # replicas whose last answer was an error that was logged

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray calls this after the constructor."""
        self._listen_task = asyncio.create_task(self._listen())
        facts = await self._facts()
        engine = self._engine = FleetEngine(
            facts, self._salt_key, self._calls.stream, num_replicas=lambda: self._known_replicas.num_serving,
            reports=lambda: answers_of(self._known_replicas.answering, "report", _REPORT_TIMEOUT_S),
            max_waiting_requests=self._server.max_waiting_requests,
        )  # fmt: skip
        app = make_app_over(engine, self._load_text(), self._server)
        self._service: Service = app.state.service
        add_host_header_check(app, self._server)
        return app

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the others as long as the settings say."""
        return await self._service.drain()

    async def _facts(self) -> EngineFacts:
        """Those of a replica."""
        while True:
            if facts := await answers_of(self._known_replicas.answering, "facts", _FACTS_TIMEOUT_S):
                return cast(EngineFacts, facts[0])
            await asyncio.sleep(_QUESTION_INTERVAL_S)

    async def _listen(self) -> None:
        """Ask every replica again and again for its states, a new question once the last one is answered."""
        questions: dict[str, asyncio.Task[None]] = {}
        while True:
            questions = {name: task for name, task in questions.items() if not task.done()}
            self._failing.intersection_update(self._known_replicas.replicas)
            for name, replica in self._known_replicas.replicas.items():
                if name not in questions:
                    questions[name] = asyncio.create_task(self._ask(name, replica))
            await asyncio.sleep(_QUESTION_INTERVAL_S)

    async def _ask(self, name: str, replica: Any) -> None:
        try:
            question = None
            if self._engine is not None:
                lacks_states = self._known_replicas.lacks_states(name)
                question = IngressQuestion(self._engine.name, lacks_states, self._engine.counts)
            status = await answer_of(replica, "status", question)
            self._known_replicas.record_answer(name, status.events)
            self._failing.discard(name)
        except ActorDiedError:
            self._known_replicas.remove(name)
        except Exception as error:
            if not isinstance(error, (RayError, RayServeException)) and name not in self._failing:
                self._failing.add(name)
                logger.warning("mambaslots: no answer of replica %s", name, exc_info=error)
            self._known_replicas.mark_incomplete(name)
