"""Serve multi-turn conversations with and without the prefix cache, and show that the answers are the same.

Users write Python modules with the model in `models/tiny-code`: 3.8 million weights in gated delta nets,
Mamba-2 mixers, attention and MLPs, trained on the standard library's source, byte by byte. Its answers look
like code. Every answer becomes part of the next prompt, so one wrong token would change all that follows.
Both runs follow one schedule, counted in engine steps: when users arrive, and how long they think after an
answer. On a CPU the model computes in float64, so that two runs that batch differently draw the same tokens.

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
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser, new_picture
from conversation_report import (
    Key,
    Run,
    figures,
    plot,
    print_conversation,
    print_table,
)
from conversation_texts import Conversation, Turn, conversations
from ideal_resume import IdealResume

MODEL = Path(__file__).parents[1] / "models/tiny-code"
TOKENIZER = ms.text.ByteTokenizer.from_folder(MODEL)
END_OF_TURN = TOKENIZER.special_tokens["<|end_of_turn|>"]
BLOCK = 32
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
PLANS = {"default": ms.CheckpointPlan(), "every-block": ms.CheckpointPlan.every_block(BLOCK)}
TIE = 1e-4  # between log-probs
CUDA_GRAPHS = 64


class Server:
    """Serves conversations with one engine: asks what is due, steps, and hands answers back to the users."""

    def __init__(self, name: str, engine: ms.DynamicInferenceEngine, users: list[Conversation]) -> None:
        self.run = Run(name)
        self.engine = engine
        self.users = users
        self.transcripts = [system_tokens(user) for user in users]
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
            max_tokens=turn.answer_tokens,
            temperature=turn.temperature,
            seed=turn.seed,
            return_log_probs=True,
            stop_token_ids=(END_OF_TURN,),
        )
        self.run.prompts[conversation, number] = list(transcript)
        request_id = self.engine.add_request(transcript, sampling)
        self.running[request_id] = (conversation, number)
        self.waiting.add(request_id)

    def _step(self, step: int) -> int:
        """Advance the engine, and return how many turns it finished."""
        if self.waiting:  # this step may admit a request, so the oracle must know what precedes it
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
        if result.tokens[-1] != END_OF_TURN:
            self.transcripts[conversation].append(END_OF_TURN)
        turns = self.users[conversation].turns
        if number + 1 < len(turns):
            heapq.heappush(self.due, (step + turns[number + 1].think_steps, conversation, number + 1))


def system_tokens(user: Conversation) -> list[int]:
    """How the chat template begins a conversation."""
    return TOKENIZER.encode(f"<|document|><|system|>{user.system_prompt}<|end_of_turn|>")


def said(turn: Turn) -> list[int]:
    """A user's turn as the chat template writes it, and the beginning of the answer."""
    return TOKENIZER.encode(f"<|user|>{turn.text}<|end_of_turn|><|assistant|>")


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
        len(system_tokens(user)) + sum(len(said(turn)) + turn.answer_tokens + 1 for turn in user.turns)
        for user in users
    )
    blocks = len(users) * (longest // BLOCK + 1)
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK,
        max_requests=8,
        max_tokens_per_step=256,
        max_sequence_length=longest,
        num_kv_blocks=blocks,
        num_mamba_slots=blocks,
        enable_prefix_caching=plan is not None,
        checkpoint_plan=PLANS[plan or "default"],
        num_cuda_graphs=CUDA_GRAPHS,
    )
    return ms.DynamicInferenceEngine(model, config)


def make_model(args: argparse.Namespace) -> ms.models.HybridLM:
    return ms.models.HybridLM.from_pretrained(MODEL, dtype=DTYPES[args.dtype])


def make_users(args: argparse.Namespace) -> list[Conversation]:
    users = conversations(args.conversations, args.turns, args.seed, args.answer_tokens)
    if args.device == "cpu":
        return users
    return [
        replace(user, turns=tuple(replace(turn, temperature=None) for turn in user.turns)) for user in users
    ]


def serve_both_ways(args: argparse.Namespace) -> tuple[Run, Run]:
    """Run the schedule without the cache and with it."""
    model, users = make_model(args).to(args.device), make_users(args)
    first = [replace(users[0], turns=users[0].turns[:1])]
    for plan in (None, args.plan):  # a process's first steps are slow: neither run shall pay for them
        Server("warm-up", make_engine(model, first, plan), first).serve(progress=False)
    engine = make_engine(model, users, args.plan)
    print(engine.context.memory.summary())
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
    ask = ms.SamplingParams(max_tokens=1, skip_prompt_log_probs=False)
    both = [[*prompt, *right[:first], token] for token in (right[first], got[first])]
    log_probs = [result.prompt_log_probs or [] for result in engine.generate(both, ask)]
    return log_probs[0][-1] - log_probs[1][-1]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--plan", choices=PLANS, default="default", help="which states the cache takes (default: %(default)s)"
    )
    add_count(parser, "--conversations", 8, "conversations in all")
    add_count(parser, "--turns", 6, "turns of each conversation")
    add_count(parser, "--answer-tokens", 140, "tokens of the longest answers")
    add_device(parser, "cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the model (default: float64 on a CPU, float32 on a GPU)"
    )
    add_count(parser, "--seed", 0, "seed of the texts and the schedule", at_least=0)
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
    print_conversation(make_users(args)[0], cached, 0, turns=2)
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
