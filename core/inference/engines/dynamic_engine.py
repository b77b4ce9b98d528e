"""Continuous batching over a `DynamicInferenceContext`."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...cache_stats import SpeculationStats
from ...config import InferenceConfig
from ...errors import KVBlockCapacityError
from ...request import DynamicInferenceRequest, FinishReason, RequestResult
from ...sampling_params import SamplingParams
from ...validation import instance, integer, integers, shown
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.pinned_prefixes import PinnedPrefix
from ..contexts.scheduled_chunk import ScheduledChunk
from ..policies.checkpoint_plan import CheckpointPlan
from ..policies.prefix_hash import PrefixHashChain
from .acceptance import count_accepted
from .drafter import Drafter, NgramDrafter
from .graph_runner import GraphBuckets, GraphRunner
from .memory_poison import MemoryPoison
from .model import Model
from .sampling import sample_step
from .scheduler import Scheduler
from .token_stream import GeneratedToken, TokenStream

Prompt = Sequence[int] | Tensor
Salt = bytes | str | None
BROKEN = "the engine could not recover from a failed step; call reset()"
PARTED = (
    "a step failed on this rank of a split model, and other ranks may have made it; once no rank is in a "
    "step, call reset() on all of them, or start all again"
)


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    `admitted`: requests that were given a row. `generated`: the newest token of each request that got any.
    `finished`: results of the requests that ended. `tokens`: all new tokens of those requests, in order; more
    than one only where drafts were accepted.
    """

    admitted: tuple[int, ...] = ()
    generated: dict[int, GeneratedToken] = field(default_factory=dict)
    finished: tuple[RequestResult, ...] = ()
    tokens: dict[int, tuple[GeneratedToken, ...]] = field(default_factory=dict)


class DynamicInferenceEngine:
    """Serves requests with a hybrid model, resuming prompts from the prefix cache of its context.

    Not thread-safe: one thread calls it, and from inside its own step only `add_request` (the others raise
    RuntimeError). `generate` serves a batch to the end; `add_request` and `step`, or `stream`, serve
    requests as they come.
    """

    def __init__(self, model: Model, config: InferenceConfig, *, drafter: Drafter | None = None) -> None:
        """`drafter`: in place of prompt lookup, where `config.num_speculative_tokens` asks for drafts."""
        if not callable(model) or isinstance(model, type) or not callable(getattr(model, "state_spec", None)):
            raise ValueError(f"model is {shown(model)}; accepted: a callable that has `state_spec()`")
        self.model = model
        self.config = instance("config", config, InferenceConfig)
        self.context = DynamicInferenceContext(model.state_spec(), config)
        device = self.context.spec.device
        self._gpu = -1 if device.type != "cuda" else device  # where launches go; -1: as it is
        self._split = self.context.spec.groups.is_split
        self._graphs = self._graph_runner()
        self._poison = MemoryPoison(self.context) if config.poison_free_memory else None
        self._drafter = self._checked_drafter(drafter)
        self._scheduler = Scheduler(self.context, self._drafter)
        self._speculation = SpeculationStats()
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._unclaimed: dict[int, RequestResult] = {}
        self._streams: WeakValueDictionary[int, TokenStream] = WeakValueDictionary()
        self._abandoned: list[int] = []  # requests of streams let go of during a step
        self._new_ids = count()
        self._weights_version: object = None
        self._stepping = False
        self._broken: BaseException | None = None

    def _graph_runner(self) -> GraphRunner | None:
        spec, most = self.context.spec, self.config.num_cuda_graphs
        if most is None or spec.device.type != "cuda" or spec.ssm_states_dtype == torch.float64:
            return None
        return GraphRunner(GraphBuckets.of(self.context), most, spec.groups)

    def _checked_drafter(self, drafter: Drafter | None) -> Drafter | None:
        most = self.config.num_speculative_tokens
        if drafter is None:
            return NgramDrafter() if most else None
        if not most or isinstance(drafter, type) or not callable(getattr(drafter, "draft", None)):
            raise ValueError(
                f"drafter is {shown(drafter)} and num_speculative_tokens {most}; accepted: an object with "
                "`draft(tokens, most)`, where num_speculative_tokens is at least 1, or None"
            )
        return drafter

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> int:
        """Queue a prompt (token ids) and return its request id.

        `cache_salt`: requests share cached states only with requests of the same salt. `checkpoint_plan`:
        in place of the configuration's. Raises ValueError for what can never run: an empty prompt, ids
        outside the vocabulary, a prompt and answer longer than `max_sequence_length` or than the KV pool.
        """
        self._check_not_broken()
        spec, config = self.context.spec, self.config
        tokens = integers("prompt", prompt, 0, spec.vocab_size - 1)
        sampling = SamplingParams() if sampling_params is None else sampling_params
        instance("sampling_params", sampling, SamplingParams)
        plan = self._checked_plan(checkpoint_plan)
        salt = _salt_bytes(cache_salt)
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
            hashes=PrefixHashChain(config.block_size_tokens, salt),
            arrival_s=time.perf_counter(),
        )
        self._requests[request.request_id] = request
        self._scheduler.add(request)
        return request.request_id

    def _checked_plan(self, plan: CheckpointPlan | None) -> CheckpointPlan:
        if plan is None:
            return self.config.checkpoint_plan
        instance("checkpoint_plan", plan, CheckpointPlan)
        plan.check_block_size(self.config.block_size_tokens)
        return plan

    def cancel(self, request_id: int) -> RequestResult:
        """End a request wherever it is and return what it has; ValueError for an unknown or ended one."""
        self.check_usable("cancel")
        return self._finish(self._request(request_id), "cancelled")

    def _request(self, request_id: int) -> DynamicInferenceRequest:
        request = self._requests.get(integer("request_id", request_id, 0))
        if request is None:
            raise ValueError(f"request_id is {request_id}; accepted: a request that has not ended")
        return request

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def computed_prefix(self, request_id: int) -> list[int]:
        """The tokens of an unfinished request whose KV and state exist now (prompt first, then answer)."""
        request = self._request(request_id)
        return request.tokens[: request.computed]

    # ---- serving

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Advance every request that can go on by one chunk, or one token and the drafts that stand.

        Raises what the model raises, and then no request has a new token: all running requests are queued
        again, and a later `step` restarts them from their last cached states. Should even that fail, the
        engine says so in a RuntimeError, at every call, until `reset`. So it does after any failed step of a
        split model, which other ranks may have made. Raises KVBlockCapacityError, on every rank, when pinned
        prefixes leave too few KV blocks for the next request.
        """
        self.check_usable("step")
        if self.context.suspended:
            raise RuntimeError("step is called on a suspended engine; resume it first")
        running = {request.request_id for request in self._scheduler.running}
        before = [(request, len(request.tokens)) for request in self._scheduler.requests]
        try:
            self._stepping = True
            with torch.cuda.device(self._gpu):
                chunks, generated = self._run_step()
            finished = self._finish_completed(generated)
            self._cancel_abandoned()
            admitted = tuple(c.request.request_id for c in chunks if c.request.request_id not in running)
        except BaseException as error:
            self._recover(error, before)
            if self._split and not isinstance(error, KVBlockCapacityError):
                self._broken = error
            raise
        finally:
            self._stepping = False
        newest = {}
        for request_id, tokens in generated.items():
            newest[request_id] = tokens[-1]
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(*tokens)
        if self._drafter is not None:
            self._count_drafts(chunks, generated)
        return StepReport(admitted, newest, finished, generated)

    def _run_step(self) -> tuple[tuple[ScheduledChunk, ...], dict[int, tuple[GeneratedToken, ...]]]:
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return (), {}
        graphs = self._graphs
        inputs = self.context.begin_step(scheduled, graphs.padded if graphs else None)
        chunks = self.context.step_chunks
        logits = graphs.run(self.model, inputs) if graphs else self.model(inputs)
        wanted = (len(inputs.logit_tokens), self.context.spec.vocab_size)
        shape = getattr(logits, "shape", None)
        if shape != wanted:
            raise ValueError(
                f"the model returned a {type(logits).__name__} of shape {shape}; accepted: logits of shape "
                f"{wanted}"
            )
        logits = logits[: inputs.num_logits]
        if self._poison is not None:
            self._poison.check(logits)
        if any(chunk.drafts for chunk in chunks):  # what is to be kept is known once drafts are verified
            generated = sample_step(chunks, logits)
            self.context.end_step({request_id: len(tokens) for request_id, tokens in generated.items()})
        else:
            self.context.end_step()
            generated = sample_step(chunks, logits)
        if graphs:
            graphs.capture(self.model)
        return chunks, generated

    def _count_drafts(
        self, chunks: Sequence[ScheduledChunk], generated: dict[int, tuple[GeneratedToken, ...]]
    ) -> None:
        decodes, tokens, drafted, accepted = 0, 0, 0, 0
        for chunk in chunks:
            if chunk.decoding:
                new = [token for token, _ in generated[chunk.request.request_id]]
                decodes += 1
                tokens += len(new)
                drafted += len(chunk.drafts)
                accepted += count_accepted(chunk.drafts, new)
        before = self._speculation
        self._speculation = SpeculationStats(
            before.num_decodes + decodes, before.num_tokens + tokens,
            before.num_drafted + drafted, before.num_accepted + accepted,
        )  # fmt: skip

    def speculation_stats(self) -> SpeculationStats:
        """What drafts were worth so far, since the last `reset`; all 0 without `num_speculative_tokens`."""
        return self._speculation

    def _finish_completed(self, generated: Iterable[int]) -> tuple[RequestResult, ...]:
        """End the requests whose answer is complete; those nobody wants any more are cancelled instead."""
        reasons = {
            request_id: reason
            for request_id in generated
            if request_id not in self._abandoned
            and (reason := _finish_reason(self._requests[request_id])) is not None
        }
        return tuple(
            self._finish(self._requests[request_id], reason) for request_id, reason in reasons.items()
        )

    def _recover(self, error: BaseException, before: list[tuple[DynamicInferenceRequest, int]]) -> None:
        """Undo a failed step; nothing it may have written is used.

        `before`: the requests there were, in the order they restart in, and how many tokens they had.
        """
        try:
            for request, length in before:
                del request.tokens[length:]
                del request.log_probs[request.num_generated :]
                request.hashes.cut_to(length)
                request.ttft_s = request.ttft_s if request.num_generated else None
            known = {request.request_id: request for request, _ in before}
            self._requests = known | self._requests  # those added during the step wait behind the others
            self.context.abort_step()
            self._scheduler.restart(self._requests.values())
            self._cancel_abandoned()
            self.context.check_integrity()
        except BaseException as second:
            self._broken = second
            raise RuntimeError(BROKEN) from error

    def check_usable(self, call: str) -> None:
        """RuntimeError, naming `call`, from inside a step, and where a step has broken the engine."""
        if self._stepping:
            raise RuntimeError(
                f"{call} is called from inside a step of the same engine; call it between steps"
            )
        self._check_not_broken()

    def _check_not_broken(self) -> None:
        if self._broken is not None:
            raise RuntimeError(PARTED if self._split else BROKEN) from self._broken

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = None,
    ) -> list[RequestResult]:
        """Serve prompts to the end and return their results in order.

        `sampling_params` and `cache_salt`: one for all, or one a prompt. Requests added before are served
        along. When it raises, for a bad argument or because a step failed, its requests are cancelled.
        """
        try:
            prompts = list(prompts)
        except TypeError as error:
            raise ValueError(f"prompts is {shown(prompts)}; accepted: a list of prompts") from error
        params = _one_each("sampling_params", sampling_params, len(prompts))
        salts = _one_each("cache_salt", cache_salt, len(prompts))
        ids: list[int] = []
        try:
            for prompt, param, salt in zip(prompts, params, salts, strict=True):
                ids.append(self.add_request(prompt, param, cache_salt=salt))
            self._serve(ids)
        except BaseException:
            for request_id in ids:
                self._forget(request_id)
            raise
        return [self._unclaimed.pop(request_id) for request_id in ids]

    def _serve(self, ids: list[int]) -> None:
        while any(request_id in self._requests for request_id in ids):
            self._step_and_keep()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> TokenStream:
        """Queue a prompt now and return an iterator over its tokens.

        Asking for a token advances all requests until this one has it. A stream closed early, or let go of,
        cancels its request; of a split model, only one closed.
        """
        request_id = self.add_request(
            prompt, sampling_params, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )

        def advance() -> bool:
            if request_id in self._requests:
                self._step_and_keep()
            return request_id in self._requests

        # Each rank collects garbage when it likes: a split model's requests end where `close` is called.
        stream = TokenStream(advance, lambda: self._forget(request_id), not self._split)
        self._streams[request_id] = stream
        return stream

    def _step_and_keep(self) -> None:
        """A step whose report nobody sees: results stay until they are claimed."""
        for result in self.step().finished:
            self._unclaimed[result.request_id] = result

    def _forget(self, request_id: int) -> None:
        """End a request, if it has not ended, and drop its result."""
        if self._stepping:
            self._abandoned.append(request_id)
            return
        self._unclaimed.pop(request_id, None)
        if request_id in self._requests and self._broken is None:
            self._finish(self._requests[request_id], "cancelled")

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned[-1]
            if request_id in self._requests:
                self._finish(self._requests[request_id], "cancelled")
            self._abandoned.remove(request_id)

    def take_result(self, request_id: int) -> RequestResult | None:
        """Claim, once, the result of a request that ended while `generate` or `stream` served others.

        A `step` that the caller makes reports its results itself; None for those and while it runs.
        """
        return self._unclaimed.pop(integer("request_id", request_id, 0), None)

    # ---- the cache

    def warm(self, tokens: Prompt, *, cache_salt: Salt = None) -> int:
        """Compute a prefix, so that later prompts resume from it; how many of its tokens they can resume.

        Takes the state at its last block boundary. Requests under way are served along.
        """
        self.check_usable("warm")
        prefix = integers("tokens", tokens, 0, self.context.spec.vocab_size - 1)
        salt = _salt_bytes(cache_salt)
        whole = len(prefix) // self.config.block_size_tokens * self.config.block_size_tokens
        if self.context.resumable_tokens(prefix, salt) < whole:
            once = SamplingParams(num_tokens_to_generate=1)
            plan = CheckpointPlan(marks=(whole,))
            request_id = self.add_request(prefix[:whole], once, cache_salt=salt, checkpoint_plan=plan)
            try:
                self._serve([request_id])
            finally:
                self._forget(request_id)
        return self.context.resumable_tokens(prefix, salt)

    def pin(self, tokens: Prompt, *, cache_salt: Salt = None) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and its KV, until `unpin` or the next reset.

        Raises ValueError where none of its boundaries has a state; `warm` it first.
        """
        self.check_usable("pin")
        prefix = integers("tokens", tokens, 0, self.context.spec.vocab_size - 1)
        return self.context.pin_prefix(prefix, _salt_bytes(cache_salt))

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Let go of a pinned prefix; ValueError if it is not pinned (any more)."""
        self.check_usable("unpin")
        self.context.unpin_prefix(prefix)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and pin. Requests under way go on, and leave nothing in the cache."""
        self.check_usable("reset_prefix_cache")
        if not self.context.suspended:  # else there is none
            self.context.reset_prefix_cache()

    @property
    def weights_version(self) -> object:
        """Whatever names the model's weights; a different one makes every older state unreachable."""
        return self._weights_version

    @weights_version.setter
    def weights_version(self, version: object) -> None:
        try:
            changed = bool(version != self._weights_version)
            bool(version == version)  # so that the next one can be compared with it
        except Exception as error:  # of an array, for one
            raise ValueError(
                f"weights_version is {shown(version)}; accepted: what compares with the one before as a whole"
            ) from error
        if changed:
            self.reset_prefix_cache()
            self._drop_graphs()
            self._weights_version = version

    def suspend(self) -> None:
        """Free the memory of all pools. Running requests are queued again, and every prefix is forgotten.

        Until `resume`, requests can be added and cancelled, and `step` raises RuntimeError.
        """
        self.check_usable("suspend")
        if not self.context.suspended:
            self._scheduler.restart(self._scheduler.requests)
            self._drop_graphs()
            self.context.suspend()

    def _drop_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()

    def resume(self) -> None:
        """Allocate the pools again, empty; queued requests start from their first token."""
        self.check_usable("resume")
        self.context.resume()

    def reset(self) -> None:
        """Drop every request, result, prefix and count; also mends an engine that could not recover."""
        if self._stepping:
            self.check_usable("reset")
        self._scheduler = Scheduler(self.context, self._drafter)
        self._speculation = SpeculationStats()
        self._requests.clear()
        self._unclaimed.clear()
        self._abandoned.clear()
        self._streams.clear()
        try:
            self.context.reset()
        except BaseException as error:
            self._broken = error
            raise
        self._broken = None

    def _finish(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        sampling, ledger = request.sampling, request.ledger
        prompt_log_probs: list[Any] = request.prompt_log_probs
        return RequestResult(
            request_id=request.request_id,
            tokens=request.generated,
            log_probs=request.log_probs if sampling.return_log_probs else None,
            prompt_log_probs=prompt_log_probs if sampling.returns_prompt_log_probs else None,
            num_prompt_tokens=len(request.prompt_tokens),
            num_resumed_tokens=ledger.resumed,
            computed_by_reason=ledger.by_reason(),
            num_recomputed_tokens=ledger.recomputed,
            ttft_s=request.ttft_s,
            finish_reason=reason,
        )


def _finish_reason(request: DynamicInferenceRequest) -> FinishReason | None:
    sampling = request.sampling
    if request.tokens[-1] in sampling.stops:
        return "stop"
    return "length" if len(request.tokens) >= request.max_length else None


def _salt_bytes(salt: object) -> bytes:
    if salt is None:
        return b""
    if isinstance(salt, bytes):
        return salt
    if isinstance(salt, str):
        with suppress(UnicodeEncodeError):  # half a surrogate pair is text that has no bytes
            return salt.encode()
    raise ValueError(f"cache_salt is {shown(salt)}; accepted: bytes, a str or None")


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(
                f"{name} has {len(value)} entries; accepted: one for all, or {count}, one a prompt"
            )
        return list(value)
    return [value] * count
