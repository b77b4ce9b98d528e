"""A piece of work that all ranks of a replica do: what each rank learns of it, and what all of them raise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mambaslots import ParallelGroups
from mambaslots.net.all_ranks import Attempt, Notes, attempt

CPU = torch.device("cpu")


class Peers:
    """Rank 0 of a replica; what the other ranks pass to `gather` is given."""

    rank = 0

    def __init__(self, *others: object) -> None:
        self.others = others

    def gather(self, value: object, device: torch.device) -> list[object]:
        assert device == CPU
        return [value, *self.others]


def attempted(work: Callable[[Notes], Any], *others: object, same: tuple[str, ...] = ()) -> Attempt[Any]:
    """On rank 0, with what the other ranks pass to `gather`."""
    groups: Any = Peers(*others)
    return attempt(groups, CPU, work, same)


def count(notes: Notes) -> int:
    notes["count"] = 7
    return 8


def fail(notes: Notes) -> int:
    notes["count"] = 7
    raise KeyError("no count")


def test_one_rank_alone_needs_no_rank_in_the_text() -> None:
    found = attempt(ParallelGroups(), CPU, count, same=("count",))
    assert (found.failure, found.difference, found.notes) == ("", "", [{"count": 7}])
    assert found.result(ValueError) == 8
    with pytest.raises(RuntimeError, match=r"^'no count'$") as raised:
        attempt(ParallelGroups(), CPU, fail).result(RuntimeError)
    assert isinstance(raised.value.__cause__, KeyError)


def test_ranks_that_fail_are_named_and_their_notes_arrive() -> None:
    found = attempted(fail, ("", {"count": 7}), ("no room", {}), same=("count",))
    assert found.failure == "rank 0 of the replica: 'no count'; rank 2 of the replica: no room"
    assert found.notes == [{"count": 7}, {"count": 7}, {}]
    assert (
        found.difference == "ranks [2] of the replica have other count than rank 0; accepted: the same on all"
    )
    with pytest.raises(OSError, match=r"^rank 0 of the replica: 'no count'"):
        found.result(OSError)


def test_a_rank_that_succeeded_raises_for_the_others() -> None:
    found = attempted(count, ("no room", {"count": 7}))
    assert found.value == 8
    with pytest.raises(OSError, match=r"^not saved: rank 1 of the replica: no room$") as raised:
        found.result(lambda reason: OSError(f"not saved: {reason}"))
    assert raised.value.__cause__ is None


def test_the_first_note_that_differs_is_the_reason() -> None:
    others = ("", {"count": 7, "size": 1}), ("", {"count": 6, "size": 2})

    def work(notes: Notes) -> None:
        notes["count"], notes["size"] = 7, 1

    text = "ranks [2] of the replica have other {} than rank 0; accepted: the same on all"
    assert attempted(work, *others, same=("size", "count")).difference == text.format("size")
    assert attempted(work, *others, same=("count", "size")).difference == text.format("count")
    assert attempted(work, *others).difference == ""


def test_what_is_no_exception_is_not_caught() -> None:
    def interrupted(_: Notes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempted(interrupted)
