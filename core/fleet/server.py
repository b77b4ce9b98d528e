"""A process that serves replicas until it is told to stop."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ..loaded_model import LoadedText
from ..serve.settings import ServerSettings
from .cluster import check_address, check_http, cluster, placed
from .deployment import QUIET, fleet_application
from .fleet_settings import FleetSettings
from .ranks import MakeEngine

_LOOK_S = 0.2
_LOOK_AT_RAY_S = 5.0
_KEEP_ALIVE_S = 75  # longer than proxies keep connections, so that they close first
_BEYOND_DRAIN_S = 10.0


def serve_replicas(
    make_engine: MakeEngine,
    load_text: Callable[[], LoadedText],
    salt_key: str,
    server: ServerSettings,
    settings: FleetSettings,
    *,
    device: str = "auto",
) -> int:
    """Serve replicas of an engine on Ray Serve until SIGTERM or Control-C; call it in the main thread.

    Prints one line when all replicas are ready. The first signal drains: new requests get status 503, running
    ones have `server.drain_timeout_s` to end. The second signal ends them, the third one this process at
    once. All that was started is ended: on a cluster that was there before, the application alone.

    Args:
        make_engine: makes a replica's engine, in its own process. It can be pickled.
        load_text: loads text and defaults of the model, in the process that answers clients.
        salt_key: the key of all replicas, under which salts are hashed.
        server: whom the server serves, and how much it takes.
        settings: how many replicas there are; what Ray reserves for each is found out here.
        device: as for `placed`.

    Returns:
        The exit code: 0 after a shutdown, 1 where Ray has stopped.

    Raises:
        OSError: the address cannot be used, or the cluster does not answer.
        ValueError: the cluster has too few GPUs, or serves HTTP elsewhere.
        RuntimeError: the replicas could not be started.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        server = replace(server, port=check_address(server.host, server.port))
    with cluster() as joined:
        http = {"host": server.host, "port": server.port, "keep_alive_timeout_s": _KEEP_ALIVE_S}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        check_http(server.host, server.port)
        settings = placed(settings, device, joined)
        application = fleet_application(make_engine, load_text, salt_key, server, settings)
        try:
            handle = serve.run(application, name=settings.name, route_prefix="/")
            return _serve_until_told(handle, server, settings)
        finally:
            if joined:
                serve.delete(settings.name)


def _serve_until_told(handle: Any, server: ServerSettings, settings: FleetSettings) -> int:
    host = f"[{server.host}]" if ":" in server.host else server.host
    with _signals() as signals:
        print(
            f"mambaslots serves {server.model_name} at http://{host}:{server.port} "
            f"with {_number(settings)}, router {settings.router}",
            flush=True,
        )
        looked_s = time.monotonic()
        while not signals:
            time.sleep(_LOOK_S)
            if time.monotonic() - looked_s > _LOOK_AT_RAY_S:
                looked_s = time.monotonic()
                try:
                    serve.status()
                except (RayError, RayServeException, ConnectionError) as error:
                    print(f"mambaslots: Ray has stopped: {error}", file=sys.stderr, flush=True)
                    return 1
        print(
            f"mambaslots: {signals[0].name}; running requests have {server.drain_timeout_s:g} s", flush=True
        )
        draining = handle.drain.remote()
        deadline = time.monotonic() + server.drain_timeout_s + _BEYOND_DRAIN_S
        while len(signals) < 2 and time.monotonic() < deadline:
            try:
                draining.result(timeout_s=_LOOK_S)
                break
            except TimeoutError:
                continue
            except (RayError, RayServeException):
                break  # who answers clients is gone, and all answers with it
    return 0


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals that came so far; the third one ends the process."""
    came: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        if len(came) > 2:
            print(f"mambaslots: {came[-1].name} for the third time; the process ends", file=sys.stderr)
            os._exit(1)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _number(settings: FleetSettings) -> str:
    fewest, most = settings.min_replicas, settings.max_replicas
    number = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    ranks = f" of {settings.ranks} ranks" if settings.ranks > 1 else ""
    return f"{number} replica{'' if most == 1 else 's'}{ranks}"
