"""The cases of `crowds.py`: what grows, and which calls are measured."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mambaslots as ms
import torch
from crowd.engines import (
    ANSWER,
    BLOCK,
    FullPool,
    Queue,
    StubModel,
    answer,
    new_engine,
    random_prompts,
    start_decodes,
    timed_step,
)
from crowd.rows import OVER_BUDGET, Bench, OverBudget, Row, Sample, Sizes, cpu_ms
from mambaslots.inference.engines.step_runner import draws_of
from mambaslots.inference.kernels.sampling import sample
from torch import Tensor

Case = Callable[[Bench], Iterator[Row]]


def queue(bench: Bench) -> Iterator[Row]:
    few, many = bench.sizes.waiting
    small, large = Queue(few), Queue(many)
    name = f"{many:,} waiting against {few:,}"
    yield bench.compare(f"decode step of 32, {name}", small.step, large.step, 1.5, warm_up=bench.warm_up)
    yield bench.compare(f"cancel, {name}", small.cancel, large.cancel, 3.0, warm_up=bench.warm_up)
    yield bench.compare("  the first step after it", small.step, large.step, repeats=1)


def generate(bench: Bench) -> Iterator[Row]:
    def served(num: int) -> float:
        engine = new_engine(max_requests=8, num_kv_blocks=512, num_mamba_slots=64)
        prompts = random_prompts(num, 32)
        return cpu_ms(lambda: engine.generate(prompts, answer(8)))

    few, many = bench.sizes.prompts
    sides = (partial(served, num) for num in (few, many))
    name = f"generate, a request of {many:,} against one of {few:,}"
    yield bench.compare(name, *sides, 1.3, bench.few, num_requests=(few, many))


@dataclass(frozen=True)
class BurstSteps:
    """Milliseconds of each `add_request`, and of the steps that prefilled."""

    added: list[float]
    steps: list[float]
    num_until_first: int


def served_burst(sizes: Sizes, seed: int) -> BurstSteps:
    model = StubModel()
    longest = sizes.document + ANSWER
    engine = new_engine(model, max_sequence_length=longest, num_kv_blocks=8 * longest // BLOCK)
    start_decodes(engine, random_prompts(5, 20, seed=seed))
    document = random_prompts(1, sizes.document, seed=seed + 1)[0]
    prompts = [document + tail for tail in random_prompts(sizes.burst, 8, seed=seed + 2)]
    ids, added = set[int](), []
    for prompt in prompts:
        added.append(cpu_ms(lambda prompt=prompt: ids.add(engine.add_request(prompt, answer(1)))))
    steps, num_until_first, num_left = [], 0, len(ids)
    while num_left:
        model.prefilled = False
        begin = time.process_time_ns()
        finished = engine.step().finished
        if model.prefilled:
            steps.append((time.process_time_ns() - begin) / 1e6)
        num_left -= sum(result.request_id in ids for result in finished)
        if num_left == len(ids):
            num_until_first = len(steps) + 1
    return BurstSteps(added, steps, num_until_first)


def burst(bench: Bench) -> Iterator[Row]:
    sizes, found = bench.sizes, list[BurstSteps]()
    name = f"burst of {sizes.burst:,} that share {sizes.document:,} tokens"
    gc.disable()
    try:
        for repeat in range(bench.few):
            bench.start_budget()
            found.append(served_burst(sizes, 10 * repeat))
            gc.collect()
    except OverBudget:
        if not found:
            yield Row(f"{name}, slowest / median", None, None, 5.0, note=OVER_BUDGET)
            return
    finally:
        gc.enable()
    # The steps of every repetition do the same work in the same order.
    steps = [statistics.median(times) for times in zip(*(run.steps for run in found), strict=False)]
    added = [statistics.median(times) for times in zip(*(run.added for run in found), strict=True)]
    first = steps[: found[0].num_until_first]
    yield Row(f"{name}, slowest / median", statistics.median(steps), max(steps), 5.0)
    yield Row("  until the first of them has its token", statistics.median(first), max(first), 5.0)
    tenth = max(1, sizes.burst // 10)
    sides = statistics.mean(added[:tenth]), statistics.mean(added[-tenth:])
    yield Row("  add_request, last against first", *sides)


def length(bench: Bench) -> Iterator[Row]:
    def decodes(max_length: int) -> ms.DynamicInferenceEngine:
        engine = new_engine(
            max_requests=256, max_tokens_per_step=8192, max_sequence_length=max_length, num_kv_blocks=40960
        )
        start_decodes(engine, random_prompts(256, 20))
        return engine

    short, long = bench.sizes.max_length
    sides = [timed_step(decodes(max_length)) for max_length in (short, long)]
    name = f"decode step of 256, max_sequence_length {long:,} against {short:,}"
    yield bench.compare(name, *sides, 1.3, warm_up=bench.warm_up)


def drafts(bench: Bench) -> Iterator[Row]:
    vocab_size = 8  # so that drafts are found in short contexts, too

    def decodes(context: int, random_answers: bool) -> Sample:
        blocks = 32 * (context + ANSWER + BLOCK) // BLOCK
        engine = new_engine(
            StubModel(vocab_size, random_answers), num_speculative_tokens=4, max_tokens_per_step=32 * context,
            max_sequence_length=context + ANSWER, num_kv_blocks=blocks + 32,
        )  # fmt: skip
        start_decodes(engine, random_prompts(32, context, vocab_size))
        return timed_step(engine)

    short, long = bench.sizes.context
    for answers in ("repeated", "random"):
        sides = [decodes(context, answers == "random") for context in (short, long)]
        name = f"{answers} answers, drafts, {long:,} tokens of context against {short:,}"
        first = bench.compare("  the first step", *sides, repeats=1)
        yield bench.compare(name, *sides, 2.0, warm_up=bench.warm_up)
        yield first


def all_rows(num: int, **settings: Any) -> list[ms.SamplingParams]:
    return [ms.SamplingParams(seed=row, **settings) for row in range(num)]


def random_logits(sizes: Sizes, peaked: bool) -> Tensor:
    """Float32 logits; where they are peaked, `candidates` of each row are e^20 times as likely as others."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sizes.logits, generator=generator)
    if peaked:
        candidates = torch.rand(sizes.logits, generator=generator).topk(sizes.candidates).indices
        logits.scatter_add_(1, candidates, torch.full(candidates.shape, 20.0))
    return logits


def sampling(bench: Bench) -> Iterator[Row]:
    num, width = bench.sizes.logits
    positions = seeds = list(range(num))
    flat, peaked = random_logits(bench.sizes, False) / 10, random_logits(bench.sizes, True)
    greedy, warm, nucleus = all_rows(num), all_rows(num, temperature=0.8), all_rows(num, top_p=0.9)

    def sampled(logits: Tensor, params: list[ms.SamplingParams]) -> Sample:
        return partial(cpu_ms, lambda: sample(logits, draws_of(params, positions, seeds)))

    compare = partial(bench.compare, repeats=bench.some, warm_up=1)
    name = f"sample {num} x {width:,},"
    yield compare(f"{name} temperature against greedy", sampled(flat, greedy), sampled(flat, warm), 4.0)
    sort = partial(cpu_ms, lambda: torch.sort(flat, dim=-1, descending=True))
    yield compare(f"{name} top_p of flat rows against torch.sort", sort, sampled(flat, nucleus), 1.3)
    sides = sampled(peaked, greedy), sampled(peaked, nucleus)
    yield compare(f"{name} top_p of peaked rows against greedy", *sides, 5.0)


def launches(bench: Bench) -> Iterator[Row]:
    name = "kernel launches of sample, 64 mixed rows beside 8"
    if not torch.cuda.is_available():
        yield Row(name, None, None, 20, "launches", note="not measured: no GPU")
        return
    wide = Sizes(logits=(64, bench.sizes.logits[1]), candidates=bench.sizes.candidates)
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9})
    params = [ms.SamplingParams(seed=row, **kinds[row % 4]) for row in range(64)]
    flat_rows = torch.arange(64)[:, None] % 8 < 4
    logits = torch.where(flat_rows, random_logits(wide, False) / 10, random_logits(wide, True)).cuda()
    counts = [num_kernels(logits[:rows], params[:rows]) for rows in (8, 64)]
    yield Row(name, *counts, 20, "launches")


def num_kernels(logits: Tensor, params: list[ms.SamplingParams]) -> int:
    """The kernels that `sample` launches, as the profiler saw them; copies and fills are not counted."""
    call = partial(sample, logits, params, range(len(params)))
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    return sum(not name.startswith("Mem") for name in on_device)


def pools(bench: Bench) -> Iterator[Row]:
    few, many = bench.sizes.blocks
    small, large = FullPool(few), FullPool(many)
    name = f"{many:,} KV blocks against {few:,}"
    yield bench.compare(f"failing step, {name}", small.fail, large.fail, 3.0, bench.some, 1)
    sides = small.step_after_failure, large.step_after_failure
    yield bench.compare("  the step after it", *sides, None, bench.some)
    yield bench.compare(f"set_weights_version, {name}", small.rename_weights, large.rename_weights, None, 1)
    yield bench.compare("  the slowest of 20 steps after it", small.slowest_step, large.slowest_step, None, 1)


def long_head(bench: Bench) -> Iterator[Row]:
    num_tokens = bench.sizes.long_prompt
    prompt = random_prompts(1, num_tokens)[0]
    # The pool holds the long prompt, or the decodes with their answers. The decodes leave too few blocks.
    num_blocks = max(32 * (ANSWER + 512), num_tokens) // BLOCK + 512
    settings = {"max_requests": 64, "max_tokens_per_step": 32 * 512, "num_kv_blocks": num_blocks}
    engines = [new_engine(max_sequence_length=num_tokens + ANSWER, **settings) for _ in range(2)]
    for engine in engines:
        engine.generate([prompt[: num_tokens // 2]], answer(1))
        start_decodes(engine, random_prompts(32, 512, seed=1))
    engines[1].add_request(prompt, answer(4))
    small, large = map(timed_step, engines)
    name = f"decode step of 32, {num_tokens:,} tokens at the head against none"
    first = bench.compare("  the first step", small, large, repeats=1)
    yield bench.compare(name, small, large, 1.5, warm_up=bench.warm_up)
    yield first
    if engines[1].stats().num_waiting != 1:
        raise SystemExit("the long prompt did not wait")


CASES: dict[str, Case] = {
    case.__name__.replace("_", "-"): case
    for case in (queue, generate, burst, length, drafts, sampling, launches, pools, long_head)
}
