"""That a replica is there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where a replica runs.

    Attributes:
        replica: its name.
        host: the machine's name.
        processes: the ids of the processes of its ranks; the first has the engine that is called.
        num_running: requests that have a row.
    """

    replica: str
    host: str
    processes: tuple[int, ...]
    num_running: int
