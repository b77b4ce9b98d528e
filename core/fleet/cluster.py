"""The Ray cluster that replicas run on: one of this process, or one that is there."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client

from .fleet_settings import FleetSettings

ADDRESS = "RAY_ADDRESS"
"""The environment variable that names the cluster to join."""
_OBJECT_STORE_BYTES = 200 * 2**20
"""Answers are too small for Ray's object store."""
_OWN_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent
    "RAY_worker_niceness": "0",  # Ray's is 15: any other process of the machine would go first
}
_LOGGERS = ("ray", "ray.serve")


@contextmanager
def cluster(num_cpus: float | None = None) -> Iterator[bool]:
    """Be connected to Ray.

    Where `RAY_ADDRESS` is set, that cluster is joined, and left at the end. Otherwise a cluster of this
    machine begins, and ends with all that runs in it. It sends no usage statistics.

    Args:
        num_cpus: what Ray takes this machine to have; None for its cores.

    Yields:
        Whether the cluster was there before.
    """
    address = os.environ.get(ADDRESS)
    for name, value in _OWN_DEFAULTS.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError) as error:
        raise OSError(f"{ADDRESS} is {address!r}, and Ray does not answer there: {error}") from error
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield bool(address)
    finally:
        if not address:
            serve.shutdown()
        ray.shutdown()


def placed(settings: FleetSettings, device: str, joined: bool) -> FleetSettings:
    """The settings with what Ray reserves for each rank.

    On GPUs a rank has one, and a core. On CPUs the ranks of a cluster of this process share the machine's
    cores; on a cluster that is joined a rank has a core.

    Args:
        settings: say how many ranks there are.
        device: "cpu", "cuda", or "auto" for GPUs where the cluster has some.
        joined: whether the cluster is not ours; it may grow.

    Raises:
        ValueError: the cluster has too few GPUs, and does not grow.
    """
    resources = ray.cluster_resources()
    num_gpus, num_cpus = resources.get("GPU", 0.0), resources.get("CPU", 1.0)
    num_ranks = settings.max_replicas * settings.ranks
    if device == "cuda" or (device == "auto" and num_gpus):
        if num_gpus < num_ranks and not joined:
            raise ValueError(
                f"{settings.max_replicas} replicas of {settings.ranks} ranks need {num_ranks} GPUs, and Ray "
                f"sees {num_gpus:g}; accepted: fewer, or a cluster named by {ADDRESS}"
            )
        return replace(settings, gpus_per_rank=1.0, cpus_per_rank=0.0 if num_cpus < num_ranks else 1.0)
    share = 1.0 if joined else min(1.0, int(1000 * num_cpus / num_ranks) / 1000)
    return replace(settings, gpus_per_rank=0.0, cpus_per_rank=share)


def check_http(host: str, port: int) -> None:
    """Raise a ValueError where Ray Serve runs already and listens at another address."""
    found = _get_global_client().http_config
    if (found.host, found.port) != (host, port):
        raise ValueError(
            f"host and port are {host} and {port}, and Ray Serve of this cluster listens at {found.host} and "
            f"{found.port}; accepted: these"
        )


def check_address(host: str, port: int) -> int:
    """The port to listen at: `port`, or a free one for 0.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise OSError(f"mambaslots cannot listen at {host}:{port}: {error}") from error
