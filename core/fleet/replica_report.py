"""What a replica reports of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's figures at one moment. It can be pickled.

    Attributes:
        replica: its name.
        metrics: its metrics in Prometheus' text format, as `LocalEngine.metrics_text` returns them.
    """

    replica: str
    metrics: bytes
