"""That a replica is there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where a replica runs.

    Attributes:
        replica: its name.
        host: the machine's name.
        process: the id of the process that has the engine, or its first rank.
        num_running: requests that have a row.
    """

    replica: str
    host: str
    process: int
    num_running: int
