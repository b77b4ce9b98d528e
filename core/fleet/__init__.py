"""Several replicas of one model at one address, on Ray Serve. They need the extra `mambaslots[fleet]`.

May import `serve`, `monitor`, `net`, `engines`, `contexts`, `cache`; no model and no tokenizer.
"""

from dataclasses import dataclass

from ..validation import INT32_MAX, LONGEST_TIMEOUT_S, boolean, instance, integer, real, set_field

_NEEDED = "replicas need Ray Serve: pip install 'mambaslots[fleet]'"


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Settings of replicas on Ray Serve.

    Attributes:
        name: of Ray Serve's application, and of all that belongs to it.
        model_name: the name of the model in the replicas' figures.
        trace: whether replicas write a line about each request to stderr.
        min_replicas, max_replicas: how many replicas there are. Where they differ, Ray starts and ends
            replicas by the requests that wait and run.
        ranks: processes of a replica, over which the model is split by tensors.
        cpus_per_rank, gpus_per_rank: what Ray reserves for each process; fractions are taken.
        max_requests: requests that run at once in a replica; as many more wait there.
        warm_timeout_s: seconds in which a new replica may receive states of another one; 0: none.
        drain_timeout_s: seconds that running requests have when a replica is to end.
        health_period_s: seconds between two looks at a replica's health.
    """

    name: str = "mambaslots"
    model_name: str = "model"
    trace: bool = False
    min_replicas: int = 1
    max_replicas: int = 1
    ranks: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    max_requests: int = 32
    warm_timeout_s: float = 20.0
    drain_timeout_s: float = 30.0
    health_period_s: float = 5.0

    def __post_init__(self) -> None:
        if not instance("name", self.name, str) or "#" in self.name:
            raise ValueError(f"name is {self.name!r}; accepted: a string that is not empty and has no '#'")
        instance("model_name", self.model_name, str)
        boolean("trace", self.trace)
        for field in ("min_replicas", "max_replicas", "ranks", "max_requests"):
            set_field(self, field, integer(field, getattr(self, field), 1, INT32_MAX))
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; accepted: at least min_replicas, {self.min_replicas}"
            )
        for field in ("cpus_per_rank", "gpus_per_rank"):
            set_field(self, field, real(field, getattr(self, field), 0.0, 1024.0))
        for field in ("warm_timeout_s", "drain_timeout_s", "health_period_s"):
            set_field(self, field, real(field, getattr(self, field), 0.0, LONGEST_TIMEOUT_S))

    @property
    def channel(self) -> str:
        """The name of the actor of the application's `StateChannel`."""
        return f"{self.name}-states"


def check_installed() -> None:
    """Raise an ImportError, which names the extra, unless what replicas need can be imported."""
    try:
        from ray import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(_NEEDED) from error
