"""What a replica reports of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..serve.served_engine import LocalEngine


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's figures at one moment. It can be pickled.

    Attributes:
        replica: its name.
        metrics: its metrics in Prometheus' text format, as `LocalEngine.metrics_text` returns them.
        snapshot: as `Monitor.snapshot` makes it; None where the replica has no page.
    """

    replica: str
    metrics: bytes
    snapshot: Mapping[str, Any] | None = None


async def replica_report(engine: LocalEngine, replica: str) -> ReplicaReport:
    """The figures of a replica's engine now; made in other threads, so that the event loop does not wait."""
    metrics, _ = await engine.metrics_text()
    return ReplicaReport(replica, metrics, await engine.snapshot())
