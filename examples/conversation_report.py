"""What `serve_conversations.py` reports of its runs: a table, JSON, a picture, and a conversation's text."""

import argparse
import math
import platform
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
from conversation_texts import Conversation

Key = tuple[int, int]  # number of the conversation, number of the turn


@dataclass
class Run:
    """What serving all conversations once came to; `ideal` is `ideal_resumed_tokens`, taken at admission."""

    name: str
    results: dict[Key, ms.RequestResult] = field(default_factory=dict)
    prompts: dict[Key, list[int]] = field(default_factory=dict)
    ideal: dict[Key, int] = field(default_factory=dict)
    steps: int = 0
    wall_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(result.num_prompt_tokens for result in self.results.values())

    @property
    def num_resumed_tokens(self) -> int:
        return sum(result.num_resumed_tokens for result in self.results.values())

    @property
    def ideal_resumed_tokens(self) -> int:
        return sum(self.ideal.values())

    @property
    def computed_by_reason(self) -> dict[str, int]:
        total = Counter[str]()
        for result in self.results.values():
            total.update(result.computed_by_reason)
        return {reason: total[reason] for reason in ms.COMPUTE_REASONS}

    @property
    def ttft_ms(self) -> dict[str, float]:
        times = sorted(_ttft_ms(result) for result in self.results.values())
        p90 = times[math.ceil(0.9 * len(times)) - 1]
        return {"mean": statistics.fmean(times), "median": statistics.median(times), "p90": p90}


def outputs_identical(a: Run, b: Run) -> bool:
    return all(a.results[key].tokens == result.tokens for key, result in b.results.items())


def log_prob_difference(a: Run, b: Run) -> float:
    """The largest, over the turns whose tokens are the same; 0 without any."""
    pairs = [(a.results[key], b.results[key]) for key in b.results]
    same = [(x.log_probs or [], y.log_probs or []) for x, y in pairs if x.tokens == y.tokens]
    return max((abs(p - q) for x, y in same for p, q in zip(x, y, strict=True)), default=0.0)


def _ttft_ms(result: ms.RequestResult) -> float:
    assert result.ttft_s is not None, "every turn asks for at least one token"
    return 1e3 * result.ttft_s


def print_table(without: Run, cached: Run) -> None:
    def row(label: str, *cells: float | str, form: str = ",") -> None:
        texts = [cell if isinstance(cell, str) else format(cell, form) for cell in cells]
        print(f"{label:<34}" + "".join(f"{text:>15}" for text in texts))

    row("", without.name, cached.name)
    row("requests", len(without.results), len(cached.results))
    row("prompt tokens", without.prompt_tokens, cached.prompt_tokens)
    row("  resumed", without.num_resumed_tokens, cached.num_resumed_tokens)
    for reason, tokens in cached.computed_by_reason.items():
        if tokens or without.computed_by_reason[reason]:
            row(f"  computed: {reason.replace('_', ' ')}", without.computed_by_reason[reason], tokens)
    ideal = cached.ideal_resumed_tokens
    row("ideal resumed tokens", "", ideal)
    row("resumed / ideal", "", cached.num_resumed_tokens / ideal if ideal else "-", form=".4f")
    for name in ("mean", "median", "p90"):
        times = without.ttft_ms[name], cached.ttft_ms[name]
        row(f"time to first token, {name} (ms)", *times, form=",.1f")
    row("engine steps", without.steps, cached.steps)
    row("wall time (s)", without.wall_s, cached.wall_s, form=".1f")
    row("largest log-prob difference", "", log_prob_difference(without, cached), form=".1e")


def figures(args: argparse.Namespace, without: Run, cached: Run) -> dict[str, Any]:
    """What `--json` writes; of the cached run where not said otherwise, times in milliseconds or seconds."""
    turns = [
        {
            "conversation": key[0],
            "turn": key[1],
            "prompt_tokens": result.num_prompt_tokens,
            "num_resumed_tokens": result.num_resumed_tokens,
            "ideal_resumed_tokens": cached.ideal[key],
            "computed_by_reason": dict(result.computed_by_reason),
            "ttft_ms": {"without_cache": _ttft_ms(without.results[key]), "with_cache": _ttft_ms(result)},
        }
        for key, result in sorted(cached.results.items())
    ]
    return {
        "outputs_identical": outputs_identical(without, cached),
        "max_log_prob_difference": log_prob_difference(without, cached),
        "plan": args.plan,
        "conversations": args.conversations,
        "turns_per_conversation": args.turns,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(args.device) if args.device != "cpu" else "cpu",
        "seed": args.seed,
        "prompt_tokens": cached.prompt_tokens,
        "num_resumed_tokens": cached.num_resumed_tokens,
        "ideal_resumed_tokens": cached.ideal_resumed_tokens,
        "computed_by_reason": cached.computed_by_reason,
        "ttft_ms": {"without_cache": without.ttft_ms, "with_cache": cached.ttft_ms},
        "wall_s": {"without_cache": without.wall_s, "with_cache": cached.wall_s},
        "steps": {"without_cache": without.steps, "with_cache": cached.steps},
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "mambaslots": ms.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "turns": turns,
    }


def plot(figures: dict[str, Any], path: Path) -> None:
    """Computed and resumed tokens, and the time to first token, turn by turn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    numbers = list(range(1, figures["turns_per_conversation"] + 1))
    by_turn = [[turn for turn in figures["turns"] if turn["turn"] == n - 1] for n in numbers]

    def mean(name: str) -> list[float]:
        return [statistics.fmean(turn[name] for turn in turns) for turns in by_turn]

    resumed, prompt = mean("num_resumed_tokens"), mean("prompt_tokens")
    computed = [whole - part for whole, part in zip(prompt, resumed, strict=True)]
    figure, (tokens, times) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    tokens.bar(numbers, resumed, label="resumed from a cached state", color="#4c78a8")
    top = tokens.bar(numbers, computed, bottom=resumed, label="computed", color="#f58518")
    shares = [f"{part / whole:.0%}" for part, whole in zip(resumed, prompt, strict=True)]
    tokens.bar_label(top, shares, padding=2)
    tokens.scatter(numbers, mean("ideal_resumed_tokens"), 200, "black", marker="_", label="ideal to resume")
    tokens.set(ylabel="prompt tokens, mean of a request", title="Computed and resumed tokens, share resumed")
    for name, label, color in (
        ("without_cache", "without cache", "#f58518"),
        ("with_cache", "with cache", "#4c78a8"),
    ):
        ttft = [statistics.fmean(turn["ttft_ms"][name] for turn in turns) for turns in by_turn]
        times.plot(numbers, ttft, "o-", label=label, color=color)
    times.set(ylabel="milliseconds, mean of a request", title="Time to first token", ylim=(0, None))
    for axes in (tokens, times):
        axes.set(xlabel="turn of the conversation", xticks=numbers)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    figure.suptitle(f"{figures['conversations']} conversations, checkpoint plan: {figures['plan']}")
    figure.savefig(path, dpi=120)


def print_conversation(user: Conversation, run: Run, number: int, turns: int) -> None:
    """The first turns of a conversation; what is no text in an answer is left out."""
    for turn, asked in enumerate(user.turns[:turns]):
        result = run.results[number, turn]
        answer = bytes(token for token in result.tokens if token < 256).decode(errors="replace")
        resumed = f"{result.num_resumed_tokens} of {result.num_prompt_tokens} prompt tokens resumed"
        print(f"\n[user] {asked.text.rstrip()}\n[answer, {resumed}]\n{answer.rstrip()}")


if __name__ == "__main__":
    print(__doc__)
