"""A process that serves until a signal stops it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from threading import Timer
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedModel
from .app import make_app
from .connections import Connection, FailedAccepts, raise_descriptor_limit
from .middleware import add_host_header_check
from .server_settings import ServerSettings, listen
from .service import Service

KEEP_ALIVE_S = 75  # longer than proxies keep connections, so that they close first
_LAST_BYTES_S = 0.5  # with what comes before and after it, the process ends 2 s after the drain's time
"""Seconds that connections have to receive the last bytes of their answers."""
_LAST_STEP_S = 5  # seconds that a step has to end when all its requests are cancelled


def serve(engine: DynamicInferenceEngine, loaded: LoadedModel, settings: ServerSettings) -> int:
    """Serve until SIGTERM or Control-C, in this thread; prints one line when the server is ready.

    The first signal drains: new requests get status 503, running ones have `settings.drain_timeout_s` to end.
    The second signal cancels them, and the third one ends the process at once. Where a step of the engine
    hangs, the process ends with exit code 1, whatever else runs in it: 5 s after the drain's time, or after
    the second signal. Signals are handled where this is the main thread.

    Args:
        engine, loaded, settings: as for `make_app`.

    Returns:
        The exit code: 0 after a shutdown, 1 where the address cannot be used or the engine has stopped.
    """
    raise_descriptor_limit()
    app = make_app(engine, loaded, settings)
    add_host_header_check(app, settings)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(f"mambaslots {error}", file=sys.stderr)
        return 1
    with listener:
        server = _Server(app, listener)
        try:
            server.run(sockets=[listener])
        finally:
            server.end_within(None)
    return 0 if server.started and app.state.engine.failure is None else 1


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that answers with status 503 while it drains."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            http=Connection,  # httptools, which may be installed for others, takes headers of any size
            loop="asyncio",  # uvloop, which may be, too, drops clients without a word for want of descriptors
            log_config=None,
            log_level="warning",
            access_log=False,  # it would show what stands in a query
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,  # type: ignore[arg-type]  # a float works
        )
        super().__init__(config)
        logging.getLogger("uvicorn.access").disabled = True  # also where it has a handler
        self._app = app
        app.state.failed_accepts = FailedAccepts()
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_task: asyncio.Task[None] | None = None
        self._num_signals = 0
        self._timer: Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._app.state.failed_accepts.watch(self._loop, self.server_state)
        await super().startup(sockets)
        settings: ServerSettings = self._app.state.settings
        address = url(settings.host, self._listener.getsockname()[1])
        print(f"mambaslots serves {settings.model_name} at {address}", flush=True)
        print(f"API {address}/v1   page {address}/   metrics {address}/metrics", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # not started
            raise SystemExit(128 + sig)
        self._num_signals += 1
        if self._num_signals > 2:
            _give_up(f"{signal.Signals(sig).name} for the third time")
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, name: str) -> None:
        service: Service = self._app.state.service
        if self._end_task is not None:
            self.end_within(_LAST_STEP_S)
            self._end_task = asyncio.create_task(self._exit_after(service.close()))
            return
        drain_s = service.settings.drain_timeout_s
        if service.engine.num_running + service.engine.num_waiting:
            print(f"mambaslots: {name}; running requests have {drain_s:g} s", flush=True)
        self.end_within(drain_s + _LAST_STEP_S)
        self._end_task = asyncio.create_task(self._exit_after(service.drain()))

    async def _exit_after(self, work: Awaitable[object]) -> None:
        try:
            await work
        finally:
            if self._end_task is asyncio.current_task():  # else a close has begun meanwhile
                self.end_within(_LAST_BYTES_S + _LAST_STEP_S)
                self.should_exit = True

    def end_within(self, seconds: float | None) -> None:
        """End the process after so many seconds, unless this is called again before; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = Timer(seconds, _give_up, ["the engine is still in a step"])
            self._timer.daemon = True
            self._timer.start()


def _give_up(reason: str) -> None:
    """End the process at once: no thread that hangs can hold it."""
    try:
        print(f"mambaslots: {reason}; the process ends without a drain", file=sys.stderr, flush=True)
    finally:
        os._exit(1)
