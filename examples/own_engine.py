"""A paged engine of its own around a toy hybrid model, with `PrefixCache` deciding what is cached where.

The engine owns the tensors: pages of KV, and slots of recurrent states. The cache owns the numbers: which
page and slot holds which prefix. The same conversations are served with and without a cache; the tokens must
be identical.

    python examples/own_engine.py
"""

import sys
from dataclasses import dataclass
from typing import Any

import mambaslots as ms
import numpy as np
import torch

BLOCK, CHUNK, PAGES, SLOTS, VOCABULARY, WIDTH = 8, 32, 96, 8, 50, 16


class Model:
    """One recurrent layer with a state [WIDTH, WIDTH], then attention over the KV of all tokens so far."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scale = WIDTH**-0.5
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
        self.q, self.k, self.v, self.out = (
            scale * torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)
        )

    def recur(self, token: int, state: torch.Tensor) -> torch.Tensor:
        """Update `state` in place with one token; returns the hidden vector."""
        x = self.embedding[token]
        state.mul_(0.9).add_(torch.outer(torch.tanh(self.k @ x), self.v @ x))
        return x + torch.tanh(state @ (self.q @ x))

    def attend(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(keys @ (self.q @ x), dim=0)
        return self.embedding @ (x + self.out @ (weights @ values))


@dataclass
class Request:
    tokens: list[int]
    num_prompt: int
    num_tokens: int  # when it is done
    path: Any = None
    state: Any = None
    computed: int = 0
    seen: int = 0  # leading tokens that earlier prompts had, before this one departs from them


class Engine:
    """Continuous batching in a few lines: each step computes a chunk or one token of each running request."""

    def __init__(self, model: Model, cached: bool) -> None:
        self.model, self.plan = model, ms.CheckpointPlan()
        self.cache = ms.PrefixCache(PAGES, SLOTS, BLOCK, enabled=cached)
        self.keys, self.values = torch.zeros(2, PAGES, BLOCK, WIDTH, dtype=torch.float64)
        self.states = torch.zeros(SLOTS, WIDTH, WIDTH, dtype=torch.float64)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.resumed = 0

    def admit(self, request: Request) -> bool:
        """Start a request from the deepest cached state, where its pages fit."""
        cache, num_blocks = self.cache, -(-request.num_tokens // BLOCK)
        chain = ms.PrefixHashChain(BLOCK)
        chain.extend_to(request.tokens)
        match = cache.match(chain, len(request.tokens))
        if not cache.can_hold(num_blocks, match, None):
            return False
        reach = len(request.tokens) - 1
        path = cache.open(chain, self.plan, np.full(num_blocks, -1, np.int32), max_resume_tokens=reach)
        cache.hold(path, match)
        if match.resume_slot >= 0:
            cache.pin_state(path, match.resume_slot, resumes=True)  # before `grow`, which may evict states
        cache.grow(path, num_blocks)
        request.path, request.computed, request.seen = path, match.resume_tokens, match.seen_tokens
        request.state = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        if match.resume_slot >= 0:
            request.state.copy_(self.states[match.resume_slot])
            cache.unpin_state(path)
        self.resumed += request.computed
        self.running.append(request)
        return True

    def step(self) -> None:
        while self.waiting and self.admit(self.waiting[0]):
            self.waiting.pop(0)
        planned = []
        for request in self.running:
            start, stop = request.computed, min(request.computed + CHUNK, len(request.tokens))
            boundaries = self.plan.boundaries(
                start=start,
                stop=stop,
                prompt_tokens=request.num_prompt,
                block_size_tokens=BLOCK,
                branch_tokens=request.seen,
            )
            decoding = start >= request.num_prompt
            planned.append(ms.PathStep(request.path, request.tokens, start, stop, decoding, boundaries))
        for request, step in zip(list(self.running), self.cache.reserve(planned), strict=True):
            token = self.forward(request, step)
            self.cache.register(request.path, request.tokens, step.stop)
            self.cache.commit(step)
            request.computed = step.stop
            if step.stop == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) > request.num_tokens:
                self.cache.release(request.path)
                self.running.remove(request)

    def forward(self, request: Request, step: ms.PathStep) -> int:
        """Compute the step's tokens, write their KV and the states at its boundaries; the next token."""
        pages = torch.tensor(request.path.blocks)
        for position in range(step.start, step.stop):
            x = self.model.recur(request.tokens[position], request.state)
            if position // BLOCK >= request.path.num_registered:  # registered pages are shared, read only
                page, place = request.path.blocks[position // BLOCK], position % BLOCK
                self.keys[page, place], self.values[page, place] = self.model.k @ x, self.model.v @ x
            if (slot := step.destinations.get(position + 1, -1)) >= 0:
                self.states[slot] = request.state
        keys, values = (pool[pages].flatten(0, 1)[: step.stop] for pool in (self.keys, self.values))
        return int(self.model.attend(x, keys, values).argmax())

    def serve(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        requests = [Request(list(p), len(p), len(p) + num_new) for p in prompts]
        self.waiting += requests
        while self.waiting or self.running:
            self.step()
        return [request.tokens[:-1] for request in requests]


def conversations(engine: Engine) -> list[list[int]]:
    """Four conversations of three turns over one system prompt; a turn repeats all that came before."""
    draw = np.random.default_rng(1)
    texts = [list(range(40)) + draw.integers(0, VOCABULARY, 12).tolist() for _ in range(4)]
    for _ in range(3):
        texts = engine.serve(texts, num_new=10)
        texts = [text + draw.integers(0, VOCABULARY, 9).tolist() for text in texts]
    return texts


def main() -> int:
    model = Model()
    cached, plain = Engine(model, cached=True), Engine(model, cached=False)
    answers, expected = conversations(cached), conversations(plain)
    total = sum(52 + 19 * turn for turn in range(3)) * 4
    print(f"prompt tokens {total}, resumed {cached.resumed}, computed {total - cached.resumed}")
    print(f"identical to no cache: {'yes' if answers == expected else 'no'}")
    cached.cache.check_integrity([])
    return 0 if answers == expected and cached.resumed > total // 3 else 1


if __name__ == "__main__":
    sys.exit(main())
