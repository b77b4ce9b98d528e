"""Which unit of a shared memory changes sides."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class KVUnit(NamedTuple):
    """A unit of KV blocks that could be emptied.

    Attributes:
        unit: its number.
        leaves: its cached blocks, children before parents.
        slots: the slots of the states at the ends of these blocks.
        last_use: when one of the blocks was last used.
    """

    unit: int
    leaves: list[int]
    slots: list[int]
    last_use: int


def kv_unit_for_states(
    candidates: Iterable[KVUnit], slots_per_unit: int, next_victims: Callable[[int], Sequence[int]]
) -> KVUnit | None:
    """The unit of KV whose loss costs least, if it costs less than evicting states for the same slots.

    A unit without states resumes nothing: it costs nothing. A unit with n states frees n slots and those of
    the unit. The states next in the order of eviction would go for these slots otherwise; so the n states
    must be among them.

    Args:
        candidates: units that could be emptied.
        slots_per_unit: slots that a unit has room for.
        next_victims: callable(count) -> the slots whose states would be evicted next, the first one first.
    """
    best = min(candidates, key=lambda c: (len(c.slots), c.last_use, c.unit), default=None)
    if best is None or not best.slots:
        return best
    victims = next_victims(len(best.slots) + slots_per_unit)
    return best if set(best.slots).issubset(victims) else None
