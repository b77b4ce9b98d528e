"""What a replay prints and writes: the table, and all results as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .cells import CellResult
from .ours import UNLIMITED
from .rows import GROUPS
from .setting import ReplaySetting

_UNLIMITED = "unlimited pool"
_MIN_LOST = 0.0005
_CEILING = frozenset(GROUPS["ceiling"])


def unlimited_shares(results: Iterable[CellResult]) -> dict[str, float]:
    """Trace -> what an unlimited pool resumes, as a share of all prompt tokens."""
    return {
        one.trace: one.share for one in results if one.cell.row == UNLIMITED.name and one.share is not None
    }


def ceiling_share(results: Iterable[CellResult], one: CellResult) -> float | None:
    """The share of the best row that knows the trace, in the setting of `one`; None without such rows."""
    shares = (
        other.share
        for other in results
        if other.cell.row in _CEILING and other.cell.setting == one.cell.setting and other.trace == one.trace
    )
    return max((share for share in shares if share is not None), default=None)


def table(results: Sequence[CellResult]) -> str:
    """A table for each trace: a line a row, a column a budget."""
    return "\n\n".join(
        "\n".join(_lines([one for one in results if one.trace == trace]))
        for trace in dict.fromkeys(one.trace for one in results)
    )


def _lines(results: Sequence[CellResult]) -> Iterable[str]:
    cells = [one for one in results if one.cell.row != UNLIMITED.name]
    first = results[0]
    num_tokens = next((one.result.prompt_tokens for one in results if one.result is not None), 0)
    yield (
        f"{first.trace}: {first.num_requests:,} requests, {num_tokens:,} prompt tokens. "
        "% of the prompt tokens resumed"
        + (" (of the ceiling)" if any(one.cell.row in _CEILING for one in cells) else "")
    )
    settings = list(dict.fromkeys(one.cell.setting for one in cells))
    heads = [budget_head(setting) for setting in settings]
    rows = list(dict.fromkeys(one.cell.row for one in cells))
    left = max(map(len, [*rows, _UNLIMITED])) + 2
    widths = [max(len(head), 12) + 2 for head in heads]
    yield "row".ljust(left) + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))
    known = {(one.cell.row, one.cell.setting): one for one in cells}
    for row in rows:
        texts = [_text(results, known.get((row, setting))) for setting in settings]
        yield row.ljust(left) + "".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))
    share = unlimited_shares(results).get(first.trace)
    if share is not None:
        yield f"{_UNLIMITED.ljust(left)}{f'{100 * share:.1f}'.rjust(widths[0])}"
    for row in rows:
        yield from _losses(row, [one for one in cells if one.cell.row == row])
    for one in cells:
        if one.refusal:
            yield f"{one.cell.row} at {budget_head(one.cell.setting)}: {one.refusal}"


def budget_head(setting: ReplaySetting) -> str:
    """The memory of a setting, as tables name it."""
    if setting.total_gb is not None:
        return f"{setting.total_gb:g} GB in all"
    return f"{setting.state_gb:g}+{setting.kv_gb:g} GB"


def _text(results: Sequence[CellResult], one: CellResult | None) -> str:
    if one is None:
        return "-"
    if one.share is None:
        return "refused"
    ceiling = ceiling_share(results, one)
    return f"{100 * one.share:.1f}" + (f" ({100 * one.share / ceiling:.0f} %)" if ceiling else "")


def _losses(row: str, cells: Sequence[CellResult]) -> Iterable[str]:
    """Why a row computed tokens, and what it saved, budget by budget; for rows that tell."""
    told = [one.result for one in cells if one.result is not None and one.result.lost_by_reason]
    if not told:
        return
    shares = {
        reason: [result.lost_by_reason.get(reason, 0) / max(1, result.prompt_tokens) for result in told]
        for reason in dict.fromkeys(reason for result in told for reason in result.lost_by_reason)
    }
    lost = ", ".join(
        f"{reason} {_listed(values)}" for reason, values in shares.items() if max(values) > _MIN_LOST
    )
    yield f"{row} computed, % of the prompt tokens: {lost}"
    saved = [one.flops_saved for one in cells if one.flops_saved is not None]
    if saved:
        yield f"{row} saved, % of the operations of prefills: {_listed(saved)}"


def _listed(shares: Iterable[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def as_json(results: Sequence[CellResult], settings: dict[str, Any], said: Sequence[str]) -> dict[str, Any]:
    """All results as plain values.

    Args:
        results: of all cells.
        settings: what the command was given.
        said: the answers to how much memory the cache should get.
    """
    return {
        "settings": settings,
        "unlimited": unlimited_shares(results),
        "results": [_plain(results, one) for one in results],
        "answers": list(said),
    }


def _plain(results: Sequence[CellResult], one: CellResult) -> dict[str, Any]:
    setting, result = one.cell.setting, one.result
    is_unlimited = one.cell.row == UNLIMITED.name
    ceiling = None if is_unlimited else ceiling_share(results, one)
    plain: dict[str, Any] = {
        "trace": one.trace,
        "row": one.cell.row,
        "num_requests": one.num_requests,
        "state_gb": None if is_unlimited else setting.state_gb,
        "kv_gb": None if is_unlimited else setting.kv_gb,
        "total_gb": None if is_unlimited else setting.total_gb,
        "share": one.share,
        "share_of_ceiling": one.share / ceiling if ceiling and one.share is not None else None,
        "flops_saved": one.flops_saved,
        "refusal": one.refusal or None,
    }
    if result is not None:
        plain |= {
            "prompt_tokens": result.prompt_tokens,
            "resumed_tokens": result.resumed_tokens,
            "lost_by_reason": dict(result.lost_by_reason),
            "num_states_taken": result.num_states_taken,
            "state_capacity": result.state_capacity,
        }
    return plain


def plain_setting(setting: ReplaySetting) -> dict[str, Any]:
    """What all cells have in common, as plain values."""
    values = asdict(setting)
    return {
        name: values[name]
        for name in ("shape", "max_requests", "max_tokens", "block_size_tokens", "cost", "host_gb")
    }
