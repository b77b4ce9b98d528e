"""Work that all ranks of a replica do together: it succeeds on all of them, or fails on all with one text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..parallel_groups import ParallelGroups

Notes = dict[str, Any]


class RankDiedError(RuntimeError):
    """Other ranks are dead; what was computed together with them since their death cannot be relied on.

    Attributes:
        ranks: the dead ranks, in order.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """`reasons`: dead rank -> how its death is known, a text that follows "rank 3 "."""
        self.ranks = tuple(sorted(reasons))
        super().__init__("; ".join(f"rank {rank} {reasons[rank]}" for rank in self.ranks))


@dataclass(frozen=True)
class Attempt[T]:
    """What a piece of work came to; notes, failure and difference are the same on every rank."""

    value: T | None  # of this rank; None where its work raised
    error: Exception | None  # of this rank
    notes: list[Notes]  # of each rank, in order
    failure: str  # the ranks that failed, each with its reason; empty if none failed
    difference: str  # the ranks whose notes differ from those of rank 0; empty if none differ

    def result(self, error: Callable[[str], Exception]) -> T:
        """This rank's value; raises `error(reason)` on every rank unless all ranks succeeded alike."""
        if reason := self.failure or self.difference:
            raise error(reason) from self.error
        return cast(T, self.value)


def attempt[T](
    groups: ParallelGroups, device: torch.device, work: Callable[[Notes], T], same: Sequence[str] = ()
) -> Attempt[T]:
    """Do a piece of work on every rank; return, and raise no Exception of `work`, once every rank is done.

    `work` may write small values into the dict for the other ranks, also before it raises; those under `same`
    must be equal on all. Raises what torch.distributed raises where a rank is lost; others may see no error.
    """
    own_notes: Notes = {}
    value: T | None = None
    error: Exception | None = None
    try:
        value = work(own_notes)
    except Exception as raised:
        error = raised
    reports = groups.gather(("" if error is None else described(error), own_notes), device)
    notes = [rank_notes for _, rank_notes in reports]
    failures = [f"rank {rank} of the replica: {reason}" for rank, (reason, _) in enumerate(reports) if reason]
    if len(reports) == 1:
        failures = [reports[0][0]]
    difference = ""
    for name in reversed(same):
        if ranks := [rank for rank, note in enumerate(notes) if note.get(name) != notes[0].get(name)]:
            difference = (
                f"ranks {ranks} of the replica have other {name} than rank 0; accepted: the same on all"
            )
    return Attempt(value, error, notes, "; ".join(failures), difference)


def described(error: BaseException) -> str:
    """An error's text, or its type where it has no text."""
    return str(error) or type(error).__name__
