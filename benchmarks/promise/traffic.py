"""The requests of `bits.py`: the same ones at every run, and random ones beside them.

Prompts have three tokens to 13 blocks. Some share their first tokens. Half of the longer prompts end shortly
before a grid point, so that their answers cross it. A third of the requests is greedy; the others draw, with
temperature and top-p or top-k, from seeds of their own.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mambaslots as ms


@dataclass(frozen=True)
class Batch:
    """A kind of request: how many, prompts of `shortest` to `longest` tokens, answers of at most `answer`."""

    count: int
    shortest: int
    longest: int
    answer: int
    num_families: int = 0


@dataclass(frozen=True)
class Sizes:
    """How large the traffic is, and the engine that serves it. Lengths are tokens.

    Attributes:
        batches: the requests.
        block: tokens of a KV block.
        rows: requests that run at once.
        max_length: longest prompt plus answer.
        step: tokens of a step that takes the longest prompt whole.
        slots: durable state slots of an engine with cache.
        cuts: for each engine that cuts prompts, its `max_tokens_per_step`.
        users, turns, turn: conversations: how many, their turns, tokens of a user's turn.
    """

    batches: tuple[Batch, ...]
    block: int
    rows: int
    max_length: int
    step: int
    slots: int
    cuts: tuple[int, ...]
    users: int
    turns: int
    turn: int


FULL = Sizes(
    (Batch(52, 3, 250, 12), Batch(38, 260, 1400, 24, num_families=6), Batch(6, 1800, 3400, 150)),
    block=256, rows=32, max_length=4096, step=4096, slots=48,
    cuts=(256, 384, 640, 896, 1152, 1664), users=24, turns=4, turn=180,
)  # fmt: skip
SMALL = Sizes(
    (Batch(6, 3, 60, 6), Batch(5, 70, 200, 12, num_families=2), Batch(1, 250, 320, 70)),
    block=64, rows=8, max_length=512, step=512, slots=48,
    cuts=(64, 192), users=3, turns=3, turn=60,
)  # fmt: skip


@dataclass(frozen=True)
class BitsRequest:
    """A prompt, and how its answer is drawn."""

    prompt: list[int]
    sampling: ms.SamplingParams

    def num_blocks(self, block: int) -> int:
        """KV blocks of `block` tokens that prompt and answer take."""
        return -(-(len(self.prompt) + self.sampling.max_tokens) // block)

    def with_prompt_log_probs(self, answer: int | None = None) -> "BitsRequest":
        """The request that also returns its prompt's log-probs; `answer`: at most this many tokens."""
        length = self.sampling.max_tokens
        length = length if answer is None else min(length, answer)
        return BitsRequest(
            self.prompt, replace(self.sampling, skip_prompt_log_probs=False, max_tokens=length)
        )


class Traffic:
    """Draws requests; the same seed draws the same ones."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._draw = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]

    def requests(self, sizes: Sizes, grid: int) -> list[BitsRequest]:
        """The requests of `sizes`, in a random order; `grid`: tokens between two grid points."""
        drawn: list[BitsRequest] = []
        for batch in sizes.batches:
            heads = [self.tokens(batch.shortest) for _ in range(batch.num_families)]
            for index in range(batch.count):
                length = self._draw.randint(batch.shortest, batch.longest)
                if index % 2 and batch.longest > 2 * grid:  # the answer crosses a grid point
                    length = max(grid, length - length % grid) - self._draw.randrange(1, batch.answer)
                head = heads[index % len(heads)][: length - 1] if heads else []
                drawn.append(self.request(head + self.tokens(length - len(head)), batch.answer))
        self._draw.shuffle(drawn)
        return drawn

    def request(self, prompt: list[int], answer: int) -> BitsRequest:
        """A request for `answer` tokens, greedy or not."""
        kinds = ({}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 40})
        sampling = ms.SamplingParams(
            max_tokens=answer,
            return_log_probs=True,
            seed=self._draw.randrange(1 << 40),
            **self._draw.choice(kinds),  # type: ignore[arg-type]
        )
        return BitsRequest(prompt, sampling)

    def shuffled(self, count: int) -> list[int]:
        """The numbers below `count` in a random order."""
        return self._draw.sample(range(count), count)

    def chance(self, share: float) -> bool:
        return self._draw.random() < share

    def length(self, shortest: int, longest: int) -> int:
        return self._draw.randint(shortest, longest)


class Bystanders:
    """Other requests, with those that are compared; their answers are not read."""

    def __init__(self, traffic: Traffic, sizes: Sizes) -> None:
        self._traffic, self._sizes = traffic, sizes
        self._running: list[int] = []
        self.num_added = 0

    def go_on(self, engine: ms.DynamicInferenceEngine, finished: set[int]) -> None:
        """Add a request, or cancel one, or neither."""
        traffic = self._traffic
        self._running = [request for request in self._running if request not in finished]
        if traffic.chance(0.5):
            prompt = traffic.tokens(traffic.length(1, self._sizes.max_length // 4))
            request = traffic.request(prompt, traffic.length(1, 40))
            self._running.append(engine.add_request(request.prompt, request.sampling))
            self.num_added += 1
        if self._running and traffic.chance(0.1):
            engine.cancel(self._running.pop(0))

    def leave(self, engine: ms.DynamicInferenceEngine) -> None:
        """Cancel what still runs."""
        for request in self._running:
            engine.cancel(request)
        self._running = []


def serve(
    engine: ms.DynamicInferenceEngine,
    requests: Sequence[BitsRequest],
    *,
    arrivals: Sequence[int] | None = None,
    between: Callable[[set[int]], None] | None = None,
) -> list[ms.RequestResult]:
    """Serve requests to their end, step by step.

    Args:
        arrivals: for each request, the step before which it arrives; None: all come first.
        between: called after each step with the ids of all requests that have ended so far.

    Returns:
        The results, in the order of the requests.
    """
    coming = sorted(range(len(requests)), key=lambda index: arrivals[index] if arrivals else 0)
    indices: dict[int, int] = {}
    results: dict[int, ms.RequestResult] = {}
    finished: set[int] = set()
    step = 0
    while len(results) < len(requests):
        while coming and (arrivals is None or arrivals[coming[0]] <= step):
            index = coming.pop(0)
            indices[engine.add_request(requests[index].prompt, requests[index].sampling)] = index
        for result in engine.step().finished:
            finished.add(result.request_id)
            if result.request_id in indices:
                results[indices[result.request_id]] = result
        if between is not None:
            between(finished)
        step += 1
    return [results[index] for index in range(len(requests))]
