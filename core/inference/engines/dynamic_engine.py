"""Continuous batching over a `DynamicInferenceContext`.

This file is over 400 lines long because it is the public face of serving: half of it documents calls.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from ...cache_stats import EngineStats, SpeculationStats
from ...config import InferenceConfig
from ...errors import KVBlockCapacityError, MambaSlotCapacityError
from ...parallel_groups import on_device_of
from ...request import EarlyEnd, FinishReason, RequestResult, SamplingParams, ScoreResult
from ...state_spec import HybridStateSpec
from ...validation import INT64_MAX, boolean, instance, integer, shown
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.cache.hashing import PrefixHashChain, salt_bytes
from ..contexts.cache.pinned_prefixes import PinnedPrefix
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.request import DynamicInferenceRequest, RequestStep
from ..kernels.kernel_set import kernel_set
from .acceptance import count_accepted
from .agreed_salt_key import agreed_salt_key
from .arguments import (
    Prompt,
    Salt,
    ScoredSequence,
    check_given,
    check_length,
    checked_drafter,
    checked_plan,
    checked_prompt,
    checked_prompts,
    checked_sampling,
    checked_sequence,
    one_each,
)
from .drafter import Drafter
from .engine_books import EngineBooks, LaunchedStep, StepUndo
from .engine_observer import EngineObserver
from .graph_runner import GraphBuckets, GraphRunner
from .memory_poison import MemoryPoison
from .model import Model
from .model_runner import ModelRunner
from .progress import ProgressLine
from .sampling import request_seed, sample_step
from .step_report import NewTokens, StepReport
from .tier_speed import set_min_tokens
from .token_stream import Lease, TokenStream

if TYPE_CHECKING:
    from .batch_invariance import BatchInvariance


class DynamicInferenceEngine:
    """Serves requests with a hybrid model, resuming prompts from the prefix cache of its context.

    One thread at a time may call an engine; streams may be dropped in any thread. From inside a step,
    requests may be added and statistics read; other calls raise RuntimeError. `generate` serves a batch to
    the end; `add_request` and `step`, or `stream`, serve requests as they come.

    A call that is interrupted (by Control-C, the exception of a signal handler, or MemoryError) loses no
    request and no token. If need be, all cached prefixes and pins are forgotten, and running requests are
    queued again: a warning is logged then.

    Attributes:
        model, config: what the engine was built with.
        context: what the requests hold, and the prefix cache.
        salt_key: hashes the salts of requests; its `key_id` tells keys apart.
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
            raise ValueError(f"model is {shown(model)}; accepted: a callable that has `state_spec()`")
        self.model = model
        self.config = instance("config", config, InferenceConfig)
        self._seed = integer("seed", seed, 0, INT64_MAX)
        spec = model.state_spec()
        self._invariance = _checked_invariance(model, spec, config) if config.batch_invariant else None
        self._served: tuple[Model | None, Model] = (None, model)  # a model, and what runs in its place
        try:
            self.context = DynamicInferenceContext(spec, config)
        except BaseException:
            if self._invariance is not None:
                self._invariance.close()
            raise
        if self.context.prefix_cache.tier is not None:
            set_min_tokens(self.context.prefix_cache.tier, self._forward, spec, config)
        self._is_split = spec.groups.is_split
        self.salt_key = agreed_salt_key(config.salt_key, spec.groups, spec.device)
        self._poison = MemoryPoison(self.context) if config.free_memory == "nan" else None
        self._runner = self._new_runner()
        self._drafter = checked_drafter(drafter, config.num_speculative_tokens)
        self._looks_ahead = config.why_steps_wait(spec.device) is None
        self._books = EngineBooks(self.context, self._drafter, self._runner.drop_graphs)
        self._new_ids = count()
        # Apart from the ids of users' requests, so that no seed depends on what is cached or scored.
        self._ids_without_seed = count(-1, -1)
        self._num_resets = 0
        self._weights_version: object = None

    def __repr__(self) -> str:
        """One line: model, device, queue, and how full the pools are."""
        served = f"{type(self.model).__name__} on {self.context.spec.device}"
        scheduler = self._books.scheduler
        queue = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting"
        return f"<DynamicInferenceEngine: {served}; {queue}; {self.context.prefix_cache.stats()}>"

    @property
    def has_one_caller(self) -> bool:
        """Whether calls in one process suffice; else each rank of a split model makes all calls itself."""
        return self._books.calls.reach_all_ranks or not self.context.spec.groups.is_split

    @property
    def _forward(self) -> Model:
        """What a step runs: the model, perhaps with other products."""
        if self._invariance is None:
            return self.model
        if self._served[0] is not self.model:
            self._served = self.model, self._invariance.served(self.model)
        return self._served[1]

    def _new_runner(self) -> ModelRunner:
        spec, max_graphs = self.context.spec, self.config.num_cuda_graphs
        dtypes = {spec.kv_dtype, *(tensor.dtype for tensor in spec.states)}
        synchronises = spec.device.type != "cuda" or torch.float64 in dtypes
        if max_graphs is None or synchronises:
            return ModelRunner(spec, self.config.batch_invariant)
        buckets = GraphBuckets.of(self.context, self.config.batch_invariant)
        return GraphRunner(spec, buckets, max_graphs)

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
            cache_salt: requests share cached states only with requests of the same salt; those without a salt
                share with each other. An empty salt is refused.
            checkpoint_plan: which states are taken, in place of the configuration's plan.

        Returns:
            The request id.

        Raises:
            ValueError: the request can never run: the prompt is empty or has ids outside the vocabulary, or
                prompt and answer are longer than `max_sequence_length` or than the KV pool.
            RuntimeError: a failed step has broken the engine.
        """
        request = self._new_request(prompt, sampling_params, cache_salt, checkpoint_plan, self._new_ids)
        try:
            self._books.enter(request)
            return request.request_id
        except BaseException:
            self._books.abandoned.append(request.request_id)  # nobody will know the id
            raise

    def _new_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        cache_salt: Salt,
        checkpoint_plan: CheckpointPlan | None,
        ids: Iterator[int],
        owned: bool = False,
    ) -> DynamicInferenceRequest:
        checked = self._checked(prompt, sampling_params, cache_salt, checkpoint_plan)
        return self._request_of(*checked, next(ids), owned)

    def _checked(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        cache_salt: Salt,
        checkpoint_plan: CheckpointPlan | None,
    ) -> tuple[list[int], SamplingParams, CheckpointPlan, bytes | None]:
        """The tokens, sampling, plan and salt of a request; a ValueError where it can never run."""
        if self._books.state.stepping:
            self._books.state.check_not_broken()
        else:
            self.check_usable("add_request")
        tokens = checked_prompt("prompt", prompt, self.context.spec.vocab_size)
        sampling = checked_sampling(sampling_params, self.context.spec.vocab_size)
        plan = checked_plan(checkpoint_plan, self.config)
        salt = salt_bytes("cache_salt", cache_salt)
        check_given(tokens, sampling)
        check_length(len(tokens) - sampling.num_generated, sampling, self.config, self._num_pool_tokens)
        return tokens, sampling, plan, salt

    @property
    def _num_pool_tokens(self) -> int:
        """How many tokens the whole KV pool holds."""
        return self.context.prefix_cache.kv_blocks.total_count * self.config.block_size_tokens

    def _request_of(
        self,
        tokens: list[int],
        sampling: SamplingParams,
        plan: CheckpointPlan,
        salt: bytes | None,
        request_id: int,
        owned: bool,
        next_token: int | None = None,
    ) -> DynamicInferenceRequest:
        num_prompt_tokens = len(tokens) - sampling.num_generated
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=tokens[:num_prompt_tokens],
            sampling=sampling,
            plan=plan,
            hashes=self._new_chain(salt),
            arrival_s=time.perf_counter(),
            seed=request_seed(sampling, self._seed, request_id),
            owned=owned,
            next_token=next_token,
            given_tokens=tokens[num_prompt_tokens:],
        )
        if self.config.enable_prefix_caching:
            request.hashes.extend_to(tokens)  # here, so that a crowd that arrives holds up no step
        return request

    def cancel(self, request_id: int, *, reason: EarlyEnd = "cancelled") -> RequestResult:
        """End a running or waiting request, and return what it has generated.

        Args:
            request_id: the request.
            reason: the result's finish reason; "stop" for an answer that is complete, for example because its
                text has a stop string.

        Raises:
            ValueError: the request is unknown or has ended, or the reason is another.
        """
        if reason not in get_args(EarlyEnd):
            raise ValueError(f"reason is {shown(reason)}; accepted: {', '.join(get_args(EarlyEnd))}")
        self.check_usable("cancel")
        request = self._request(request_id)
        result = self._books.end(request, reason)
        unclaimed = self._books.unclaimed
        try:
            self._books.observers.tell_ended()
            return result
        finally:
            if request_id in unclaimed:
                del unclaimed[request_id]

    def _request(self, request_id: int) -> DynamicInferenceRequest:
        request = self._books.requests.get(integer("request_id", request_id, 0))
        if request is None:
            raise ValueError(f"request_id is {request_id}; accepted: a request that has not ended")
        return request

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, or to report."""
        self._books.settle()
        return bool(self._books.requests or self._books.reports)

    def computed_prefix(self, request_id: int) -> list[int]:
        """The tokens of an unfinished request that are computed: KV and state for them exist now."""
        request = self._request(request_id)
        return request.tokens[: request.holding.num_computed] if request.holding is not None else []

    # ---- serving

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that wait or run; any thread may read this."""
        return len(self._books.requests)

    def step(self, *, claims_results: bool = True) -> StepReport:
        """Advance every request that can go on: by a part of its prompt, or by a token and accepted drafts.

        After a call that was interrupted when its step was made, the report of that step is returned.

        Args:
            claims_results: whether the report has the only copy of its results; else `take_result` has them,
                too.

        Raises:
            KVBlockCapacityError: pinned prefixes leave too few KV blocks for each request that is left. The
                error has the `request_id` of the first. All ranks of a split model raise this error.
            RuntimeError: the engine is suspended, in a step, or broken. Errors other than capacity errors
                break the engine of a split model, because other ranks may have completed the step.
            Exception: what the model raises. No request then has a new token, and all running requests are
                queued again: a later `step` restarts them from their last cached states.
        """
        self.check_usable("step")
        reports = self._books.reports
        try:
            if not reports:
                self._make_step(reports=True, claims_results=claims_results)
            try:
                return reports[0]
            finally:
                del reports[0]  # no call, which a signal could interrupt, comes between this and the return
        except BaseException as error:
            self._books.state.note_interrupt(error)
            raise

    def _make_step(self, reports: bool = False, claims_results: bool = True) -> None:
        """Make a step.

        Args:
            reports: whether the results of requests without an owner are reported.
            claims_results: whether `take_result` has no result that is reported.
        """
        self._books.calls.make("step", partial(self._step_here, reports, claims_results))
        self._books.drain()

    @torch.inference_mode()
    def _step_here(self, reports: bool = False, claims_results: bool = True) -> None:
        """This rank's part of a step."""
        if not self.context.memory.allocated:
            raise RuntimeError("step is called on a suspended engine; resume it first")
        books = self._books
        begun_s = time.perf_counter()
        undo = books.begin_step()
        with books.in_step(sys._getframe(), undo), on_device_of(self.context.spec.device):
            steps, tokens, invalid = self._run_step(undo)
            finished = self._finish_completed(steps, invalid)
            if self._drafter is not None:
                self._count_drafts(steps, tokens)
            if reports:
                for result in finished if claims_results else ():
                    books.unclaimed.pop(result.request_id, None)
                books.reports.append(self._report(steps, tokens, finished))
        admitted, books.scheduler.admitted = books.scheduler.admitted, {}
        if books.observers:
            books.observers.step_made(steps, admitted, tokens, time.perf_counter() - begun_s)

    def _run_step(self, undo: StepUndo) -> tuple[Sequence[RequestStep], NewTokens, Sequence[int]]:
        step = self._books.take_unread()  # the step that the last call launched ahead
        if step is None:
            scheduled = self._schedule(undo)  # match, plan, hold KV blocks
            if not scheduled:
                return (), {}, ()
            step = self._launch(scheduled, None, undo)
        ahead = self._looks_ahead and not self._runner.captures_next
        following = self._books.scheduler.following(step.requests) if ahead else []
        if following:
            tokens_there = step.sampled.tokens_of([one.request for one in following])
            self._books.unread = self._launch(following, tokens_there, undo)
        if step.check_logits is not None:
            step.check_logits()
        tokens = step.sampled.wait()
        self._runner.after_step(self._forward)
        return step.requests, tokens, step.sampled.invalid

    def _launch(
        self, scheduled: Sequence[RequestStep], sampled_tokens: Tensor | None, undo: StepUndo
    ) -> LaunchedStep:
        """Launch a step. `sampled_tokens`: its tokens, where it follows a step that nobody has read."""
        if self._invariance is not None:
            self._invariance.check_switches()
        undo.settled = False
        step = self.context.begin_step(scheduled, self._runner.padded, sampled_tokens)  # reserve, publish
        undo.settled = True
        logits = self._runner.run(self._forward, step.inputs)  # forward
        check_logits = self._poison.check(logits) if self._poison is not None else None
        sampled = sample_step(step.requests, logits)  # launched; nothing waits yet
        undo.settled = False
        # Register, commit, advance; waits only for drafts, and where blocks or states become findable.
        self.context.end_step(sampled.num_accepted, sampled.is_valid)
        return LaunchedStep(step.requests, sampled, check_logits)

    def _schedule(self, undo: StepUndo) -> list[RequestStep]:
        try:
            return self._books.scheduler.schedule()
        except KVBlockCapacityError as error:
            undo.settled = error.request_id is not None
            raise

    def _report(
        self, steps: Sequence[RequestStep], tokens: NewTokens, finished: tuple[RequestResult, ...]
    ) -> StepReport:
        admitted = self._books.scheduler.admitted
        return StepReport(
            admitted=tuple(step.request.request_id for step in steps if step.request in admitted),
            generated={request_id: new[-1] for request_id, new in tokens.items()},
            finished=finished,
            tokens=tokens,
        )

    def _finish_completed(
        self, steps: Sequence[RequestStep], invalid: Sequence[int]
    ) -> tuple[RequestResult, ...]:
        """End the requests that are complete, and those whose logits are no numbers."""
        reasons: dict[int, FinishReason] = dict.fromkeys(invalid, "invalid_logits")
        for request in (step.request for step in steps):
            reason = request.finish_reason
            if reason is not None and request.result is None:  # of a step ahead, requests may have ended
                reasons.setdefault(request.request_id, reason)
        return tuple(
            self._books.finish(self._books.requests[request_id], reason)
            for request_id, reason in reasons.items()
        )

    def _count_drafts(self, steps: Sequence[RequestStep], tokens: NewTokens) -> None:
        so_far = self._books.speculation
        for step in steps:
            if step.decoding and step.request.request_id in tokens:
                new = [one.token for one in tokens[step.request.request_id]]
                so_far = SpeculationStats(
                    so_far.num_decodes + 1,
                    so_far.num_tokens + len(new),
                    so_far.num_drafted + len(step.drafts),
                    so_far.num_accepted + count_accepted(step.drafts, new),
                )
        self._books.speculation = so_far

    def check_usable(self, call: str) -> None:
        """Put the books in order: repair what an interrupted call left, cancel what nobody waits for.

        Raises:
            RuntimeError: a step runs, the engine is broken, or the repair fails. The message names `call`.
        """
        self._books.check_usable(call)

    def changing_cache(self, *in_order: type[Exception]) -> AbstractContextManager[None]:
        """Inside, prefixes may be put into the cache between steps; what stops that is repaired.

        `in_order`: errors that leave the cache's books in order.
        """
        return self._books.changing(*in_order)

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

        Requests that were added before advance in the same steps. When the call raises, the requests of this
        call are cancelled.

        Args:
            prompts: a list of prompts, each as `add_request` takes it.
            sampling_params, cache_salt, checkpoint_plan: one value for all prompts, or a list of one per
            prompt.
            progress: whether a line on stderr says how many requests are done, and how many tokens there are.

        Returns:
            The results, in the order of the prompts.
        """
        shown_as = "generate" if boolean("progress", progress) else None
        listed = checked_prompts(prompts)
        params = one_each("sampling_params", sampling_params, len(listed))
        salts = one_each("cache_salt", cache_salt, len(listed))
        plans = one_each("checkpoint_plan", checkpoint_plan, len(listed))
        self.check_usable("generate")
        arguments = zip(listed, params, salts, plans, strict=True)
        checked = [self._checked(*each) for each in arguments]  # all of them, before one counts as a request
        requests = (self._request_of(*each, next(self._new_ids), owned=True) for each in checked)
        return self._serve(requests, shown_as)

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

        Sequences are computed as prompts are, beside the requests that were added before, and cached as
        prompts are. The tokens before `start` are resumed from a cached state where there is one. Nothing is
        sampled, and no seed of a request changes. When the call raises, its sequences are dropped.

        Args:
            sequences: a list of sequences, each of 2 or more token ids, as `add_request` takes a prompt.
            start: position of the first scored token, >= 1. What goes before is context. One value for all
                sequences, or a list of one per sequence.
            cache_salt: as for `generate`.
            checkpoint_plan: as for `generate`. None takes the last boundary before the scored tokens, too,
                for the sequences that share their context.
            progress: as for `generate`.

        Returns:
            The log-probs, in the order of the sequences.

        Raises:
            ValueError: an argument is of another kind, a sequence can never run, or has no token at `start`.
            RuntimeError: as `step`.
        """
        shown_as = "score" if boolean("progress", progress) else None
        listed = checked_prompts(sequences, "sequences")
        starts = one_each("start", start, len(listed), "sequence")
        salts = one_each("cache_salt", cache_salt, len(listed), "sequence")
        plans = one_each("checkpoint_plan", checkpoint_plan, len(listed), "sequence")
        self.check_usable("score")
        vocab_size, config, pool = self.context.spec.vocab_size, self.config, self._num_pool_tokens
        checked = [
            checked_sequence(number, *each, vocab_size=vocab_size, config=config, pool=pool)
            for number, each in enumerate(zip(listed, starts, salts, plans, strict=True))
        ]
        results = self._serve(map(self._scoring_request, checked), shown_as)
        return [
            ScoreResult(
                log_probs=result.prompt_log_probs or [],
                start=sequence.start,
                num_tokens=len(sequence.tokens),
                num_resumed_tokens=result.num_resumed_tokens,
                computed_by_reason=result.computed_by_reason,
                num_recomputed_tokens=result.num_recomputed_tokens,
                finish_reason=result.finish_reason,
            )
            for sequence, result in zip(checked, results, strict=True)
        ]

    def _scoring_request(self, sequence: ScoredSequence) -> DynamicInferenceRequest:
        """A request that ends with its prompt: the sequence's last token is the one behind the prompt."""
        wanted = SamplingParams(
            num_tokens_to_generate=1, skip_prompt_log_probs=False, prompt_log_probs_start=sequence.start
        )
        *prompt, last = sequence.tokens
        request_id = next(self._ids_without_seed)
        return self._request_of(
            prompt, wanted, sequence.plan, sequence.salt, request_id, owned=True, next_token=last
        )

    def _serve(
        self, wanted: Iterable[DynamicInferenceRequest], shown_as: str | None = None
    ) -> list[RequestResult]:
        """Add new requests, each when it is reached, and serve them to the end.

        `shown_as`: the call's name on a line that shows how far it is; None shows none.
        """
        lease = Lease(self._books.abandoned, self.has_one_caller)
        results: list[RequestResult] = []
        try:
            requests = []
            for request in wanted:
                requests.append(request)
                lease.request_ids.append(request.request_id)
                self._books.enter(request)
            line = None if shown_as is None else ProgressLine(shown_as, requests)
            for request in requests:
                while request.result is None:
                    self._advance()
                    if line is not None:
                        line.show()
                results.append(request.result)
            if line is not None:
                line.end()
            return results
        except BaseException as error:
            self._books.state.note_interrupt(error)
            raise
        finally:
            lease.end()
            self._books.settle()

    def _advance(self) -> None:
        """Make a step for `generate`, `warm` or a stream."""
        self.check_usable("step")
        self._make_step()

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
        cancels the request. Dropping the last reference to a stream, in any thread, also cancels the request,
        at the engine's next call; not on a split model without a `LeadingEngine`.
        """
        # Ranks that make their calls themselves collect garbage at different times: there a request ends only
        # where `close` is called.
        lease = Lease(self._books.abandoned, self.has_one_caller)
        try:
            request = self._new_request(
                prompt, sampling_params, cache_salt, checkpoint_plan, self._new_ids, owned=True
            )
            lease.request_ids.append(request.request_id)
            self._books.enter(request)
            return TokenStream(request, lease, self._advance, self._books.settle)
        except BaseException:
            lease.end()
            raise

    def take_result(self, request_id: int) -> RequestResult | None:
        """Claim the result of a request that ended while another call served it.

        Returns:
            The result, once. None while the request runs, and where a stream or the caller's `step` claimed
                the result.
        """
        request_id = integer("request_id", request_id, 0)
        self._books.settle()
        unclaimed = self._books.unclaimed
        result = unclaimed.get(request_id)
        try:
            return result
        finally:
            if request_id in unclaimed:
                del unclaimed[request_id]

    # ---- the cache

    def warm(self, tokens: Prompt, *, cache_salt: Salt = None) -> int:
        """Compute a prefix and take the state at its last block boundary, so that later prompts resume there.

        Requests under way advance in the same steps.

        Returns:
            How many of the prefix's tokens later prompts can resume.
        """
        self._check_allocated("warm")
        prefix, chain = self._hashed(tokens, cache_salt)
        cache, size = self.context.prefix_cache, self.config.block_size_tokens
        whole = len(prefix) // size * size
        if cache.resumable_tokens(chain) < whole:
            once, plan = SamplingParams(num_tokens_to_generate=1), CheckpointPlan(marks=(whole,))
            request = self._new_request(
                prefix[:whole], once, cache_salt, plan, self._ids_without_seed, owned=True
            )
            self._serve([request])
        return cache.resumable_tokens(chain)

    def pin(self, tokens: Prompt, *, cache_salt: Salt = None) -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and its KV, until `unpin` or the next reset.

        Raises:
            ValueError: no block boundary of the prefix has a state; call `warm` first.
            MambaSlotCapacityError: pins keep `num_mamba_slots` slots already.
            RuntimeError: the engine is suspended, and so caches nothing.
        """
        self._check_allocated("pin")
        _, chain = self._hashed(tokens, cache_salt)
        cache = self.context.prefix_cache
        if not cache.resumable_tokens(chain):
            return cache.pin(chain)  # raises, and changes nothing
        return self._books.calls.make("pin", partial(self._pin, chain), chain.root, chain.tokens)

    def _pin(self, chain: PrefixHashChain) -> PinnedPrefix:
        with self._books.changing(MambaSlotCapacityError):
            return self.context.prefix_cache.pin(chain)

    def pins(self) -> list[PinnedPrefix]:
        """The pinned prefixes, in the order in which they were pinned."""
        self._books.settle()
        return list(self.context.prefix_cache.pins)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Release a pinned prefix; ValueError for a prefix that is not pinned."""
        self.check_usable("unpin")
        cache = self.context.prefix_cache
        if not any(prefix is pinned for pinned in cache.pins):
            cache.pins.unpin(prefix)  # raises, and changes nothing
        else:
            number = [pinned is prefix for pinned in cache.pins].index(True)
            self._books.calls.make("unpin", partial(self._unpin, prefix), number)

    def _unpin(self, prefix: PinnedPrefix) -> None:
        with self._books.changing():
            self.context.prefix_cache.pins.unpin(prefix)

    def _check_allocated(self, call: str) -> None:
        self.check_usable(call)
        if not self.context.memory.allocated:
            raise RuntimeError(f"{call} is called on a suspended engine; resume it first")

    def _hashed(self, tokens: Prompt, cache_salt: Salt) -> tuple[list[int], PrefixHashChain]:
        prefix = checked_prompt("tokens", tokens, self.context.spec.vocab_size)
        chain = self._new_chain(salt_bytes("cache_salt", cache_salt))
        chain.extend_to(prefix)
        return prefix, chain

    def _new_chain(self, salt: bytes | None) -> PrefixHashChain:
        return PrefixHashChain(self.config.block_size_tokens, self.salt_key.root(salt))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and pin. Requests under way go on, but cache nothing any more."""
        self.check_usable("reset_prefix_cache")
        self._books.calls.make("reset_prefix_cache", self._reset_prefix_cache)

    def _reset_prefix_cache(self) -> None:
        with self._books.forgetting():
            self._forget_prefixes()

    def _forget_prefixes(self) -> None:
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
        except (TypeError, ValueError, RuntimeError) as error:  # for example of an array
            raise ValueError(
                f"version is {shown(version)}; accepted: what compares with the version before as a whole"
            ) from error
        if changed:
            self._books.calls.make("set_weights_version", partial(self._name_weights, version), version)

    def _name_weights(self, version: object) -> None:
        with self._books.forgetting():
            self._forget_prefixes()
            self._runner.drop_graphs()
            self._weights_version = version

    # ---- the whole

    def observe(self, observer: EngineObserver) -> None:
        """Tell `observer` of requests and steps from now on, until `unobserve`; one that observes stays once.

        Raises:
            ValueError: the object lacks a method of `EngineObserver`.
        """
        self._books.observers.add(observer)

    def unobserve(self, observer: EngineObserver) -> None:
        """Stop telling `observer`; ValueError for one that does not observe."""
        self._books.observers.remove(observer)

    def stats(self, *, settle: bool = True) -> EngineStats:
        """A snapshot of the cache, the drafts and the queue.

        `settle`: whether requests that nobody waits for are cancelled first. Without that the call changes
        nothing, and may be made in any thread; counts may then be off by what a step changes meanwhile.
        """
        if settle:
            self._books.settle()
        return EngineStats(
            cache=self.context.cache_stats(),
            speculation=self._books.speculation,
            num_running=len(self._books.scheduler.running),
            num_paused=self._books.scheduler.num_paused,
            num_waiting=len(self._books.scheduler.waiting),
            num_rebuilds=self._books.num_rebuilds,
        )

    def describe(self) -> str:
        """Says what serves the model: device, kernels and why no better ones, graphs, and steps ahead.

        A model that brings kernels of its own does not use those that are named.

        Returns:
            One line for each.
        """
        config, spec = self.config, self.context.spec
        device = torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else "no GPU"
        kernels = kernel_set(spec.device, spec.kv_dtype)
        return "\n".join(
            (
                f"device: {spec.device} ({device}), KV in {str(spec.kv_dtype).removeprefix('torch.')}",
                *kernels.describe(spec, config.block_size_tokens),
                f"CUDA graphs: {self._runner.describe()}",
                f"decode steps: {self._describe_steps()}",
                f"decodes: {self._describe_decodes()}",
                f"evicted states: {self._describe_tier()}",
                *(self._invariance.describe() if self._invariance is not None else ()),
            )
        )

    def _describe_steps(self) -> str:
        because = self.config.why_steps_wait(self.context.spec.device)
        if because is None:
            return "launched before the tokens of the step before are read"
        return f"wait for the tokens of the step before, because of {because}"

    def _describe_decodes(self) -> str:
        if not any(tensor.num_layers for tensor in self.context.spec.states):
            return "the model has no states"
        if not self.config.replays:
            return "update a state at each token"
        chunk = self.context.spec.chunk_tokens(self.config.block_size_tokens)
        return f"replay the inputs since the last multiple of {chunk} tokens, where a state is written"

    def _describe_tier(self) -> str:
        tier = self.context.prefix_cache.tier
        if tier is None:
            return "are dropped; host_cache_gb keeps them in host memory"
        files = f", {tier.files.num_slots} in files" if tier.files.num_slots else ""
        back = f"{tier.min_tokens} tokens"
        if tier.files.num_slots:
            back += f", from a file {tier.min_tokens_from_file}"
        return f"{tier.host.num_slots} in host memory{files}; come back where that saves at least {back}"

    def memory_summary(self) -> str:
        """One line that says how many bytes each pool takes."""
        return self.context.memory.summary()

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict themselves; O(pools and requests)."""
        self._books.settle()
        self._books.check_integrity()

    def suspend(self) -> None:
        """Free the memory of all pools. Running requests are queued again, and every prefix is forgotten.

        Until `resume`, requests can be added and cancelled, and `step` raises RuntimeError.
        """
        self.check_usable("suspend")
        if self.context.memory.allocated:
            self._books.calls.make("suspend", self._suspend)

    def _suspend(self) -> None:
        with self._books.forgetting():
            self._books.scheduler.restart(self._books.scheduler.running)
            self._books.unread = None  # its requests are queued again, and compute its tokens again
            self._runner.drop_graphs()
            self.context.suspend()

    def resume(self) -> None:
        """Allocate the pools again, empty; queued requests start from their first token."""
        self.check_usable("resume")
        self._books.calls.make("resume", self.context.resume)

    def reset(self) -> None:
        """Drop every request, result, prefix and count. Repairs an engine that a failed step has broken.

        Requests that have not ended end with the reason "reset", which their streams tell.
        """
        if self._books.state.stepping:
            self._books.state.check_usable("reset")
        told = self._weights_version, self.context.memory.allocated
        self._books.calls.make("reset", self._books.reset, *told)
        if self._is_split:  # ranks that failed at different requests go on with the same ids
            self._num_resets += 1
            self._new_ids = count(self._num_resets << 32)


def _checked_invariance(model: Model, spec: HybridStateSpec, config: InferenceConfig) -> "BatchInvariance":
    from .batch_invariance import BatchInvariance  # here, because it imports triton by way of torch

    return BatchInvariance(model, spec, config)
