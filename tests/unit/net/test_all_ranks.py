"""A piece of work that all ranks of a replica do: what each rank learns of it, and what all of them raise."""

from typing import Any

import pytest
import torch
from mambaslots import ParallelGroups
from mambaslots.net.all_ranks import AllRanks, Notes

CPU = torch.device("cpu")


class Peers:
    """Rank 0 of a replica; what the other ranks pass to `gather` is given."""

    rank = 0

    def __init__(self, *others: object) -> None:
        self.others = others

    def gather(self, value: object, device: torch.device) -> list[object]:
        assert device == CPU
        return [value, *self.others]


def ranks_beside(*others: object) -> AllRanks:
    parallel: Any = Peers(*others)
    return AllRanks(parallel, CPU)


def count(notes: Notes) -> int:
    notes["count"] = 7
    return 8


def fail(notes: Notes) -> int:
    notes["count"] = 7
    raise KeyError("no count")


def test_one_rank_alone_needs_no_rank_in_the_text() -> None:
    ranks = AllRanks(ParallelGroups(), CPU)
    assert ranks.rank == 0
    assert ranks.from_first_rank("x") == "x"
    attempt = ranks.attempt(count, same=("count",))
    assert (attempt.reason, attempt.notes) == ("", [{"count": 7}])
    assert attempt.result(ValueError) == 8
    with pytest.raises(RuntimeError, match=r"^'no count'$") as raised:
        ranks.attempt(fail).result(RuntimeError)
    assert isinstance(raised.value.__cause__, KeyError)


def test_ranks_that_fail_are_named_and_their_notes_arrive() -> None:
    attempt = ranks_beside(("", {"count": 7}), ("no room", {})).attempt(fail, same=("count",))
    assert attempt.failure == "rank 0 of the replica: 'no count'; rank 2 of the replica: no room"
    assert attempt.notes == [{"count": 7}, {"count": 7}, {}]
    assert (
        attempt.difference
        == "ranks [2] of the replica have other count than rank 0; accepted: the same on all"
    )
    assert attempt.reason == attempt.failure


def test_a_rank_that_succeeded_raises_for_the_others() -> None:
    attempt = ranks_beside(("no room", {"count": 7})).attempt(count)
    assert attempt.value == 8
    with pytest.raises(OSError, match=r"^not saved: rank 1 of the replica: no room$") as raised:
        attempt.result(lambda reason: OSError(f"not saved: {reason}"))
    assert raised.value.__cause__ is None


def test_the_first_note_that_differs_is_the_reason() -> None:
    ranks = ranks_beside(("", {"count": 7, "size": 1}), ("", {"count": 6, "size": 2}))

    def work(notes: Notes) -> None:
        notes["count"], notes["size"] = 7, 1

    text = "ranks [2] of the replica have other {} than rank 0; accepted: the same on all"
    assert ranks.attempt(work, same=("size", "count")).reason == text.format("size")
    assert ranks.attempt(work, same=("count", "size")).reason == text.format("count")
    assert ranks.attempt(work).reason == ""


def test_what_is_no_exception_is_not_caught() -> None:
    def interrupted(_: Notes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks_beside().attempt(interrupted)
