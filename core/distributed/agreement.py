"""Debug mode: ranks that hold parts of the same requests compare what they decided, before every forward."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from ..inference.contexts.dynamic_context import DynamicInferenceContext
from ..inference.contexts.scheduled_chunk import ScheduledChunk
from ..inference.contexts.step_inputs import StepInputs
from ..request import DynamicInferenceRequest
from ..validation import LONGEST_TIMEOUT_S, instance, integer, real
from .disagreement import DisagreementError, absence, difference

# Each rank may have budgets of its own; the counts that come of them are compared instead.
_BUDGETS = ("num_kv_blocks", "buffer_size_gb", "num_mamba_slots", "prefix_caching_mamba_gb")
_SPEC = (
    "model", "ssd_chunk_size", "vocab_size", "separate_states",
    "conv_states_dtype", "ssm_states_dtype", "kv_dtype",
)  # fmt: skip


class Agreement:
    """Observes a context, and compares its decisions with the other ranks' when a step has been built.

    That is before the step's forward, where ranks that computed different steps would wait for each other for
    ever. A rank's decisions since the last comparison are kept in order, as text, and hashed; the ranks
    exchange digests, and the texts only where digests differ. The first step also compares what the contexts
    were built with. Compared are the last step's tokens and states too, so only those of the very last step
    are left, which `compare` sees to.

    Ranks exchange over a store, not over the model's groups: a collective would hang where ranks come to
    different numbers of steps, and nccl would need a device. Whether all came in time is one key a step,
    which the first rank to know sets and all obey: one that comes at the very end of the timeout agrees with
    all or with nobody. It costs each rank about five messages to the store a step, and time in the number of
    slots: too much to serve with.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float = 30.0,
    ) -> None:
        """Does not wait for the others. Every rank makes it before its context's first step.

        `rank` and `world_size`: among the ranks of both groups, a whole model. `store`: one that all of them
        reach and no other model uses, nor an earlier start of this one that failed (`dist.PrefixStore` parts
        one store), and no other thread (`clone` it).
        `timeout_s`: the longest wait for the slowest rank.
        """
        self._context = instance("context", context, DynamicInferenceContext)
        self._store = instance("store", store, Store)
        self._world_size = integer("world_size", world_size, 1)
        self._rank = integer("rank", rank, 0, self._world_size - 1)
        self._timeout_s = real("timeout_s", timeout_s, 0.001, LONGEST_TIMEOUT_S)
        made = store.add(f"agreements of {self._rank}", 1)  # an agreement made later uses other keys
        self._prefix = f"agreement {made}"
        self._step = 0
        self._failure: DisagreementError | None = None
        self._decisions: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._followed: dict[int, _Followed] = {}
        slots = context.mamba_slot_allocator
        self._slot_blocks = [-1] * (slots.max_slots if slots else 0)
        self._closed = False
        for decision in _built_with(context):
            self._note(decision)
        self._note_slots()
        context.observe(self)
        context.kv_block_allocator.observe_deregistration(self._blocks_deregistered)

    def close(self) -> None:
        """Observe no more; compares nothing and waits for nobody. Once more does nothing.

        The last rank to close deletes what is left in the store: until then others may have to read it.
        """
        if self._closed:
            return
        self._closed = True
        self._context.unobserve(self)
        self._context.kv_block_allocator.unobserve_deregistration(self._blocks_deregistered)
        self._decisions.clear()
        self._followed.clear()
        with suppress(RuntimeError):  # without the store's host there is nothing to delete
            self._leave_the_store()

    def _leave_the_store(self) -> None:
        closed = f"{self._prefix}, closed"
        if self._store.add(closed, 1) < self._world_size:
            return
        for step in range(self._step - 2, self._step + 1):  # another rank may have begun one more
            for what in ("digest", "decisions"):
                for key in (*self._keys(what, step), self._verdict_key(what, step)):
                    self._store.delete_key(key)
        self._store.delete_key(closed)

    # ---- what the context tells

    def step_begun(self, chunks: Sequence[ScheduledChunk], inputs: StepInputs) -> None:
        """Compare all decisions up to this step's forward. Blocks; raises DisagreementError on every rank."""
        self._note_what_happened()
        for chunk in chunks:
            self._note_chunk(chunk)
        self._note(f"step of shape {inputs.shape}")
        self.compare()

    def step_ended(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._note_tokens()  # with drafts they are known by now
        for chunk in chunks:
            self._note(f"request {chunk.request.request_id} is computed up to {chunk.stop}")
        self._note_slots()

    def _blocks_deregistered(self, blocks: list[int], hashes: set[int]) -> None:
        self._note_tokens()
        for block in blocks:
            self._note(f"KV block {block} deregistered")

    def _note(self, decision: str) -> None:
        self._decisions.append(decision)
        self._digest.update(decision.encode())
        self._digest.update(b"\0")

    def _note_what_happened(self) -> None:
        self._note_tokens()
        self._note_slots()
        self._note_departures()

    def _note_tokens(self) -> None:
        """The tokens that requests were given since they were last looked at."""
        for followed in self._followed.values():
            request = followed.request
            prompt, tokens = len(request.prompt_tokens), request.tokens
            for position in range(followed.tokens, len(tokens)):
                self._note(f"token {position - prompt} of request {request.request_id} is {tokens[position]}")
            followed.tokens = len(tokens)  # fewer after a failed step

    def _note_slots(self) -> None:
        """Which slots lost, and which got, a state; in between they may have done so more often."""
        slots = self._context.mamba_slot_allocator
        if slots is None:
            return
        before, now = self._slot_blocks, slots.slot_to_block.tolist()
        for slot, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new and old >= 0:
                self._note(f"slot {slot} lost the state of block {old}")
        for slot, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new and new >= 0:
                self._note(f"slot {slot} holds the state of block {new}")
        self._slot_blocks = now

    def _note_departures(self) -> None:
        for row, followed in list(self._followed.items()):
            if followed.request.row != row:
                self._note(f"request {followed.request.request_id} left row {row}")
                del self._followed[row]

    def _note_chunk(self, chunk: ScheduledChunk) -> None:
        request = chunk.request
        name = f"request {request.request_id}"
        followed = self._followed.get(request.row)
        if followed is None or chunk.start == chunk.skipped:  # the latter: again, in the same row
            followed = self._followed[request.row] = _Followed(request)
            for decision in _asked(request):
                self._note(decision)
            self._note(f"admission of {name} to row {request.row}: {self._resumption(chunk)}")
        elif chunk.skipped:
            self._note(f"jump of {name}: {self._resumption(chunk)}")
        blocks, known = request.blocks, followed.blocks
        same = next((i for i, (a, b) in enumerate(zip(blocks, known, strict=False)) if a != b), None)
        kept = min(len(blocks), len(known)) if same is None else same
        if blocks[kept:] or known[kept:]:
            self._note(f"KV blocks {blocks[kept:]} for {name} from its block {kept} on")
        followed.blocks = list(blocks)
        drafts = f", drafts {list(chunk.drafts)}" if chunk.drafts else ""
        self._note(f"chunk of {name} in row {request.row}: [{chunk.start}, {chunk.stop}){drafts}")
        for position, slot in sorted(chunk.destinations.items()):
            self._note(f"slot {slot} reserved for the state of {name} at {position}")
        unserved = [b.position for b in chunk.boundaries if b.position not in chunk.destinations]
        if unserved:
            self._note(f"no slot for the states of {name} at {unserved}")
        source = request.state_index if request.computed else -1
        self._note(f"state of {name} from {source} to {self._context.state_destinations(chunk)}")

    def _resumption(self, chunk: ScheduledChunk) -> str:
        request, slots = chunk.request, self._context.mamba_slot_allocator
        size = self._context.block_size_tokens
        shared = request.blocks[: request.immutable_blocks]
        if not chunk.skipped or slots is None:
            return f"starts at {chunk.start}, shares blocks {shared}"
        slot = slots.get_slot(request.blocks[chunk.start // size - 1])
        return f"resumes at {chunk.start} from slot {slot}, shares blocks {shared}"

    # ---- comparing

    def compare(self) -> None:
        """Compare all decisions since the last comparison; every rank calls it, between steps.

        Blocks until all ranks have come, at most `timeout_s`. Raises DisagreementError, on every rank, where
        they differ or one did not come; from then on at every call and every step, until the ranks `close` it
        and make another.
        """
        if self._failure is not None:
            known = self._failure
            raise DisagreementError(str(known), known.step, known.ranks, known.decisions)
        self._note_what_happened()
        step, self._step = self._step, self._step + 1
        digests = self._exchange("digest", step, self._digest.digest())
        if len(set(digests)) > 1:
            lists = self._exchange("decisions", step, json.dumps(self._decisions).encode())
            self._fail(difference(step, [json.loads(text) for text in lists]))
        if step:  # all are here, so none needs what the step before exchanged
            self._store.delete_key(self._keys("digest", step - 1)[self._rank])
            if self._rank == 0:
                self._store.delete_key(self._verdict_key("digest", step - 1))
        self._decisions.clear()
        self._digest = hashlib.blake2b(digest_size=16)

    def _keys(self, what: str, step: int) -> list[str]:
        return [f"{self._prefix}, {what} {step} of {rank}" for rank in range(self._world_size)]

    def _verdict_key(self, what: str, step: int) -> str:
        return f"{self._prefix}, absent from {what} {step}"

    def _exchange(self, what: str, step: int, value: bytes) -> list[bytes]:
        """What each rank says, in order."""
        keys = self._keys(what, step)
        self._store.set(keys[self._rank], value)  # type: ignore[arg-type]  # the stub forgets bytes
        absent, late = [], None
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            late = error
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        verdict = self._store.compare_set(self._verdict_key(what, step), "", json.dumps(absent))
        absent = json.loads(verdict)  # ours, or that of the rank that was first
        if absent:
            self._fail(absence(step, absent, self._timeout_s), late)
        return self._store.multi_get(keys)

    def _fail(self, error: DisagreementError, cause: Exception | None = None) -> NoReturn:
        self._failure = error
        raise error from cause


class _Followed:
    """What was last known of a request in a row."""

    def __init__(self, request: DynamicInferenceRequest) -> None:
        self.request = request
        self.tokens = len(request.tokens)
        self.blocks: list[int] = []


def _built_with(context: DynamicInferenceContext) -> Iterator[str]:
    config, spec, slots = context.config, context.spec, context.mamba_slot_allocator
    for field in fields(config):
        if field.name not in _BUDGETS:
            yield f"built with {field.name} {getattr(config, field.name)}"
    yield f"built with {context.kv_block_allocator.total_count} KV blocks"
    yield f"built with {slots.max_slots if slots else 0} durable and {context.state_pool.num_live} live slots"
    for name in _SPEC:
        yield f"built with {name} {getattr(spec, name)}"


def _asked(request: DynamicInferenceRequest) -> Iterator[str]:
    name = f"request {request.request_id}"
    digest = hashlib.blake2b(repr(request.prompt_tokens).encode(), digest_size=4).hexdigest()
    yield f"prompt of {name} has {len(request.prompt_tokens)} tokens, digest {digest}"
    yield f"salt of {name} is {request.hashes.salt!r}"
    yield f"sampling of {name} is {request.sampling}"
    yield f"plan of {name} is {request.plan}"
