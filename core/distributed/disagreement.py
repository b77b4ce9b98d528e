"""Ranks that must decide alike and do not: the error, and how it is worded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

_NOTHING = "nothing"


class DisagreementError(RuntimeError):
    """Ranks that must decide alike did not, or one did not come to compare.

    Attributes:
        step: the comparison that found it, counted from 0.
        ranks: those in the minority; all of them where there is none; those that did not come.
        decisions: by rank, the first decision that is not the same on all; empty where a rank did not come.
    """

    def __init__(
        self, message: str, step: int, ranks: Sequence[int], decisions: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = tuple(ranks)
        self.decisions = dict(decisions or {})


def absence(step: int, ranks: Sequence[int], timeout_s: float) -> DisagreementError:
    """`ranks`: those that did not come."""
    message = (
        f"step {step}: {_ranks(ranks)} did not come to compare decisions within {timeout_s:g} s; "
        "they stand still, or make fewer steps than the others"
    )
    return DisagreementError(message, step, ranks)


def difference(step: int, lists: Sequence[Sequence[str]]) -> DisagreementError:
    """`lists`: what each rank decided, in order; not all equal."""
    rows = enumerate(zip_longest(*lists, fillvalue=_NOTHING))
    place, row = next((place, row) for place, row in rows if len(set(row)) > 1)
    ranks_by_decision: dict[str, list[int]] = defaultdict(list)
    for rank, decision in enumerate(row):
        ranks_by_decision[decision].append(rank)
    groups = sorted(ranks_by_decision.items(), key=lambda group: (len(group[1]), -group[1][0]))
    *others, (decision, majority) = groups
    if len(majority) == len(others[-1][1]):
        ranks = list(range(len(row)))
        told = ", ".join(f"{_ranks(group)} decided {_quoted(said)}" for said, group in reversed(groups))
        message = f"step {step}: {_ranks(ranks)} differ at decision {place}: {told}"
    else:
        ranks = sorted(rank for _, group in others for rank in group)
        told = ", ".join(
            _quoted(said) + (f" of {_ranks(group)}" if len(others) > 1 else "") for said, group in others
        )
        message = (
            f"step {step}: {_ranks(ranks)} differ from {majority} at decision {place}: {told} against "
            f"{_quoted(decision)}"
        )
    return DisagreementError(message, step, ranks, dict(enumerate(row)))


def _quoted(decision: str) -> str:
    return decision if decision == _NOTHING else f"'{decision}'"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {list(ranks)}"
