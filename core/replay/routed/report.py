"""What a replay with replicas prints and writes: the table, and all results as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..report import budget_head
from .cells import RoutedCellResult

_COLUMNS = (
    ("replicas", 8), ("router", 14), ("resumed", 7), ("of one cache", 12), ("tokens", 6), ("requests", 8),
    ("first token", 12), ("moved sessions", 14), ("event bytes a request", 21), ("a second", 9),
)  # fmt: skip
"""Heads of the columns, and their widths."""


def one_cache_share(results: Iterable[RoutedCellResult], one: RoutedCellResult) -> float | None:
    """What one cache with the memory of all replicas of `one` resumes; None where it was not replayed."""
    for other in results:
        if (
            other.cell.routing.is_one_cache
            and other.result is not None
            and (other.trace, other.cell.setting) == (one.trace, one.cell.setting)
            and other.cell.routing.num_replicas == one.cell.routing.num_replicas
        ):
            return other.result.share
    return None


def share_of_one_cache(results: Iterable[RoutedCellResult], one: RoutedCellResult) -> float | None:
    """The share of `one`, as a part of what one cache resumes; None where that is nothing or not known."""
    whole = one_cache_share(results, one)
    return one.result.share / whole if whole and one.result is not None else None


def routing_table(results: Sequence[RoutedCellResult]) -> str:
    """A table for each trace and budget: a line for each router and number of replicas."""
    parts = list(dict.fromkeys((one.trace, one.cell.setting) for one in results))
    return "\n\n".join(
        "\n".join(_lines([one for one in results if (one.trace, one.cell.setting) == part])) for part in parts
    )


def _lines(results: Sequence[RoutedCellResult]) -> Iterable[str]:
    first = results[0]
    num_tokens = next((one.result.prompt_tokens for one in results if one.result is not None), 0)
    delay_ms = first.cell.routing.event_delay_ms
    yield (
        f"{first.trace}: {first.num_requests:,} requests, {num_tokens:,} prompt tokens, "
        f"{budget_head(first.cell.setting)} a replica, events after {delay_ms:g} ms"
    )
    yield (
        "resumed: % of the prompt tokens. of one cache: % of what one cache with the sum of the budgets "
        "resumes."
    )
    yield "tokens, requests: most of a replica / mean. first token: mean / 95 % of the requests, ms."
    yield "  ".join(name.rjust(width) for name, width in _COLUMNS)
    for one in results:
        yield "  ".join(
            text.rjust(width) for text, (_, width) in zip(_texts(results, one), _COLUMNS, strict=True)
        )
    yield from dict.fromkeys(one.refusal for one in results if one.refusal)


def _texts(results: Sequence[RoutedCellResult], one: RoutedCellResult) -> Sequence[str]:
    """The cells of a line."""
    result, routing = one.result, one.cell.routing
    head = [str(routing.num_replicas), routing.router]
    if result is None:
        return [*head, "refused", *["-"] * (len(_COLUMNS) - 3)]
    of_whole = share_of_one_cache(results, one)
    first_token = f"{1000 * result.mean_first_token_s:.0f} / {1000 * result.p95_first_token_s:.0f}"
    known = [
        *head, f"{100 * result.share:.1f}", "-" if of_whole is None else f"{100 * of_whole:.1f}",
        f"{result.token_imbalance:.2f}", f"{result.request_imbalance:.2f}", first_token,
    ]  # fmt: skip
    if routing.is_one_cache:
        return [*known[:4], *["-"] * (len(_COLUMNS) - 4)]
    moved = f"{result.num_moved_sessions:,} of {result.num_sessions:,}"
    if not result.num_events:
        return [*known, moved, "-", "-"]
    return [*known, moved, f"{result.event_bytes_per_request:,.0f}", f"{result.event_bytes_per_s:,.0f}"]


def routed_json(results: Sequence[RoutedCellResult], settings: dict[str, Any]) -> dict[str, Any]:
    """All results as plain values; `settings`: what the command was given."""
    return {"settings": settings, "results": [_plain(results, one) for one in results]}


def _plain(results: Sequence[RoutedCellResult], one: RoutedCellResult) -> dict[str, Any]:
    setting, routing, result = one.cell.setting, one.cell.routing, one.result
    plain: dict[str, Any] = {
        "trace": one.trace,
        "num_requests": one.num_requests,
        "num_replicas": routing.num_replicas,
        "router": routing.router,
        "state_gb": setting.state_gb,
        "kv_gb": setting.kv_gb,
        "total_gb": setting.total_gb,
        "share": None if result is None else result.share,
        "share_of_one_cache": share_of_one_cache(results, one),
        "refusal": one.refusal or None,
    }
    if result is not None:
        plain |= {
            "prompt_tokens": result.prompt_tokens,
            "resumed_tokens": result.resumed_tokens,
            "lost_by_reason": result.lost_by_reason,
            "token_imbalance": result.token_imbalance,
            "request_imbalance": result.request_imbalance,
            "mean_first_token_s": result.mean_first_token_s,
            "p95_first_token_s": result.p95_first_token_s,
            "duration_s": result.duration_s,
            "num_sessions": result.num_sessions,
            "num_moved_sessions": result.num_moved_sessions,
            "num_events": result.num_events,
            "event_bytes": result.event_bytes,
            "event_bytes_per_request": result.event_bytes_per_request,
            "event_bytes_per_s": result.event_bytes_per_s,
            "replicas": [
                {
                    "num_requests": replica.served.num_requests,
                    "prompt_tokens": replica.served.prompt_tokens,
                    "resumed_tokens": replica.served.resumed_tokens,
                    "num_generated_tokens": replica.num_generated_tokens,
                    "num_computed_tokens": replica.num_computed_tokens,
                }
                for replica in result.replicas
            ],
        }
    return plain
