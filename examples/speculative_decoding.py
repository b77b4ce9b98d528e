"""Decode with drafts from prompt lookup, and show what they save, and that the answers are the same.

A small hybrid Mamba-2/attention model with random weights, whose layers add little to each token, answers
conversations of three turns. Decoded greedily it soon repeats itself, which prompt lookup foresees; drawn at
temperature 1 it says anything, and nearly every draft is wrong. Each text is served three times: by plain
decoding without a cache, by plain decoding with the prefix cache, and with drafts and the cache. Drawn
tokens are the same with drafts, not only distributed alike: each position has its own random number.

A CPU takes as long as there are tokens to compute, so that here drafts save steps and no time. On a GPU a
decode step waits for weights and states, which are read once a step, however many tokens it has.

    python examples/speculative_decoding.py --drafts 6 --json out.json

The last line says whether all answers are identical; the exit code is 1 if they are not.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser

BLOCK = 32
TEXTS = {
    "repetitive": ms.SamplingParams(return_log_probs=True),
    "free": ms.SamplingParams(return_log_probs=True, temperature=1.0),
}
OPENINGS = (
    "id, name, city\n1, Ada, London\n2, Emmy, Erlangen\n3, Grace, ",
    "The rain it raineth every day, ",
    "def f(x): return g(x)\ndef g(x): return h(x)\n",
    "To be, or not to be: ",
    "0, 1, 1, 2, 3, 5, 8, ",
    "Row, row, row your boat, ",
)
FOLLOW_UPS = ("\nGo on: ", "\nAnd then? ")


@dataclass
class Run:
    """One text, served one way."""

    answers: list[list[int]]
    log_probs: list[list[float]]
    prompt_tokens: int = 0
    num_resumed_tokens: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    speculation: ms.SpeculationStats = field(default_factory=ms.SpeculationStats)


def make_model(device: str) -> ms.models.HybridLM:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(dtype=torch.float64), seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("out_proj", "o_proj", "down_proj")):
                weight.mul_(0.1)
    return model.to(device)


def serve(model: ms.models.HybridLM, params: ms.SamplingParams, tokens: int, cache: bool, drafts: int) -> Run:
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK,
        max_requests=len(OPENINGS),
        max_tokens_per_step=256,
        max_sequence_length=2048,
        num_kv_blocks=512,
        num_mamba_slots=64 if cache else None,
        enable_prefix_caching=cache,
        num_speculative_tokens=drafts,
    )
    engine = ms.DynamicInferenceEngine(model, config)
    run = Run([], [])
    histories = [list(opening.encode()) for opening in OPENINGS]
    begin = time.process_time()
    for turn in range(1 + len(FOLLOW_UPS)):
        asked = [
            ms.SamplingParams(
                max_tokens=tokens,
                temperature=params.temperature,
                return_log_probs=True,
                seed=100 * turn + number,
            )
            for number in range(len(histories))
        ]
        ids = [engine.add_request(history, one) for history, one in zip(histories, asked, strict=True)]
        results: dict[int, ms.RequestResult] = {}
        while engine.has_unfinished_requests():
            results |= {result.request_id: result for result in engine.step().finished}
            run.steps += 1
        engine.context.check_integrity()
        for history, request_id in zip(histories, ids, strict=True):
            result = results[request_id]
            run.answers.append(result.tokens)
            run.log_probs.append(result.log_probs or [])
            run.prompt_tokens += result.num_prompt_tokens
            run.num_resumed_tokens += result.num_resumed_tokens
            history += result.tokens
            if turn < len(FOLLOW_UPS):
                history += FOLLOW_UPS[turn].encode()
    run.cpu_s = time.process_time() - begin
    run.speculation = engine.stats().speculation
    return run


def print_table(text: str, plain: Run, cached: Run, drafted: Run) -> None:
    stats, saved = drafted.speculation, 1 - drafted.steps / cached.steps
    rows = [
        (f"{text} text", "plain, no cache", "plain, cache", "drafts, cache"),
        ("generated tokens", *(f"{sum(map(len, run.answers)):,}" for run in (plain, cached, drafted))),
        ("prompt tokens", *(f"{run.prompt_tokens:,}" for run in (plain, cached, drafted))),
        ("  resumed", *(f"{run.num_resumed_tokens:,}" for run in (plain, cached, drafted))),
        ("drafted tokens", "", "", f"{stats.num_drafted:,}"),
        ("  accepted", "", "", f"{stats.num_accepted:,}"),
        ("acceptance", "", "", f"{stats.acceptance:.1%}"),
        ("tokens a decode", "1.00", "1.00", f"{stats.tokens_per_decode:.2f}"),
        ("engine steps", *(f"{run.steps:,}" for run in (plain, cached, drafted))),
        ("  saved by drafts", "", "", f"{saved:.1%}"),
        ("CPU time (s)", *(f"{run.cpu_s:.1f}" for run in (plain, cached, drafted))),
        (
            "largest log-prob difference", "",
            *(f"{log_prob_difference(plain, run):.1e}" for run in (cached, drafted)),
        ),
        ("answers identical", "", *("yes" if same(plain, run) else "no" for run in (cached, drafted))),
    ]  # fmt: skip
    for row in rows:
        print(f"{row[0]:<30}" + "".join(f"{cell:>17}" for cell in row[1:]))
    print()


def same(one: Run, other: Run) -> bool:
    return one.answers == other.answers


def log_prob_difference(one: Run, other: Run) -> float:
    """Over the tokens up to where answers differ."""
    pairs = [
        abs(a - b)
        for ones, others in zip(one.log_probs, other.log_probs, strict=True)
        for a, b in zip(ones, others, strict=True)
    ]
    return max(pairs)


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--drafts", 4, "drafts for a request and a step, at most", at_least=0)
    add_count(parser, "--tokens", 150, "tokens of each answer")
    add_device(parser, "cpu")
    args = parser.parse_args()
    check_device(parser, args.device)
    torch.set_num_threads(1)  # these shapes are small
    model = make_model(args.device)
    figures: dict[str, object] = {"drafts": args.drafts, "tokens": args.tokens, "device": args.device}
    identical = True
    for text, params in TEXTS.items():
        plain = serve(model, params, args.tokens, cache=False, drafts=0)
        cached = serve(model, params, args.tokens, cache=True, drafts=0)
        drafted = serve(model, params, args.tokens, cache=True, drafts=args.drafts)
        print_table(text, plain, cached, drafted)
        identical &= same(plain, cached) and same(plain, drafted)
        figures[text] = {
            "acceptance": drafted.speculation.acceptance,
            "tokens_per_decode": drafted.speculation.tokens_per_decode,
            "steps": {"plain": plain.steps, "cached": cached.steps, "drafted": drafted.steps},
            "speculation": asdict(drafted.speculation),
            "num_resumed_tokens": drafted.num_resumed_tokens,
            "log_prob_difference": log_prob_difference(plain, drafted),
        }
    figures["identical"] = identical
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"outputs identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
