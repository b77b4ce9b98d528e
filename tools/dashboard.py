"""docs/grafana.json and the table of metrics in docs/operations.md, made of the figures' definitions.

    python tools/dashboard.py              (make docs: writes both)

A figure that no panel names gets a panel in a row of its own, so that the board shows every metric.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mambaslots.monitor.metrics import COUNTERS, DURATIONS, FAILED_ACCEPTS, GAUGES, Figure

DOCS = Path(__file__).parents[1] / "docs"
BOARD, PAGE = DOCS / "grafana.json", DOCS / "operations.md"
ALL = {figure.name: figure for figure in (*COUNTERS, *GAUGES, *DURATIONS, FAILED_ACCEPTS)}
COLUMNS, HEIGHT = 24, 8
TABLE = re.compile(r"(<!-- metrics \(tools/dashboard\.py\) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = '{job=~"$job",instance=~"$instance"}'


class Panel(NamedTuple):
    """A panel: "name" or "name legend" of each line, "part / whole" for a share.

    Attributes:
        text: what is not in the figures' own help.
        style: "lines", "stack" or "number".
    """

    title: str
    width: int
    lines: Sequence[str]
    text: str = ""
    style: str = "lines"


ROWS: dict[str, Sequence[Panel]] = {
    "Cache": (
        Panel("Hit rate", 8, ["resumed_prompt_tokens / prompt_tokens resumed"],
              "prompt tokens that were resumed, of all prompt tokens"),
        Panel("Prompt tokens by what became of them, a second", 16, [
            "resumed_prompt_tokens resumed", "computed_prompt_tokens", "recomputed_tokens recomputed",
        ], "resumed tokens, and computed ones by why they were not resumed", "stack"),
        Panel("State slots", 12, [
            "state_slots", "state_slots_pinned of these pinned", "tier_states copies in {{tier}}",
        ]),
        Panel("KV blocks", 12, ["kv_blocks"], style="stack"),
        Panel("States removed and stored, a second", 12, [
            "states_left", "states_refused refused", "states_evicted_unused evicted unused",
            "states_committed committed", "tier_states_fetched back from {{tier}}",
            "tier_copies_damaged damaged copies",
        ], "new_state, live_state and kv_evicted are want of memory; refused ones got no slot"),
        Panel("KV blocks removed and registered, a second", 12, [
            "kv_blocks_left", "kv_blocks_registered registered",
        ], "new_block is want of memory"),
        Panel("Age of evicted states", 24, ["state_eviction_age"]),
    ),
    "Latency": (
        Panel("Time to first token", 6, ["time_to_first_token"]),
        Panel("Time in the queue", 6, ["queue_time"]),
        Panel("Inter-token time", 6, ["inter_token"]),
        Panel("Step", 6, ["step"]),
    ),
    "Load": (
        Panel("Requests", 8, [
            "requests_running running", "requests_waiting waiting", "requests_paused paused",
            "requests_max can run",
        ], "paused requests run, and wait for a KV block"),
        Panel("Requests that ended, a second", 8, ["requests_ended", "requests_added added"]),
        Panel("Tokens, a second", 8, ["generated_tokens generated", "prompt_tokens prompt"]),
        Panel("Accepted drafts", 6, ["accepted_drafted_tokens / drafted_tokens accepted"],
              "accepted drafted tokens of all drafted"),
        Panel("Warnings", 6, ["warnings warnings"], style="number"),
        Panel("Rebuilds of the cache", 6, ["cache_rebuilds rebuilds"], style="number"),
        Panel("Connections not accepted", 6, ["failed_accepts failures"], style="number"),
    ),
    "Tenants": (
        Panel("Hit rate by tenant", 12, ["tenant_resumed_prompt_tokens / tenant_prompt_tokens"],
              "resumed of all prompt tokens"),
        Panel("Requests by tenant, a second", 12, ["tenant_requests"]),
    ),
}  # fmt: skip


def metric(figure: Figure) -> str:
    suffix = "_total" if figure in (*COUNTERS, FAILED_ACCEPTS) else "_seconds" if figure in DURATIONS else ""
    return f"mambaslots_{figure.name}{suffix}"


def expression(name: str, rates: bool = True) -> str:
    """The sum over all chosen servers, a second where it counts something."""
    figure = ALL[name]
    chosen = metric(figure) + CHOSEN
    if rates and figure not in GAUGES:
        chosen = f"rate({chosen}[$__rate_interval])"
    return f"sum by ({figure.label}) ({chosen})" if figure.label else f"sum({chosen})"


def targets(panel: Panel) -> Iterator[tuple[str, str]]:
    """Expressions and legends."""
    for line in panel.lines:
        share = re.fullmatch(r"(\w+) / (\w+) ?(.*)", line)
        name, _, legend = line.partition(" ")
        if share is not None:
            name, legend = share[1], share[3]
            shown = f"{expression(name)} / {expression(share[2])}"
        elif ALL[name] in DURATIONS:
            bucket = f"{metric(ALL[name])}_bucket{CHOSEN}[$__rate_interval]"
            for rank in (50, 90, 99):
                yield f"histogram_quantile({rank / 100}, sum by (le) (rate({bucket})))", f"p{rank}"
            continue
        else:
            shown = expression(name, rates=panel.style != "number")
        yield shown, legend or f"{{{{{ALL[name].label}}}}}"


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """The panel as Grafana reads it."""
    first = ALL[panel.lines[0].partition(" ")[0]]
    text = panel.text or first.help
    is_share, is_number = " / " in panel.lines[0], panel.style == "number"
    unit = "percentunit" if is_share else "s" if first in DURATIONS else "short"
    look: dict[str, Any] = {"unit": unit, "min": 0} | ({"max": 1} if is_share else {})
    if not is_number:
        is_stack = panel.style == "stack"
        look["custom"] = {"fillOpacity": 30 if is_stack else 8, "lineWidth": 1, "showPoints": "never"}
        if is_stack:
            look["custom"]["stacking"] = {"mode": "normal", "group": "A"}
    numbers = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    lines = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {
        "id": number,
        "type": "stat" if is_number else "timeseries",
        "title": panel.title,
        "description": f"{text[0].upper()}{text[1:]}.",
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": look, "overrides": []},
        "options": numbers if is_number else lines,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": shown, "legendFormat": legend}
            for i, (shown, legend) in enumerate(targets(panel))
        ],
    }


def panels() -> Iterator[dict[str, Any]]:
    named = {name for row in ROWS.values() for panel in row for name in re.findall(r"\w+", str(panel.lines))}
    others = [Panel(name.replace("_", " "), 8, [f"{name} {name}"]) for name in ALL if name not in named]
    number, x, y = 0, 0, 0
    for title, row in (ROWS | ({"Other": others} if others else {})).items():
        number += 1
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        for panel in row:
            number += 1
            yield drawn(panel, number, x, y)
            x += panel.width
            if x >= COLUMNS:
                x, y = 0, y + HEIGHT
        if x:
            x, y = 0, y + HEIGHT


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query,
        "definition": query, "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def board() -> str:
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
        "current": {},
    }  # fmt: skip
    info = "mambaslots_build_info"
    of_job, of_instance = f"label_values({info}, job)", f'label_values({info}{{job=~"$job"}}, instance)'
    content = {
        "title": "mambaslots",
        "uid": "mambaslots",
        "description": "The prefix cache of hybrid models: hits, losses, pools, latencies and tenants.",
        "tags": ["mambaslots", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [source, variable("job", "Job", of_job), variable("instance", "Instance", of_instance)]
        },
        "annotations": {"list": []},
        "panels": list(panels()),
    }
    return json.dumps(content, indent=1) + "\n"


def table() -> str:
    rows = [("mambaslots_build_info", "`version`, `model`", "always 1; its labels name version and model")]
    rows += [
        (metric(figure), f"`{figure.label}`" if figure.label else "", figure.help) for figure in ALL.values()
    ]
    lines = [f"| `{name}` | {label} | {text} |" for name, label, text in rows]
    return "\n".join(["| metric | labels | means |", "|---|---|---|", *lines]) + "\n"


def page(text: str) -> str:
    """The page with the newest table."""
    return TABLE.sub(lambda found: found[1] + table() + found[3], text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    BOARD.write_text(board())
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
