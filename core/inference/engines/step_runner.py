"""Steps: the call of the model, which may be launched before the tokens of the step before are read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.padding import padded_to_ladder
from ..contexts.request import RequestStep
from ..contexts.step_inputs import StepInputs, StepShape
from ..kernels.kernel_set import kernel_set
from .cuda_graphs import GraphRunner
from .engine_observer import NewTokens
from .logits_changes import LogitsChanges
from .model_protocol import Model
from .sampler import SampledStep
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .batch_invariance import BatchInvariance


class StepRunner:
    """Makes the steps of a scheduler's requests, and may launch one before the last one's tokens are read."""

    def __init__(self, context: DynamicInferenceContext, invariance: "BatchInvariance | None") -> None:
        # Launched ahead. Dropping it loses no token, once its requests are queued again.
        self.unread: SampledStep | None = None
        self.graphs = GraphRunner.of(context)
        self.invariance = invariance
        self.logits_changes = LogitsChanges(context.spec.device)
        self.in_model = False  # the model was called and has not returned, also after it failed
        self._context = context
        self._looks_ahead = context.config.why_steps_wait(context.spec.device) is None

    def make(
        self, model: Model, scheduler: Scheduler
    ) -> tuple[Sequence[RequestStep], NewTokens, Sequence[int]]:
        """Make the next step: what requests did in it, their tokens, and the requests with invalid logits."""
        step, self.unread = self.unread, None
        if step is None or all(one.request.result is not None for one in step.steps):
            scheduled = scheduler.schedule()  # match, plan, hold KV blocks
            if not scheduled:
                return (), {}, ()
            step = self._launch(model, scheduled, None)
        ahead = self._looks_ahead and not (self.graphs and self.graphs.captures_next)
        if ahead and (following := scheduler.following(step.steps)):
            tokens_there = step.tokens_of([one.request for one in following])
            self.unread = self._launch(model, following, tokens_there)
        tokens = step.wait()
        if self.graphs is not None:
            self.graphs.after_step(model)
        return step.steps, tokens, step.invalid

    def forget(self) -> None:
        """Drop the step ahead and all counts of tokens: its requests are queued again, or have ended."""
        self.unread = None
        self.logits_changes.clear()

    def drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.drop_graphs()

    def _launch(
        self, model: Model, scheduled: Sequence[RequestStep], sampled_tokens: Tensor | None
    ) -> SampledStep:
        """Launch a step. `sampled_tokens`: its tokens, where it follows a step whose tokens are not read."""
        if self.invariance is not None:
            self.invariance.check_switches()
        inputs = self._context.begin_step(scheduled, self.padded, sampled_tokens)  # reserve, publish
        sampled = SampledStep(self._context.steps, self.run(model, inputs), self.logits_changes)
        # Register, commit, advance; waits only for drafts, and where blocks or states become findable.
        self._context.end_step(sampled.num_accepted, sampled.is_valid)
        return sampled

    def padded(self, shape: StepShape) -> StepShape:
        """The shape to pad a step of `shape` to: that of a graph, or a rung where bits must not change."""
        captured = self.graphs.padded(shape) if self.graphs is not None else None
        return captured or (padded_to_ladder(shape) if self._context.config.batch_invariant else shape)

    def run(self, model: Model, inputs: StepInputs) -> Tensor:
        """The model's logits of a step. Does not synchronise."""
        self.in_model = True
        logits = model(inputs) if self.graphs is None else self.graphs.run(model, inputs)
        self.in_model = False
        expected = (len(inputs.logit_tokens), self._context.spec.vocab_size)
        shape = getattr(logits, "shape", None)
        if shape != expected:
            raise ValueError(
                f"the model returned a {type(logits).__name__} of shape {shape}; accepted: logits of shape "
                f"{expected}, one row for each of inputs.logit_tokens"
            )
        return logits[: inputs.num_logits]


def describe_steps(context: DynamicInferenceContext, graphs: GraphRunner | None) -> tuple[str, ...]:
    """A line each: device, kernels, graphs, when decode steps are launched, how decodes compute, the tier."""
    config, spec, tier = context.config, context.spec, context.prefix_cache.tier
    device = torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else "no GPU"
    kernels = kernel_set(spec.device, spec.kv_dtype)
    because, chunk = config.why_steps_wait(spec.device), spec.chunk_tokens(config.block_size_tokens)
    steps = "launched before the tokens of the step before are read"
    if because is not None:
        steps = f"wait for the tokens of the step before, because of {because}"
    decodes = "update a state at each token"
    if not any(tensor.num_layers for tensor in spec.states):
        decodes = "the model has no states"
    elif config.replays:
        decodes = f"replay the inputs since the last multiple of {chunk} tokens, where a state is written"
    captured = "none; on a GPU, num_cuda_graphs captures them, except in float64"
    if graphs is not None:
        captured = graphs.describe()
    evicted = "are dropped; host_cache_gb keeps them in host memory"
    if tier is not None:
        files, back = "", f"{tier.min_tokens} tokens"
        if tier.files.num_slots:
            files = f", {tier.files.num_slots} in files"
            back += f", from a file {tier.min_tokens_from_file}"
        evicted = f"{tier.host.num_slots} in host memory{files}; come back where that saves at least {back}"
    return (
        f"device: {spec.device} ({device}), KV in {str(spec.kv_dtype).removeprefix('torch.')}",
        *kernels.describe(spec),
        f"CUDA graphs: {captured}",
        f"decode steps: {steps}",
        f"decodes: {decodes}",
        f"evicted states: {evicted}",
    )
