"""Conversations of several users, turn by turn, with and without the prefix cache.

All users share the first tokens of their prompts. A turn adds the user's tokens, drawn at random, to what
was said before; all users send their turn at once, and the next turn follows when all have their answer.
"""

import statistics
import time
from typing import Any

import mambaslots as ms
from serving.models import BLOCK, ServingModel
from serving.prefill import free


def measure_conversations(served: ServingModel) -> dict[str, dict[str, float]]:
    """Times to first token and between tokens, and tokens a second, with and without cache."""
    figures = {}
    for name, caching in (("without cache", False), ("with cache", True)):
        lengths = served.lengths
        longest = lengths.shared + lengths.turns * (lengths.turn + lengths.answer)
        engine = served.engine(
            rows=lengths.users,
            length=-(-longest // BLOCK) * BLOCK,
            tokens_per_step=lengths.compared,
            slots=4 * lengths.users,
            graphs=32,
            caching=caching,
        )
        _converse(served, engine)  # compiles, tunes, captures
        engine.reset()
        figures[name] = _converse(served, engine)
        del engine
        free(served.device)
    return figures


def _converse(served: ServingModel, engine: ms.DynamicInferenceEngine) -> dict[str, float]:
    lengths = served.lengths
    sampling = ms.SamplingParams(max_tokens=lengths.answer)
    shared = served.tokens(lengths.shared)
    said = [list(shared) for _ in range(lengths.users)]
    first_ms: list[float] = []
    between_ms: list[float] = []
    num_prompt = num_resumed = num_generated = 0
    served.synchronise()
    begun = time.perf_counter()
    for _ in range(lengths.turns):
        turns = [served.tokens(lengths.turn) for _ in said]
        for words, turn in zip(said, turns, strict=True):
            words += turn
        sent = time.perf_counter()
        users = {engine.add_request(words, sampling): user for user, words in enumerate(said)}
        newest: dict[int, float] = {}
        finished: list[Any] = []
        while len(finished) < len(users):
            report = engine.step()
            now = time.perf_counter()
            for request in report.tokens:
                if request in newest:
                    between_ms.append(1e3 * (now - newest[request]))
                else:
                    first_ms.append(1e3 * (now - sent))
                newest[request] = now
            finished += report.finished
        for result in finished:
            said[users[result.request_id]] += result.tokens
            num_prompt += result.num_prompt_tokens
            num_resumed += result.num_resumed_tokens
            num_generated += len(result.tokens)
    seconds = time.perf_counter() - begun
    return {
        "prompt_tokens": num_prompt,
        "resumed_tokens": num_resumed,
        "generated_tokens": num_generated,
        "seconds": seconds,
        "first_token_mean_ms": statistics.fmean(first_ms),
        "first_token_median_ms": statistics.median(first_ms),
        "first_token_p90_ms": statistics.quantiles(first_ms, n=10)[-1],
        "between_tokens_mean_ms": statistics.fmean(between_ms),
        "between_tokens_median_ms": statistics.median(between_ms),
        "between_tokens_p99_ms": statistics.quantiles(between_ms, n=100)[-1],
        "generated_tokens_per_s": num_generated / seconds,
        "tokens_per_s": (num_prompt + num_generated) / seconds,
    }
