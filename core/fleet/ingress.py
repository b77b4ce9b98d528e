"""Who answers clients: the server's application, in a process that Ray Serve starts."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from ..inference.contexts.cache.hashing import SaltKey
from ..loaded_model import LoadedText
from ..serve.app import make_app_over
from ..serve.gate import host_checks
from ..serve.service import Service
from ..serve.settings import ServerSettings
from .fleet_engine import FleetEngine
from .fleet_settings import FleetSettings
from .replica_calls import ReplicaCalls

logger = logging.getLogger(__name__)


_COUNT_S = 1.0
"""Between two counts of the replicas that answer."""
_REPORT_S = 10.0
_SILENT_S = 10.0
"""Without an answer for so long, no replica serves."""


class Ingress:
    """What Ray Serve deploys as the application's ingress: it reads bodies, makes tokens and hashes of
    prompts, and asks a replica for the answer.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        replicas: Any,
        load_text: Callable[[], LoadedText],
        salt_key: bytes,
        server: ServerSettings,
        settings: FleetSettings,
    ) -> None:
        """
        Args:
            replicas: the handle of the replicas' deployment.
            load_text: loads text and defaults of the model.
            salt_key: the key of all replicas, under which salts are hashed.
            server: whom the server serves, and how much it takes.
            settings: how many replicas there are.
        """
        self._calls = ReplicaCalls(replicas)
        self._load_text = load_text
        self._salt_key = SaltKey(salt_key)
        self._server = server
        self._settings = settings
        self._app: FastAPI | None = None
        self._num_replicas = 1

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray calls this after the constructor."""
        facts = await self._calls.ask("facts")
        self._counting = asyncio.create_task(self._count_replicas())
        engine = FleetEngine(
            facts,
            self._salt_key,
            self._calls.stream,
            num_replicas=lambda: self._num_replicas,
            reports=lambda: self._calls.ask_all("report", timeout_s=_REPORT_S),
            max_waiting_requests=self._server.max_waiting_requests,
        )
        app = make_app_over(engine, self._load_text(), self._server)
        for check in host_checks(self._server):
            app.add_middleware(check.cls, *check.args, **check.kwargs)
        self._app = app
        return app

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the others as long as the settings say."""
        assert self._app is not None
        service: Service = self._app.state.service
        return await service.drain()

    async def _count_replicas(self) -> None:
        """Count the replicas that answer, again and again. Where none does in time, the last count stays for
        a while: replicas that are busy are there.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while True:
            number = len(await self._calls.ask_all("pulse", timeout_s=_COUNT_S))
            if number:
                heard_s = loop.time()
            if number or loop.time() - heard_s > _SILENT_S:
                self._num_replicas = number
            await asyncio.sleep(_COUNT_S)
