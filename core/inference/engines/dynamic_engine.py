"""Continuous batching over a `DynamicInferenceContext`."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...config import HybridStateSpec, InferenceConfig, SamplingParams
from ...request import DynamicInferenceRequest, FinishReason, RequestResult
from ...validation import integer, integers
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.scheduled_chunk import ScheduledChunk
from ..contexts.step_inputs import StepInputs
from ..policies.checkpoint_plan import CheckpointPlan
from ..policies.prefix_hash import PrefixHashChain
from .sampling import log_softmax, sample
from .scheduler import Scheduler


class Model(Protocol):
    """What the engine needs of a model."""

    def state_spec(self) -> HybridStateSpec: ...

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits [len(inputs.logit_tokens), vocabulary]."""


class GeneratedToken(NamedTuple):
    """One token of an answer; `log_prob` is None unless asked for."""

    token: int
    log_prob: float | None


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    `admitted`: requests that were given a row. `generated`: the new token of each request that got one.
    `finished`: results of the requests that ended.
    """

    admitted: tuple[int, ...] = ()
    generated: dict[int, GeneratedToken] = field(default_factory=dict)
    finished: tuple[RequestResult, ...] = ()


class DynamicInferenceEngine:
    """Serves requests with a hybrid model, resuming prompts from the prefix cache of its context.

    Not thread-safe: one thread calls it. `generate` serves a batch to the end; `add_request` and `step`,
    or `stream`, serve requests as they come.
    """

    def __init__(self, model: Model, config: InferenceConfig) -> None:
        self.model = model
        self.config = config
        self.context = DynamicInferenceContext(model.state_spec(), config)
        self._scheduler = Scheduler(self.context)
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._unclaimed: dict[int, RequestResult] = {}
        self._streams: dict[int, list[GeneratedToken]] = {}
        self._new_ids = count()

    # ---- requests

    def add_request(
        self,
        prompt: Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: bytes | str | None = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> int:
        """Queue a prompt (token ids) and return its request id.

        `cache_salt`: requests share cached states only with requests of the same salt. `checkpoint_plan`:
        in place of the configuration's. Raises ValueError for what can never run: an empty prompt, ids
        outside the vocabulary, a prompt and answer longer than `max_sequence_length` or than the KV pool.
        """
        spec, config = self.context.spec, self.config
        tokens = integers("prompt", prompt, 0, spec.vocab_size - 1)
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling_params is {sampling!r}; accepted: a SamplingParams")
        plan = self._checked_plan(checkpoint_plan)
        if not tokens:
            raise ValueError("prompt is empty; accepted: at least one token")
        length = len(tokens) + sampling.num_tokens_to_generate
        pool_tokens = self.context.kv_block_allocator.total_count * config.block_size_tokens
        if length > min(config.max_sequence_length, pool_tokens):
            raise ValueError(
                f"prompt and answer have {len(tokens)} + {sampling.num_tokens_to_generate} tokens; accepted: "
                f"together at most max_sequence_length ({config.max_sequence_length}) and the KV pool "
                f"({pool_tokens})"
            )
        longest_prefill = length - 1  # an evicted request prefills its own answer
        if not config.enable_chunked_prefill and longest_prefill > config.max_tokens:
            raise ValueError(
                f"prompt and answer have {len(tokens)} + {sampling.num_tokens_to_generate} tokens; accepted: "
                f"at most max_tokens + 1 ({config.max_tokens + 1}) without chunked prefill"
            )
        request = DynamicInferenceRequest(
            request_id=next(self._new_ids),
            prompt_tokens=tokens,
            sampling=sampling,
            plan=plan,
            hashes=PrefixHashChain(config.block_size_tokens, _salt_bytes(cache_salt)),
            arrival_s=time.perf_counter(),
        )
        self._requests[request.request_id] = request
        self._scheduler.add(request)
        return request.request_id

    def _checked_plan(self, plan: CheckpointPlan | None) -> CheckpointPlan:
        if plan is None:
            return self.config.checkpoint_plan
        if not isinstance(plan, CheckpointPlan):
            raise ValueError(f"checkpoint_plan is {plan!r}; accepted: a CheckpointPlan")
        plan.check_block_size(self.config.block_size_tokens)
        return plan

    def cancel(self, request_id: int) -> RequestResult:
        """End a request wherever it is and return what it has; ValueError for an unknown or ended one."""
        request = self._requests.get(integer("request_id", request_id, 0))
        if request is None:
            raise ValueError(f"request_id is {request_id}; accepted: a request that has not ended")
        return self._finish(request, "cancelled")

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def computed_tokens(self, request_id: int) -> list[int]:
        """The tokens of an unfinished request whose KV and state exist now (prompt first, then answer)."""
        request = self._requests[request_id]
        return request.tokens[: request.computed]

    # ---- serving

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Advance every request that can go on by one chunk or one token.

        Raises what the model raises; the requests of the failed step are queued again, and a later `step`
        restarts them from their last cached states.
        """
        waiting = {request.request_id for request in self._scheduler.waiting}
        chunks: list[ScheduledChunk] = []
        try:
            chunks = self._scheduler.schedule()
            if not chunks:
                return StepReport()
            inputs = self.context.begin_step(chunks)
            chunks = list(self.context.step_chunks)
            logits = self.model(inputs)
            self.context.end_step()
            generated = self._sample(chunks, logits)
        except BaseException:
            self.context.abort_step()
            for chunk in reversed(chunks):
                self._scheduler.requeue(chunk.request)
            raise
        finished = tuple(
            self._finish(self._requests[request_id], reason)
            for request_id in generated
            if (reason := _finish_reason(self._requests[request_id])) is not None
        )
        admitted = tuple(c.request.request_id for c in chunks if c.request.request_id in waiting)
        return StepReport(admitted, generated, finished)

    def generate(
        self,
        prompts: Iterable[Sequence[int] | Tensor],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: bytes | str | Sequence[bytes | str | None] | None = None,
    ) -> list[RequestResult]:
        """Serve prompts to the end and return their results in order.

        `sampling_params` and `cache_salt`: one for all, or one a prompt. Requests added before are served
        along. A bad argument raises ValueError before anything is queued.
        """
        prompts = list(prompts)
        params = _one_each("sampling_params", sampling_params, len(prompts))
        salts = _one_each("cache_salt", cache_salt, len(prompts))
        ids: list[int] = []
        try:
            for prompt, param, salt in zip(prompts, params, salts, strict=True):
                ids.append(self.add_request(prompt, param, cache_salt=salt))
        except ValueError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        while any(request_id in self._requests for request_id in ids):
            self._step_and_keep()
        return [self._unclaimed.pop(request_id) for request_id in ids]

    def stream(
        self,
        prompt: Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: bytes | str | None = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> Iterator[GeneratedToken]:
        """Queue a prompt now and return an iterator over its tokens.

        Asking for a token advances all requests until this one has it. An iterator closed early cancels its
        request.
        """
        request_id = self.add_request(
            prompt, sampling_params, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )
        self._streams[request_id] = []
        return self._tokens_of(request_id)

    def _tokens_of(self, request_id: int) -> Iterator[GeneratedToken]:
        arrived = self._streams[request_id]
        try:
            while arrived or request_id in self._requests:
                if not arrived:
                    self._step_and_keep()
                while arrived:
                    yield arrived.pop(0)
        finally:
            if request_id in self._requests:
                self.cancel(request_id)
            self._streams.pop(request_id, None)
            self._unclaimed.pop(request_id, None)

    def _step_and_keep(self) -> None:
        """A step whose report nobody sees: results stay until they are claimed."""
        for result in self.step().finished:
            self._unclaimed[result.request_id] = result

    def take_result(self, request_id: int) -> RequestResult | None:
        """Claim, once, the result of a request that ended while `generate` or `stream` served others.

        A `step` that the caller makes reports its results itself; None for those and while it runs.
        """
        return self._unclaimed.pop(request_id, None)

    def reset(self) -> None:
        """Drop every request, result and cached prefix."""
        for request in list(self._requests.values()):
            self._scheduler.remove(request)
        self._requests.clear()
        self._unclaimed.clear()
        self._streams.clear()
        self.context.reset()

    # ---- after the forward

    def _sample(self, chunks: list[ScheduledChunk], logits: Tensor) -> dict[int, GeneratedToken]:
        last_rows: list[int] = []
        sampled: list[DynamicInferenceRequest] = []
        first = 0
        for chunk in chunks:
            wanted = chunk.logit_positions
            if chunk.request.sampling.returns_prompt_log_probs:
                self._record_prompt_log_probs(chunk, logits[first : first + len(wanted)])
            first += len(wanted)
            if chunk.completes:
                last_rows.append(first - 1)
                sampled.append(chunk.request)
        if not sampled:
            return {}
        last = logits[last_rows]
        tokens = sample(last, [r.sampling for r in sampled], [r.num_generated for r in sampled])
        chosen: list[float] = []
        if any(request.sampling.return_log_probs for request in sampled):
            chosen = log_softmax(last)[range(len(tokens)), tokens].tolist()
        now = time.perf_counter()
        generated: dict[int, GeneratedToken] = {}
        for i, (request, token) in enumerate(zip(sampled, tokens, strict=True)):
            log_prob = chosen[i] if request.sampling.return_log_probs else None
            request.tokens.append(token)
            if log_prob is not None:
                request.log_probs.append(log_prob)
            if request.ttft_s is None:
                request.ttft_s = now - request.arrival_s
            generated[request.request_id] = GeneratedToken(token, log_prob)
            if request.request_id in self._streams:
                self._streams[request.request_id].append(generated[request.request_id])
        return generated

    def _record_prompt_log_probs(self, chunk: ScheduledChunk, logits: Tensor) -> None:
        """The logits at position p are of the token at p + 1."""
        prompt = chunk.request.prompt_tokens
        rows = [(row, p) for row, p in enumerate(chunk.logit_positions) if p + 1 < len(prompt)]
        if not rows:
            return
        log_probs = log_softmax(logits[: len(rows)])
        values = log_probs[range(len(rows)), [prompt[p + 1] for _, p in rows]].tolist()
        for (_, p), value in zip(rows, values, strict=True):
            chunk.request.prompt_log_probs[p] = value

    def _finish(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        sampling, ledger = request.sampling, request.ledger
        prompt_log_probs: list[Any] = request.prompt_log_probs
        return RequestResult(
            request_id=request.request_id,
            tokens=request.generated,
            log_probs=request.log_probs if sampling.return_log_probs else None,
            prompt_log_probs=prompt_log_probs if sampling.returns_prompt_log_probs else None,
            prompt_tokens=len(request.prompt_tokens),
            resumed_tokens=ledger.resumed,
            computed_by_reason=ledger.by_reason(),
            recomputed_tokens=ledger.recomputed,
            ttft_s=request.ttft_s,
            finish_reason=reason,
        )


def _finish_reason(request: DynamicInferenceRequest) -> FinishReason | None:
    sampling = request.sampling
    if request.tokens[-1] in (sampling.termination_id, *sampling.stop_token_ids):
        return "stop"
    return "length" if len(request.tokens) == request.max_length else None


def _salt_bytes(salt: object) -> bytes:
    if salt is None:
        return b""
    if isinstance(salt, str):
        return salt.encode()
    if not isinstance(salt, bytes):
        raise ValueError(f"cache_salt is {salt!r}; accepted: bytes, a str or None")
    return salt


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(
                f"{name} has {len(value)} entries; accepted: one for all, or {count}, one a prompt"
            )
        return list(value)
    return [value] * count
