"""The README's picture, of figures in benchmarks/results.

python tools/readme_picture.py --picture docs/figures.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
OURS, OTHER, THIRD = "#2a78d6", "#b8bcc4", "#e0a458"
TRACES = ("chat", "agent", "documents", "fork")


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def bars(axes: Any, groups: list[str], sides: dict[str, tuple[list[float], str]]) -> None:
    width = 0.8 / len(sides)
    for place, (name, (values, colour)) in enumerate(sides.items()):
        at = [index + (place - (len(sides) - 1) / 2) * width for index in range(len(groups))]
        drawn = axes.bar(at, values, width * 0.92, color=colour, label=name)
        axes.bar_label(drawn, [f"{value:.0f}" for value in values], padding=2, fontsize=11)
    axes.set_xticks(range(len(groups)), groups, fontsize=11)
    axes.margins(y=0.15)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--picture", required=True, help="a .png file")
    args = parser.parse_args()
    figure, (off_on, peer, shared) = plt.subplots(1, 3, figsize=(11, 3.9), width_ratios=[1.3, 2, 3.3])

    conversations = results("gpu_serving_h200")["models"]["HybridLM-8B"]["conversations"]
    means = {side: [conversations[side]["first_token_mean_ms"]] for side in ("without cache", "with cache")}
    sides = {"without cache": (means["without cache"], OTHER), "with cache": (means["with cache"], OURS)}
    bars(off_on, ["an 8B hybrid"], sides)
    off_on.set_title("Time to first token, ms", fontsize=12)

    found = results("vllm_peer_h100")["models"]
    models = {name: sides for name, sides in found.items() if "vllm" in sides}
    first = {
        side: [model[side]["conversations"]["first_token_ms"] for model in models.values()]
        for side in ("vllm", "mambaslots")
    }
    bars(
        peer,
        list(models),
        {"vLLM 0.26": (first["vllm"], OTHER), "mambaslots": (first["mambaslots"], OURS)},
    )
    peer.set_title("Time to first token, ms", fontsize=12)

    found = {
        (row["row"], row["trace"].partition(",")[0]): 100 * row["share"]
        for row in results("replay_total")["results"]
        if row["total_gb"] == 22.0
    }
    rows = {
        "sglang": ("SGLang's rules", THIRD),
        "vllm": ("vLLM's rules", OTHER),
        "ours": ("mambaslots", OURS),
    }
    bars(
        shared,
        list(TRACES),
        {name: ([found[row, trace] for trace in TRACES], colour) for row, (name, colour) in rows.items()},
    )
    shared.set_title("Prompt tokens resumed with 22 GB, %", fontsize=12)
    shared.set_ylim(0, 118)
    for axes in (off_on, peer, shared):
        axes.legend(
            frameon=False,
            fontsize=11,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.1),
            ncols=3,
            columnspacing=1,
            handlelength=1.2,
        )
    figure.tight_layout()
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
