"""Serve multi-turn conversations with and without the prefix cache, and show that the answers are the same.

A small hybrid Mamba-2/attention model with random weights reads real text byte by byte and answers nonsense;
but every answer becomes part of the next prompt, so one wrong token would change all that follows. Both runs
follow one schedule, counted in engine steps: when users arrive, and how long they think after an answer.

    python examples/serve_conversations.py --plan every-block --json out.json --plot out.png

The last line says whether the outputs are identical; the exit code is 1 if they are not.

With `--device cuda` both runs are on the GPU, in float32 unless said otherwise, with CUDA graphs, and all
answers are greedy. A third run, on the CPU and without the cache, says what they must be: the same tokens,
or, where an answer first differs, one that the CPU's model finds less than 1e-4 below the best. What a
conversation goes on with after such a tie cannot be compared.
"""

import argparse
import heapq
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser, new_picture
from conversation_texts import Conversation, Turn, conversations
from ideal_resume import IdealResume

BLOCK = 32
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
PLANS = {"default": ms.CheckpointPlan(), "every-block": ms.CheckpointPlan.every_block(BLOCK)}
Key = tuple[int, int]  # number of the conversation, number of the turn
TIE = 1e-4  # between log-probs
CUDA_GRAPHS = 64


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


class Server:
    """Serves conversations with one engine: asks what is due, steps, and hands answers back to the users."""

    def __init__(self, name: str, engine: ms.DynamicInferenceEngine, users: list[Conversation]) -> None:
        self.run = Run(name)
        self.engine = engine
        self.users = users
        self.transcripts = [list(user.system_prompt.encode()) for user in users]
        self.due = [(user.start_step, number, 0) for number, user in enumerate(users)]  # (step, *Key), a heap
        self.running: dict[int, Key] = {}  # by request id
        self.waiting: set[int] = set()  # those not yet admitted
        self.oracle = IdealResume(BLOCK)

    def serve(self, *, progress: bool = True) -> Run:
        heapq.heapify(self.due)
        total = sum(len(user.turns) for user in self.users)
        started, step = time.perf_counter(), 0
        while self.due or self.running:
            if not self.running:
                step = max(step, self.due[0][0])  # all users think: go on to the first who is done
            while self.due and self.due[0][0] <= step:
                _, conversation, turn = heapq.heappop(self.due)
                self._ask(conversation, turn)
            finished = self._step(step)
            self.run.wall_s = time.perf_counter() - started
            if progress and finished:
                show_progress(self.run, step, finished, total)
            step += 1
        return self.run

    def _ask(self, conversation: int, number: int) -> None:
        turn, transcript = self.users[conversation].turns[number], self.transcripts[conversation]
        transcript.extend(said(turn))
        sampling = ms.SamplingParams(
            num_tokens_to_generate=turn.answer_tokens,
            temperature=turn.temperature,
            seed=turn.seed,
            return_log_probs=True,
        )
        self.run.prompts[conversation, number] = list(transcript)
        request_id = self.engine.add_request(transcript, sampling)
        self.running[request_id] = (conversation, number)
        self.waiting.add(request_id)

    def _step(self, step: int) -> int:
        """Advance the engine, and return how many turns it finished."""
        if self.waiting:  # this step may admit somebody, so the oracle must know what precedes it
            for request_id, key in self.running.items():
                self.oracle.computed(key, self.engine.computed_prefix(request_id))
        report = self.engine.step()
        self.run.steps += 1
        for request_id in self.waiting.intersection(report.admitted):
            key = self.running[request_id]
            self.run.ideal[key] = self.oracle.ideal(self.transcripts[key[0]])
        self.waiting.difference_update(report.admitted)
        for result in report.finished:
            self._answered(result, step)
        return len(report.finished)

    def _answered(self, result: ms.RequestResult, step: int) -> None:
        key = conversation, number = self.running.pop(result.request_id)
        self.run.results[key] = result
        self.transcripts[conversation].extend(result.tokens)
        self.oracle.computed(key, self.transcripts[conversation][:-1])  # the last token was never an input
        turns = self.users[conversation].turns
        if number + 1 < len(turns):
            heapq.heappush(self.due, (step + turns[number + 1].think_steps, conversation, number + 1))


def said(turn: Turn) -> bytes:
    return f"\n\nUser: {turn.text}\nAssistant: ".encode()


def show_progress(run: Run, step: int, finished: int, total: int) -> None:
    """One updating line on a terminal, ten lines elsewhere."""
    done = len(run.results)
    line = f"{run.name:>13}: {done:4d} of {total} turns, step {step:5d}, {run.wall_s:5.1f} s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if done == total else "", flush=True)
    elif 10 * done // total > 10 * (done - finished) // total:
        print(line, flush=True)


def make_engine(
    model: ms.models.HybridLM, users: list[Conversation], plan: str | None
) -> ms.DynamicInferenceEngine:
    """`plan` None serves without the cache. The pools hold all that is ever computed: nothing is evicted."""
    longest = 2 + max(
        len(user.system_prompt.encode()) + sum(len(said(turn)) + turn.answer_tokens for turn in user.turns)
        for user in users
    )
    blocks = len(users) * (longest // BLOCK + 1)
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK,
        max_requests=8,
        max_tokens=256,
        max_sequence_length=longest,
        num_kv_blocks=blocks,
        num_mamba_slots=blocks,
        enable_prefix_caching=plan is not None,
        checkpoint_plan=PLANS[plan or "default"],
        num_cuda_graphs=CUDA_GRAPHS,
    )
    return ms.DynamicInferenceEngine(model, config)


def make_model(args: argparse.Namespace) -> ms.models.HybridLM:
    config = ms.models.HybridConfig.tiny(
        DTYPES[args.dtype], hidden_size=128, mamba_num_heads=16, mamba_state_dim=32, mlp_hidden_size=256
    )
    return ms.models.HybridLM(config, seed=args.seed)


def make_users(args: argparse.Namespace) -> list[Conversation]:
    users = conversations(args.conversations, args.turns, args.seed)
    if args.device == "cpu":
        return users
    return [
        replace(user, turns=tuple(replace(turn, temperature=None) for turn in user.turns)) for user in users
    ]


def serve_both_ways(args: argparse.Namespace) -> tuple[Run, Run]:
    """Run the schedule without the cache and with it."""
    model, users = make_model(args).to(args.device), make_users(args)
    for plan in (None, args.plan):  # a process's first steps are slow: neither run shall pay for them
        Server("warm-up", make_engine(model, users[:1], plan), users[:1]).serve(progress=False)
    engine = make_engine(model, users, args.plan)
    print(engine.memory_summary())
    without = Server("without cache", make_engine(model, users, None), users).serve()
    return without, Server("with cache", engine, users).serve()


@dataclass
class Comparison:
    """How a run's answers, turn by turn, stand to the CPU's. `ties`: first differences that are no fault."""

    same: int = 0
    ties: int = 0
    faults: int = 0
    after_a_difference: int = 0
    gaps: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.same} the same, {self.ties} part where the CPU's model all but ties, {self.faults} part "
            f"elsewhere, {self.after_a_difference} come after such"
        )


def compare_with_cpu(engine: ms.DynamicInferenceEngine, expected: Run, run: Run) -> Comparison:
    """`engine`: on the CPU, without the cache, as the one that `expected` comes from."""
    comparison = Comparison()
    conversations_of = sorted({conversation for conversation, _ in expected.results})
    for conversation in conversations_of:
        keys = sorted(key for key in expected.results if key[0] == conversation)
        for number, key in enumerate(keys):
            right, got = expected.results[key].tokens, run.results[key].tokens
            if right == got:
                comparison.same += 1
                continue
            gap = gap_at_first_difference(engine, expected.prompts[key], right, got)
            comparison.gaps.append(gap)
            comparison.ties += gap < TIE
            comparison.faults += gap >= TIE
            comparison.after_a_difference += len(keys) - number - 1
            break
    return comparison


def gap_at_first_difference(
    engine: ms.DynamicInferenceEngine, prompt: list[int], right: list[int], got: list[int]
) -> float:
    """By how much the engine's model prefers the right token: at least its two best logits' difference."""
    first = next(i for i, (a, b) in enumerate(zip(right, got, strict=True)) if a != b)
    ask = ms.SamplingParams(num_tokens_to_generate=1, skip_prompt_log_probs=False)
    both = [[*prompt, *right[:first], token] for token in (right[first], got[first])]
    log_probs = [result.prompt_log_probs or [] for result in engine.generate(both, ask)]
    return log_probs[0][-1] - log_probs[1][-1]


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


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--plan", choices=PLANS, default="default", help="which states the cache takes (default: %(default)s)"
    )
    add_count(parser, "--conversations", 30, "conversations in all")
    add_count(parser, "--turns", 8, "turns of each conversation")
    add_device(parser, "cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the model (default: float64 on a CPU, float32 on a GPU)"
    )
    add_count(parser, "--seed", 0, "seed of the weights, the texts and the schedule", at_least=0)
    parser.add_argument("--plot", type=new_picture, metavar="PATH", help="draw the figures turn by turn")
    args = parser.parse_args()
    check_device(parser, args.device)
    args.dtype = args.dtype or ("float64" if args.device == "cpu" else "float32")
    return args


def compare_on_cpu(args: argparse.Namespace, *runs: Run) -> dict[str, Comparison]:
    """Serve on the CPU without the cache, and hold the runs against that."""
    users = make_users(args)
    engine = make_engine(make_model(args), users, None)
    expected = Server("CPU, no cache", engine, users).serve()
    print("\nanswers beside the CPU's, without the cache:")
    comparisons = {}
    for run in runs:
        comparison = compare_with_cpu(engine, expected, run)
        print(f"{run.name:>13}: {comparison}")
        comparisons[f"{run.name} beside the CPU".replace(" ", "_")] = comparison
    return comparisons


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # two gain a quarter on idle cores, but stall each other where others run too
    without, cached = serve_both_ways(args)
    print()
    print_table(without, cached)
    results = figures(args, without, cached)
    comparisons = compare_on_cpu(args, without, cached) if args.device != "cpu" else {}
    results |= {name: asdict(comparison) for name, comparison in comparisons.items()}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)
    if comparisons:
        good = not any(comparison.faults for comparison in comparisons.values())
        print(f"the CPU's tokens, by the rule of float32: {'yes' if good else 'no'}")
        return 0 if good else 1
    identical: bool = results["outputs_identical"]
    print(f"outputs identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
