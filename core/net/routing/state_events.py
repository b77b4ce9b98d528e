"""What a replica tells routers about the states that it holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateEvents:
    """What became of a replica's resumable states since its last events.

    Attributes:
        replica: its name.
        epoch: a larger one whenever its cache begins anew. What was told in a smaller one is over.
        sequence: 0, 1, 2, ... within an epoch. Who misses a number asks for a snapshot.
        inserted: hashes of blocks behind which a state can be resumed now.
        removed: hashes of blocks behind which none can be resumed any more.
        is_snapshot: whether `inserted` is all that the replica holds.
    """

    replica: str
    epoch: int
    sequence: int
    inserted: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_snapshot: bool = False
