"""A table and a plot of what `gpu_serving.py` measured, before and after a change, beside the limits.

    python benchmarks/serving/plot.py --after after.json ... [--before before.json ...] [--plot out.png]

Several files of one side add up: a later file's parts replace those of an earlier file.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parents[1])]
from arguments import new_file, new_picture
from serving.report import checkpoint_cost, list_requirements

Models = dict[str, dict[str, Any]]
Figure = tuple[str, str, float]
"""What was measured, in which unit, and the value."""


def merged(paths: list[Path]) -> Models:
    """The parts of each model; rows of a later file replace those of an earlier."""
    models: Models = {}
    for path in paths:
        for name, parts in json.loads(path.read_text())["models"].items():
            known = models.setdefault(name, {})
            for part, figures in parts.items():
                key = {"prefill": "tokens", "decode": "requests"}.get(part)
                if key is not None:
                    rows = {row[key]: row for row in (*known.get(part, ()), *figures)}
                    figures = [rows[value] for value in sorted(rows)]
                known[part] = figures
    return models


def figures_of(parts: dict[str, Any]) -> Iterator[tuple[Figure, float | None]]:
    """Each figure of a model, and its limit where it has one."""
    for row in parts.get("prefill", ()):
        limit = row["products_ms"]
        yield (f"prefill of {row['tokens']:,}: forward", "ms", row["forward_ms"]), limit
        yield (f"prefill of {row['tokens']:,}: to the token", "ms", row["step_ms"]), limit
    if parts.get("transformers"):
        row = parts["transformers"]
        yield (f"transformers' own forward of {row['tokens']:,}", "ms", row["forward_ms"]), None
    for row in parts.get("decode", ()):
        yield (f"decode step of {row['requests']:,}", "ms", row["step_ms"]), row["limit_ms"]
        if "idle_share" in row.get("trace", {}):
            yield (
                (f"decode step of {row['requests']:,}: GPU idle", "%", 100 * row["trace"]["idle_share"]),
                5.0,
            )
    if "checkpoints" in parts:
        row = parts["checkpoints"]
        cost = 100 * checkpoint_cost(row)[0]
        yield (f"{row['states']} checkpoints in a prefill of {row['tokens']:,}", "%", cost), 1.0
    if "rolling" in parts:
        row = parts["rolling"]
        yield ("rolling states", "%", 100 * (row["rolling_ms"] / row["off_ms"] - 1)), 1.0
    if "cold" in parts:
        row = parts["cold"]
        yield ("cache on, nothing reused", "%", 100 * (row["on_s"] / row["off_s"] - 1)), 1.0
    for name, row in parts.get("conversations", {}).items():
        yield (f"conversations {name}: first token, median", "ms", row["first_token_median_ms"]), None
        yield (f"conversations {name}: between tokens, median", "ms", row["between_tokens_median_ms"]), None
        yield (f"conversations {name}: generated tokens", "a second", row["generated_tokens_per_s"]), None


def print_table(before: Models, after: Models) -> None:
    """Print a table for each model, and the kernels of a prefill and of a decode step."""
    for name in after:
        known = {figure[:2]: figure[2] for figure, _ in figures_of(before.get(name, {}))}
        print(f"\n| {name} | before | after | limit | after / limit |\n|---|---|---|---|---|")
        for (what, unit, value), limit in figures_of(after[name]):
            old = known.get((what, unit))
            ratio = f"{value / limit:.2f}" if limit is not None and unit == "ms" else ""
            bound = "" if limit is None else f"{limit:,.2f}" if unit == "ms" else f"< {limit:.0f} %"
            print(f"| {what}, {unit} | {_number(old)} | {_number(value)} | {bound} | {ratio} |")
        for what, tables in (
            ("prefill", [models.get(name, {}).get("prefill_trace") for models in (before, after)]),
            *(
                (
                    f"decode step of {count}",
                    [_decode_kernels(models, name, count) for models in (before, after)],
                )
                for count in (1, 32)
            ),
        ):
            if tables[1]:
                _print_kernels(f"{name}, a {what}", *tables)


def _decode_kernels(models: Models, name: str, requests: int) -> dict[str, Any] | None:
    for row in models.get(name, {}).get("decode", ()):
        if row["requests"] == requests:
            kernels: dict[str, Any] | None = row.get("trace", {}).get("kernels")
            return kernels
    return None


def _print_kernels(what: str, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
    sides = [{row["name"]: row for row in table["families"]} if table else {} for table in (before, after)]
    print(f"\n| {what} | launches before | us | launches after | us | share |\n|---|---|---|---|---|---|")
    for family in sorted(sides[0].keys() | sides[1].keys(), key=lambda name: -_us(sides[1], name)):
        cells = [
            f"{row['launches']:,.0f} | {row['us']:,.0f}" if (row := side.get(family)) else " | "
            for side in sides
        ]
        share = sides[1].get(family, {}).get("share")
        print(f"| {family} | {cells[0]} | {cells[1]} | {'' if share is None else f'{share:.1%}'} |")
    totals = [
        f"{table['launches']:,.0f} | {table['us']:,.0f}" if table else " | " for table in (before, after)
    ]
    print(f"| all | {totals[0]} | {totals[1]} | |")


def _us(side: dict[str, Any], family: str) -> float:
    return float(side.get(family, {}).get("us", 0.0))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def draw(before: Models, after: Models, path: Path) -> None:
    """Prefills above, decode steps below, a column a model; logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(after), figsize=(3.6 * len(after), 5.6), squeeze=False)
    for column, name in enumerate(after):
        for axis, part, x, y, limit in (
            (axes[0][column], "prefill", "tokens", "forward_ms", "products_ms"),
            (axes[1][column], "decode", "requests", "step_ms", "limit_ms"),
        ):
            for label, models, key, style in (
                ("before", before, y, "C0o--"), ("after", after, y, "C1o-"), ("limit", after, limit, "k:")
            ):  # fmt: skip
                rows = models.get(name, {}).get(part, [])
                if rows:
                    axis.plot([row[x] for row in rows], [row[key] for row in rows], style, label=label, ms=4)
            axis.set(xscale="log", yscale="log", xlabel=x)
            ticks = [row[x] for row in after[name].get(part, [])]
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.minorticks_off()
            values = [
                row[key]
                for models in (before, after)
                for row in models.get(name, {}).get(part, [])
                for key in (y, limit)
            ]
            if values:
                wide = max(values) > 4 * min(values)
                marks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if wide else range(1, 100)
                inside = [mark for mark in marks if min(values) * 0.7 <= mark <= max(values) * 1.4]
                axis.set_yticks(inside, [f"{mark:,}" for mark in inside])
            axis.grid(alpha=0.3)
        axes[0][column].set_title(name, fontsize=10)
    axes[0][0].set_ylabel("prefill, ms of the forward")
    axes[1][0].set_ylabel("decode step, ms")
    for axis in axes[:, 0]:
        if axis.lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", nargs="*", type=Path, default=[], help="files of gpu_serving.py")
    parser.add_argument("--after", nargs="+", type=Path, required=True, help="files of gpu_serving.py")
    parser.add_argument("--plot", type=new_picture, metavar="PATH", help="draw a picture")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write all files of --after as one")
    args = parser.parse_args()
    before, after = merged(args.before), merged(args.after)
    print_table(before, after)
    if args.json is not None:
        document = json.loads(args.after[-1].read_text())
        document["requirements"] = list_requirements(after)
        args.json.write_text(json.dumps(document | {"models": after}, indent=1) + "\n")
    if args.plot is not None:
        draw(before, after, args.plot)


if __name__ == "__main__":
    main()
