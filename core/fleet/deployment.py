"""The deployments of an application of Ray Serve: replicas of an engine, and who asks them."""

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from ..inference.contexts.cache.hashing import key_bytes
from ..loaded_model import LoadedText
from ..serve.settings import ServerSettings
from .engine_replica import EngineReplica
from .fleet_settings import RAY_PREFIX, FleetSettings
from .ingress import Ingress
from .ranks import MakeEngine
from .request_router import FleetRequestRouter

_RAY_PREFIX_ROUTER = f"{__package__}.ray_prefix_router:RayPrefixRouter"


QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # it would show what stands in a query
_CONTROL_CALLS = 100
"""Calls of an ingress beside its requests: for health, figures and the page."""


def fleet_application(
    make_engine: MakeEngine,
    load_text: Callable[[], LoadedText],
    salt_key: str,
    server: ServerSettings,
    settings: FleetSettings,
) -> serve.Application:
    """The whole application; the arguments are those of `core/fleet/server.py:serve_replicas`."""
    most = server.max_waiting_requests + settings.max_replicas * settings.max_requests
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * most + _CONTROL_CALLS,  # the server itself refuses what is too much
        graceful_shutdown_timeout_s=server.drain_timeout_s + 5.0,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=3,
        logging_config=QUIET,
    )
    replicas = replica_deployment(make_engine, settings)
    return ingress.bind(replicas, load_text, key_bytes("salt_key", salt_key), server, settings)


def replica_deployment(make_engine: MakeEngine, settings: FleetSettings) -> serve.Application:
    """The replicas of an engine, bound to what makes them."""
    needs = {"num_cpus": settings.cpus_per_rank, "num_gpus": settings.gpus_per_rank}
    options: dict[str, Any] = {
        "name": "EngineReplica",
        "ray_actor_options": needs,
        "max_ongoing_requests": 2 * settings.max_requests,
        "request_router_config": _router_config(settings),
        "graceful_shutdown_timeout_s": settings.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": settings.health_period_s,
        "max_constructor_retry_count": 3,
        "logging_config": QUIET,
    }
    if settings.ranks > 1:  # each rank has a bundle, all of them on one machine where there is room
        bundle = {"CPU": settings.cpus_per_rank, "GPU": settings.gpus_per_rank}
        options["placement_group_bundles"] = [
            {name: number for name, number in bundle.items() if number}
        ] * settings.ranks
        options["placement_group_strategy"] = "PACK"
    if settings.min_replicas == settings.max_replicas:
        options["num_replicas"] = settings.min_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            initial_replicas=settings.min_replicas,
            target_ongoing_requests=max(1.0, 0.8 * settings.max_requests),
        )
    return serve.deployment(EngineReplica, **options).bind(make_engine, settings)


def _router_config(settings: FleetSettings) -> RequestRouterConfig:
    if settings.router == RAY_PREFIX:
        return RequestRouterConfig(request_router_class=_RAY_PREFIX_ROUTER)
    return RequestRouterConfig(
        request_router_class=FleetRequestRouter,
        request_router_kwargs={"channel": settings.channel},
    )
