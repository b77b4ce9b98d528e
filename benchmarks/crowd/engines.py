"""The engines of `crowds.py`: with a model that computes nothing, a long queue, a full pool."""

import random
from functools import partial
from typing import Any

import mambaslots as ms
import numpy as np
import torch
from crowd.rows import Sample, cpu_ms
from mambaslots.inference.contexts.step_inputs import StepInputs
from torch import Tensor

VOCABULARY, BLOCK = 64, 16
ANSWER = 2000  # longer than any measurement


class ModelFailureError(Exception):
    """What the stub raises."""


def stub_spec(vocab_size: int) -> ms.HybridStateSpec:
    """The states of a model that computes nothing."""
    return ms.HybridStateSpec(
        states=(ms.StateTensor("state", 1, (1,), torch.float32, grid=4),),
        num_attention_layers=1, num_kv_heads=1, head_dim=1, kv_dtype=torch.float32,
        vocab_size=vocab_size, device=torch.device("cpu"),
    )  # fmt: skip


class StubModel:
    """Answers with logits that were made before; reads and writes nothing.

    Attributes:
        fails: whether the next call raises ModelFailureError.
        prefilled: whether the latest call had a prefill.
    """

    def __init__(self, vocab_size: int = VOCABULARY, random_answers: bool = False) -> None:
        self._vocab_size = vocab_size
        shape = (64 if random_answers else 1, 2048, vocab_size)
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.rand(shape, generator=generator) if random_answers else torch.zeros(shape)
        self._calls = 0
        self.fails = self.prefilled = False

    def state_spec(self) -> ms.HybridStateSpec:
        return stub_spec(self._vocab_size)

    def __call__(self, inputs: StepInputs) -> Tensor:
        if self.fails:
            raise ModelFailureError
        self.prefilled = inputs.num_prefills > 0
        self._calls += 1
        return self._logits[self._calls % len(self._logits), : len(inputs.logit_tokens)]


def new_engine(model: StubModel | None = None, **settings: Any) -> ms.DynamicInferenceEngine:
    defaults = {
        "block_size_tokens": BLOCK, "max_requests": 32, "max_tokens_per_step": 2048, "num_kv_blocks": 8192,
        "num_mamba_slots": 1024,
    }  # fmt: skip
    return ms.DynamicInferenceEngine(model or StubModel(), ms.InferenceConfig(**(defaults | settings)))


def random_prompts(num: int, length: int, vocab_size: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    prompts: list[list[int]] = np.random.default_rng(seed).integers(vocab_size, size=(num, length)).tolist()
    return prompts


def answer(num_tokens: int) -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=num_tokens)


def start_decodes(
    engine: ms.DynamicInferenceEngine, prompts: list[list[int]], num_tokens: int = ANSWER
) -> None:
    """Add prompts, and make steps until all of them have a token."""
    started = {engine.add_request(prompt, answer(num_tokens)) for prompt in prompts}
    while started:
        started -= engine.step().tokens.keys()


def timed_step(engine: ms.DynamicInferenceEngine) -> Sample:
    return partial(cpu_ms, engine.step)


class Queue:
    """An engine with 32 decodes under way, and requests that wait for a row."""

    def __init__(self, num_waiting: int) -> None:
        self._engine = new_engine()
        start_decodes(self._engine, random_prompts(32, 32))
        self.step = timed_step(self._engine)
        self._draw = random.Random(0)
        self._ids = [self._engine.add_request(p, answer(4)) for p in random_prompts(num_waiting, 32, seed=1)]

    def cancel(self) -> float:
        place = self._draw.randrange(len(self._ids))
        taken = cpu_ms(partial(self._engine.cancel, self._ids[place]))
        self._ids[place] = self._engine.add_request(random_prompts(1, 32)[0], answer(4))
        return taken


class FullPool:
    """An engine whose KV blocks are all cached, with 4 decodes under way."""

    def __init__(self, num_blocks: int) -> None:
        block, blocks_each = 4, 256
        self._model = StubModel()
        self._engine = new_engine(
            self._model,
            block_size_tokens=block,
            max_tokens_per_step=64 * block * blocks_each,
            num_kv_blocks=num_blocks,
        )
        prompts = random_prompts(num_blocks // blocks_each, block * blocks_each)
        for first in range(0, len(prompts), 32):
            self._engine.generate(prompts[first : first + 32], answer(1))
        pool = self._engine.stats().cache
        if pool.num_cached_kv_blocks < 0.99 * num_blocks:
            raise SystemExit(f"of {num_blocks} KV blocks, {pool.num_cached_kv_blocks} are cached")
        start_decodes(self._engine, random_prompts(4, 20, seed=1), 200)
        self._after = 0.0

    def fail(self) -> float:
        """Make a step that fails; then make the steps that restart the requests."""
        self._model.fails = True
        taken = cpu_ms(self._failing_step)
        self._model.fails = False
        self._after = cpu_ms(self._engine.step)
        self._engine.step()
        return taken

    def _failing_step(self) -> None:
        try:
            self._engine.step()
        except ModelFailureError:
            return
        raise SystemExit("a step did not fail")

    def step_after_failure(self) -> float:
        self.fail()
        return self._after

    def rename_weights(self) -> float:
        return cpu_ms(lambda: self._engine.set_weights_version("new"))

    def slowest_step(self) -> float:
        return max(cpu_ms(self._engine.step) for _ in range(20))
