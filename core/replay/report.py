"""Caches on traces in settings, as cells of a table, and a sentence: how much memory to give."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from .compared_caches import UNLIMITED, ComparedCache
from .generate import KINDS, generate
from .read_trace import read_trace
from .setting import ReplayResult, ReplaySetting
from .trace import Trace

_UNLIMITED = "unlimited pool"
_MIN_LOST = 0.0005
_BUDGETS = ("state_gb", "kv_gb", "total_gb")


@dataclass(frozen=True)
class TraceSource:
    """A kind with a seed, or a file; of it the first requests, `speed` times as fast."""

    origin: str
    seed: int = 0
    num_requests: int | None = None
    speed: float = 1.0


@lru_cache(maxsize=2)
def load_trace(source: TraceSource) -> Trace:
    """Make or read the trace; the last two are kept."""
    generated = source.origin in KINDS
    trace = generate(source.origin, source.seed) if generated else read_trace(source.origin)
    if source.num_requests is not None:
        trace = replace(trace, requests=trace.requests[: source.num_requests])
    if source.speed != 1:
        faster = [replace(request, arrival_s=request.arrival_s / source.speed) for request in trace.requests]
        trace = replace(trace, name=f"{trace.name}, {source.speed:g} x as fast", requests=faster)
    if not trace.requests:
        raise ValueError(f"{source.origin} has no requests; accepted: a trace with one or more")
    return trace


@dataclass(frozen=True)
class Cell:
    """One cache on one trace in one setting."""

    source: TraceSource
    cache: ComparedCache
    setting: ReplaySetting


@dataclass(frozen=True)
class CellResult:
    """The result of a cell; None, with a refusal, where the cache cannot serve in the setting."""

    cell: Cell
    trace: str
    num_requests: int
    result: ReplayResult | None
    refusal: str = ""
    flops_saved: float | None = None  # share of the prefills' arithmetic

    @property
    def share(self) -> float | None:
        return None if self.result is None else self.result.share


def replay_cell(cell: Cell) -> CellResult:
    """Replay one cell. A ValueError of the cache becomes the cell's refusal."""
    trace = load_trace(cell.source)
    number = len(trace.requests)
    try:
        result = cell.cache.replay(trace, cell.setting)
    except ValueError as error:
        return CellResult(cell, trace.name, number, None, str(error))
    saved = None
    if result.resumed_lengths:  # a request that resumed several times counts as if it had resumed once
        flops = cell.setting.shape.prefill_flops
        whole = sum(flops(len(request.prompt)) for request in trace.requests)
        saved = sum(map(flops, result.resumed_lengths)) / whole
    return CellResult(cell, trace.name, number, replace(result, resumed_lengths=()), flops_saved=saved)


def unlimited_shares(results: Iterable[CellResult]) -> dict[str, float]:
    """Trace -> what an unlimited pool resumes, as a share of all prompt tokens."""
    return {
        outcome.trace: outcome.share
        for outcome in results
        if outcome.cell.cache == UNLIMITED and outcome.share is not None
    }


def percent(outcome: CellResult) -> str:
    return "refused" if outcome.share is None else f"{100 * outcome.share:.1f}"


def table(results: Sequence[CellResult], text: Callable[[CellResult], str] = percent, note: str = "") -> str:
    """A table for each trace: a line a cache, a column a budget; `text` of each cell, `note` in the title."""
    return "\n\n".join(
        "\n".join(_lines([outcome for outcome in results if outcome.trace == trace], text, note))
        for trace in dict.fromkeys(outcome.trace for outcome in results)
    )


def _lines(results: Sequence[CellResult], text: Callable[[CellResult], str], note: str) -> Iterable[str]:
    cells = [outcome for outcome in results if outcome.cell.cache != UNLIMITED]
    first = results[0]
    num_tokens = next((outcome.result.prompt_tokens for outcome in results if outcome.result is not None), 0)
    yield (
        f"{first.trace}: {first.num_requests:,} requests, {num_tokens:,} prompt tokens. "
        f"% of the prompt tokens resumed{note}"
    )
    settings = list(dict.fromkeys(outcome.cell.setting for outcome in cells))
    heads = [budget_head(setting) for setting in settings]
    names = list(dict.fromkeys(outcome.cell.cache.name for outcome in cells))
    left = max(map(len, [*names, _UNLIMITED])) + 2
    widths = [max(len(head), 12) + 2 for head in heads]
    yield "row".ljust(left) + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))
    known = {(outcome.cell.cache.name, outcome.cell.setting): text(outcome) for outcome in cells}
    for name in names:
        texts = [known.get((name, setting), "-") for setting in settings]
        yield name.ljust(left) + "".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))
    if (share := unlimited_shares(results).get(first.trace)) is not None:
        yield f"{_UNLIMITED.ljust(left)}{f'{100 * share:.1f}'.rjust(widths[0])}"
    for name in names:
        yield from _losses(name, [outcome for outcome in cells if outcome.cell.cache.name == name])
    for outcome in cells:
        if outcome.refusal:
            yield f"{outcome.cell.cache.name} at {budget_head(outcome.cell.setting)}: {outcome.refusal}"


def budget_head(setting: ReplaySetting) -> str:
    """The memory of a setting, as tables name it."""
    if setting.total_gb is not None:
        return f"{setting.total_gb:g} GB in all"
    return f"{setting.state_gb:g}+{setting.kv_gb:g} GB"


def _losses(name: str, cells: Sequence[CellResult]) -> Iterable[str]:
    """Why a cache computed tokens, and what it saved, budget by budget; for caches with reasons."""
    known = [found for each in cells if (found := each.result) is not None and found.lost_by_reason]
    if not known:
        return
    shares = {
        reason: [result.lost_by_reason.get(reason, 0) / max(1, result.prompt_tokens) for result in known]
        for reason in dict.fromkeys(reason for result in known for reason in result.lost_by_reason)
    }
    large = {reason: values for reason, values in shares.items() if max(values) > _MIN_LOST}
    lost = ", ".join(f"{reason} {_listed(values)}" for reason, values in large.items())
    yield f"{name} computed, % of the prompt tokens: {lost}"
    saved = [outcome.flops_saved for outcome in cells if outcome.flops_saved is not None]
    if saved:
        yield f"{name} saved, % of the operations of prefills: {_listed(saved)}"


def _listed(shares: Iterable[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def as_plain(outcome: CellResult) -> dict[str, Any]:
    setting, result = outcome.cell.setting, outcome.result
    has_budget = outcome.cell.cache != UNLIMITED
    values: dict[str, Any] = {
        "trace": outcome.trace,
        "row": outcome.cell.cache.name,
        "num_requests": outcome.num_requests,
        **{name: getattr(setting, name) if has_budget else None for name in _BUDGETS},
        "share": outcome.share,
        "flops_saved": outcome.flops_saved,
        "refusal": outcome.refusal or None,
    }
    if result is not None:
        names = ("prompt_tokens", "resumed_tokens", "num_states_taken", "state_capacity")
        values |= {name: getattr(result, name) for name in names}
        values["lost_by_reason"] = dict(result.lost_by_reason)
    return values


def plain_setting(setting: ReplaySetting) -> dict[str, Any]:
    """The part of a setting that all cells share, as plain values."""
    return {name: value for name, value in asdict(setting).items() if name not in _BUDGETS}


_NEAR = 0.01  # shares that differ by no more count as equal


@dataclass(frozen=True, order=True)
class BudgetPoint:
    """What a cache resumes with a budget; `lacks_kv`: more tokens lack KV than states."""

    budget_gb: float
    share: float
    lacks_kv: bool = False


def budget_of(setting: ReplaySetting) -> tuple[str, float]:
    """What the budget of a setting is for, and its GB."""
    host = f"{setting.host_gb:g} GB of the host" if setting.host_gb else ""
    if setting.total_gb is not None:
        return f"for states and KV together{f', with {host}' if host else ''}", setting.total_gb
    kv = f"{setting.kv_gb:g} GB for KV{f' and {host}' if host else ''}"
    return f"for states, with {kv}", setting.state_gb or 0.0


def sizing_sentences(results: Sequence[CellResult], unlimited: dict[str, float], cache: str) -> list[str]:
    """A sentence for each trace and kind of budget of the cache named `cache`; `unlimited`: of each trace."""
    curves: dict[tuple[str, str], list[BudgetPoint]] = {}
    for outcome in results:
        if outcome.cell.cache.name == cache and outcome.share is not None:
            kind, budget_gb = budget_of(outcome.cell.setting)
            curves.setdefault((outcome.trace, kind), []).append(
                BudgetPoint(budget_gb, outcome.share, _lacks_kv(outcome))
            )
    return [
        f"{trace}: {sizing_sentence(sorted(points), unlimited[trace], kind)}"
        for (trace, kind), points in curves.items()
    ]


def _lacks_kv(outcome: CellResult) -> bool:
    if outcome.cell.setting.total_gb is not None or outcome.result is None:
        return False
    lost = outcome.result.lost_by_reason
    for_kv, for_states = (
        sum(lost.get(reason, 0) for reason in reasons)
        for reasons in (("kv_evicted", "too_long"), ("state_evicted", "capacity"))
    )
    return for_kv > for_states


def sizing_sentence(points: Sequence[BudgetPoint], unlimited: float, kind: str) -> str:
    """The smallest budget within a point of an unlimited pool; else which memory the largest one lacks."""
    if unlimited < _NEAR:
        return (
            "give it no memory for this traffic, in which too little repeats: even an unlimited pool "
            f"resumes {_percent(unlimited)} of the prompt tokens."
        )
    enough = next((point for point in points if unlimited - point.share <= _NEAR), None)
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
    last = points[-1]
    return (
        f"give it more than {_gb(last)} {kind}: with that it resumes {_percent(last.share)} of the prompt "
        f"tokens, and an unlimited pool {_percent(unlimited)}."
    )


def _less(points: Sequence[BudgetPoint], chosen: BudgetPoint) -> str:
    """What the next smaller budget brings, as the end of a sentence."""
    smaller = [point for point in points if point.budget_gb < chosen.budget_gb]
    return f"; {_gb(smaller[-1])} bring {_percent(smaller[-1].share)}" if smaller else ""


def _gb(point: BudgetPoint) -> str:
    return f"{point.budget_gb:g} GB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
