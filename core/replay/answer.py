"""How much memory a cache should get, said in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from .cells import CellResult
from .setting import ReplaySetting

NEAR = 0.01
"""Shares that differ by no more count as equal."""


@dataclass(frozen=True)
class BudgetPoint:
    """What a row resumes with a budget, in GB.

    `lacks_kv`: whether more tokens are computed for want of KV memory than for want of states.
    """

    budget_gb: float
    share: float
    lacks_kv: bool = False


def budget_of(setting: ReplaySetting) -> tuple[str, float]:
    """What a setting gives: for what the budget is, and how many GB."""
    host = f" and {setting.host_gb:g} GB of the host" if setting.host_gb else ""
    if setting.total_gb is not None:
        return f"for states and KV together{host and ', beside' + host[4:]}", setting.total_gb
    return f"for states, beside {setting.kv_gb:g} GB for KV{host}", setting.state_gb or 0.0


def answers(results: Sequence[CellResult], unlimited: dict[str, float], row: str) -> list[str]:
    """A sentence for each trace and kind of budget in which `row` was replayed.

    `unlimited`: trace -> what an unlimited pool resumes, as a share of all prompt tokens.
    """
    curves: dict[tuple[str, str], list[BudgetPoint]] = {}
    for one in results:
        if one.cell.row == row and one.share is not None:
            kind, budget_gb = budget_of(one.cell.setting)
            curves.setdefault((one.trace, kind), []).append(BudgetPoint(budget_gb, one.share, _lacks_kv(one)))
    return [
        f"{trace}: {answer(sorted(points, key=lambda point: point.budget_gb), unlimited[trace], kind)}"
        for (trace, kind), points in curves.items()
    ]


def _lacks_kv(one: CellResult) -> bool:
    if one.cell.setting.total_gb is not None or one.result is None:
        return False
    lost = one.result.lost_by_reason
    for_kv, for_states = (
        sum(lost.get(reason, 0) for reason in reasons)
        for reasons in (("kv_evicted", "too_long"), ("state_evicted", "capacity"))
    )
    return for_kv > for_states


def answer(points: Sequence[BudgetPoint], unlimited: float, kind: str) -> str:
    """The smallest budget that is worth almost as much as any.

    That is the first at which the share is within a point of an unlimited pool's; else the first from which
    twice as much brings less than a point. Where KV memory is what the largest budget lacks, that is said.

    Args:
        points: one or more, the smallest budget first.
        unlimited: the share of an unlimited pool.
        kind: what the budget is for.
    """
    if unlimited < NEAR:
        return (
            "give it no memory for this traffic, in which too little repeats: even an unlimited pool "
            f"resumes {_percent(unlimited)} of the prompt tokens."
        )
    enough = next((point for point in points if unlimited - point.share <= NEAR), None)
    if enough is not None:
        return (
            f"give it {_gb(enough)} {kind}: it then resumes {_percent(enough.share)} of the prompt tokens, "
            f"within a point of the {_percent(unlimited)} that an unlimited pool resumes"
            f"{_less(points, enough)}."
        )
    if points[-1].lacks_kv:
        return (
            f"give KV more: with {_gb(points[-1])} {kind}, it resumes {_percent(points[-1].share)} of the "
            "prompt tokens, and most of what is missing is KV (an unlimited pool resumes "
            f"{_percent(unlimited)})."
        )
    flat = next((pair for pair in _doublings(points) if pair[1].share - pair[0].share <= NEAR), None)
    if flat is not None:
        point, double = flat
        return (
            f"give it {_gb(point)} {kind}: it then resumes {_percent(point.share)} of the prompt tokens, and "
            f"{_gb(double)} bring only {_percent(double.share)} (an unlimited pool {_percent(unlimited)})"
            f"{_less(points, point)}."
        )
    last = points[-1]
    return (
        f"give it more than {_gb(last)} {kind}: with that it resumes {_percent(last.share)} of the prompt "
        f"tokens, and an unlimited pool {_percent(unlimited)}."
    )


def _doublings(points: Sequence[BudgetPoint]) -> list[tuple[BudgetPoint, BudgetPoint]]:
    """Each point, and the first one with at least twice its budget."""
    pairs = []
    for point in points:
        double = next((other for other in points if other.budget_gb >= 2 * point.budget_gb), None)
        if double is not None:
            pairs.append((point, double))
    return pairs


def _less(points: Sequence[BudgetPoint], chosen: BudgetPoint) -> str:
    """What the next smaller budget brings, as the end of a sentence."""
    smaller = [point for point in points if point.budget_gb < chosen.budget_gb]
    return f"; {_gb(smaller[-1])} bring {_percent(smaller[-1].share)}" if smaller else ""


def _gb(point: BudgetPoint) -> str:
    return f"{point.budget_gb:g} GB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
