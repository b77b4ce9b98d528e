"""Chunks were counted by request, and by the kernel over the batch: all states but its first were wrong."""

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.models import hybrid_lm
from oracle.cached_states import assert_cached_states
from oracle.context_driver import make_request
from oracle.serving import random_tokens, small_config

STARTS = (3, 1, 0, 2)
"""Tokens of each request that an earlier step has computed: inside a chunk."""
LENGTHS = (5, 3, 2, 4)
"""Of each request's prompt, in blocks; and a few tokens."""


def gpu_kernels() -> ModuleType:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    kernels = GpuKernelSet()

    return kernels


class Batch:
    """Requests of one step, whose prefills begin inside their chunks, and one that begins behind a hit."""

    def __init__(self, kernels: ModuleType, dtype: torch.dtype, chunk: int, device: str = "cpu") -> None:
        self._kernels, self.chunk = kernels, chunk
        self.model = ms.models.HybridLM(small_config(chunk, dtype), seed=3).to(device)
        settings: dict[str, Any] = {
            "block_size_tokens": chunk, "max_requests": 6, "max_tokens_per_step": 24 * chunk,
            "max_sequence_length": 8 * chunk, "num_kv_blocks": 60, "num_mamba_slots": 40,
        }  # fmt: skip
        self.context = DynamicInferenceContext(self.model.state_spec(), ms.InferenceConfig(**settings))

    def request(self, tokens: list[int]) -> Any:
        request = make_request(tokens, ms.CheckpointPlan.every_block(self.chunk))
        request.chain = type(request.chain)(self.chunk)
        return request

    def step(self, *work: tuple[Any, int]) -> list[Any]:
        steps = [self.context.admission.schedule_request(request, budget) for request, budget in work]
        inputs = self.context.begin_step(steps)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(hybrid_lm, "kernel_set", lambda device, dtype: self._kernels)
            if not torch.cuda.is_available():  # kernels of others enter the device of their inputs
                patch.setattr(torch.cuda, "device", lambda index: nullcontext())
            self.model(inputs)
        self.context.end_step()
        self.context.check_integrity()
        return steps

    def run(self, **tolerance: float) -> None:
        """All states of the batch are the recurrence's: inside the prefills, and at their ends."""
        chunk = self.chunk
        texts = [random_tokens(n * chunk + 2, seed=60 + n) for n in LENGTHS]
        requests = [self.request(text) for text in texts]
        self.step(*((request, start) for request, start in zip(requests, STARTS, strict=True) if start))
        assert assert_cached_states(self.context, self.model, **tolerance) == 0
        self.step(*((request, 8 * chunk) for request in requests))
        assert assert_cached_states(self.context, self.model, **tolerance) == sum(LENGTHS)
        # Behind hits of other depths, beside a prompt that begins.
        again = [self.request(texts[0][: 2 * chunk + 1] + random_tokens(2 * chunk, seed=70)),
                 self.request(random_tokens(3 * chunk + 1, seed=71)),
                 self.request([*texts[1], *random_tokens(chunk, seed=72)])]  # fmt: skip
        for request in requests:
            self.context.release(request)
        steps = self.step(*((request, 8 * chunk) for request in again))
        assert [step.start for step in steps] == [2 * chunk, 0, 3 * chunk]
        assert assert_cached_states(self.context, self.model, **tolerance) == sum(LENGTHS) + 2 + 3 + 1


@pytest.mark.disaster(number=3)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("chunk", [4, 7])
def test_each_state_of_a_batch_of_prefills_is_that_of_its_own_request(chunk: int) -> None:
    Batch(KernelSet(), torch.float64, chunk).run(atol=1e-10)


@pytest.mark.disaster(number=3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_so_it_is_with_the_kernels_of_a_gpu() -> None:
    Batch(gpu_kernels(), torch.float32, 16).run(atol=1e-3, rtol=1e-3)


@pytest.mark.disaster(number=3)
@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("chunk", [16, 64])
def test_so_it_is_on_a_gpu(chunk: int) -> None:
    Batch(gpu_kernels(), torch.float32, chunk, "cuda").run(atol=2e-3, rtol=2e-3)
