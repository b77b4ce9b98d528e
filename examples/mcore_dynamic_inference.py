"""megatron-core's engine serves conversations: without a cache, with its own, and with mambaslots dropped in.

A small hybrid model with random weights is built with megatron-core and served by its
DynamicInferenceEngine, in chunks, several conversations at once. All three runs are asked the same prompts:
each turn sends again what was said and answered before (in the run without a cache), so that every answer
can be judged by itself.

    python examples/mcore_dynamic_inference.py --conversations 4 --turns 3

On a GPU it runs as it is; elsewhere `mcore_rig` lets megatron-core run on the CPU. The exit code is 1 if an
answer with mambaslots differs from the one without a cache.
"""

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import mambaslots.mcore
import mcore_rig
import torch
from arguments import add_count, make_parser
from conversation_texts import Conversation, conversations

SYSTEM_PROMPT_BYTES = 160  # of each: a tiny model on a CPU is slow enough
ANSWER_TOKENS = 48
CHUNK_TOKENS = 4 * mcore_rig.BLOCK  # a step computes at most so many
Answers = list[list[list[int]]]  # by turn, by conversation


@dataclass
class Run:
    """What serving all conversations once came to."""

    name: str
    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    answers: Answers = field(default_factory=list)
    stats: Any = None

    @property
    def num_resumed_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    def identical(self, other: "Run") -> int:
        """Requests with the same answer as in the other run."""
        turns = zip(self.answers, other.answers, strict=True)
        return sum(a == b for turn in turns for a, b in zip(*turn, strict=True))


def serve(name: str, engine: Any, users: list[Conversation], history: Answers | None = None) -> Run:
    """`history` holds the answers to send again; without it, those of this run."""
    run = Run(name)
    transcripts = [list(user.system_prompt.encode()[:SYSTEM_PROMPT_BYTES]) for user in users]
    started = time.perf_counter()
    for turn in range(len(users[0].turns)):
        for transcript, user in zip(transcripts, users, strict=True):
            transcript.extend(f"\nUser: {user.turns[turn].text}\nBot: ".encode())
        numbers = [mcore_rig.add(engine, transcript, ANSWER_TOKENS) for transcript in transcripts]
        done = mcore_rig.finish(engine)
        run.answers.append([done[number].tokens for number in numbers])
        run.requests += len(numbers)
        run.prompt_tokens += sum(map(len, transcripts))
        for transcript, answer in zip(transcripts, (history or run.answers)[turn], strict=True):
            transcript.extend(answer)
        print(f"{name:>13}: turn {turn + 1}, {time.perf_counter() - started:5.1f} s", flush=True)
    run.computed_tokens = engine.context.lifetime_prefill_token_count
    return run


def three_runs(users: list[Conversation]) -> tuple[Run, Run, Run]:
    model = mcore_rig.hybrid_model()

    def engine(**options: Any) -> Any:
        rows = len(users)
        return mcore_rig.make_engine(model, max_requests=rows, num_kv_blocks=64 * rows, **options)

    caching = {"num_mamba_slots": 16 * len(users), "max_tokens": CHUNK_TOKENS, "enable_chunked_prefill": True}
    # Whole prompts at a time: the last chunk of a prompt is one of the places where stock goes wrong.
    without = serve("no cache", engine(prefix_caching=False, max_tokens=1024 * len(users)), users)
    stock = serve("stock", engine(**caching), users, without.answers)
    with mambaslots.mcore.installed():  # or, for good: mambaslots.mcore.install()
        dropped_in = engine(**caching)
        ours = serve("mambaslots", dropped_in, users, without.answers)
        ours.stats = mambaslots.mcore.stats(dropped_in.context)
    return without, stock, ours


def print_table(without: Run, *cached: Run) -> None:
    def row(label: str, *cells: str) -> None:
        print(f"{label:<32}" + "".join(f"{cell:>15}" for cell in cells))

    runs = (without, *cached)
    row("", *(run.name for run in runs))
    row("requests", *(str(run.requests) for run in runs))
    row("prompt tokens", *(f"{run.prompt_tokens:,}" for run in runs))
    row("  resumed", *(f"{run.num_resumed_tokens:,}" for run in runs))
    row("  computed", *(f"{run.computed_tokens:,}" for run in runs))
    row(
        "answers identical to no cache",
        "",
        *(f"{run.identical(without)} of {run.requests}" for run in cached),
    )


def figures(without: Run, *cached: Run) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        run.name: {
            "requests": run.requests,
            "prompt_tokens": run.prompt_tokens,
            "num_resumed_tokens": run.num_resumed_tokens,
            "computed_tokens": run.computed_tokens,
            "identical_answers": run.identical(without),
            "stats": asdict(run.stats) if run.stats else None,
        }
        for run in (without, *cached)
    }


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_count(parser, "--conversations", 4, "conversations, served at a time")
    add_count(parser, "--turns", 3, "turns of each conversation")
    add_count(parser, "--seed", 0, "seed of the texts", at_least=0)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of megatron-core
    with mcore_rig.on_this_machine():
        without, stock, ours = three_runs(conversations(args.conversations, args.turns, args.seed))
    print()
    print_table(without, stock, ours)
    print(f"\nmambaslots.mcore.stats(context):\n  {ours.stats}")
    identical = ours.identical(without) == ours.requests
    if args.json:
        args.json.write_text(json.dumps(figures(without, stock, ours), indent=2) + "\n")
    print(f"outputs identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
