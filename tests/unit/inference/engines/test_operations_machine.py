"""Any sequence of requests, steps, failures, cancellations and operations keeps every invariant and token."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.inference.contexts.cache.pins import PinnedPrefix
from mambaslots.inference.engines.streams import TokenStream
from mambaslots.monitor import Monitor
from oracle.budget import costly
from oracle.drafters import MODES, MixedDrafter
from oracle.faults import InjectedError, Interrupted, failing
from oracle.model_kinds import kind_of_model, kinds
from oracle.observed import Recorder
from oracle.scrubbed import NewOwners, assert_scrubbed
from oracle.serving import resumable, small_engine
from oracle.workload import BLOCK, FORKS, HEADS, Asked, Client, answer, engine_settings, plans, requests

prompts = st.sampled_from(HEADS + FORKS)


class OperationsMachine(RuleBasedStateMachine):
    """One client that steps by hand, streams beside it, and an operator who does what he likes."""

    @initialize(kind=kinds, sizes=engine_settings)
    def start(self, kind: str, sizes: dict[str, Any]) -> None:
        self.scope = ExitStack()
        self.observers_may_miss_steps = False
        self.scope.enter_context(kind_of_model(kind))
        self.client = Client(small_engine(**sizes))
        self.engine = self.client.engine
        self.recorder = Recorder()
        self.engine.observe(self.recorder)
        self.monitor = Monitor(self.engine, model_name="small")
        self.pins: list[tuple[PinnedPrefix, list[int], str | None]] = []
        self.streams: list[tuple[TokenStream, list[int], list[int]]] = []

    @property
    def running(self) -> bool:
        return self.engine.context.memory.is_allocated

    def collect(self) -> None:
        """After steps that others made: results wait in the engine, and tokens were reported to no caller."""
        for request_id in list(self.client.asked):
            result = self.engine.take_result(request_id)
            if result is None:
                self.client.arrived[request_id] = list(self.engine.core.requests[request_id].new_tokens)
            else:
                self.client.arrived[request_id] = list(result.tokens)
                self.client.take(result)

    @rule(several=st.lists(requests, min_size=1, max_size=3), plan=st.none() | plans)
    def ask(self, several: list[Asked], plan: ms.CheckpointPlan | None) -> None:
        for asked in several:
            self.client.ask(asked, plan)

    @precondition(lambda self: self.running)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            with self.unless_pins_hold_all():
                self.client.step()
            self.engine.context.check_integrity()

    @contextmanager
    def unless_pins_hold_all(self) -> Iterator[None]:
        try:
            yield
        except ms.KVBlockCapacityError:
            assert self.pins

    @precondition(lambda self: self.running)
    @rule(
        point=st.sampled_from(["matching", "slot reservation", "inputs", "forward", "commit", "sampled"]),
        after=st.booleans(),
        error=st.sampled_from([InjectedError, Interrupted]),
    )
    def failing_step(self, point: str, after: bool, error: type[BaseException]) -> None:
        with failing(self.engine, point, after=after, error=error), suppress(error, ms.KVBlockCapacityError):
            self.client.step()
        self.observers_may_miss_steps |= error is Interrupted

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.client.asked:
            self.client.cancel(list(self.client.asked)[which % len(self.client.asked)])

    @rule(prompt=prompts, length=st.integers(1, 12))
    def stream(self, prompt: list[int], length: int) -> None:
        params = ms.SamplingParams(max_tokens=length)
        self.streams.append((self.engine.stream(prompt, params), answer(tuple(prompt))[0][:length], []))

    @precondition(lambda self: self.streams and self.running)
    @rule(which=st.integers(0, 100), ends=st.sampled_from(["goes on", "goes on", "closed", "dropped"]))
    def take(self, which: int, ends: str) -> None:
        index = which % len(self.streams)
        stream, expected, arrived = self.streams[index]
        with self.unless_pins_hold_all():
            arrived += [token.token for token in islice(stream, 1)]
        assert arrived == expected[: len(arrived)]
        if ends != "goes on" or arrived == expected:
            self.streams.pop(index)
            if ends == "closed":
                stream.close()
        del stream
        self.collect()

    def root(self, salt: str | None) -> bytes:
        return self.engine.salt_key.root(None if salt is None else salt.encode())

    @precondition(lambda self: self.running)
    @rule(prompt=prompts, salt=st.sampled_from([None, None, "tenant"]), pin=st.booleans())
    def warm(self, prompt: list[int], salt: str | None, pin: bool) -> None:
        with self.unless_pins_hold_all():
            resumable = self.engine.warm(prompt, cache_salt=salt)
            assert resumable <= len(prompt)
            assert resumable % BLOCK == 0
            if pin and resumable:
                self.note_pin(prompt, salt, resumable)
        self.collect()

    @rule(prompt=prompts)
    def pin(self, prompt: list[int]) -> None:
        if not self.running:
            with pytest.raises(RuntimeError, match="suspended"):
                self.engine.pin(prompt)
            return
        with suppress(ValueError):
            self.note_pin(prompt, None, resumable(self.engine.context, prompt))

    def note_pin(self, prompt: list[int], salt: str | None, num_tokens: int) -> None:
        """Pin; refused are only pins of more states than the pool has beside live ones."""
        slots = self.engine.context.prefix_cache.pins.slot_pins
        try:
            pinned = self.engine.pin(prompt, cache_salt=salt)
        except ms.MambaSlotCapacityError:
            assert len(slots) == self.engine.config.num_mamba_slots
        else:
            assert pinned.num_tokens == num_tokens
            self.pins.append((pinned, prompt, salt))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        self.engine.unpin(self.pins.pop(which % len(self.pins))[0])

    @rule(what=st.sampled_from(["reset_prefix_cache", "weights_version", "suspend", "reset"]))
    def operate(self, what: str) -> None:
        if what == "weights_version":
            self.engine.set_weights_version(object())
        else:
            getattr(self.engine, what)()
        self.pins.clear()
        if what == "reset":
            self.client.asked.clear()
            self.client.arrived.clear()
            self.streams.clear()

    @precondition(lambda self: not self.running)
    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.engine.context.check_integrity()
        stats = self.engine.context.cache_stats()
        assert stats.num_prompt_tokens == stats.num_resumed_tokens + stats.num_computed_tokens
        for pin, prompt, salt in self.pins:
            assert resumable(self.engine.context, prompt, self.root(salt)) >= pin.num_tokens

    @invariant()
    def observers_know_who_is_served_and_what_was_answered(self) -> None:
        recorder, stats = self.recorder, self.engine.stats()
        assert recorder.requests.keys() == self.engine.core.requests.keys()
        for request_id, result in recorder.ended:
            assert recorder.tokens.get(request_id, []) == result.tokens
        shown = self.monitor.snapshot()
        # Requests of `score` and `warm` have negative ids; the monitor counts those of users.
        users = [len(tokens) for request_id, tokens in recorder.tokens.items() if request_id >= 0]
        assert shown["tokens"]["generated"] == sum(users)
        assert shown["tokens"]["prompt"] == stats.cache.num_prompt_tokens
        assert shown["engine"]["running"] == stats.num_running
        assert shown["engine"]["waiting"] == stats.num_waiting
        for request in shown["requests"]:
            computed = sum(stop - start for start, stop, _ in request["spans"])
            assert (
                computed + request["resumed_tokens"] >= request["prompt_tokens"]
                or request["finish_reason"] in (None, "cancelled", "reset")
                or self.observers_may_miss_steps  # an interrupt may cost a call of `step_made`
            )

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        with self.scope:
            for pin, _, _ in self.pins:
                self.engine.unpin(pin)
            self.engine.resume()
            self.streams.clear()
            self.client.finish()
            assert self.engine.context.prefix_cache.kv_blocks.num_held == 0
            assert self.engine.context.requests == []
            assert not self.engine.core.unclaimed
            self.engine.unobserve(self.recorder)  # which no error has dropped
            self.monitor.close()


OperationsMachine.TestCase.settings = costly()
TestOperationsMachine = OperationsMachine.TestCase


class FewSlotsMachine(OperationsMachine):
    """Hardly a slot beside the live ones, and enough of all else: a request waits for a row alone."""

    @initialize(
        kind=kinds,
        slots=st.sampled_from([1, 1, 2]),
        rows=st.sampled_from([1, 2, 4]),
        plan=plans,
        mode=st.sampled_from(["", "", "in_place", "decode_by_replay"]),
        drafts=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self, kind: str, slots: int, rows: int, plan: ms.CheckpointPlan, mode: str, drafts: int
    ) -> None:
        sizes: dict[str, Any] = {
            "num_mamba_slots": slots, "max_requests": rows, "checkpoint_plan": plan, "num_kv_blocks": 400,
            "max_tokens_per_step": 512, "max_sequence_length": 96, "num_speculative_tokens": drafts,
        }  # fmt: skip
        if mode:
            sizes[mode] = True
        if drafts:
            sizes["make_drafter"] = MixedDrafter
        super().start(kind, sizes)

    @precondition(lambda self: self.running)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        scheduler, rows = self.engine.core.scheduler, self.engine.config.max_requests
        for _ in range(times):
            waiting, num_running = list(scheduler.waiting.values()), len(scheduler.running)
            report = self.client.step()
            self.engine.context.check_integrity()
            left = [request for request in waiting if request.request_id in scheduler.waiting]
            if num_running + len(report.admitted) < rows:
                assert all(request.awaited_tokens for request in left)


FewSlotsMachine.TestCase.settings = costly()
TestFewSlotsMachine = FewSlotsMachine.TestCase


class ScrubbedMachine(OperationsMachine):
    """After every call memory without an owner is zero, and what is allocated is zero."""

    @initialize(
        kind=kinds,
        sizes=engine_settings,
        mode=st.sampled_from(["", "in place", "mixed", "encoded, mixed", "replay, mixed", "async"]),
    )
    def start(self, kind: str, sizes: dict[str, Any], mode: str) -> None:
        super().start(kind, sizes | {"free_memory": "zero"} | (MODES[mode] if mode else {}))
        self.owners = NewOwners(self.engine)

    @invariant()
    def memory_without_an_owner_is_zero(self) -> None:
        assert_scrubbed(self.engine)


ScrubbedMachine.TestCase.settings = costly()
TestScrubbedMachine = ScrubbedMachine.TestCase
