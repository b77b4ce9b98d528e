"""Which states get a slot where there are fewer slots than states to take."""

from collections.abc import Sequence
from typing import NamedTuple


class SlotChoice[T](NamedTuple):
    """`chosen` candidates get a slot; `refused` ones are certain candidates that get none."""

    chosen: list[T]
    refused: list[T]


def choose_for_slots[T](
    certain: Sequence[T], guessed: Sequence[T] = (), *, num_available: int, num_free: int = 0
) -> SlotChoice[T]:
    """Give slots to the worthiest candidates.

    Args:
        certain: states that the step takes, the worthiest first. A certain state may evict others.
        guessed: states that the step takes only if drafts turn out right. A guessed state evicts nothing: the
            guess may be wrong, and the evicted state would have been useful.
        num_available: slots that are free or can be freed by an eviction.
        num_free: slots that are free now.
    """
    chosen = list(certain[:num_available])
    refused = list(certain[num_available:])
    return SlotChoice(chosen + list(guessed[: max(0, num_free - len(chosen))]), refused)
