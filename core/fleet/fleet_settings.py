"""Settings of replicas, which need no Ray to be read."""

from dataclasses import dataclass

CLUSTER = "RAY_ADDRESS"  # the environment variable that names the cluster to join
DEPLOYMENT = "EngineReplica"  # the name of the replicas in Ray Serve's application


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Settings of replicas on Ray Serve.

    Attributes:
        name: of Ray Serve's application, and of all that belongs to it.
        model_name: the name of the model in the replicas' figures.
        trace: whether replicas write a line about each request to stderr.
        min_replicas, max_replicas: how many replicas there are. Where they differ, Ray starts and ends
            replicas by the requests that wait and run.
        ingresses: processes that serve HTTP and choose replicas. With 2, clients are served while Ray
            replaces one that is lost.
        ranks: processes of a replica, over which the model is split by tensors.
        cpus_per_rank, gpus_per_rank: what Ray reserves for each process; fractions are taken.
        max_requests: requests that run at once in a replica; as many more wait there.
        warm_timeout_s: seconds in which a new replica may receive states of another one; 0: none.
        drain_timeout_s: seconds that running requests have when a replica is to end.
        health_period_s, health_timeout_s: seconds between two looks at a replica's health, and of a look.
            Ray replaces a replica, or an ingress, after three looks without an answer.
    """

    name: str = "mambaslots"
    model_name: str = "model"
    trace: bool = False
    min_replicas: int = 1
    max_replicas: int = 1
    ingresses: int = 1
    ranks: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    max_requests: int = 32
    warm_timeout_s: float = 20.0
    drain_timeout_s: float = 30.0
    health_period_s: float = 5.0
    health_timeout_s: float = 8.0

    @property
    def stall_s(self) -> float:
        """A process that runs nothing for so long is killed."""
        return 3 * self.health_timeout_s


def check_installed() -> None:
    """Raise an ImportError, which names the extra, unless what replicas need can be imported."""
    try:
        from ray import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError("replicas need Ray Serve: pip install 'mambaslots[fleet]'") from error
