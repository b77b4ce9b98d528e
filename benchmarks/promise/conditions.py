"""The conditions under which `bits.py` serves the same requests, and compares each with the request alone."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import mambaslots as ms
from promise.answers import Answer, Differences, write_answers
from promise.bench import BitsBench, Results, num_preempted, num_resumed
from promise.drafters import KnowingDrafter, RandomDrafter
from promise.traffic import Bystanders, Traffic, serve

ANSWER_BESIDE_PROMPT = 4
"""Tokens of an answer where a prompt's log-probs are what is compared."""
NUM_DRAFTS = 3
SMALL_BLOCK = 16
SUSPENDED_AFTER = (8, 21, 60)


def in_batches(bench: BitsBench) -> None:
    """As many requests at once as the engine has rows, without cache; then in another order."""
    rows = bench.sizes.rows
    engine = bench.engine()
    bench.compare(f"batch of {rows}", lambda: serve(engine, bench.requests))
    order = Traffic(bench.vocabulary, seed=2).shuffled(len(bench.requests))
    bench.compare(f"batch of {rows}, another order", lambda: bench.reordered(engine, order))


def by_graph_and_eager(bench: BitsBench) -> None:
    """Without CUDA graphs."""
    _batch(bench, f"batch of {bench.sizes.rows}, eager", num_cuda_graphs=None)


def _batch(
    bench: BitsBench,
    condition: str,
    evidence: Callable[[Results], dict[str, int]] | None = None,
    **settings: Any,
) -> None:
    if not bench.late:
        engine = bench.engine(**settings)
        bench.compare(condition, lambda: serve(engine, bench.requests), evidence=evidence)
        del engine
        bench.free()


def cached(bench: BitsBench) -> None:
    """With a cache: empty, then full, then in another order with a state at every block."""
    engine = bench.engine(enable_prefix_caching=True)
    order = Traffic(bench.vocabulary, seed=3).shuffled(len(bench.requests))
    bench.compare("cache, empty at first", lambda: serve(engine, bench.requests), evidence=num_resumed)
    bench.compare("cache, all seen before", lambda: serve(engine, bench.requests), evidence=num_resumed)
    engine.reset_prefix_cache()
    bench.compare("cache, another order", lambda: bench.reordered(engine, order), evidence=num_resumed)
    plan = ms.CheckpointPlan.every_block(bench.sizes.block)
    del engine
    bench.free()
    engine = bench.engine(enable_prefix_caching=True, checkpoint_plan=plan)
    serve(engine, bench.requests)
    bench.compare(
        "cache, a state at every block", lambda: bench.reordered(engine, order), evidence=num_resumed
    )


def cut(bench: BitsBench) -> None:
    """Prompts that steps cut at grid points, with the log-probs of all prompt tokens."""
    for max_tokens_per_step in bench.sizes.cuts:
        if max_tokens_per_step % bench.grid == 0 and not bench.late:
            _cut(bench, max_tokens_per_step)
            bench.free()


def _cut(bench: BitsBench, max_tokens_per_step: int) -> None:
    requests = [request.with_prompt_log_probs(ANSWER_BESIDE_PROMPT) for request in bench.requests]
    engine = bench.engine(max_tokens_per_step=max_tokens_per_step, num_cuda_graphs=None)
    cuts: set[int] = set()

    def note_cuts(finished: set[int]) -> None:
        for request in engine.context.requests:
            if request.allocation is not None and request.allocation.num_computed < len(
                request.prompt_tokens
            ):
                cuts.add(request.allocation.num_computed)
        bench.cuts |= cuts

    bench.compare(
        f"prompts in steps of {max_tokens_per_step}",
        lambda: serve(engine, requests, between=note_cuts),
        evidence=lambda results: {
            "points cut at": len(cuts),
            "off the grid": sum(point % bench.grid > 0 for point in cuts),
        },
    )


def drafted(bench: BitsBench) -> None:
    """Decodes that verify drafts: mostly right ones, random ones, those of prompt lookup."""
    drafters: dict[str, ms.Drafter | None] = {
        "mostly right": KnowingDrafter(bench.requests, bench.expected),
        "at random": RandomDrafter(bench.vocabulary),
        "prompt lookup": None,
    }
    for name, drafter in drafters.items():
        if not bench.late:
            _drafted(bench, name, drafter)
            bench.free()


def _drafted(bench: BitsBench, name: str, drafter: ms.Drafter | None) -> None:
    engine = bench.engine(drafter, num_speculative_tokens=NUM_DRAFTS)
    bench.compare(
        f"drafts, {name}", lambda: serve(engine, bench.requests), evidence=lambda _: _num_drafts(engine)
    )


def _num_drafts(engine: ms.DynamicInferenceEngine) -> dict[str, int]:
    stats = engine.stats().speculation
    return {"drafted": stats.num_drafted, "accepted": stats.num_accepted}


def preempted(bench: BitsBench) -> None:
    """Answers that outgrow the KV pool; and an engine that is suspended while requests run."""
    for cache in (False, True):
        if not bench.late:
            _preempted(bench, cache)
            bench.free()
    engine = bench.engine(enable_prefix_caching=True, num_cuda_graphs=4)
    steps = count(1)

    def suspend(finished: set[int]) -> None:
        if next(steps) in SUSPENDED_AFTER:
            engine.suspend()
            engine.resume()

    bench.compare(
        "suspended and resumed three times",
        lambda: serve(engine, bench.requests, between=suspend),
        evidence=num_preempted,
    )


def _preempted(bench: BitsBench, cache: bool) -> None:
    """The prompts of all rows fill the pool, and every answer needs more blocks."""
    block = bench.served.model.state_spec().grid if cache else SMALL_BLOCK
    traffic = Traffic(bench.vocabulary, seed=10)
    lengths = [traffic.length(bench.grid // 2, 3 * bench.grid) for _ in range(bench.sizes.rows)]
    requests = [traffic.request(traffic.tokens(length), 5 * SMALL_BLOCK) for length in lengths]
    expected = bench.expect(requests)
    num_blocks = sum(-(-length // block) for length in lengths)
    engine = bench.engine(block_size_tokens=block, num_kv_blocks=num_blocks, enable_prefix_caching=cache)
    bench.compare(
        f"preempted, {'with' if cache else 'without'} cache",
        lambda: serve(engine, requests),
        expected,
        num_preempted,
    )


def beside_others(bench: BitsBench) -> None:
    """Requests that arrive one by one, beside random ones that come, end and are cancelled."""
    for cache in (False, True):
        if not bench.late:
            condition = f"beside random traffic, {'with' if cache else 'without'} cache"
            _beside(bench, condition, bench.engine(enable_prefix_caching=cache))
            bench.free()


def _beside(bench: BitsBench, condition: str, engine: ms.DynamicInferenceEngine) -> None:
    traffic = Traffic(bench.vocabulary, seed=6)
    others = Bystanders(traffic, bench.sizes)
    arrivals = [traffic.length(0, len(bench.requests)) for _ in bench.requests]
    bench.compare(
        condition,
        lambda: serve(
            engine, bench.requests, arrivals=arrivals, between=lambda finished: others.go_on(engine, finished)
        ),
        evidence=lambda results: (
            {"random requests": others.num_added}
            | num_resumed(results)
            | num_preempted(results)
            | _num_drafts(engine)
        ),
    )
    others.leave(engine)


def all_at_once(bench: BitsBench) -> None:
    """Cache, cuts, drafts, a small KV pool and random traffic, all together."""
    sizes = bench.sizes
    engine = bench.engine(
        KnowingDrafter(bench.requests, bench.expected),
        enable_prefix_caching=True,
        num_speculative_tokens=NUM_DRAFTS,
        max_tokens_per_step=next(tokens for tokens in sizes.cuts[1:] if tokens % bench.grid == 0),
        num_kv_blocks=2 * sizes.max_length // sizes.block,
        num_cuda_graphs=8,
    )
    _beside(bench, "all of these at once", engine)


def in_conversations(bench: BitsBench) -> None:
    """Turns of users: an answer comes back in the next prompt, which may resume inside the answer."""
    sizes = bench.sizes
    traffic = Traffic(bench.vocabulary, seed=7)
    said = [traffic.tokens(sizes.turn) for _ in range(sizes.users)]
    answers: list[list[range]] = [[] for _ in said]
    turns, expected = [], []
    for _ in range(sizes.turns):
        turn = [traffic.request(list(words), sizes.turn // 2) for words in said]
        turns.append(turn)
        for words, spans, answer in zip(said, answers, bench.expect(turn), strict=True):
            expected.append(answer)
            spans.append(range(len(words) + 1, len(words) + len(answer.tokens) + 1))
            words += answer.tokens + traffic.tokens(sizes.turn)
    engine = bench.engine(enable_prefix_caching=True)

    def evidence(results: Results) -> dict[str, int]:
        resumed = zip(results, answers * sizes.turns, strict=True)
        inside = sum(any(result.num_resumed_tokens in span for span in spans) for result, spans in resumed)
        return num_resumed(results) | {"resumed inside an answer": inside}

    bench.compare(
        f"conversations of {sizes.turns} turns, cached",
        lambda: [result for turn in turns for result in serve(engine, turn)],
        expected,
        evidence,
    )


def as_prompts(bench: BitsBench) -> None:
    """Prompts and answers that come back as prompts: the log-probs of all their tokens."""
    traffic = Traffic(bench.vocabulary, seed=8)
    pairs = list(zip(bench.requests, bench.expected, strict=True))
    sequences = [request.prompt + answer.tokens for request, answer in pairs]
    expected = [Answer([], answer.prompt_log_probs + answer.log_probs) for answer in bench.expected]
    engine = bench.engine(enable_prefix_caching=True)
    requests = [traffic.request(sequence, 1).with_prompt_log_probs() for sequence in sequences]
    bench.compare(
        "answers resent as prompts",
        lambda: serve(engine, requests),
        expected,
        answer_of=lambda result: Answer([], result.prompt_log_probs or []),
    )


def scored(bench: BitsBench) -> None:
    """What generation returned, beside the scores of the same tokens: of answers, then of whole sequences."""
    engine = bench.engine(enable_prefix_caching=True)
    serve(engine, bench.requests)
    pairs = list(zip(bench.requests, bench.expected, strict=True))
    sequences = [request.prompt + answer.tokens for request, answer in pairs]
    starts = [len(request.prompt) for request in bench.requests]
    bench.compare(
        "scores of answers",
        lambda: engine.score(sequences, starts),
        [Answer([], answer.log_probs) for answer in bench.expected],
        num_resumed,
        lambda result: Answer([], result.log_probs),
    )
    bench.compare(
        "scores of prompts and answers",
        lambda: engine.score(sequences),
        [Answer([], answer.prompt_log_probs + answer.log_probs) for answer in bench.expected],
        answer_of=lambda result: Answer([], result.log_probs),
    )


def built_again(bench: BitsBench) -> None:
    """Another engine with other sizes: rows, and tokens of a KV block."""
    sizes = bench.sizes
    engine = bench.engine(
        enable_prefix_caching=True,
        max_requests=sizes.rows // 2 + 1,
        block_size_tokens=2 * sizes.block,
        num_kv_blocks=sizes.rows * sizes.max_length // sizes.block // 4,
    )
    for name in ("empty", "full"):
        bench.compare(
            f"other rows and blocks, {name} cache",
            lambda: serve(engine, bench.requests),
            evidence=num_resumed,
        )


def in_another_process(bench: BitsBench) -> None:
    """The same model, drawn again in a second process on the same GPU."""
    script = Path(__file__).parents[1] / "bits.py"
    with tempfile.TemporaryDirectory() as folder:
        answers, figures = Path(folder, "answers.json"), Path(folder, "figures.json")
        write_answers(answers, bench.expected)
        command = [sys.executable, str(script), *bench.arguments, "--models", bench.served.name]
        command += ["--only", "batch", "--expected", str(answers), "--json", str(figures)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # fails where answers differ
        rows = json.loads(figures.read_text())["models"][bench.served.name]["comparisons"]
    for row in rows:
        bench.note(Differences(**row | {"condition": f"another process, {row['condition']}"}))


def without_setting(bench: BitsBench) -> None:
    """What is expected is a batch here: batches again, requests alone, and a full cache."""
    engine = bench.engine()
    bench.expected = [Answer.of(result) for result in serve(engine, bench.requests)]
    alone = bench.requests[: bench.sizes.rows]
    bench.compare("setting off: batches again", lambda: serve(engine, bench.requests))
    bench.compare(
        "setting off: alone",
        lambda: [serve(engine, [request])[0] for request in alone],
        bench.expected[: len(alone)],
    )
    _with_full_cache(bench)


def _with_full_cache(bench: BitsBench) -> None:
    bench.free()
    engine = bench.engine(enable_prefix_caching=True)
    serve(engine, bench.requests)
    bench.compare("setting off: cached", lambda: serve(engine, bench.requests), evidence=num_resumed)


CONDITIONS: dict[str, Callable[[BitsBench], None]] = {
    "batch": in_batches,
    "cache": cached,
    "graphs": by_graph_and_eager,
    "drafts": drafted,
    "conversations": in_conversations,
    "preempted": preempted,
    "prompts": as_prompts,
    "scores": scored,
    "traffic": beside_others,
    "together": all_at_once,
    "engine": built_again,
    "process": in_another_process,
    "cuts": cut,
}
"""Groups of conditions, in the order in which they are served."""
