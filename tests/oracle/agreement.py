"""Debug mode: the ranks of a split model compare their cache decisions before every forward."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from itertools import zip_longest
from typing import NoReturn

from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.dynamic_request import (
    Allocation,
    DynamicInferenceRequest,
    ScheduledRequest,
)
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.validation import LONGEST_TIMEOUT_S, instance, integer, real
from torch.distributed import Store  # type: ignore[attr-defined]

# Ranks may differ in these settings; the numbers of blocks and slots that result are compared instead.
_BUDGETS = (
    "num_kv_blocks", "num_mamba_slots", "total_gb", "host_cache_gb", "disk_cache",
)  # fmt: skip
_SPEC = ("model", "vocab_size", "separate_states", "kv_dtype")


_NOTHING = "nothing"


class DisagreementError(RuntimeError):
    """Ranks that must decide alike did not, or a rank did not come to compare.

    Attributes:
        step: the number of the comparison that found it, from 0.
        ranks: the ranks in the minority, or all ranks where no majority exists; or the ranks that did not
            come.
        decisions: rank -> its first decision that is not the same on all ranks; empty where a rank did not
            come.
    """

    def __init__(
        self, message: str, step: int, ranks: Sequence[int], decisions: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = tuple(ranks)
        self.decisions = dict(decisions or {})


def missing_ranks_error(step: int, ranks: Sequence[int], timeout_s: float) -> DisagreementError:
    """The error for `ranks` that did not come to comparison `step` within `timeout_s`."""
    message = (
        f"step {step}: {_ranks(ranks)} did not come to compare decisions within {timeout_s:g} s; "
        "they stand still, or make fewer steps than the others"
    )
    return DisagreementError(message, step, ranks)


def difference_error(step: int, decisions_by_rank: Sequence[Sequence[str]]) -> DisagreementError:
    """The error for ranks that decided differently; it quotes the first decision that differs.

    Args:
        step: the number of the comparison.
        decisions_by_rank: each rank's decisions, in order; not equal on all ranks.
    """
    rows = enumerate(zip_longest(*decisions_by_rank, fillvalue=_NOTHING))
    place, row = next((place, row) for place, row in rows if len(set(row)) > 1)
    ranks_by_decision: dict[str, list[int]] = defaultdict(list)
    for rank, decision in enumerate(row):
        ranks_by_decision[decision].append(rank)
    groups = sorted(ranks_by_decision.items(), key=lambda group: (len(group[1]), -group[1][0]))
    *others, (decision, majority) = groups
    if len(majority) == len(others[-1][1]):
        ranks = list(range(len(row)))
        texts = (f"{_ranks(members)} decided {_quoted(text)}" for text, members in reversed(groups))
        message = f"step {step}: {_ranks(ranks)} differ at decision {place}: {', '.join(texts)}"
    else:
        ranks = sorted(rank for _, members in others for rank in members)
        texts = (
            _quoted(text) + (f" of {_ranks(members)}" if len(others) > 1 else "") for text, members in others
        )
        message = (
            f"step {step}: {_ranks(ranks)} differ from {majority} at decision {place}: {', '.join(texts)} "
            f"against {_quoted(decision)}"
        )
    return DisagreementError(message, step, ranks, dict(enumerate(row)))


def _quoted(decision: str) -> str:
    return decision if decision == _NOTHING else f"'{decision}'"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {list(ranks)}"


class Agreement:
    """Observes a context, and compares its decisions with those of the other ranks once a step is built.

    The comparison comes before the step's forward. In the forward, ranks that had built different steps would
    wait for each other for ever. The first comparison also covers what the contexts were built with.
    Every comparison covers the tokens and states of the step before. `compare` covers those of the last step.

    Each rank keeps its decisions since the last comparison, in order, as text, and hashes them. The ranks
    exchange the digests; they exchange the texts only where the digests differ.

    The exchange goes over a store, not over the model's process groups. A collective would hang where ranks
    come to different numbers of steps, and nccl would need a device. One key a comparison says whether all
    ranks came in time. The first rank that knows sets it, and all ranks obey it: so a rank that comes at the
    very end of the timeout agrees with all other ranks or with none.

    A step costs each rank about five messages to the store, and time that grows with the number of slots: too
    much for serving.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float = 30.0,
    ) -> None:
        """Begin to observe; waits for no other rank. Every rank does so before its context's first step.

        Args:
            context: the context of this rank.
            store: a client of a store that all ranks reach. Nothing else uses its keys: no other model, and
                no earlier start of this one that failed (`dist.PrefixStore` divides one store). No other
                thread uses this client (`clone` makes another).
            rank: this rank, among the ranks of one whole model (of the tensor and the pipeline group).
            world_size: the number of these ranks.
            timeout_s: the longest wait for the slowest rank, in seconds.

        Raises:
            ValueError: a bad argument.
        """
        self._context = instance("context", context, DynamicInferenceContext)
        self._store = instance("store", store, Store)
        self._world_size = integer("world_size", world_size, 1)
        self._rank = integer("rank", rank, 0, self._world_size - 1)
        self._timeout_s = real("timeout_s", timeout_s, 0.001, LONGEST_TIMEOUT_S)
        serial = store.add(f"agreements of {self._rank}", 1)  # an agreement made later uses other keys
        self._prefix = f"agreement {serial}"
        self._step = 0
        self._failure: DisagreementError | None = None
        self._decisions: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._tracked: dict[int, _TrackedRequest] = {}
        self._slot_blocks = [-1] * context.prefix_cache.slots.num_slots
        self._closed = False
        for decision in _initial_decisions(context):
            self._note(decision)
        self._note_slots()
        context.observers.append(self)
        context.prefix_cache.kv_blocks.observe_deregistration(self._blocks_deregistered)

    def close(self) -> None:
        """Stop observing; compares nothing and waits for no other rank. A second call does nothing.

        The last rank to close deletes the keys that are left in the store. Other ranks may have to read them
        until then.
        """
        if self._closed:
            return
        self._closed = True
        self._context.observers.remove(self)
        self._context.prefix_cache.kv_blocks._observers.remove(self._blocks_deregistered)
        self._decisions.clear()
        self._tracked.clear()
        with suppress(RuntimeError):  # the store's host has ended: no key is left
            self._leave_the_store()

    def _leave_the_store(self) -> None:
        closed = f"{self._prefix}, closed"
        if self._store.add(closed, 1) < self._world_size:
            return
        for step in range(self._step - 2, self._step + 1):  # another rank may be one step ahead
            for topic in ("digest", "decisions"):
                for key in (*self._keys(topic, step), self._verdict_key(topic, step)):
                    self._store.delete_key(key)
        self._store.delete_key(closed)

    # ---- decisions

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: StepInputs) -> None:
        """Compare all decisions up to this step's forward; blocks, and raises, as `compare` does."""
        self._note_changes()
        for scheduled in batch:
            self._note_step(scheduled)
        self._note(f"step of shape {inputs.shape}")
        self.compare()

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Note what the step computed and stored."""
        self._count_tokens()  # of steps with drafts; other steps are sampled later
        for scheduled in batch:
            self._note(f"request {scheduled.request.request_id} is computed up to {scheduled.stop}")
        self._note_slots()

    def _blocks_deregistered(self, blocks: list[int], hashes: set[int]) -> None:
        if self._closed:
            return
        self._count_tokens()
        for block in blocks:
            self._note(f"KV block {block} deregistered")

    def _note(self, decision: str) -> None:
        self._decisions.append(decision)
        self._digest.update(decision.encode())
        self._digest.update(b"\0")

    def _note_changes(self) -> None:
        self._count_tokens()
        self._note_slots()
        self._note_departures()

    def _count_tokens(self) -> None:
        """Note the tokens that requests got since the last call."""
        for tracked in self._tracked.values():
            request = tracked.request
            prompt, tokens = len(request.prompt_tokens), request.tokens
            for position in range(tracked.tokens, len(tokens)):
                self._note(f"token {position - prompt} of request {request.request_id} is {tokens[position]}")
            tracked.tokens = len(tokens)  # fewer where a failed step took tokens back

    def _note_slots(self) -> None:
        """Note which slots have lost a state, and which have got one, since the last call.

        Of several states that a slot held in between, none is noted.
        """
        slots = self._context.prefix_cache.slots
        before, now = (
            self._slot_blocks,
            [slots.cached_states.block_of(slot) for slot in range(slots.num_slots)],
        )
        for slot, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new and old >= 0:
                self._note(f"slot {slot} lost the state of block {old}")
        for slot, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new and new >= 0:
                self._note(f"slot {slot} holds the state of block {new}")
        self._slot_blocks = now

    def _note_departures(self) -> None:
        for row, tracked in list(self._tracked.items()):
            if tracked.request.allocation is not tracked.allocation:
                self._note(f"request {tracked.request.request_id} left row {row}")
                del self._tracked[row]

    def _note_step(self, scheduled: ScheduledRequest) -> None:
        request, allocation = scheduled.request, scheduled.allocation
        name = f"request {request.request_id}"
        tracked = self._tracked.get(allocation.row)
        if tracked is None or tracked.allocation is not allocation:  # admitted, perhaps again in the same row
            tracked = self._tracked[allocation.row] = _TrackedRequest(request, allocation)
            for decision in _request_decisions(request):
                self._note(decision)
            self._note(f"admission of {name} to row {allocation.row}: {self._resumption(scheduled)}")
        elif scheduled.num_resumed:
            self._note(f"jump of {name}: {self._resumption(scheduled)}")
        blocks, known = allocation.path.blocks, tracked.blocks
        pairs = zip(blocks, known, strict=False)
        first_change = next(
            (i for i, (new, old) in enumerate(pairs) if new != old), min(len(blocks), len(known))
        )
        if blocks[first_change:] or known[first_change:]:
            self._note(f"KV blocks {blocks[first_change:]} for {name} from its block {first_change} on")
        tracked.blocks = list(blocks)
        drafts = f", drafts {list(scheduled.drafts)}" if scheduled.drafts else ""
        self._note(f"step of {name} in row {allocation.row}: [{scheduled.start}, {scheduled.stop}){drafts}")
        for position, slot in sorted(scheduled.destinations.items()):
            self._note(f"slot {slot} reserved for the state of {name} at {position}")
        unserved = [b.position for b in scheduled.boundaries if b.position not in scheduled.destinations]
        if unserved:
            self._note(f"no slot for the states of {name} at {unserved}")
        source = allocation.state_index if allocation.num_computed else -1
        self._note(f"state of {name} from {source}, live slots {list(allocation.live_slots)}")

    def _resumption(self, scheduled: ScheduledRequest) -> str:
        path = scheduled.allocation.path
        shared = path.blocks[: path.num_registered]
        if not scheduled.num_resumed:
            return f"starts at {scheduled.start}, shares blocks {shared}"
        slot = self._context.prefix_cache.slots.cached_states.slot_of(scheduled.block_at(scheduled.start))
        return f"resumes at {scheduled.start} from slot {slot}, shares blocks {shared}"

    # ---- comparing

    def compare(self) -> None:
        """Compare all decisions since the last comparison. Every rank calls this, between steps.

        Blocks until all ranks have come, at most `timeout_s`.

        Raises:
            DisagreementError: on every rank, where decisions differ or a rank did not come. From then on
                every call and every step raises it, until the ranks `close` this agreement and make another.
        """
        if self._failure is not None:
            failure = self._failure
            raise DisagreementError(str(failure), failure.step, failure.ranks, failure.decisions)
        self._note_changes()
        step, self._step = self._step, self._step + 1
        digests = self._exchange("digest", step, self._digest.digest())
        if len(set(digests)) > 1:
            lists = self._exchange("decisions", step, json.dumps(self._decisions).encode())
            self._fail(difference_error(step, [json.loads(text) for text in lists]))
        if step:  # all ranks are here, so no rank needs the keys of the step before
            self._store.delete_key(self._keys("digest", step - 1)[self._rank])
            if self._rank == 0:
                self._store.delete_key(self._verdict_key("digest", step - 1))
        self._decisions.clear()
        self._digest = hashlib.blake2b(digest_size=16)

    def _keys(self, topic: str, step: int) -> list[str]:
        return [f"{self._prefix}, {topic} {step} of {rank}" for rank in range(self._world_size)]

    def _verdict_key(self, topic: str, step: int) -> str:
        return f"{self._prefix}, absent from {topic} {step}"

    def _exchange(self, topic: str, step: int, value: bytes) -> list[bytes]:
        """The `value` of each rank, in order of rank; blocks until all ranks have come."""
        keys = self._keys(topic, step)
        self._store.set(keys[self._rank], value)  # type: ignore[arg-type]  # the stub forgets bytes
        absent, timeout = [], None
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            timeout = error
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        verdict = self._store.compare_set(self._verdict_key(topic, step), "", json.dumps(absent))
        absent = json.loads(verdict)  # of the first rank to set it
        if absent:
            self._fail(missing_ranks_error(step, absent, self._timeout_s), timeout)
        return self._store.multi_get(keys)

    def _fail(self, error: DisagreementError, cause: Exception | None = None) -> NoReturn:
        self._failure = error
        raise error from cause


class _TrackedRequest:
    """What was last noted about the request in a row."""

    def __init__(self, request: DynamicInferenceRequest, allocation: Allocation) -> None:
        self.request = request
        self.allocation = allocation
        self.tokens = len(request.tokens)
        self.blocks: list[int] = []


def _initial_decisions(context: DynamicInferenceContext) -> Iterator[str]:
    """What must be equal on all ranks from the beginning."""
    config, spec = context.config, context.spec
    for field in fields(config):
        if field.name not in (*_BUDGETS, "salt_key"):  # a secret; the ranks agree on it by its id
            yield f"built with {field.name} {getattr(config, field.name)}"
    yield f"built with {context.prefix_cache.kv_blocks.total_count} KV blocks"
    memory, tier = context.memory, context.prefix_cache.tiers
    durable, live = memory.durable_pool.num_durable, memory.state_pool.num_live
    yield f"built with {durable} durable and {live} live slots"
    if tier is not None:
        yield f"built with {tier.host.num_slots} slots in host memory and {tier.files.num_slots} in files"
    for name in _SPEC:
        yield f"built with {name} {getattr(spec, name)}"
    for tensor in spec.states:
        yield f"built with state {tensor.name}: {tensor.dtype}, grid {tensor.grid}"


def _request_decisions(request: DynamicInferenceRequest) -> Iterator[str]:
    """What the caller asked for with a request."""
    name = f"request {request.request_id}"
    digest = hashlib.blake2b(repr(request.prompt_tokens).encode(), digest_size=4).hexdigest()
    yield f"prompt of {name} has {len(request.prompt_tokens)} tokens, digest {digest}"
    yield f"root of {name} is {request.chain.root.hex()}"
    yield f"sampling of {name} is {request.sampling}"
    yield f"plan of {name} is {request.plan}"
