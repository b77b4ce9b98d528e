"""Continuous batching over a `DynamicInferenceContext`."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, get_args

from ...cache_stats import EngineStats
from ...config import InferenceConfig
from ...params_and_results import EarlyEnd, GeneratedToken, RequestResult, SamplingParams, ScoreResult
from ...progress import ProgressBar
from ...validation import INT64_MAX, boolean, instance, integer, one_of, refused
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.cache.pins import PinnedPrefix
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.dynamic_request import NO_ID, DynamicInferenceRequest
from ..contexts.pool_sizes import with_total_gb
from ..contexts.step_inputs import Model
from .drafter import Drafter
from .engine_core import EngineCore
from .engine_description import description_of
from .engine_observer import EngineObserver, StepReport
from .request_factory import Prompt, RequestFactory, Salt, agreed_salt_key, checked_drafter, prompts_with
from .streams import RequestSource, TokenStream

logger = logging.getLogger(__name__)


class DynamicInferenceEngine:
    """Serves requests with a hybrid model, resuming prompts from the prefix cache of its context.

    One thread at a time may call an engine; streams may be dropped in any thread. From inside a step,
    requests may be added and statistics read; other calls raise RuntimeError. `generate` serves a batch to
    the end; `add_request` and `step`, or `stream`, serve requests as they come.

    Control-C and SIGTERM wait for the end of a step. A step that fails (by MemoryError, a failing model or a
    second Control-C) loses no request and no token: its requests are queued again. If need be, all cached
    prefixes and pins are removed, too, and a warning is logged.

    Attributes:
        model, config: what the engine was built with.
        context: what the requests hold, and the prefix cache.
        salt_key: hashes the salts of requests; its `key_id` identifies the key.
        factory, core: for the package alone: what makes new requests, and what has the requests and their
            results.
    """

    def __init__(
        self, model: Model, config: InferenceConfig, *, drafter: Drafter | None = None, seed: int = 0
    ) -> None:
        """Allocate all pools. Where the model is split, this is a collective: all ranks make the call.

        Args:
            model: a hybrid model, on the device where the model runs.
            config: sizes and switches.
            drafter: replaces prompt lookup; only with `config.num_speculative_tokens` >= 1.
            seed: seed of the random numbers of requests without a seed of their own, from 0 to 2**63 - 1. Two
                engines with the same seed and the same order of requests give the same answers.
        """
        if not callable(model) or isinstance(model, type) or not callable(getattr(model, "state_spec", None)):
            raise refused("model", model, "a callable that has `state_spec()`")
        self.model = model
        instance("config", config, InferenceConfig)
        seed = integer("seed", seed, 0, INT64_MAX)
        drafter = checked_drafter(drafter, config.num_speculative_tokens)
        spec, invariance = model.state_spec(), None
        spec.groups.check_device(spec.device)
        why_not = config.why_not_invariant(spec.device)
        if why_not is None:
            from .invariance import mode  # here, because it imports triton by way of torch

            config, invariance, why_not = mode.decide(model, spec, config)
        else:
            config = replace(config, batch_invariant=False)
        if invariance is not None:
            self._invariance_lines = invariance.describe()
        else:
            off = f"batch invariance: off, because {why_not}; answers may depend on the batch"
            self._invariance_lines = (off,)
        self.config = config = with_total_gb(config, spec.device)
        self.context = DynamicInferenceContext(spec, config)
        self.salt_key = agreed_salt_key(config.salt_key, spec.groups, spec.device)
        self.factory = RequestFactory(self.context, self.salt_key, seed)
        self.core = EngineCore(self.context, drafter, invariance)
        logger.info(self._invariance_lines[0])

    def __repr__(self) -> str:
        """One line: model, device, queue, and how full the pools are."""
        served = f"{type(self.model).__name__} on {self.context.spec.device}"
        scheduler = self.core.scheduler
        queue = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting"
        return f"<DynamicInferenceEngine: {served}; {queue}; {self.context.prefix_cache.stats()}>"

    @property
    def has_one_caller(self) -> bool:
        """Whether calls in one process suffice; else each rank of a split model makes all calls."""
        return not self.core.is_split

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
            cache_salt: requests share cached states only with requests of the same salt, or also without one.
            checkpoint_plan: which states are taken, in place of the configuration's plan.

        Returns:
            The request id.

        Raises:
            ValueError: the request can never run, as a prompt that is longer than the KV pool.
            RuntimeError: a failed step has broken the engine.
        """
        request = self._new_request(prompt, sampling_params, cache_salt, checkpoint_plan, owned=False)
        self._add(request)
        return request.request_id

    def _new_request(self, *arguments: Any, owned: bool) -> DynamicInferenceRequest:
        """A request with its id; during a step, too."""
        if not self.core.is_stepping:
            self.ensure_usable("add_request")
        else:
            self.core.check_not_broken()
        request = self.factory.new_request("prompt", *arguments)
        self.factory.assign_id(request, is_users=True, owned=owned)
        return request

    def _add(self, request: DynamicInferenceRequest) -> None:
        try:
            self._apply(self.core.add, request)
        except BaseException:
            self.core.queue_cancel(request.request_id)  # no caller will know the id
            raise

    def cancel(self, request_id: int, *, reason: EarlyEnd = "cancelled") -> RequestResult:
        """End a running or waiting request, and return what it has generated.

        Args:
            request_id: the request.
            reason: the result's finish reason; "stop" for an answer that is complete, for example because its
                text has a stop string.

        Raises:
            ValueError: the request is unknown or has ended, or the reason is another.
        """
        one_of("reason", reason, get_args(EarlyEnd))
        self.ensure_usable("cancel")
        self._unfinished_request(request_id)
        result = self._apply(self.core.end, request_id, reason)
        self.core.claim(request_id)
        self.core.notify_ended()
        return result

    def _unfinished_request(self, request_id: int) -> DynamicInferenceRequest:
        request = self.core.requests.get(integer("request_id", request_id, 0))
        if request is None:
            raise ValueError(f"request_id is {request_id}; accepted: a request that has not ended")
        return request

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, as to cancel the request of a dropped stream, or to report."""
        return bool(self.core.requests or self.core.reports or self.core.repair)

    def computed_prefix(self, request_id: int) -> list[int]:
        """The tokens of an unfinished request that are computed: KV and state for them exist now."""
        request = self._unfinished_request(request_id)
        return request.tokens[: request.allocation.num_computed] if request.allocation is not None else []

    # ---- serving

    def step(self, *, claims_results: bool = True) -> StepReport:
        """Advance every request that can go on: by a part of its prompt, or by a token and accepted drafts.

        After a call that was interrupted when its step was made, the report of that step is returned.

        Args:
            claims_results: whether `take_result` does not return the results of the report any more.

        Raises:
            KVBlockCapacityError: pinned prefixes leave too few KV blocks for each request that is left. The
                error has the `request_id` of the first.
            RuntimeError: the engine is suspended, in a step, or broken. A split model is broken by all errors
                but KVBlockCapacityError.
            Exception: what the model raises. No request has a new token then, and all running requests are
                queued again.
        """
        self.ensure_usable("step")
        try:
            while not self.core.reports:
                self._advance(reports=True, claims_results=claims_results)
            return self.core.reports.popleft()
        except BaseException as error:
            self._break_on_interrupt(error)
            raise

    def _advance(self, reports: bool = False, claims_results: bool = True) -> None:
        """Make a step, then cancel the requests that are queued for it. Arguments as of `EngineCore.step`."""
        self.ensure_allocated("step")
        self._apply(self.core.step, self.model, reports, claims_results)
        self._cancel_queued()

    def _break_on_interrupt(self, error: BaseException) -> None:
        """Break an engine whose ranks make their calls themselves, unless all ranks raise the same."""
        if not self.has_one_caller and not isinstance(error, (ValueError, RuntimeError)):
            self.core.break_on_failure(error)

    # ---- calls that change the engine

    def _apply[**P, R](self, change: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Call a method of `core`, by which alone the engine changes; `LeadingEngine` does on all ranks."""
        return change(*arguments, **options)

    @property
    def _can_cancel(self) -> bool:
        return True

    def _cancel_queued(self) -> None:
        """Cancel the requests whose streams were dropped, and notify observers of all that have ended."""
        for request_id, reason in self.core.queued_cancels(lambda: self._can_cancel):
            self._apply(self.core.end, request_id, reason)
        self.core.notify_ended()

    def settle(self) -> None:
        """As `ensure_usable`, but does nothing during a step, or where the engine is broken."""
        if not self.core.is_stepping and self.core.broken_by is None:
            self.ensure_usable("settle")

    def ensure_usable(self, call: str) -> None:
        """Repair what a failed call has left, and cancel the requests that are queued for it.

        Raises:
            RuntimeError: a step runs, the engine is broken, or the repair fails. The message names `call`.
        """
        self.core.ensure_usable(call)
        self._cancel_queued()

    def ensure_allocated(self, call: str) -> None:
        """`ensure_usable` of a call that needs the pools: RuntimeError where the engine is suspended, too."""
        self.ensure_usable(call)
        if not self.context.memory.is_allocated:
            raise RuntimeError(f"{call} is called on a suspended engine; resume it first")

    def changing_cache(self, *harmless: type[Exception]) -> AbstractContextManager[None]:
        """Inside, prefixes may enter the cache; errors are repaired, but for `harmless` ones."""
        return self.core.changing(*harmless)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = None,
        checkpoint_plan: CheckpointPlan | Sequence[CheckpointPlan | None] | None = None,
        progress: bool = False,
    ) -> list[RequestResult]:
        """Serve prompts to the end.

        Requests that were added before advance in the same steps. When the call raises, its own requests are
        cancelled.

        Args:
            prompts: a list of prompts, each as `add_request` takes it.
            sampling_params, cache_salt, checkpoint_plan: one value for all prompts, or a list of one each.
            progress: whether a bar on stderr shows how many requests are done, and how many tokens there are.

        Returns:
            The results, in the order of the prompts.
        """
        arguments = prompts_with(
            "prompt", prompts, sampling_params=sampling_params, cache_salt=cache_salt,
            checkpoint_plan=checkpoint_plan,
        )  # fmt: skip
        self.ensure_allocated("generate")
        requests = [  # all of them are checked before one has an id
            self.factory.new_request("prompt" if len(arguments) == 1 else f"prompts[{i}]", *args)
            for i, args in enumerate(arguments)
        ]
        return self._serve(requests, progress)

    def score(
        self,
        sequences: Iterable[Prompt],
        start: int | Sequence[int] = 1,
        *,
        cache_salt: Salt | Sequence[Salt] = None,
        checkpoint_plan: CheckpointPlan | Sequence[CheckpointPlan | None] | None = None,
        progress: bool = False,
    ) -> list[ScoreResult]:
        """The log-probs of given tokens, each under the model's distribution after the tokens before it.

        Sequences are computed and cached as prompts are. The tokens before `start` are resumed from a cached
        state where there is one. Nothing is sampled, and no seed of a request changes.

        Args:
            sequences: a list of sequences, each of 2 or more token ids, as `add_request` takes a prompt.
            start: position of the first scored token, >= 1: one for all sequences, or a list of one each.
            cache_salt, progress: as for `generate`.
            checkpoint_plan: as for `generate`. None takes the last boundary before the scored tokens, too,
                for the sequences that share their context.

        Returns:
            The log-probs, in the order of the sequences.

        Raises:
            ValueError: a sequence can never run, or has no token at `start`.
        """
        arguments = prompts_with(
            "sequence", sequences, start=start, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )
        self.ensure_allocated("score")
        requests = [self.factory.new_sequence(f"sequences[{i}]", *args) for i, args in enumerate(arguments)]
        results = self._serve(requests, progress, is_users=False)
        return [
            ScoreResult(
                log_probs=result.prompt_log_probs or [],
                start=request.sampling.prompt_log_probs_start,
                num_tokens=result.num_prompt_tokens + 1,
                num_resumed_tokens=result.num_resumed_tokens,
                computed_by_reason=result.computed_by_reason,
                num_recomputed_tokens=result.num_recomputed_tokens or 0,
                finish_reason=result.finish_reason,
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def _serve(
        self, requests: Sequence[DynamicInferenceRequest], progress: bool = False, *, is_users: bool = True
    ) -> list[RequestResult]:
        """Add new requests and serve them to the end."""
        boolean("progress", progress)
        try:
            for request in requests:
                self.factory.assign_id(request, is_users=is_users, owned=True)
                self._apply(self.core.add, request)
            with ProgressBar(total=len(requests), unit="request") if progress else nullcontext() as bar:
                for request in requests:
                    while request.result is None:
                        self._advance()
                        if bar is not None and bar.is_due():
                            _update_bar(bar, requests)
                if bar is not None:
                    _update_bar(bar, requests)
            return [request.result for request in requests if request.result is not None]
        except BaseException as error:
            for request in requests:
                if request.request_id != NO_ID:
                    self.core.queue_cancel(request.request_id)
            self._break_on_interrupt(error)
            raise
        finally:
            self.settle()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> TokenStream[GeneratedToken]:
        """Queue a prompt and return an iterator over its tokens; the arguments are those of `add_request`.

        Asking for a token advances all requests until this one has a token. Closing or dropping a stream
        cancels its request; dropping does not on a split model without a `LeadingEngine`.
        """
        request = self._new_request(prompt, sampling_params, cache_salt, checkpoint_plan, owned=True)
        queue_cancel, one_caller = self.core.queue_cancel, self.has_one_caller
        source = RequestSource(request, self._advance, self.settle, queue_cancel, one_caller)
        stream = TokenStream[GeneratedToken](source)
        self._add(request)
        return stream

    def take_result(self, request_id: int) -> RequestResult | None:
        """Claim the result of a request that ended while another call served it.

        Returns:
            The result, once. None while the request runs, and where a stream or `step` claimed it.
        """
        request_id = integer("request_id", request_id, 0)
        self.settle()
        return self.core.claim(request_id)

    # ---- the cache

    def warm(self, tokens: Prompt, *, cache_salt: Salt = None) -> int:
        """Compute a prefix and take the state at its last block boundary, so that later prompts resume there.

        Requests under way advance in the same steps.

        Returns:
            How many of the prefix's tokens later prompts can resume.
        """
        self.ensure_allocated("warm")
        prefix, chain = self.factory.hashed_prefix(tokens, cache_salt)
        cache, size = self.context.prefix_cache, self.config.block_size_tokens
        whole = len(prefix) // size * size
        if cache.resumable_tokens(chain) < whole:
            params = SamplingParams(max_tokens=1)
            plan = CheckpointPlan(marks=(whole,))
            request = self.factory.new_request("prompt", prefix[:whole], params, cache_salt, plan)
            self._serve([request], is_users=False)
        return cache.resumable_tokens(chain)

    def pin(self, tokens: Prompt, *, cache_salt: Salt = None) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and its KV, until `unpin` or the next reset.

        Raises:
            ValueError: no block boundary of the prefix has a state; call `warm` first.
            MambaSlotCapacityError: pins keep `num_mamba_slots` slots already.
            RuntimeError: the engine is suspended, and so caches nothing.
        """
        self.ensure_allocated("pin")
        _, chain = self.factory.hashed_prefix(tokens, cache_salt)
        if not self.context.prefix_cache.resumable_tokens(chain):
            raise ValueError(
                f"tokens is a prefix of {len(chain.hashes)} whole blocks; accepted: one with a cached state"
            )
        return self._apply(self.core.pin, chain)

    def pins(self) -> list[PinnedPrefix]:
        """The pinned prefixes, in the order in which they were pinned."""
        self.settle()
        return list(self.context.prefix_cache.pins.prefixes)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Release a pinned prefix; ValueError for a prefix that is not pinned."""
        self.ensure_usable("unpin")
        pins = self.context.prefix_cache.pins
        index = next((index for index, pinned in enumerate(pins.prefixes) if pinned is prefix), None)
        if index is None:
            pins.unpin(prefix)  # raises, and changes nothing
        else:
            self._apply(self.core.unpin, index)

    def reset_prefix_cache(self) -> None:
        """Remove every cached prefix and pin. Requests under way go on, but cache nothing any more."""
        self.ensure_usable("reset_prefix_cache")
        self._apply(self.core.reset_prefix_cache)

    @property
    def weights_version(self) -> object:
        """The name of the model's weights; None at first."""
        return self.core.weights_version

    def set_weights_version(self, version: object) -> None:
        """Name the model's weights. A new name clears the prefix cache and the CUDA graphs.

        Raises:
            ValueError: comparing `version` with the version before gives no single truth value.
        """
        self.ensure_usable("set_weights_version")
        try:
            changed = bool(version != self.core.weights_version)
            bool(version == version)  # the next version must be comparable with this one
        except (TypeError, ValueError, RuntimeError) as error:  # for example of an array
            raise refused("version", version, "what compares with the version before as a whole") from error
        if changed:
            self._apply(self.core.set_weights_version, version)

    # ---- the whole

    def observe(self, observer: EngineObserver) -> None:
        """Call `observer` for requests and steps from now on, until `unobserve`; a second call does nothing.

        Raises:
            ValueError: the object lacks a method of `EngineObserver`.
        """
        self.core.observers.add(observer)

    def unobserve(self, observer: EngineObserver) -> None:
        """Stop calling `observer`; ValueError for one that does not observe."""
        self.core.observers.remove(observer)

    def stats(self, *, settle: bool = True) -> EngineStats:
        """A snapshot of the cache, the drafts and the queue.

        `settle`: whether requests of dropped streams are cancelled first; False allows any thread to call.
        """
        if settle:
            self.settle()
        core, scheduler = self.core, self.core.scheduler
        return EngineStats(
            cache=self.context.cache_stats(), speculation=core.speculation,
            num_running=len(scheduler.running), num_paused=scheduler.num_paused,
            num_waiting=len(scheduler.waiting), num_rebuilds=core.num_rebuilds,
        )  # fmt: skip

    def describe(self) -> str:
        """What serves the model, a line each: device, kernels and why no better ones, graphs, scheduling."""
        lines = description_of(self.context, self.core.step_runner.graphs)
        return "\n".join((*lines, *self._invariance_lines))

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, rows and memory disagree; O(pools and requests)."""
        self.settle()
        self.core.check_integrity()

    def suspend(self) -> None:
        """Free all pools until `resume`: the cache is cleared, running requests wait, `step` raises."""
        self.ensure_usable("suspend")
        if self.context.memory.is_allocated:
            self._apply(self.core.suspend)

    def resume(self) -> None:
        """Allocate the pools again, empty; queued requests start from their first token."""
        self.ensure_usable("resume")
        self._apply(self.core.resume)

    def reset(self) -> None:
        """Clear the cache and all counts, end all requests with "reset", and repair a broken engine."""
        if self.core.is_stepping:
            self.ensure_usable("reset")
        self._apply(self.core.reset, self.core.weights_version, self.context.memory.is_allocated)
        if self.core.is_split:
            self.factory.skip_ids()


def _update_bar(bar: ProgressBar, requests: Sequence[DynamicInferenceRequest]) -> None:
    bar.set_postfix(tokens=sum(each.num_new for each in requests), refresh=False)
    bar.update(sum(each.result is not None for each in requests) - bar.n)
