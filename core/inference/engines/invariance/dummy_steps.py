"""Steps of requests without users, which check a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....config import InferenceConfig
from ....params_and_results import SamplingParams
from ....state_spec import HybridStateSpec
from ....validation import ceil_div
from ...contexts.cache.hashing import PrefixHashChain
from ...contexts.dynamic_context import DynamicInferenceContext
from ...contexts.dynamic_request import DynamicInferenceRequest
from ...contexts.padding import MAX_PADDING, Padding, invariant_bucket
from ...contexts.step_inputs import StepInputs

MAX_REQUESTS = 2  # requests that run at once


class DummySteps:
    """Runs a model on its own requests and pools, which are small; collectives where the model is split."""

    def __init__(
        self, model: Callable[[StepInputs], Tensor], spec: HybridStateSpec, config: InferenceConfig,
        longest: int, most_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Allocate the pools."""
        self.longest = longest
        self.num_drafts = config.num_speculative_tokens
        self._model, self._vocab_size = model, spec.vocab_size
        self._block_size = config.block_size_tokens
        small = replace(
            config, max_requests=MAX_REQUESTS,
            max_tokens_per_step=max(invariant_bucket(MAX_REQUESTS * longest), most_tokens) + MAX_PADDING,
            max_sequence_length=longest, num_kv_blocks=MAX_REQUESTS * ceil_div(longest, self._block_size),
            num_mamba_slots=None, total_gb=None, host_cache_gb=0.0, disk_cache=None,
            enable_prefix_caching=False, free_memory="keep",
        )  # fmt: skip
        self._context = DynamicInferenceContext(spec, small)
        self._num_requests = 0

    def request(self, tokens: Sequence[int]) -> DynamicInferenceRequest:
        """A request with this prompt, which wants the log-probs of all its tokens."""
        self._num_requests += 1
        params = SamplingParams(
            max_tokens=max(1, self.longest - len(tokens)), return_log_probs=True, skip_prompt_log_probs=False
        )
        return DynamicInferenceRequest(
            request_id=self._num_requests, prompt_tokens=list(tokens), sampling=params,
            plan=self._context.config.checkpoint_plan, chain=PrefixHashChain(self._block_size), arrival_s=0.0,
        )  # fmt: skip

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Random tokens."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randint(self._vocab_size, (count,), generator=generator, device="cpu").tolist()

    @torch.inference_mode()
    def run(
        self, work: Sequence[tuple[DynamicInferenceRequest, int]], padded: Padding, drafts: Sequence[int] = ()
    ) -> list[Tensor]:
        """One step."""
        batch = [self._context.admission.schedule_request(request, budget) for request, budget in work]
        ready = [scheduled for scheduled in batch if scheduled is not None]
        assert len(ready) == len(work), "the pools hold all requests"
        if drafts:
            ready[0] = self._context.admission.add_drafts(ready[0], drafts)
        inputs = self._context.begin_step(ready, padded)
        logits = self._model(inputs)  # no step follows one that fails
        first = ready[0]
        if first.drafts:  # all are right
            first.request.append(first.drafts, [None] * len(first.drafts), 0.0)
        self._context.end_step({first.request.request_id: first.length})
        in_row_order = sorted(ready, key=lambda scheduled: not scheduled.decoding)
        sizes = [len(scheduled.logit_positions) for scheduled in in_row_order]
        parts = torch.split(logits[: inputs.num_logits], sizes)
        of = {scheduled.request: part for scheduled, part in zip(in_row_order, parts, strict=True)}
        return [of[request] for request, _ in work]

    def release(self, request: DynamicInferenceRequest) -> None:
        """Take back what a request holds."""
        self._context.release(request)
