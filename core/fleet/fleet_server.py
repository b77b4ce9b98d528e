"""A process that serves replicas on Ray until a signal stops it: cluster, deployments, signals."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from ..inference.contexts.cache.hashing import key_bytes
from ..loaded_model import LoadedText
from ..serve.server import KEEP_ALIVE_S, url
from ..serve.server_settings import ServerSettings, listen
from .fleet_settings import CLUSTER, DEPLOYMENT, FleetSettings
from .ingress import Ingress
from .replica import EngineReplica, MakeEngine
from .request_router import FleetRequestRouter

_OBJECT_STORE_BYTES = 200 * 2**20  # answers are too small for Ray's object store
RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent
    "RAY_worker_niceness": "0",  # Ray's is 15: any other process of the machine would go first
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a process that is silent does not drain
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mambaslots.fleet.cut_answers.middlewares",
}


@contextmanager
def connected_cluster() -> Iterator[bool]:
    """Be connected to the cluster that `RAY_ADDRESS` names, or to a new one; yield whether it was there."""
    address = os.environ.get(CLUSTER)
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if address:
        options["address"] = address
    else:
        options |= {"address": "local", "include_dashboard": False}
        options["object_store_memory"] = _OBJECT_STORE_BYTES
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError) as error:
        raise OSError(f"{CLUSTER} is {address!r}, and Ray does not answer there: {error}") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield bool(address)
    finally:
        if not address:
            serve.shutdown()
        ray.shutdown()


def with_resources(settings: FleetSettings, device: str, is_joined: bool) -> FleetSettings:
    """With what Ray reserves for each rank; ValueError where an own cluster has too few GPUs."""
    resources = ray.cluster_resources()
    num_gpus = resources.get("GPU", 0.0)
    num_cpus = resources.get("CPU", 1.0)
    num_ranks = settings.max_replicas * settings.ranks
    if device == "cuda" or (device == "auto" and num_gpus):
        if num_gpus < num_ranks and not is_joined:
            raise ValueError(
                f"{settings.max_replicas} replicas of {settings.ranks} ranks need {num_ranks} GPUs, and Ray "
                f"sees {num_gpus:g}; accepted: fewer, or a cluster named by {CLUSTER}"
            )
        return replace(settings, gpus_per_rank=1.0, cpus_per_rank=0.0 if num_cpus < num_ranks else 1.0)
    cpus_per_rank = 1.0 if is_joined else min(1.0, int(1000 * num_cpus / num_ranks) / 1000)
    return replace(settings, gpus_per_rank=0.0, cpus_per_rank=cpus_per_rank)


def check_http(host: str, port: int) -> None:
    """Raise a ValueError where Ray Serve runs already and listens at another address."""
    from ray.serve.context import _get_global_client  # in Ray 2.60, no public call says it

    http = _get_global_client().http_config
    if (http.host, http.port) != (host, port):
        raise ValueError(
            f"host and port are {host} and {port}, and Ray Serve of this cluster listens at {http.host} and "
            f"{http.port}; accepted: these"
        )


def usable_port(host: str, port: int) -> int:
    """The port to listen at: `port`, or a free one for 0. OSError: the address cannot be used."""
    with listen(host, port) as listener:
        return int(listener.getsockname()[1])


QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # it would show what stands in a query
_CONTROL_CALLS = 100  # calls of an ingress besides its requests: for health, figures and the page


def fleet_application(
    make_engine: MakeEngine,
    load_text: Callable[[], LoadedText],
    salt_key: str,
    server: ServerSettings,
    settings: FleetSettings,
) -> serve.Application:
    """The ingresses and the replicas."""
    max_open = server.max_waiting_requests + settings.max_replicas * settings.max_requests
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * max_open + _CONTROL_CALLS,  # the server itself refuses what is too much
        graceful_shutdown_timeout_s=server.drain_timeout_s + 5.0,
        **_common_options(settings),
    )
    replicas = replica_deployment(make_engine, settings)
    return ingress.bind(replicas, load_text, key_bytes("salt_key", salt_key), server, settings)


def replica_deployment(make_engine: MakeEngine, settings: FleetSettings) -> serve.Application:
    options = _common_options(settings)
    if settings.ranks > 1:  # each rank has a bundle, all of them on one machine where there is room
        rank_resources = {"CPU": settings.cpus_per_rank, "GPU": settings.gpus_per_rank}
        bundle = {name: number for name, number in rank_resources.items() if number}
        options |= {"placement_group_bundles": [bundle] * settings.ranks, "placement_group_strategy": "PACK"}
    if settings.min_replicas == settings.max_replicas:
        options["num_replicas"] = settings.min_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            initial_replicas=settings.min_replicas,
            target_ongoing_requests=max(1.0, 0.8 * settings.max_requests),
        )
    return serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": settings.cpus_per_rank, "num_gpus": settings.gpus_per_rank},
        max_ongoing_requests=2 * settings.max_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRequestRouter, request_router_kwargs={"application": settings.name}
        ),
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        **options,
    ).bind(make_engine, settings)


def _common_options(settings: FleetSettings) -> dict[str, Any]:
    return {
        "graceful_shutdown_wait_loop_s": 0.2, "health_check_period_s": settings.health_period_s,
        "health_check_timeout_s": settings.health_timeout_s, "max_constructor_retry_count": 3,
        "logging_config": QUIET,
    }  # fmt: skip


_POLL_INTERVAL_S = 0.2
_RAY_CHECK_INTERVAL_S = 5.0
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
    once. On a cluster that was there before, only the application is ended.

    `make_engine` and `load_text` are called in the replicas and in the ingresses. Returns the exit code: 0
    after a shutdown, 1 where Ray has stopped.
    """
    if not os.environ.get(CLUSTER):
        server = replace(server, port=usable_port(server.host, server.port))
    with connected_cluster() as is_joined:
        http = {"host": server.host, "port": server.port, "keep_alive_timeout_s": KEEP_ALIVE_S}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        check_http(server.host, server.port)
        settings = with_resources(settings, device, is_joined)
        application = fleet_application(make_engine, load_text, salt_key, server, settings)
        try:
            handle = serve.run(application, name=settings.name, route_prefix="/")
            return _serve_until_signal(handle, server, settings)
        finally:
            if is_joined:
                serve.delete(settings.name)


def _serve_until_signal(handle: Any, server: ServerSettings, settings: FleetSettings) -> int:
    with _signals() as signals:
        address = url(server.host, server.port)
        print(f"mambaslots serves {server.model_name} at {address} with {_fleet_size(settings)}", flush=True)
        checked_s = time.monotonic()
        while not signals:
            time.sleep(_POLL_INTERVAL_S)
            if time.monotonic() - checked_s > _RAY_CHECK_INTERVAL_S:
                checked_s = time.monotonic()
                try:
                    serve.status()
                except (RayError, RayServeException, ConnectionError) as error:
                    print(f"mambaslots: Ray has stopped: {error}", file=sys.stderr, flush=True)
                    return 1
        drain_s = server.drain_timeout_s
        print(f"mambaslots: {signals[0].name}; running requests have {drain_s:g} s", flush=True)
        drain_answers = handle.broadcast("drain")
        deadline = time.monotonic() + drain_s + _BEYOND_DRAIN_S
        while len(signals) < 2 and time.monotonic() < deadline:
            try:
                outcomes = drain_answers.results(timeout_s=_POLL_INTERVAL_S, return_exceptions=True)
            except TimeoutError:
                continue
            if not any(isinstance(outcome, TimeoutError) for outcome in outcomes):
                break  # an ingress that is lost has lost its answers, too
    return 0


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals so far; the third one ends the process, as it does without a handler."""
    signals: list[signal.Signals] = []

    def record_signal(number: int, frame: object) -> None:
        signals.append(signal.Signals(number))
        if len(signals) > 1:
            for handled in handlers:
                signal.signal(handled, signal.SIG_DFL)

    handlers = {number: signal.signal(number, record_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _fleet_size(settings: FleetSettings) -> str:
    most = settings.max_replicas
    number = f"{most}" if settings.min_replicas == most else f"{settings.min_replicas} to {most}"
    ranks = f" of {settings.ranks} ranks" if settings.ranks > 1 else ""
    return f"{number} replica{'' if most == 1 else 's'}{ranks}"
