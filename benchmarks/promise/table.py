"""What `bits.py` has measured, as Markdown tables.

    python benchmarks/promise/table.py out.json more.json

Later files add their models, and their parts of a model, to those of earlier ones.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def merged(paths: Sequence[Path]) -> dict[str, Figures]:
    """The parts of each model in all files; a later file's part takes the place of an earlier one's."""
    models: dict[str, Figures] = {}
    for path in paths:
        for name, figures in json.loads(path.read_text())["models"].items():
            models.setdefault(name, {}).update(figures)
    return models


def comparisons(rows: Sequence[Figures]) -> list[str]:
    """A line for each condition."""
    lines = [
        "| condition | requests | positions | tokens that differ | bits that differ | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        evidence = ", ".join(f"{what} {count:,}" for what, count in row["evidence"].items() if count)
        lines.append(
            f"| {row['condition']} | {row['requests']:,} | {row['positions']:,} | "
            f"{row['differing_tokens']:,} | {row['differing_bits']:,} | {evidence} |"
        )
    return lines


def costs(rows: Sequence[Figures]) -> list[str]:
    """A line for each work."""
    lines = ["| what | off, ms | on, ms | on / off | at most |", "|---|---|---|---|---|"]
    return lines + [
        f"| {row['what']} | {row['off_ms']:.2f} | {row['on_ms']:.2f} | {row['ratio']:.3f} | "
        f"{row['most']:.2f} |"
        for row in rows
    ]


def replays(rows: Sequence[Figures]) -> list[str]:
    """A line for each number of requests."""
    lines = [
        "| requests | recurrent, ms | replay, ms | replay / recurrent | recurrent, MB a token "
        "| replay, MB a token |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['requests']} | {row['recurrent_ms']:.2f} | {row['replay_ms']:.2f} | {row['ratio']:.3f} | "
        f"{row['recurrent_bytes'] / 1e6:,.1f} | {row['replay_bytes'] / 1e6:,.1f} |"
        for row in rows
    ]


TABLES = {"comparisons": comparisons, "off": comparisons, "costs": costs, "replay": replays}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="what --json of bits.py has written")
    args = parser.parse_args()
    for name, figures in merged(args.files).items():
        print(f"\n{name}")
        for part, table in TABLES.items():
            if part in figures:
                print(f"\n{part}:\n")
                print("\n".join(table(figures[part])))
        if "total" in figures:
            whole = figures["total"]
            print(
                f"\n{whole['requests']:,} requests and {whole['positions']:,} positions were compared: "
                f"{whole['differing_tokens']:,} tokens and {whole['differing_bits']:,} bits differ."
            )


if __name__ == "__main__":
    main()
