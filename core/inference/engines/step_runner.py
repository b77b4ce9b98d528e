"""Steps: the call of the model, and the draw of tokens, which may be read after the next step's launch."""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import batched, repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...devices import tensor_on
from ...params_and_results import GeneratedToken, SamplingParams
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.dynamic_request import Batch
from ..contexts.padding import invariant_padding
from ..contexts.step_inputs import Model, StepInputs, StepShape
from ..kernels.sampling import log_probs_of, sample, top_log_probs
from ..kernels.step_rows import WHOLE, TokenDraw
from .cuda_graphs import GraphRunner
from .drafter import accepted_tokens
from .engine_observer import NewTokens
from .invariance.switches import check_switches
from .logits_changes import LogitsChanges, Row
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .invariance.mode import BatchInvariance

ColumnName = str | tuple[str, int]
"""Of the numbers of drawn rows; with a request's id, of the rows of its scored prompt."""


class StepRunner:
    """Makes the steps of a scheduler's requests, and may launch one before the last one's tokens are read."""

    def __init__(self, context: DynamicInferenceContext, invariance: "BatchInvariance | None") -> None:
        # Launched, its tokens not read. Dropping it loses no token, once its requests are queued again.
        self.unread_step: SampledStep | None = None
        self.graphs = GraphRunner.of(context, 0 if invariance is None else invariance.min_decode_tokens)
        self.invariance = invariance  # torch's switches are set as long as it lives
        self.logits_changes = LogitsChanges(context.spec.device)
        self.is_in_model = False  # the model was called and has not returned, also after it failed
        self._context = context
        self._groups = context.spec.groups if context.spec.groups.is_split else None
        self._is_async = context.config.why_not_async(context.spec.device) is None

    def make_step(self, model: Model, scheduler: Scheduler) -> tuple[Batch, NewTokens, Sequence[int]]:
        """Make the next step: its requests, their new tokens, and ids of requests with invalid logits."""
        sampled, self.unread_step = self.unread_step, None
        if sampled is None or all(scheduled.request.result is not None for scheduled in sampled.batch):
            batch = scheduler.schedule()  # match, plan, hold KV blocks
            if not batch:
                return (), {}, ()
            sampled = self._launch(model, batch)
        may_launch = self._is_async and not (self.graphs and self.graphs.captures_next)
        if may_launch and (batch := scheduler.schedule_after_unread()):
            self.unread_step = self._launch(model, batch, sampled.unread_tokens(batch))
        tokens = sampled.append_tokens()
        if self._groups is not None:
            self._groups.check_not_aborted()
        self._context.commit_batch(sampled.batch, sampled.invalid)
        if self.graphs is not None:
            self.graphs.after_step(model)
        return sampled.batch, tokens, sampled.invalid

    def clear(self) -> None:
        """Remove the unread step and all counts of tokens: its requests are queued again, or have ended."""
        self.unread_step = None
        self.logits_changes.clear()

    def clear_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear_graphs()

    def _launch(self, model: Model, batch: Batch, unread_tokens: Tensor | None = None) -> "SampledStep":
        """Launch a step. `unread_tokens`: as `begin_step` takes them."""
        if self.invariance is not None:
            check_switches()
        inputs = self._context.begin_step(batch, self.padded, unread_tokens)  # reserve, build
        sampled = SampledStep(self._context.batch, self.run_model(model, inputs), self.logits_changes)
        accepted: dict[int, int] = {}
        if self._context.needs_tokens(commits_later=self._is_async):
            accepted = {request_id: len(new) for request_id, new in sampled.append_tokens().items()}
        self._context.end_step(accepted, sampled.invalid, commits_later=self._is_async)  # register, commit
        return sampled

    def padded(self, shape: StepShape) -> StepShape:
        """The shape to pad a step to: a graph bucket, else with batch invariance invariant buckets."""
        captured = self.graphs.padded(shape) if self.graphs is not None else None
        return captured or (invariant_padding(shape) if self._context.config.batch_invariant else shape)

    def run_model(self, model: Model, inputs: StepInputs) -> Tensor:
        """The model's logits of a step. Does not synchronise."""
        self.is_in_model = True
        logits = model(inputs) if self.graphs is None else self.graphs.run(model, inputs)
        self.is_in_model = False
        expected = (len(inputs.logit_tokens), self._context.spec.vocab_size)
        shape = getattr(logits, "shape", None)
        if shape != expected:
            raise ValueError(
                f"the model returned a {type(logits).__name__} of shape {shape}; accepted: logits of shape "
                f"{expected}, one row for each of inputs.logit_tokens"
            )
        return logits[: inputs.num_logits]


class SampledStep:
    """A step that runs on the device, and its new tokens there; perhaps they are not computed yet."""

    def __init__(self, batch: Batch, logits: Tensor, changes: LogitsChanges) -> None:
        """Choose tokens for the requests whose known tokens are all computed. Does not synchronise."""
        self.batch = batch
        # Ids of requests without a token, known after `append_tokens`: the largest logit of a row that they
        # need is NaN or infinite. Logits of -inf next to a finite one are valid: they forbid tokens.
        self.invalid: tuple[int, ...] = ()
        self._scored = [scheduled for scheduled in batch if scheduled.scored_positions]
        self._sampled = [scheduled for scheduled in batch if scheduled.samples_token]
        self._rows: list[Row] = [
            (scheduled, index) for scheduled in self._sampled for index in range(1 + len(scheduled.drafts))
        ]
        self._drawn: Tensor | None = None
        self._tokens: NewTokens | None = None
        columns: dict[ColumnName, Tensor] = {}
        rows: list[int] = []
        stop = 0
        for scheduled in batch:
            first, stop = stop, stop + len(scheduled.logit_positions)
            if scheduled.scored_positions:
                request = scheduled.request
                scored_logits = logits[first : first + len(scheduled.scored_positions)]
                targets = tensor_on(logits.device, request.target_tokens(scheduled.scored_positions))
                columns["log_probs", request.request_id] = log_probs_of(scored_logits, targets)
                columns["largest", request.request_id] = scored_logits.amax(dim=-1)
            if scheduled.samples_token:
                rows += range(stop - 1 - len(scheduled.drafts), stop)
        if self._sampled:
            columns |= self._draw(_rows_of(logits, rows), changes)
        self._readback = DeviceReadback(columns)

    def _draw(self, logits: Tensor, changes: LogitsChanges) -> dict[ColumnName, Tensor]:
        """Drawn tokens, largest logits; where asked for, log-probs, and ids and log-probs of top tokens."""
        params = [scheduled.request.sampling for scheduled, _ in self._rows]
        positions = [scheduled.answer_length + index for scheduled, index in self._rows]
        seeds = [scheduled.request.seed for scheduled, _ in self._rows]
        are_changed = any(sampling.changes_logits for sampling in params)
        to_draw = changes.apply(self._rows, logits) if are_changed else logits
        drawn, largest = sample(to_draw, draws_of(params, positions, seeds))
        if are_changed:
            changes.count(drawn)
        self._drawn = drawn
        columns: dict[ColumnName, Tensor] = {"tokens": drawn, "largest": largest}
        if any(sampling.return_log_probs for sampling in params):
            columns["log_probs"] = log_probs_of(logits, drawn)
        if width := max(sampling.num_top_log_probs for sampling in params):
            wanting = _rows_of(logits, [row for row, each in enumerate(params) if each.num_top_log_probs])
            ids, log_probs = top_log_probs(wanting, width)
            columns |= {"top_ids": ids.flatten(), "top_log_probs": log_probs.flatten()}
        return columns

    def unread_tokens(self, batch: Batch) -> Tensor | None:
        """The tokens that `batch` decodes, [decodes] int64 on the device, or None. Does not synchronise."""
        requests = [scheduled.request for scheduled in batch if scheduled.decodes_unread]
        if not requests:
            return None
        assert self._drawn is not None, "a step without drafts draws a token for each of these"
        rows = {scheduled.request.request_id: row for row, scheduled in enumerate(self._sampled)}
        indices = [rows[request.request_id] for request in requests]
        if indices == list(range(len(self._drawn))):
            return self._drawn
        return self._drawn.index_select(0, tensor_on(self._drawn.device, indices))

    def append_tokens(self) -> NewTokens:
        """Wait for the new tokens, and append them to their requests, once; returns them by request id."""
        if self._tokens is not None:
            return self._tokens
        columns = self._readback.read()
        invalid = {
            request.request_id
            for request in (scheduled.request for scheduled in self._scored)
            if request.result is None and not all(map(math.isfinite, columns["largest", request.request_id]))
        }
        drawn, largest = self._drawn_tokens(columns), columns.get("largest", [])
        all_finite = all(map(math.isfinite, largest))
        now_s = time.perf_counter()
        generated: NewTokens = {}
        stop = 0
        for scheduled in self._sampled:
            request, first, stop = scheduled.request, stop, stop + 1 + len(scheduled.drafts)
            if request.result is not None or len(request.tokens) != scheduled.stop - len(scheduled.drafts):
                continue
            new = drawn[first:stop]
            if scheduled.drafts:  # rows after the first wrong draft mean nothing
                token_ids = [generated_token.token for generated_token in new]
                right = accepted_tokens(scheduled.drafts, token_ids, request.sampling.stops)
                new = new[: len(right)]
            if not all_finite and not all(map(math.isfinite, largest[first : first + len(new)])):
                invalid.add(request.request_id)
            if request.request_id in invalid:
                continue
            generated[request.request_id] = tuple(new)
            tokens, log_probs, tops = zip(*new, strict=True)
            request.append(tokens, log_probs, now_s, tops)
        for scheduled in self._scored:
            if scheduled.request.request_id not in invalid and scheduled.request.result is None:
                prompt_log_probs = columns["log_probs", scheduled.request.request_id]
                scheduled.request.set_prompt_log_probs(scheduled.scored_positions, prompt_log_probs)
        self.invalid = tuple(sorted(invalid))
        self._tokens = generated
        return generated

    def _drawn_tokens(self, columns: dict[ColumnName, list[float]]) -> list[GeneratedToken]:
        """What was drawn in each row, with what its request asks for."""
        params = [scheduled.request.sampling for scheduled, _ in self._rows]
        width = max((sampling.num_top_log_probs for sampling in params), default=0)
        pairs = zip(map(int, columns.get("top_ids", ())), columns.get("top_log_probs", ()), strict=True)
        tops = batched(pairs, max(1, width))
        log_probs: Iterable[float | None] = columns.get("log_probs", repeat(None))
        return [
            GeneratedToken(
                int(token),
                log_prob if sampling.return_log_probs else None,
                next(tops)[: sampling.num_top_log_probs] if sampling.num_top_log_probs else None,
            )
            for token, log_prob, sampling in zip(columns.get("tokens", ()), log_probs, params, strict=False)
        ]


def _rows_of(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, ascending; without a copy where they are all."""
    return logits if len(rows) == len(logits) else logits.index_select(0, tensor_on(logits.device, rows))


def draws_of(
    params: Sequence[SamplingParams], positions: Sequence[int], seeds: Sequence[int]
) -> list[TokenDraw]:
    """How the tokens of rows are drawn; a greedy row has no draw."""
    return [
        TokenDraw(
            row=row,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            uniform=uniform(seed, position),
            min_p=sampling.min_p,
        )
        for row, (sampling, position, seed) in enumerate(zip(params, positions, seeds, strict=True))
        if not sampling.greedy
    ]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a request's token at `position`; exact in float64."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / WHOLE


class DeviceReadback:
    """The numbers of 1-D tensors, copied to the CPU by one copy. float64 holds token ids exactly."""

    def __init__(self, columns: Mapping[ColumnName, Tensor]) -> None:
        self._lengths = {name: len(column) for name, column in columns.items()}
        self._copied: torch.cuda.Event | None = None
        if not columns:
            return
        self._numbers = torch.cat([column.double() for column in columns.values()])
        if self._numbers.device.type == "cuda":
            there = self._numbers
            self._numbers = torch.empty(there.shape, dtype=there.dtype, pin_memory=True, device="cpu")
            self._numbers.copy_(there, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> dict[ColumnName, list[float]]:
        """The numbers of each tensor, by its name. Waits until they are here."""
        if not self._lengths:
            return {}
        if self._copied is not None:
            self._copied.synchronize()
        parts = torch.split(self._numbers, list(self._lengths.values()))
        return {name: part.tolist() for name, part in zip(self._lengths, parts, strict=True)}
