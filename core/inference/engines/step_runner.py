"""Steps: the call of the model, which may be launched ahead, and the draw of tokens, read later."""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import batched
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...devices import tensor_on
from ...request import SamplingParams, TopLogProbs
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.padding import padded_to_ladder
from ..contexts.request import DynamicInferenceRequest, GeneratedToken, RequestStep
from ..contexts.step_inputs import StepInputs, StepShape
from ..kernels.kernel_set import kernel_set, runs_triton
from ..kernels.log_probs import log_probs_of, top_log_probs
from ..kernels.operands import WHOLE, TokenDraw
from ..kernels.reference import token_draws
from .cuda_graphs import GraphRunner
from .engine_observer import NewTokens
from .logits_changes import LogitsChanges
from .model_protocol import Model
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
        self._groups = context.spec.groups if context.spec.groups.is_split else None
        self._looks_ahead = context.config.why_steps_wait(context.spec.device) is None

    def make_step(
        self, model: Model, scheduler: Scheduler
    ) -> tuple[Sequence[RequestStep], NewTokens, Sequence[int]]:
        """Make the next step: what requests did in it, their tokens, and the requests with invalid logits."""
        step, self.unread = self.unread, None
        if step is None or all(one.request.result is not None for one in step.steps):
            scheduled = scheduler.schedule()  # match, plan, hold KV blocks
            if not scheduled:
                return (), {}, ()
            step = self._launch(model, scheduled, None)
        looks_ahead = self._looks_ahead and not (self.graphs and self.graphs.captures_next)
        if looks_ahead and (ahead := scheduler.steps_ahead()):
            decoding = [one.request for one in ahead if one.is_ahead]
            self.unread = self._launch(model, ahead, step.tokens_of(decoding) if decoding else None)
        tokens = step.read_tokens()
        if self._groups is not None:
            self._groups.check_not_aborted()
        self._context.commit_steps(step.steps, step.invalid)
        if self.graphs is not None:
            self.graphs.after_step(model)
        return step.steps, tokens, step.invalid

    def clear(self) -> None:
        """Remove the step ahead and all counts of tokens: its requests are queued again, or have ended."""
        self.unread = None
        self.logits_changes.clear()

    def clear_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear_graphs()

    def _launch(
        self, model: Model, scheduled: Sequence[RequestStep], sampled_tokens: Tensor | None
    ) -> "SampledStep":
        """Launch a step. `sampled_tokens`: on the device, of its decodes that are ahead."""
        if self.invariance is not None:
            self.invariance.check_switches()
        inputs = self._context.begin_step(scheduled, self.padded, sampled_tokens)  # reserve, build
        sampled = SampledStep(self._context.steps, self.run_model(model, inputs), self.logits_changes)
        # Register, commit, advance. Waits for drafts, and, unless steps follow unread ones, where blocks or
        # states become findable.
        self._context.end_step(sampled.num_accepted, sampled.is_valid, commits_later=self._looks_ahead)
        return sampled

    def padded(self, shape: StepShape) -> StepShape:
        """The shape to pad a step of `shape` to: that of a graph, or a rung where bits must not change."""
        captured = self.graphs.padded(shape) if self.graphs is not None else None
        return captured or (padded_to_ladder(shape) if self._context.config.batch_invariant else shape)

    def run_model(self, model: Model, inputs: StepInputs) -> Tensor:
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
    elif config.decodes_by_replay:
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


class SampledStep:
    """A step that runs on the device, and its new tokens there; perhaps they are not computed yet."""

    def __init__(self, steps: Sequence[RequestStep], logits: Tensor, changes: LogitsChanges) -> None:
        """Choose tokens for the requests whose known tokens are all computed. Does not synchronise."""
        self.steps = steps
        # Ids of requests without a token, known after `read_tokens`: the largest logit of a row that they
        # need is NaN or infinite. Logits of -inf next to a finite one are valid: they forbid tokens.
        self.invalid: tuple[int, ...] = ()
        self._scored = [step for step in steps if step.scored_positions]
        self._sampled = [step for step in steps if step.samples_token]
        self._drawn: Tensor | None = None
        self._tokens: NewTokens | None = None
        columns: list[Tensor] = []  # of a scored step: log-probs, largest logits
        rows: list[int] = []
        stop = 0
        for step in steps:
            first, stop = stop, stop + len(step.logit_positions)
            if not step.decoding and step.scored_positions:
                own = logits[first : first + len(step.scored_positions)]
                targets = tensor_on(logits.device, step.request.target_tokens(step.scored_positions))
                columns += [log_probs_of(own, targets), own.amax(dim=-1)]
            if step.samples_token:
                rows += range(stop - 1 - len(step.drafts), stop)
        if self._sampled:
            columns += self._draw(_rows_of(logits, rows), changes)
        self._results = Results(columns)

    def _draw(self, logits: Tensor, changes: LogitsChanges) -> list[Tensor]:
        """Drawn tokens, largest logits; where asked for, log-probs, and ids and log-probs of top tokens."""
        rows = [(step, number) for step in self._sampled for number in range(1 + len(step.drafts))]
        params = [step.request.sampling for step, _ in rows]
        positions = [step.answer_length + number for step, number in rows]
        are_changed = any(one.changes_logits for one in params)
        to_draw = changes.apply(self._sampled, logits) if are_changed else logits
        drawn, largest = sample(to_draw, params, positions, [step.request.seed for step, _ in rows])
        if are_changed:
            changes.count(drawn)
        self._drawn = drawn
        columns = [drawn, largest]
        if any(one.return_log_probs for one in params):
            columns.append(log_probs_of(logits, drawn))
        if width := max(one.num_top_log_probs for one in params):
            wanting = _rows_of(logits, [row for row, one in enumerate(params) if one.num_top_log_probs])
            columns += [column.flatten() for column in top_log_probs(wanting, width)]
        return columns

    def tokens_of(self, requests: Sequence[DynamicInferenceRequest]) -> Tensor:
        """The tokens of requests without drafts, [requests] int64 on the device. Does not synchronise."""
        assert self._drawn is not None, "a step without drafts draws a token for each of these"
        rows = {step.request.request_id: row for row, step in enumerate(self._sampled)}
        wanted = [rows[request.request_id] for request in requests]
        if wanted == list(range(len(self._drawn))):
            return self._drawn
        return self._drawn.index_select(0, tensor_on(self._drawn.device, wanted))

    def num_accepted(self, request_id: int) -> int:
        """How many tokens of a valid request's step are right. Waits as `read_tokens` does."""
        return len(self.read_tokens()[request_id])

    def is_valid(self, request_id: int) -> bool:
        """Whether a request has no invalid logits in this step."""
        if self._tokens is None and all(
            step.request.request_id != request_id for step in (*self._scored, *self._sampled)
        ):
            return True
        self.read_tokens()
        return request_id not in self.invalid

    def read_tokens(self) -> NewTokens:
        """Append the new tokens to their requests, and return them by request id."""
        if self._tokens is not None:
            return self._tokens
        numbers = iter(self._results.read())
        scored = [(step.request, step, next(numbers), next(numbers)) for step in self._scored]
        invalid = {
            request.request_id
            for request, _, _, largest in scored
            if request.result is None and not all(map(math.isfinite, largest))
        }
        drawn = list(map(int, next(numbers, ())))
        largest = next(numbers, ())
        all_finite = all(map(math.isfinite, largest))
        nothing: Sequence[None] = [None] * len(drawn)
        returned = any(step.request.sampling.return_log_probs for step in self._sampled)
        log_probs: Sequence[float | None] = next(numbers) if returned else nothing
        tops = self._top_log_probs(numbers) or nothing
        now_s = time.perf_counter()
        generated: NewTokens = {}
        stop = 0
        for step in self._sampled:
            request, first, stop = step.request, stop, stop + 1 + len(step.drafts)
            if request.result is not None or len(request.tokens) != step.stop - len(step.drafts):
                continue
            tokens = drawn[first:stop]
            if step.drafts:
                tokens = accepted_tokens(step.drafts, tokens, request.sampling.stops)
            reached = slice(first, first + len(tokens))  # rows after the first wrong draft mean nothing
            if not all_finite and not all(map(math.isfinite, largest[reached])):
                invalid.add(request.request_id)
            if request.request_id in invalid:
                continue
            values = (log_probs if request.sampling.return_log_probs else nothing)[reached]
            generated[request.request_id] = tuple(map(GeneratedToken, tokens, values, tops[reached]))
            request.append(tokens, values, now_s, tops[reached])
        for request, step, own, _ in scored:
            if request.request_id not in invalid and request.result is None:
                request.set_prompt_log_probs(step.scored_positions, own)
        self.invalid = tuple(sorted(invalid))
        self._tokens = generated
        return generated

    def _top_log_probs(self, numbers: Iterator[list[float]]) -> list[TopLogProbs | None]:
        """The most likely tokens of each drawn row; empty where no request returns them."""
        rows = (step for step in self._sampled for _ in range(1 + len(step.drafts)))
        wanted = [step.request.sampling.num_top_log_probs for step in rows]
        if not any(wanted):
            return []
        pairs = zip(map(int, next(numbers)), next(numbers), strict=True)
        returned = batched(pairs, max(wanted))
        return [next(returned)[:number] if number else None for number in wanted]


def _rows_of(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, ascending; without a copy where they are all."""
    return logits if len(rows) == len(logits) else logits.index_select(0, tensor_on(logits.device, rows))


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], seeds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A token for each row, and its largest logit. Synchronises only without triton, or in float64."""
    draws = [
        TokenDraw(
            row=row,
            temperature=1.0 if one.temperature is None else one.temperature,
            top_k=one.top_k or 0,
            top_p=1.0 if one.top_p is None else one.top_p,
            uniform=_uniform(seed, position),
            min_p=one.min_p,
        )
        for row, (one, position, seed) in enumerate(zip(params, positions, seeds, strict=True))
        if not one.greedy
    ]
    if len(draws) < len(params):
        largest, tokens = logits.max(dim=-1)
    else:
        largest = logits.amax(dim=-1)
        tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if draws:
        _draws_for(logits)(tokens, logits, largest, draws)
    return tokens, largest


def _draws_for(logits: Tensor) -> Callable[[Tensor, Tensor, Tensor, Sequence[TokenDraw]], None]:
    if runs_triton(logits.device) and logits.dtype != torch.float64:
        from ..kernels.token_draws import draw_tokens

        return draw_tokens
    return token_draws.draw_tokens


def _uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a request's token at `position`; exact in float64."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / WHOLE


class Results:
    """The numbers of 1-D tensors, on their way to the CPU in one copy. float64 holds token ids exactly."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._lengths = [len(column) for column in columns]
        self._copied: torch.cuda.Event | None = None
        if not columns:
            return
        self._numbers = torch.cat([column.double() for column in columns])
        if self._numbers.device.type == "cuda":
            there = self._numbers
            self._numbers = torch.empty(there.shape, dtype=there.dtype, pin_memory=True, device="cpu")
            self._numbers.copy_(there, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[list[float]]:
        """The numbers of each tensor. Waits until they are here."""
        if not self._lengths:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        return [part.tolist() for part in torch.split(self._numbers, self._lengths)]


def accepted_tokens(drafts: Sequence[int], drawn: Sequence[int], stops: Collection[int | None]) -> list[int]:
    """New tokens: `drawn` up to the first token that differs from its draft or ends the answer."""
    tokens: list[int] = []
    for i, token in enumerate(drawn):
        tokens.append(token)
        if token in stops or i == len(drafts) or token != drafts[i]:
            break
    return tokens
