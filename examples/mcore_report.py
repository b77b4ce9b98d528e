"""What `mcore_dynamic_inference.py` prints and writes of its runs."""

import argparse
import datetime
from dataclasses import asdict
from importlib.metadata import version
from statistics import mean, median, quantiles
from typing import Any

import mcore_rig
import megatron.core
import torch
from mcore_runs import LOADS, Run

PACKAGES = ("torch", "triton")


def _row(label: str, *cells: str) -> None:
    print(f"{label:<32}" + "".join(f"{cell:>15}" for cell in cells))


def _counts(runs: tuple[Run, ...] | list[Run]) -> None:
    _row("", *(run.name for run in runs))
    _row("requests", *(str(run.requests) for run in runs))
    _row("prompt tokens", *(f"{run.prompt_tokens:,}" for run in runs))
    _row("  resumed", *(f"{run.num_resumed_tokens:,}" for run in runs))
    _row("  computed", *(f"{run.computed_tokens:,}" for run in runs))


def print_table(without: Run, *cached: Run) -> None:
    """Counts and answers, of the run without a cache and of those with one."""
    _counts((without, *cached))
    _row(
        "answers identical to no cache",
        "",
        *(f"{run.identical(without)} of {run.requests}" for run in cached),
    )


def print_machine(args: argparse.Namespace, without: Run) -> None:
    """Where the runs were made, of what, and which code served the names of missing packages."""
    print(", ".join(machine(without).values()))
    load = LOADS[args.shape]
    print(
        f"shape {args.shape}, {args.dtype}: {args.conversations} conversations at a time, "
        f"{args.turns} turns, "
        f"system prompts of {load.system_prompt:,} tokens,\nanswers of {load.answer}, "
        f"at most {load.step:,} tokens a step, {args.rounds} timed round{'s' * (args.rounds > 1)} (medians)"
    )
    for name, what in mcore_rig.what_runs().items():
        print(f"  {name}: {what}")


def machine(without: Run) -> dict[str, str]:
    """The devices of all ranks, the versions of packages, the date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if without.ranks > 1:
        device = f"{without.ranks} ranks, each on one {device}"
    versions = {name: version(name) for name in PACKAGES} | {"megatron-core": megatron.core.__version__}
    packages = {name: f"{name} {number}" for name, number in versions.items()}
    return {"device": device, **packages, "date": datetime.date.today().isoformat()}


def print_speed(without: Run, runs: list[Run]) -> None:
    """Counts, times and answers: a table without CUDA graphs, one with them."""
    for graphs in sorted({run.cuda_graphs for run in runs}):
        shown = [run for run in runs if run.cuda_graphs == graphs]
        speeds = [speed(run) for run in shown]
        print(f"\nCUDA graphs {'on' if graphs else 'off'}")
        _counts([run.timed[0] for run in shown])
        _row("time to first token, mean, ms", *(f"{1e3 * one['ttft_mean_s']:,.0f}" for one in speeds))
        _row("time to first token, p90, ms", *(f"{1e3 * one['ttft_p90_s']:,.0f}" for one in speeds))
        _row("  after the first turn, mean", *(f"{1e3 * one['later_ttft_mean_s']:,.0f}" for one in speeds))
        _row("output tokens a second", *(f"{one['output_tokens_a_second']:,.0f}" for one in speeds))
        _row("seconds", *(f"{one['seconds']:.1f}" for one in speeds))
        _row("answers as in whole prompts", *(f"{run.identical(without)} of {run.requests}" for run in shown))


def speed(run: Run) -> dict[str, float]:
    """Of each figure the median of the rounds."""
    rounds = [_speed_of(one) for one in run.timed]
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def _speed_of(done: Run) -> dict[str, float]:
    later = [one.ttft_s for turn in done.served[1:] for one in turn if one.ttft_s]
    return {
        "ttft_mean_s": mean(done.ttfts_s),
        "ttft_p90_s": _p90(done.ttfts_s),
        "later_ttft_mean_s": mean(later or done.ttfts_s),
        "output_tokens_a_second": done.num_generated_tokens / done.seconds,
        "seconds": done.seconds,
    }


def print_differences(without: Run, runs: list[Run]) -> None:
    """How far apart the two best tokens of whole prompts were where an answer first differs."""
    print("\nwhere an answer first differs from that of whole prompts without a cache:")
    print(f"{'':<32}{'answers':>9}{'median token':>14}{'gap: median':>13}{'p90':>8}{'largest':>9}")
    for run in runs:
        name = f"{run.name}{', CUDA graphs' if run.cuda_graphs else ''}"
        found = list(run.first_differences(without))
        cells = f"{len(found):>9}"
        if found:
            gaps = [gap for _, gap in found if gap is not None]
            cells += f"{median(at for at, _ in found):>14.0f}"
            cells += f"{median(gaps):>13.4f}{_p90(gaps):>8.4f}{max(gaps):>9.4f}"
        print(f"{name:<32}{cells}")
    gaps = [gap for turn in without.served for one in turn for gap in one.gaps]
    if gaps:
        cells = f"{len(gaps):>9}{'':>14}{median(gaps):>13.4f}{_p90(gaps):>8.4f}{max(gaps):>9.4f}"
        print(f"{'of all tokens':<32}{cells}")


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def figures(args: argparse.Namespace, without: Run, runs: list[Run]) -> dict[str, Any]:
    """What `--json` writes."""
    asked = {name: value for name, value in vars(args).items() if name != "json"}
    return {
        "machine": machine(without),
        "what_runs": mcore_rig.what_runs(),
        "arguments": asked,
        "load": asdict(LOADS[args.shape]),
        "runs": [_figures_of(run, without) for run in (without, *runs)],
    }


def _figures_of(run: Run, without: Run) -> dict[str, Any]:
    return {
        **_counts_of(run),
        "whole_prompts": run is without,
        "cuda_graphs": run.cuda_graphs,
        "identical_answers": run.identical(without),
        "first_differences": [{"token": at, "gap": gap} for at, gap in run.first_differences(without)],
        "speed": speed(run) if run.timed else None,
        "timed": [_counts_of(one) for one in run.timed],
    }


def _counts_of(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "requests": run.requests,
        "prompt_tokens": run.prompt_tokens,
        "num_resumed_tokens": run.num_resumed_tokens,
        "computed_tokens": run.computed_tokens,
        "generated_tokens": run.num_generated_tokens,
        "seconds": run.seconds,
        "ttfts_s": run.ttfts_s,
        "stats": asdict(run.stats) if run.stats else None,
    }


if __name__ == "__main__":
    print(__doc__)
