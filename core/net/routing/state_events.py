"""Changes of a replica's resumable states, as messages; docs/fleet.md describes their bytes."""

from msgspec import Struct

from ...validation import INT64_MAX, refused

_LARGEST = (1 << 64) - 1


class StateEvents(Struct, frozen=True, array_like=True, tag="state-events-2", forbid_unknown_fields=True):
    """The changes of a replica's resumable states since its previous message.

    Example: StateEvents("r0", epoch=7, sequence=3, inserted=(5, 9), removed=(4,)): r0 can now resume after
    the blocks with hashes 5 and 9, and no longer after 4.

    Attributes:
        replica: its name.
        epoch: grows with each start of the replica; messages of smaller epochs are obsolete.
        sequence: 0, 1, 2, ... within an epoch. A reader that misses a number asks for a snapshot.
        inserted: hashes of blocks after which a state can be resumed now.
        removed: hashes of blocks after which none can be resumed any more.
        is_snapshot: whether `inserted` is all that the replica holds.

    Raises:
        ValueError: a field is out of its range, or the fields contradict each other.
    """

    replica: str
    epoch: int
    sequence: int
    inserted: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_snapshot: bool = False

    def __post_init__(self) -> None:
        if not self.replica or not self.replica.isprintable():
            raise refused("replica", self.replica, "a printable name")
        for name in ("epoch", "sequence"):
            if not 0 <= getattr(self, name) <= _LARGEST:
                raise refused(name, getattr(self, name), "from 0 to 2**64 - 1")
        if self.is_snapshot and self.removed:
            raise ValueError(f"removed has {len(self.removed)} hashes; accepted: none in a snapshot")
        hashes = self.inserted + self.removed
        for prefix_hash in (min(hashes), max(hashes)) if hashes else ():
            if not 0 < prefix_hash <= INT64_MAX:
                raise refused("a hash", prefix_hash, "from 1 to 2**63 - 1")
        if len(set(hashes)) < len(hashes):
            raise ValueError("a hash is named twice; accepted: distinct hashes")
