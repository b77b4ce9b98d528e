"""Continuous batching over a `DynamicInferenceContext`.

This file is over 400 lines long because it is the public face of serving: half of it documents calls.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch

from ...cache_stats import EngineStats, SpeculationStats
from ...config import InferenceConfig
from ...cuda_device import on_device_of
from ...request import FinishReason, RequestResult
from ...sampling_params import SamplingParams
from ...validation import instance, integer, shown
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.pinned_prefixes import PinnedPrefix
from ..contexts.request import DynamicInferenceRequest
from ..contexts.request_step import RequestStep
from ..policies.checkpoint_plan import CheckpointPlan
from ..policies.prefix_hash import PrefixHashChain, salt_bytes
from .acceptance import count_accepted
from .arguments import (
    Prompt,
    Salt,
    check_length,
    checked_drafter,
    checked_plan,
    checked_prompt,
    checked_prompts,
    checked_sampling,
    one_each,
)
from .drafter import Drafter
from .graph_runner import GraphBuckets, GraphRunner
from .memory_poison import MemoryPoison
from .model import Model
from .model_runner import ModelRunner
from .sampling import sample_step
from .scheduler import Scheduler
from .step_transaction import EngineState, StepUndo
from .token_stream import GeneratedToken, StreamFeed, TokenStream

NewTokens = dict[int, tuple[GeneratedToken, ...]]


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    Attributes:
        admitted: ids of the requests that got a row.
        generated: request id -> newest token, for each request with a new token.
        finished: results of the requests that ended.
        tokens: request id -> all new tokens, in order; more than one only where drafts were accepted.
    """

    admitted: tuple[int, ...] = ()
    generated: dict[int, GeneratedToken] = field(default_factory=dict)
    finished: tuple[RequestResult, ...] = ()
    tokens: NewTokens = field(default_factory=dict)


class DynamicInferenceEngine:
    """Serves requests with a hybrid model, resuming prompts from the prefix cache of its context.

    One thread at a time may call an engine. From inside a step only `add_request` may be called; other calls
    raise RuntimeError. `generate` serves a batch to the end; `add_request` and `step`, or `stream`, serve
    requests as they come.

    Attributes:
        model, config: what the engine was built with.
        context: what the requests hold, and the prefix cache.
    """

    def __init__(self, model: Model, config: InferenceConfig, *, drafter: Drafter | None = None) -> None:
        """Allocate all pools. Where the model is split, this is a collective: all ranks make the call.

        Args:
            model: a hybrid model, on the device where the model runs.
            config: sizes and switches.
            drafter: replaces prompt lookup; only with `config.num_speculative_tokens` >= 1.
        """
        if not callable(model) or isinstance(model, type) or not callable(getattr(model, "state_spec", None)):
            raise ValueError(f"model is {shown(model)}; accepted: a callable that has `state_spec()`")
        self.model = model
        self.config = instance("config", config, InferenceConfig)
        self.context = DynamicInferenceContext(model.state_spec(), config)
        spec = self.context.spec
        self._is_split = spec.groups.is_split
        self._runner = self._new_runner()
        self._drafter = checked_drafter(drafter, config.num_speculative_tokens)
        self._scheduler = Scheduler(self.context, self._drafter)
        self._speculation = SpeculationStats()
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._unclaimed: dict[int, RequestResult] = {}
        self._feeds: WeakValueDictionary[int, StreamFeed] = WeakValueDictionary()
        self._abandoned: list[int] = []  # requests whose streams ended during a step
        self._new_ids = count()
        self._weights_version: object = None
        self._state = EngineState(self._is_split)

    def _new_runner(self) -> ModelRunner:
        spec, max_graphs = self.context.spec, self.config.num_cuda_graphs
        inspect = MemoryPoison(self.context).check if self.config.poison_free_memory else None
        if max_graphs is None or spec.device.type != "cuda" or spec.ssm_states_dtype == torch.float64:
            return ModelRunner(spec, inspect)
        return GraphRunner(spec, GraphBuckets.of(self.context), max_graphs, inspect)

    # ---- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> int:
        """Queue a prompt.

        Args:
            prompt: token ids, a list or a 1-D integer tensor.
            sampling_params: how tokens are chosen; None for the defaults.
            cache_salt: requests share cached states only with requests of the same salt.
            checkpoint_plan: which states are taken, in place of the configuration's plan.

        Returns:
            The request id.

        Raises:
            ValueError: the request can never run: the prompt is empty or has ids outside the vocabulary, or
                prompt and answer are longer than `max_sequence_length` or than the KV pool.
            RuntimeError: a failed step has broken the engine.
        """
        self._state.check_not_broken()
        config, kv = self.config, self.context.prefix_cache.kv_blocks
        tokens = checked_prompt("prompt", prompt, self.context.spec.vocab_size)
        sampling = checked_sampling(sampling_params, self.context.spec.vocab_size)
        plan = checked_plan(checkpoint_plan, config)
        salt = salt_bytes("cache_salt", cache_salt)
        check_length(len(tokens), sampling, config, kv.total_count * config.block_size_tokens)
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

    def cancel(self, request_id: int) -> RequestResult:
        """End a running or waiting request, and return what it has generated.

        Raises:
            ValueError: the request is unknown or has ended.
        """
        self.check_usable("cancel")
        return self._finish(self._request(request_id), "cancelled")

    def _request(self, request_id: int) -> DynamicInferenceRequest:
        request = self._requests.get(integer("request_id", request_id, 0))
        if request is None:
            raise ValueError(f"request_id is {request_id}; accepted: a request that has not ended")
        return request

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def computed_prefix(self, request_id: int) -> list[int]:
        """The tokens of an unfinished request that are computed: KV and state for them exist now."""
        request = self._request(request_id)
        return request.tokens[: request.holding.num_computed] if request.holding is not None else []

    # ---- serving

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Advance every request that can go on: by a part of its prompt, or by a token and accepted drafts.

        Raises:
            KVBlockCapacityError: pinned prefixes leave too few KV blocks for the next request; all ranks of a
                split model raise this error.
            RuntimeError: the engine is suspended, in a step, or broken. A failed step breaks the engine where
                the step cannot be undone. Other errors than KVBlockCapacityError also break the engine of a
                split model, because other ranks may have completed the step.
            Exception: what the model raises. No request then has a new token, and all running requests are
                queued again: a later `step` restarts them from their last cached states.
        """
        self.check_usable("step")
        if not self.context.memory.allocated:
            raise RuntimeError("step is called on a suspended engine; resume it first")
        running = set(self._scheduler.running)
        undo = StepUndo(self.context, self._scheduler)
        with self._state.in_step(lambda: self._undo(undo)), on_device_of(self.context.spec.device):
            steps, tokens = self._run_step()
            finished = self._finish_completed(tokens)
            self._cancel_abandoned()
        self._deliver(steps, tokens, finished)
        return StepReport(
            admitted=tuple(step.request.request_id for step in steps if step.request not in running),
            generated={request_id: new[-1] for request_id, new in tokens.items()},
            finished=finished,
            tokens=tokens,
        )

    def _run_step(self) -> tuple[Sequence[RequestStep], NewTokens]:
        scheduled = self._scheduler.schedule()  # match, plan, hold KV blocks
        if not scheduled:
            return (), {}
        step = self.context.begin_step(scheduled, self._runner.padded)  # reserve slots, publish
        logits = self._runner.run(self.model, step.inputs)  # forward
        sampled = sample_step(step.requests, logits)  # launched; nothing waits yet
        self.context.end_step(sampled.num_accepted)  # register, commit, advance; waits only for drafts
        tokens = sampled.wait()
        self._runner.after_step(self.model)
        return step.requests, tokens

    def _undo(self, undo: StepUndo) -> None:
        undo(self._requests)
        self._cancel_abandoned()
        self.context.check_integrity()

    def _finish_completed(self, generated: Iterable[int]) -> tuple[RequestResult, ...]:
        """End the requests whose answer is complete. Abandoned requests are cancelled later instead."""
        reasons = {
            request_id: reason
            for request_id in generated
            if request_id not in self._abandoned
            and (reason := self._requests[request_id].finish_reason) is not None
        }
        return tuple(
            self._finish(self._requests[request_id], reason) for request_id, reason in reasons.items()
        )

    def _finish(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        result = request.result(reason)
        if reason == "cancelled":
            self._deliver_result(result)
        return result

    def _deliver(
        self, steps: Sequence[RequestStep], tokens: NewTokens, finished: Sequence[RequestResult]
    ) -> None:
        """Hand the tokens and results of a successful step to streams and counters."""
        for request_id, new in tokens.items():
            feed = self._feeds.get(request_id)
            if feed is not None:
                feed.arrived.extend(new)
        for result in finished:
            self._deliver_result(result)
        if self._drafter is not None:
            self._count_drafts(steps, tokens)

    def _deliver_result(self, result: RequestResult) -> None:
        feed = self._feeds.get(result.request_id)
        if feed is not None:
            feed.end(result)

    def _count_drafts(self, steps: Sequence[RequestStep], tokens: NewTokens) -> None:
        so_far = self._speculation
        for step in steps:
            if step.decoding:
                new = [token for token, _ in tokens[step.request.request_id]]
                so_far = SpeculationStats(
                    so_far.num_decodes + 1,
                    so_far.num_tokens + len(new),
                    so_far.num_drafted + len(step.drafts),
                    so_far.num_accepted + count_accepted(step.drafts, new),
                )
        self._speculation = so_far

    def check_usable(self, call: str) -> None:
        """Raise RuntimeError, naming `call`, during a step and where a step has broken the engine."""
        self._state.check_usable(call)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = None,
        checkpoint_plan: CheckpointPlan | Sequence[CheckpointPlan | None] | None = None,
    ) -> list[RequestResult]:
        """Serve prompts to the end.

        Requests that were added before advance in the same steps. When the call raises, the requests of this
        call are cancelled.

        Args:
            prompts: a list of prompts, each as `add_request` takes it.
            sampling_params, cache_salt, checkpoint_plan: one value for all prompts, or a list of one per
            prompt.

        Returns:
            The results, in the order of the prompts.
        """
        listed = checked_prompts(prompts)
        params = one_each("sampling_params", sampling_params, len(listed))
        salts = one_each("cache_salt", cache_salt, len(listed))
        plans = one_each("checkpoint_plan", checkpoint_plan, len(listed))
        self.check_usable("generate")
        ids: list[int] = []
        try:
            for prompt, param, salt, plan in zip(listed, params, salts, plans, strict=True):
                ids.append(self.add_request(prompt, param, cache_salt=salt, checkpoint_plan=plan))
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
        """Queue a prompt and return an iterator over its tokens; the arguments are those of `add_request`.

        Asking for a token advances all requests until this one has a token. Closing a stream before its end
        cancels the request. Dropping the last reference to a stream also cancels the request, except on a
        split model.
        """
        request_id = self.add_request(
            prompt, sampling_params, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )
        feed = self._feeds[request_id] = StreamFeed()
        # Ranks collect garbage at different times: a split model's requests end only where `close` is called.
        return TokenStream(
            request_id, feed, lambda: self._advance(feed, request_id), lambda: self._forget(request_id),
            not self._is_split,
        )  # fmt: skip

    def _advance(self, feed: StreamFeed, request_id: int) -> None:
        """Make a step for a stream, unless its request is gone: after a reset, say."""
        if request_id in self._requests:
            self._step_and_keep()
        elif not feed.ended:
            feed.end(None)

    def _step_and_keep(self) -> None:
        """Make a step for `generate` or `stream`: results without a stream stay until they are claimed."""
        for result in self.step().finished:
            if result.request_id not in self._feeds:
                self._unclaimed[result.request_id] = result

    def _forget(self, request_id: int) -> None:
        """End a request, if it has not ended, and drop its result."""
        if self._state.stepping:
            self._abandoned.append(request_id)
            return
        self._unclaimed.pop(request_id, None)
        if request_id in self._requests and not self._state.broken:
            self._finish(self._requests[request_id], "cancelled")

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned[-1]
            if request_id in self._requests:
                self._finish(self._requests[request_id], "cancelled")
            self._unclaimed.pop(request_id, None)
            self._abandoned.remove(request_id)

    def take_result(self, request_id: int) -> RequestResult | None:
        """Claim the result of a request that ended while `generate` or `stream` served others.

        Returns:
            The result, once. None while the request runs, and where a stream or a `step` of the caller has
                the result.
        """
        return self._unclaimed.pop(integer("request_id", request_id, 0), None)

    # ---- the cache

    def warm(self, tokens: Prompt, *, cache_salt: Salt = None) -> int:
        """Compute a prefix and take the state at its last block boundary, so that later prompts resume there.

        Requests under way advance in the same steps.

        Returns:
            How many of the prefix's tokens later prompts can resume.
        """
        self.check_usable("warm")
        prefix, chain = self._hashed(tokens, cache_salt)
        cache, size = self.context.prefix_cache, self.config.block_size_tokens
        whole = len(prefix) // size * size
        if cache.resumable_tokens(chain) < whole:
            once = SamplingParams(num_tokens_to_generate=1)
            plan = CheckpointPlan(marks=(whole,))
            request_id = self.add_request(prefix[:whole], once, cache_salt=cache_salt, checkpoint_plan=plan)
            try:
                self._serve([request_id])
            finally:
                self._forget(request_id)
        return cache.resumable_tokens(chain)

    def pin(self, tokens: Prompt, *, cache_salt: Salt = None) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and its KV, until `unpin` or the next reset.

        Raises:
            ValueError: no block boundary of the prefix has a state; call `warm` first.
        """
        self.check_usable("pin")
        return self.context.prefix_cache.pin(self._hashed(tokens, cache_salt)[1])

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Release a pinned prefix; ValueError for a prefix that is not pinned."""
        self.check_usable("unpin")
        self.context.prefix_cache.unpin(prefix)

    def _hashed(self, tokens: Prompt, cache_salt: Salt) -> tuple[list[int], PrefixHashChain]:
        prefix = checked_prompt("tokens", tokens, self.context.spec.vocab_size)
        chain = PrefixHashChain(self.config.block_size_tokens, salt_bytes("cache_salt", cache_salt))
        chain.extend_to(prefix)
        return prefix, chain

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and pin. Requests under way go on, but cache nothing any more."""
        self.check_usable("reset_prefix_cache")
        if self.context.memory.allocated:  # a suspended engine caches nothing
            self.context.reset_prefix_cache()

    @property
    def weights_version(self) -> object:
        """The name of the model's weights; None at first."""
        return self._weights_version

    def set_weights_version(self, version: object) -> None:
        """Name the model's weights. A new name forgets every cached prefix and drops CUDA graphs.

        Raises:
            ValueError: comparing `version` with the version before gives no single truth value.
        """
        self.check_usable("set_weights_version")
        try:
            changed = bool(version != self._weights_version)
            bool(version == version)  # the next version must be comparable with this one
        except Exception as error:  # for example of an array
            raise ValueError(
                f"version is {shown(version)}; accepted: what compares with the version before as a whole"
            ) from error
        if changed:
            self.reset_prefix_cache()
            self._runner.drop_graphs()
            self._weights_version = version

    # ---- the whole

    def stats(self) -> EngineStats:
        """A snapshot of the cache, the drafts and the queue."""
        return EngineStats(
            cache=self.context.cache_stats(),
            speculation=self._speculation,
            num_running=len(self._scheduler.running),
            num_paused=self._scheduler.num_paused,
            num_waiting=len(self._scheduler.waiting),
        )

    def memory_summary(self) -> str:
        """One line that says how many bytes each pool takes."""
        return self.context.memory.summary()

    def check_integrity(self) -> None:
        """Raise AssertionError where the cache's bookkeeping contradicts itself; O(pools)."""
        self.context.check_integrity()

    def suspend(self) -> None:
        """Free the memory of all pools. Running requests are queued again, and every prefix is forgotten.

        Until `resume`, requests can be added and cancelled, and `step` raises RuntimeError.
        """
        self.check_usable("suspend")
        if self.context.memory.allocated:
            self._scheduler.restart(self._scheduler.requests)
            self._runner.drop_graphs()
            self.context.suspend()

    def resume(self) -> None:
        """Allocate the pools again, empty; queued requests start from their first token."""
        self.check_usable("resume")
        self.context.resume()

    def reset(self) -> None:
        """Drop every request, result, prefix and count. Repairs an engine that a failed step has broken."""
        if self._state.stepping:
            self.check_usable("reset")
        self._scheduler = Scheduler(self.context, self._drafter)
        self._speculation = SpeculationStats()
        for collection in (self._requests, self._unclaimed, self._abandoned, self._feeds):
            collection.clear()
        try:
            self.context.reset()
        except BaseException as error:
            self._state.set_broken(error)
            raise
        self._state.set_mended()
