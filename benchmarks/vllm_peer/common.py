"""What both sides of the comparison share: sizes, prompts, JSON lines, and how figures are made of times."""

import contextlib
import json
import random
import statistics
import time
import traceback
from importlib import metadata

VOCABULARY = {"Nemotron-H-8B": 131072, "Qwen3.5-4B": 248320, "Qwen3.6-27B": 248320}
LARGE = "Qwen3.6-27B"
PARTS = ("ttft", "hits", "decode", "conversations", "throughput", "bits", "clients")
FULL = {
    "ttft": (512, 4096, 16384),
    "hits": (2048, 8192, 32768, 131072),
    "new": 512,
    "repeats": 7,
    "warm": 3,
    "decode": ((1, 512), (1, 3000), (1, 4096), (8, 3000), (32, 3000), (128, 3000)),
    "steps": 96,
    "warm_steps": 16,
    "users": 12,
    "turns": 4,
    "shared": 1024,
    "turn": 400,
    "answer": 48,
    "requests": 256,
    "prompt": 1024,
    "common": 768,
    "generate": 256,
    "bit_prompts": 24,
    "bit_lengths": (200, 2000),
    "bit_tokens": 32,
    "clients": 16,
    "client_prompt": 8192,
    "client_answer": 1024,
    "max_len": 132608,
    "max_tokens": 8192,
    "max_seqs": 256,
}
TINY = FULL | {
    "ttft": (64, 512),
    "hits": (256, 1024),
    "new": 64,
    "repeats": 2,
    "warm": 1,
    "decode": ((1, 64), (3, 300)),
    "steps": 6,
    "warm_steps": 2,
    "users": 2,
    "turns": 2,
    "shared": 256,
    "turn": 64,
    "answer": 4,
    "requests": 4,
    "prompt": 300,
    "common": 256,
    "generate": 4,
    "bit_prompts": 3,
    "bit_lengths": (200, 600),
    "bit_tokens": 4,
    "clients": 3,
    "client_prompt": 600,
    "client_answer": 8,
    "max_len": 2048,
    "max_tokens": 512,
    "max_seqs": 8,
}


def parts_of(model):
    """What is measured by default: of a model that fills the card, its clients alone."""
    return PARTS[-1:] if model == LARGE else PARTS[:-1]


def size_of(model, tiny=False):
    if tiny:
        return TINY
    return FULL | {"max_seqs": FULL["clients"], "max_len": 9728} if model == LARGE else FULL


class Draw:
    """Random token ids, drawn as `ServingModel.tokens` of the project's benchmarks draws them."""

    def __init__(self, vocabulary, seed=0):
        self.vocabulary, self.random = vocabulary, random.Random(seed)

    def tokens(self, count):
        return [self.random.randrange(self.vocabulary) for _ in range(count)]


class Side:
    """One engine. Subclasses have `add(tokens, count, logprobs=False) -> id`, `step() -> {id: [new tokens]}`,
    `busy()`, `result(id) -> (tokens, log_probs, cached)`, `reset()` (forgets the prefix cache), `sync()`."""

    name = "?"

    def drain(self):
        while self.busy():
            self.step()


def emit(side, model, part, **figures):
    print(json.dumps({"side": side, "model": model, "part": part, **figures}), flush=True)


def versions():
    """Of the packages that compute, where they are installed."""
    found = {}
    for package in ("torch", "triton", "vllm", "fla-core", "tokenspeed-fa3"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def first_token(side, prompt):
    """Milliseconds until a prompt's first token, and how many of its tokens were cached."""
    side.sync()
    time.sleep(0.05)
    begun = time.perf_counter()
    request = side.add(prompt, 1)
    while not side.step().get(request):
        pass
    ms = 1e3 * (time.perf_counter() - begun)
    side.drain()
    return ms, side.result(request)[2]


def ttft(side, size, draw):
    for length in size["ttft"]:
        times = [first_token(side, draw.tokens(length))[0] for _ in range(size["warm"] + size["repeats"])]
        times = times[size["warm"] :]
        yield {"tokens": length, "ms": statistics.median(times), "least": min(times), "most": max(times)}


def hits(side, size, draw):
    """The first token of a prompt whose first tokens an earlier prompt had, all but `new` ones."""
    for known in size["hits"]:
        side.reset()
        head = draw.tokens(known)
        cold_ms, _ = first_token(side, head)
        repeats = range(size["warm"] + size["repeats"])
        rounds = [first_token(side, head + draw.tokens(size["new"])) for _ in repeats]
        times = [ms for ms, _ in rounds[size["warm"] :]]
        yield {
            "known": known, "new": size["new"], "ms": statistics.median(times), "least": min(times),
            "most": max(times), "cold_head_ms": cold_ms, "cached_tokens": min(cached for _, cached in rounds),
        }  # fmt: skip


def counted_step(side, counts):
    """Make a step; count the new tokens of each request that is counted."""
    new = 0
    for request, tokens in side.step().items():
        if request in counts:
            counts[request] += len(tokens)
            new += len(tokens)
    return new


def decode(side, size, draw):
    for rows, context in size["decode"]:
        side.reset()
        steps, warm = size["steps"], size["warm_steps"]
        wanted = steps + warm + 200 + rows  # no request ends before the last step
        ids = [side.add(draw.tokens(context), wanted) for _ in range(rows)]
        counts = dict.fromkeys(ids, 0)

        while min(counts.values()) < 1:
            counted_step(side, counts)
        for _ in range(warm):
            counted_step(side, counts)
        per_step = []
        begun = last = time.perf_counter()
        new = 0
        for _ in range(steps):
            got = counted_step(side, counts)
            now = time.perf_counter()
            new += got
            per_step.append(1e3 * (now - last))
            last = now
        seconds = time.perf_counter() - begun
        mean_context = context + statistics.fmean(counts.values())
        ended = not all(count < wanted for count in counts.values())
        side.cancel(ids)
        yield {
            "rows": rows, "context": round(mean_context), "ms": 1e3 * seconds * rows / new,
            "tokens": new, "steps": steps,
            "median_step_ms": statistics.median(per_step), "ended": ended,
        }  # fmt: skip


def converse(side, size, draw):
    """Users whose turns follow a shared prompt; all send a turn, and then wait for all answers."""
    shared = draw.tokens(size["shared"])
    said = [list(shared) for _ in range(size["users"])]
    first_ms, by_turn = [], []
    num_prompt = num_cached = num_generated = 0
    side.sync()
    begun = time.perf_counter()
    for _ in range(size["turns"]):
        turns = [draw.tokens(size["turn"]) for _ in said]
        for words, turn in zip(said, turns, strict=True):
            words += turn
        sent = time.perf_counter()
        users = {side.add(words, size["answer"]): user for user, words in enumerate(said)}
        newest = {}
        while side.busy():
            new = side.step()
            now = time.perf_counter()
            for request, tokens in new.items():
                if tokens and request not in newest:
                    first_ms.append(1e3 * (now - sent))
                    newest[request] = now
        by_turn.append(statistics.fmean(first_ms[-size["users"] :]))
        for request, user in users.items():
            num_prompt += len(said[user])
            tokens, _, cached = side.result(request)
            assert len(tokens) == size["answer"], (len(tokens), size["answer"])
            said[user] += tokens
            num_cached += cached
            num_generated += len(tokens)
    seconds = time.perf_counter() - begun
    return {
        "prompt_tokens": num_prompt, "cached_tokens": num_cached, "generated_tokens": num_generated,
        "seconds": seconds,
        "first_token_mean_ms": statistics.fmean(first_ms),
        "first_token_median_ms": statistics.median(first_ms),
        "first_token_mean_ms_by_turn": by_turn, "generated_tokens_per_s": num_generated / seconds,
    }  # fmt: skip


def conversations(side, size, draw, repeats=3):
    converse(side, size, draw)  # compiles, tunes, captures
    rows = []
    for _ in range(repeats):
        side.reset()
        rows.append(converse(side, size, draw))
    rows.sort(key=lambda row: row["first_token_mean_ms"])
    yield rows[len(rows) // 2] | {"all_first_token_mean_ms": [row["first_token_mean_ms"] for row in rows]}


def throughput(side, size, draw):
    for shared in (0, size["common"]):
        for _repeat in range(2):  # the first compiles, tunes, captures
            side.reset()
            head = draw.tokens(shared)
            prompts = [head + draw.tokens(size["prompt"] - shared) for _ in range(size["requests"])]
            side.sync()
            begun = time.perf_counter()
            ids = [side.add(prompt, size["generate"]) for prompt in prompts]
            added = time.perf_counter() - begun
            steps, firsts, first_seen = 0, [], set()
            while side.busy():
                new = side.step()
                steps += 1
                now = time.perf_counter()
                for request, tokens in new.items():
                    if tokens and request not in first_seen:
                        first_seen.add(request)
                        firsts.append(now - begun)
            seconds = time.perf_counter() - begun
            generated = cached = 0
            for request in ids:
                tokens, _, hits = side.result(request)
                generated += len(tokens)
                cached += hits
        yield {
            "shared": shared, "requests": len(ids), "prompt": size["prompt"], "generated_tokens": generated,
            "cached_tokens": cached, "seconds": seconds, "add_seconds": added, "steps": steps,
            "generated_tokens_per_s": generated / seconds, "first_token_mean_s": statistics.fmean(firsts),
            "first_token_last_s": max(firsts),
        }  # fmt: skip


def clients(side, size, draw):
    """Prompts that share nothing and come at once, after a short round that compiles, tunes and captures."""
    for answer in (32, size["client_answer"]):
        side.reset()
        prompts = [draw.tokens(size["client_prompt"]) for _ in range(size["clients"])]
        side.sync()
        begun = time.perf_counter()
        ids = [side.add(prompt, answer) for prompt in prompts]
        firsts = {}
        while side.busy():
            new = side.step()
            now = time.perf_counter() - begun
            for request, tokens in new.items():
                if tokens:
                    firsts.setdefault(request, now)
        seconds = time.perf_counter() - begun
        generated = sum(len(side.result(request)[0]) for request in ids)
    yield {
        "clients": len(ids), "prompt": size["client_prompt"], "answer": answer, "seconds": seconds,
        "first_token_mean_s": statistics.fmean(firsts.values()), "first_token_last_s": max(firsts.values()),
        "generated_tokens_per_s": generated / seconds,
    }  # fmt: skip


def bits(side, size, draw):
    low, high = size["bit_lengths"]
    lengths = [draw.random.randint(low, high) for _ in range(size["bit_prompts"])]
    prompts = [draw.tokens(length) for length in lengths]

    def alone():
        answers = []
        for prompt in prompts:
            request = side.add(prompt, size["bit_tokens"], logprobs=True)
            side.drain()
            answers.append(side.result(request))
        return answers

    def together():
        ids = [side.add(prompt, size["bit_tokens"], logprobs=True) for prompt in prompts]
        side.drain()
        return [side.result(request) for request in ids]

    side.reset()
    base = alone()
    runs = {"alone, warm cache": alone()}
    runs["one batch, warm cache"] = together()
    side.reset()
    runs["one batch, cold cache"] = together()
    side.reset()
    runs["alone, cold cache again"] = alone()
    for what, answers in runs.items():
        same_tokens = same_bits = 0
        largest = 0.0
        for (tokens, log_probs, _), (expected, expected_log_probs, _) in zip(answers, base, strict=True):
            same_tokens += tokens == expected
            same_bits += tokens == expected and log_probs == expected_log_probs
            for token, other, mine, theirs in zip(
                tokens, expected, log_probs, expected_log_probs, strict=False
            ):
                if token != other:
                    break
                largest = max(largest, abs(mine - theirs))
        yield {
            "what": what, "answers": len(base), "same_tokens": same_tokens, "same_bits": same_bits,
            "largest_difference_of_log_probs": largest, "cached_tokens": sum(answer[2] for answer in answers),
            "prompt_tokens": sum(lengths), "distinct_tokens": len({t for a in base for t in a[0]}),
        }  # fmt: skip


MEASURES = {
    "ttft": ttft,
    "hits": hits,
    "decode": decode,
    "conversations": conversations,
    "throughput": throughput,
    "bits": bits,
    "clients": clients,
}


def measure(side, name, model, parts, size, **labels):
    """Each part on its own: one that fails prints its traceback, and the next follows."""
    emit(name, model, "engine", **labels, versions=versions())
    for number, part in enumerate(PARTS):
        if part not in parts:
            continue
        begun = time.perf_counter()
        try:
            for figures in MEASURES[part](
                side, size, Draw(VOCABULARY[model] if not labels.get("tiny") else 512, number)
            ):
                emit(name, model, part, **labels, **figures)
        except Exception:
            emit(name, model, part, **labels, failed=traceback.format_exc()[-1500:])
            try:
                side.recover()
            except Exception:
                traceback.print_exc()
        print(f"# {name} {model} {part} took {time.perf_counter() - begun:.1f} s", flush=True)
