"""Ranks that must act alike: what they learn of each other, and the errors that all of them raise.

The ranks of a replica do a piece of work together through `AllRanks`, over the replica's process groups.
Every rank learns which ranks failed and which results differ, and raises the same text as the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..parallel_groups import ParallelGroups

Notes = dict[str, Any]


@dataclass(frozen=True)
class Attempt[T]:
    """What a piece of work came to on all ranks of a replica.

    Attributes:
        value: what the work returned on this rank; None where it raised.
        error: what the work raised on this rank; None where it returned.
        notes: the notes of each rank, in order of rank; the same on every rank.
        failure: the ranks that failed, each with its reason; the same text on every rank, empty if none
            failed.
        difference: the ranks whose notes differ from those of rank 0; the same text on every rank, empty if
            none differ.
    """

    value: T | None
    error: Exception | None
    notes: list[Notes]
    failure: str
    difference: str

    @property
    def reason(self) -> str:
        """Why the work is void on every rank; empty where all ranks succeeded alike."""
        return self.failure or self.difference

    def result(self, error: Callable[[str], Exception]) -> T:
        """This rank's value; where the work is void, raises `error(reason)` on every rank."""
        if self.reason:
            raise error(self.reason) from self.error
        return cast(T, self.value)


class AllRanks:
    """The ranks of one replica, which succeed together or fail together.

    Every rank calls the same methods in the same order. Each call synchronises the ranks. It raises what
    torch.distributed raises where a rank of the replica is lost; other ranks may then see no error.
    """

    def __init__(self, parallel: ParallelGroups, device: torch.device) -> None:
        """
        Args:
            parallel: the process groups of the replica.
            device: where this rank's model lives; nccl sends from there.
        """
        self._parallel = parallel
        self._device = device

    @property
    def rank(self) -> int:
        return self._parallel.rank

    def from_first_rank[T](self, value: T) -> T:
        """What rank 0 passes as `value`, on every rank."""
        values: list[T] = self._parallel.gather(value, self._device)
        return values[0]

    def attempt[T](self, work: Callable[[Notes], T], same: Sequence[str] = ()) -> Attempt[T]:
        """Do a piece of work on every rank; return once every rank is done.

        Args:
            work: this rank's part. It gets an empty dict, and may write notes for the other ranks into the
                dict, also before it raises. Notes are small values that pickle.
            same: the notes that must be equal on all ranks.

        Returns:
            What the work came to on this rank and on the others. An Exception of `work` is in the result,
            not raised.
        """
        notes: Notes = {}
        value: T | None = None
        error: Exception | None = None
        try:
            value = work(notes)
        except Exception as raised:
            error = raised
        reason = "" if error is None else described(error)
        reports = self._parallel.gather((reason, notes), self._device)
        all_notes = [rank_notes for _, rank_notes in reports]
        differences = (_difference(name, [found.get(name) for found in all_notes]) for name in same)
        return Attempt(
            value=value,
            error=error,
            notes=all_notes,
            failure=_failure([text for text, _ in reports]),
            difference=next(filter(None, differences), ""),
        )


def described(error: BaseException) -> str:
    """An error's text, or its type where it has no text."""
    return str(error) or type(error).__name__


def _failure(reasons: Sequence[str]) -> str:
    """The ranks that have a reason, with it; a replica of one rank needs no rank in the text."""
    if len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"rank {rank} of the replica: {reason}" for rank, reason in enumerate(reasons) if reason)


def _difference(name: str, values: Sequence[object]) -> str:
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if not others:
        return ""
    return f"{_ranks(others)} of the replica have other {name} than rank 0; accepted: the same on all"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {list(ranks)}"
