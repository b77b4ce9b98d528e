"""What an engine was asked, what came back, and what nothing may be left of.

Only public names of an engine are used: a ledger survives any change behind them.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice

import mambaslots as ms
from mambaslots.inference.contexts.cache.pins import PinnedPrefix
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from mambaslots.monitor import Monitor

from .toy_answers import Answer, Ask, answer, prompt_log_probs
from .toy_lm import ToyLM

TOLERANCE = 1e-9
MAX_STEPS = 2000
BELONG_TO_REQUESTS = frozenset(
    {
        "DynamicInferenceRequest", "TokenStream", "StreamFeed", "RequestResult", "Allocation", "CachedPath",
        "ScheduledRequest", "PrefixMatch", "PinnedPrefix", "GeneratedToken", "StepReport",
    }
)  # fmt: skip


class LeftWrongError(AssertionError):
    """An engine is left wrong. `kind` is one of a few words for tables."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(eq=False)
class Entry:
    """One request. Another model's requests say otherwise what is `expected`.

    Attributes:
        ask: what it must answer.
        request_id: what the engine calls it, once that is known; -1 before.
        salt, prompt_log_probs: as it was asked.
        stream: its stream; None for a request of `add_request`.
        arrived: tokens that its stream has returned.
        resumes_nothing: whether its prompt must be computed in full.
        mixed: whether the weights changed while it ran: its tokens are then not checked.
        may_vanish: whether a call that ends it was interrupted: it may have ended without a result.
        may_be_cut: whether a call that ends it was made: fewer tokens may come.
    """

    ask: Ask
    request_id: int = -1
    salt: bytes | None = None
    prompt_log_probs: bool = False
    stream: ms.TokenStream | None = None
    arrived: list[int] = field(default_factory=list)
    resumes_nothing: bool = False
    mixed: bool = False
    may_vanish: bool = False
    may_be_cut: bool = False

    @property
    def params(self) -> ms.SamplingParams:
        ask = self.ask
        return ms.SamplingParams(
            max_tokens=ask.length, temperature=ask.temperature, top_k=ask.top_k, top_p=ask.top_p,
            seed=ask.seed, stop_token_ids=ask.stops, return_log_probs=True,
            skip_prompt_log_probs=not self.prompt_log_probs,
        )  # fmt: skip

    tolerance = TOLERANCE

    @property
    def expected(self) -> Answer | None:
        """The whole answer; None where it is not known, or not yet."""
        return answer(self.ask)

    @property
    def expected_prompt_log_probs(self) -> tuple[float, ...]:
        return prompt_log_probs(self.ask.prompt, self.ask.version, self.ask.kind)

    def check(self, result: ms.RequestResult) -> None:
        """Hold a result against the independent answer."""
        self.request_id = result.request_id
        if result.num_prompt_tokens != len(self.ask.prompt):
            raise LeftWrongError("answer", f"a result of another prompt: {result}")
        if self.resumes_nothing and result.num_resumed_tokens:
            raise LeftWrongError("stale", f"{result.num_resumed_tokens} tokens resumed of what was forgotten")
        cut = result.finish_reason not in ("length", "stop")
        if cut and not (self.may_be_cut or result.finish_reason == "invalid_logits"):
            raise LeftWrongError("answer", f"the answer ended as {result.finish_reason}")
        expected = None if self.mixed else self.expected
        if expected is None:
            return
        count = len(result.tokens)
        if not cut and result.finish_reason != expected.finish_reason:
            raise LeftWrongError(
                "answer", f"ended as {result.finish_reason}, not as {expected.finish_reason}"
            )
        if tuple(result.tokens) != (expected.tokens[:count] if cut else expected.tokens):
            raise LeftWrongError("answer", f"{result.tokens}, not {expected.tokens}")
        if not close(result.log_probs, expected.log_probs[:count], self.tolerance):
            raise LeftWrongError("answer", f"log-probs {result.log_probs}, not {expected.log_probs[:count]}")
        if not cut and result.num_resumed_tokens + sum(result.computed_by_reason.values()) != len(
            self.ask.prompt
        ):
            raise LeftWrongError("counts", f"prompt tokens are not accounted for: {result}")
        if self.prompt_log_probs and not cut:
            wanted = self.expected_prompt_log_probs
            if not close(result.prompt_log_probs, wanted, self.tolerance):
                raise LeftWrongError("answer", f"prompt log-probs {result.prompt_log_probs}, not {wanted}")


def close(found: list[float] | None, wanted: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Whether log-probs are as many as wanted, and none is further off."""
    return (
        found is not None
        and len(found) == len(wanted)
        and all(abs(a - b) <= tolerance for a, b in zip(found, wanted, strict=True))
    )


@contextmanager
def _may_vanish(entry: Entry) -> Iterator[None]:
    """A call that takes a request's result; interrupted, it may have done so."""
    before, entry.may_vanish = entry.may_vanish, True
    try:
        yield
    except ValueError:
        entry.may_vanish = before
        raise
    entry.may_vanish = before


class EndWatch:
    """An observer that knows which requests run. It keeps ids only."""

    def __init__(self) -> None:
        self.running: set[int] = set()

    def request_added(self, request: DynamicInferenceRequest) -> None:
        self.running.add(request.request_id)

    def request_resumed(self, scheduled: ScheduledRequest) -> None:
        pass

    def step_made(self, batch: Sequence[ScheduledRequest], tokens: object, duration_s: float) -> None:
        pass

    def request_ended(self, request: DynamicInferenceRequest, result: ms.RequestResult) -> None:
        self.running.discard(request.request_id)  # an end may be reported twice


class Ledger:
    """What is asked of an engine that serves `model`.

    Attributes:
        entries: requests under way, by id.
        strays: what was asked in calls that did not return: no caller has an id.
        pins: what is pinned.
        watch, monitor: observers of the engine; there may be no monitor.
    """

    def __init__(self, engine: ms.DynamicInferenceEngine, model: ToyLM) -> None:
        self.engine = engine
        self.watch = EndWatch()
        engine.observe(self.watch)
        self.monitor: Monitor | None = None
        self.model = model
        self.entries: dict[int, Entry] = {}
        self.strays: list[Entry] = []
        self.pins: list[PinnedPrefix] = []
        self.num_results = 0
        self.num_steps = 0
        self.num_invalid = 0

    # ---- asking

    def add(self, entry: Entry, plan: ms.CheckpointPlan | None = None) -> int:
        self.strays.append(entry)
        request_id = self.engine.add_request(
            entry.ask.prompt, entry.params, cache_salt=entry.salt, checkpoint_plan=plan
        )
        self.strays.remove(entry)
        entry.request_id = request_id
        self.entries[request_id] = entry
        return request_id

    def stream(self, entry: Entry, plan: ms.CheckpointPlan | None = None) -> int:
        self.strays.append(entry)
        entry.stream = self.engine.stream(
            entry.ask.prompt, entry.params, cache_salt=entry.salt, checkpoint_plan=plan
        )
        self.strays.remove(entry)
        entry.request_id = entry.stream.request_id
        self.entries[entry.request_id] = entry
        return entry.request_id

    def generate(self, entries: list[Entry]) -> None:
        """Serve entries at once, and check them."""
        self.strays += entries
        results = self.engine.generate(
            [entry.ask.prompt for entry in entries],
            [entry.params for entry in entries],
            cache_salt=[entry.salt for entry in entries],
        )
        for entry, result in zip(entries, results, strict=True):
            self.strays.remove(entry)
            self._check(entry, result)

    def score(self, *sequences: Sequence[int], start: int) -> None:
        """Score sequences with the model's present weights, and check the log-probs."""
        for tokens, result in zip(sequences, self.engine.score(sequences, start), strict=True):
            wanted = self.wanted_scores(tokens, start)
            if wanted is not None and not close(result.log_probs, wanted, self.tolerance):
                raise LeftWrongError("answer", f"scored {result.log_probs}, not {wanted}")
            if result.num_resumed_tokens + sum(result.computed_by_reason.values()) != len(tokens) - 1:
                raise LeftWrongError("counts", f"tokens are not accounted for: {result}")

    tolerance = TOLERANCE

    def wanted_scores(self, tokens: Sequence[int], start: int) -> Sequence[float] | None:
        """The log-probs of tokens `start` .. N-1 with the present weights; None where they are not known."""
        return prompt_log_probs(tuple(tokens), self.model.version, self.model.kind)[start - 1 :]

    # ---- serving

    def step(self) -> None:
        self.num_steps += 1
        for result in self.engine.step().finished:
            self.take(result)

    def take(self, result: ms.RequestResult) -> None:
        """Check a result that an engine has handed out."""
        entry = self.entries.get(result.request_id)
        if entry is None:
            self._take_stray(result)
        elif entry.stream is None:
            del self.entries[result.request_id]
            self._check(entry, result)
        else:  # the stream has it, too
            entry.check(result)

    def _check(self, entry: Entry, result: ms.RequestResult) -> None:
        entry.check(result)
        self.num_results += 1
        self.num_invalid += result.finish_reason == "invalid_logits"
        if self.num_invalid > self.model.num_spoiled:
            raise LeftWrongError("answer", "more answers are invalid than the model has made invalid")

    def _take_stray(self, result: ms.RequestResult) -> None:
        alike = [entry for entry in self.strays if len(entry.ask.prompt) == result.num_prompt_tokens]
        for entry in alike:
            entry.may_be_cut = True
            # Of several, one whose answer is not known yet may be another's.
            entry.mixed |= len(alike) > 1 and entry.expected is None
            with suppress(LeftWrongError):
                self._check(entry, result)
                return
        raise LeftWrongError("answer", f"the result of a request that was not asked: {result}")

    def read(self, request_id: int, count: int | None = None) -> None:
        """Read tokens of a stream; all for None."""
        entry = self.entries[request_id]
        assert entry.stream is not None
        for token in islice(entry.stream, count):
            entry.arrived.append(token.token)
        self.see_stream(request_id)

    def see_stream(self, request_id: int) -> None:
        """Check what a stream has returned so far, and take its result once it has one."""
        entry = self.entries[request_id]
        assert entry.stream is not None
        arrived, expected = tuple(entry.arrived), None if entry.mixed else entry.expected
        if expected is not None and arrived != expected.tokens[: len(arrived)]:
            raise LeftWrongError("answer", f"a stream returned {arrived}, not {expected.tokens}")
        result = entry.stream.result
        if result is not None and arrived == tuple(result.tokens):
            self._check(entry, result)
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        self.entries.pop(request_id).stream = None

    def cancel(self, request_id: int) -> None:
        """Cancel a request, which may have ended before: in steps of others, or in an interrupted call."""
        entry = self.entries[request_id]
        entry.may_be_cut = True
        try:
            with _may_vanish(entry):
                result = self.engine.cancel(request_id)
        except ValueError:
            return
        self._check(entry, result)
        self.forget(request_id)

    def close(self, request_id: int) -> None:
        entry = self.entries[request_id]
        entry.may_vanish = entry.may_be_cut = True
        assert entry.stream is not None
        entry.stream.close()
        self.forget(request_id)

    def finish(self) -> None:
        """Step until no request waits, and check that each request has its result."""
        for _ in self.steps():
            self.check_integrity()
        for request_id, entry in list(self.entries.items()):
            if entry.stream is not None:
                self.read(request_id)
            else:
                self.claim(request_id)
            if request_id in self.entries:
                if not entry.may_vanish:
                    raise LeftWrongError("lost", f"request {request_id} has no result")
                self.forget(request_id)
        self.strays.clear()

    def claim(self, request_id: int) -> None:
        """Take the result of a request that ended in steps of others, if it has ended."""
        with _may_vanish(self.entries[request_id]):
            result = self.engine.take_result(request_id)
        if result is not None:
            self.take(result)

    def steps(self) -> Iterator[None]:
        before = self.num_steps
        while self.engine.has_unfinished_requests():
            if self.num_steps - before > MAX_STEPS:
                raise LeftWrongError("hang", f"not finished after {MAX_STEPS} steps")
            self.step()
            yield

    def unpin_all(self, may_be_unpinned: bool = False) -> None:
        """`may_be_unpinned`: whether a call that unpins was interrupted."""
        for pin in self.pins:
            with suppress(ValueError) if may_be_unpinned else nullcontext():
                self.engine.unpin(pin)
        self.pins.clear()
        for pin in list(getattr(self.engine, "pins", list)()):  # of interrupted calls: no caller has these
            self.engine.unpin(pin)

    def forget_all(self) -> None:
        """The engine was reset."""
        for request_id in list(self.entries):
            self.forget(request_id)
        self.strays.clear()
        self.pins.clear()

    # ---- looking

    def check_integrity(self) -> None:
        try:
            self.engine.check_integrity()
        except AssertionError as error:
            raise LeftWrongError("integrity", str(error)) from None

    def check_idle(self) -> None:
        """Nothing is held: no block, slot, row or request."""
        engine, stats, context = self.engine, self.engine.stats(), self.engine.context
        self.check_integrity()
        left = {
            "requests": len(engine.core.requests),
            "running requests": stats.num_running,
            "waiting requests": stats.num_waiting,
            "paused requests": stats.num_paused,
            "rows": len(context.requests),
            "live slots": stats.cache.num_live_slots,
            "KV blocks": stats.cache.num_held_kv_blocks,
            "reserved slots": stats.cache.num_reserved_slots,
            "slot pins": len(context.prefix_cache.slots.pins),
            "ends that were not reported": self._num_unreported_ends,
        }
        if any(left.values()):
            raise LeftWrongError(
                "leak", ", ".join(f"{count} {name}" for name, count in left.items() if count)
            )

    @property
    def _num_unreported_ends(self) -> int:
        """Requests that have ended, which an observer takes for running; an interrupted one was dropped."""
        core, running = self.engine.core, set[int]()
        if self.watch in core.observers.members:
            running |= self.watch.running
        if self.monitor is not None and self.monitor in core.observers.members:
            running |= self.monitor._running.keys()
        return len(running - core.requests.keys())


def objects() -> Counter[str]:
    """How many objects there are of each type that belongs to requests. Collects garbage first."""
    gc.collect()
    if _let_go_of_lost_errors():
        gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(
        kind.__name__
        for kind in kinds
        if kind.__name__ in BELONG_TO_REQUESTS and kind.__module__.startswith("mambaslots")
    )


def _let_go_of_lost_errors() -> bool:
    """Take the tracebacks from exceptions that nothing refers to.

    CPython 3.12 never frees an exception if another one is raised by a monitor just where a `with` statement
    takes the first one up. The frames of its traceback hold requests, and are no one's fault here.
    """
    things = gc.get_objects()
    errors = [thing for thing in things if issubclass(type(thing), BaseException)]
    lost = [
        error for error in errors if all(user is things or user is errors for user in gc.get_referrers(error))
    ]
    for error in lost:
        error.__traceback__ = None
    return bool(lost)


def check_objects(before: Counter[str]) -> None:
    """No more objects than before are left."""
    growth = objects() - before
    if growth:
        raise LeftWrongError("leak", ", ".join(f"{count} {name}" for name, count in growth.items()))
