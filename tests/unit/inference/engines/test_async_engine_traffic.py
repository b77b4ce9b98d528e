"""Any traffic of tasks leaves an AsyncEngine with the recurrence's answers, and nothing behind.

Hypothesis draws what tasks do: read quickly, slowly or never, cancel, let go, go away; calls that do anything
to the engine; forwards that fail; and how the server ends.
"""

import asyncio
import gc
import threading
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import mambaslots as ms
from hypothesis import given
from hypothesis import strategies as st
from oracle.budget import costly
from oracle.faults import InjectedError
from oracle.latched_model import PATIENCE_S, LatchedModel
from oracle.model_kinds import kind_of_model, kinds, present_kind
from oracle.serving import small_engine
from oracle.workload import FORKS, HEADS, answer, assert_idle, engine_settings

MAX_STEP_FAILURES = 3
READERS = "reads", "reads slowly", "reads never", "generates", "cancels", "leaves", "drops", "is cancelled"


class Visit(NamedTuple):
    """What one task wants.

    Attributes:
        seed: of random tokens; None for greedy ones.
        comes_after, stays: turns of the event loop before the task asks, and before it goes away.
    """

    prompt: list[int]
    length: int
    seed: int | None
    salt: bytes | None
    reader: str
    comes_after: int
    stays: int

    @property
    def params(self) -> ms.SamplingParams:
        random = {} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return ms.SamplingParams(max_tokens=self.length, **random)  # type: ignore[arg-type]


visits = st.builds(
    Visit,
    prompt=st.sampled_from(HEADS + FORKS),
    length=st.integers(1, 24),
    seed=st.sampled_from([None, None, 1, 2]),
    salt=st.sampled_from([None, None, b"tenant"]),
    reader=st.sampled_from(READERS),
    comes_after=st.integers(0, 60),
    stays=st.integers(0, 60),
)
CALLS = {
    "reads": lambda engine: engine.stats(),
    "checks": lambda engine: engine.check_integrity(),
    "forgets": lambda engine: engine.reset_prefix_cache(),
    "warms": lambda engine: engine.warm(HEADS[7]),
    "serves": lambda engine: engine.generate([HEADS[3]]),
    "suspends": lambda engine: (engine.suspend(), engine.resume()),
    "preempts": lambda engine: [engine.core.scheduler.preempt(one) for one in engine.context.requests[-1:]],
    "fails": lambda engine: engine.cancel(10**6),
}
calls = st.lists(st.tuples(st.sampled_from(list(CALLS)), st.integers(0, 60)), max_size=6)
failures = st.lists(st.booleans(), max_size=30)
ends = st.sampled_from(["is waited for", "drains", "drains in a hurry", "closes"])


@cache
def drawn_answer(kind: str, prompt: tuple[int, ...], seed: int) -> list[int]:
    """The longest answer with random tokens, of the prompt alone in an engine without a cache."""
    engine = small_engine(enable_prefix_caching=False)
    params = ms.SamplingParams(max_tokens=24, temperature=1.0, seed=seed)
    return engine.generate([prompt], params)[0].tokens


def expected(visit: Visit) -> list[int]:
    prompt = tuple(visit.prompt)
    longest = answer(prompt)[0] if visit.seed is None else drawn_answer(present_kind(), prompt, visit.seed)
    return longest[: visit.length]


class Server:
    """One AsyncEngine, and what its tasks found."""

    def __init__(self, engine: ms.DynamicInferenceEngine, failures: list[bool]) -> None:
        self.engine = engine
        self.latch = LatchedModel(engine, is_open=True)
        self.latch.errors = [InjectedError("forward") if fails else None for fails in failures]
        self.may_fail = any(all(failures[i : i + MAX_STEP_FAILURES]) for i in range(len(failures) - 2))
        self.served = ms.AsyncEngine(engine, max_step_failures=MAX_STEP_FAILURES)
        self.ended = False

    async def turns(self, number: int) -> None:
        for turn in range(number):
            await asyncio.sleep(0.0005 * (turn % 8 == 7))  # now and then the engine's thread gets its turn

    async def visit(self, visit: Visit) -> None:
        await self.turns(visit.comes_after)
        try:
            await self._visit(visit)
        except InjectedError:
            assert self.may_fail
        except RuntimeError as error:
            if not self.ended or "clos" not in str(error):
                raise

    async def _visit(self, visit: Visit) -> None:
        asked: dict[str, Any] = {"cache_salt": visit.salt}
        whole = expected(visit)
        if visit.reader == "generates":
            result = await self.served.generate(visit.prompt, visit.params, **asked)
            assert result.tokens == whole or (self.ended and result.finish_reason == "cancelled")
            assert result.tokens == whole[: len(result.tokens)]
            return
        if visit.reader == "is cancelled":
            task = asyncio.create_task(self.served.generate(visit.prompt, visit.params, **asked))
            await self.turns(visit.stays)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        stream = await self.served.stream(visit.prompt, visit.params, **asked)
        if visit.reader == "reads never":
            await self.turns(visit.stays)
            return
        arrived: list[int] = []
        if visit.reader == "drops":
            with suppress(StopAsyncIteration):
                arrived += [one.token for one in await anext(stream)]
            assert arrived == whole[: len(arrived)]
            return
        async with stream:
            async for tokens in stream:
                arrived += [one.token for one in tokens]
                if visit.reader == "reads slowly":
                    await self.turns(visit.stays)
                elif visit.reader == "cancels" and len(arrived) > visit.stays % 5:
                    stream.cancel()
                elif visit.reader == "leaves" and len(arrived) > visit.stays % 5:
                    break
                assert arrived == whole[: len(arrived)]
        if visit.reader != "leaves":
            assert stream.result is not None
            assert stream.result.tokens == arrived == whole[: len(arrived)]
            was_cancelled = stream.result.finish_reason == "cancelled"
            assert was_cancelled == (len(arrived) < len(whole))
            assert not was_cancelled or visit.reader == "cancels" or self.ended

    async def call(self, name: str, comes_after: int) -> None:
        await self.turns(comes_after)
        try:
            await self.served.call(CALLS[name])
        except ValueError:
            assert name == "fails"
        except InjectedError:
            assert name in ("warms", "serves")
        except RuntimeError as error:
            if not self.ended or "clos" not in str(error):
                raise

    async def run(self, visits: list[Visit], calls: list[tuple[str, int]], end: str) -> None:
        try:
            await self._run(visits, calls, end)
        finally:
            self.ended = True
            await asyncio.wait_for(self.served.close(), PATIENCE_S)

    async def _run(self, visits: list[Visit], calls: list[tuple[str, int]], end: str) -> None:
        self.served.start()
        tasks = [asyncio.create_task(self.visit(visit)) for visit in visits]
        called = [asyncio.create_task(self.call(*call)) for call in calls]
        tasks += called
        if end == "is waited for":
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        else:
            await self.turns(40)
            self.ended = True
        if end.startswith("drains"):
            await asyncio.wait_for(self.served.drain(0.0 if end == "drains in a hurry" else None), PATIENCE_S)
            if all(task.done() for task in called):  # a call may serve requests after a drain, too
                assert self.served.num_waiting == self.served.num_running == 0
        self.ended = True
        await asyncio.wait_for(self.served.close(), PATIENCE_S)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


@given(
    speculating=st.sampled_from([0, 2]),
    kind=kinds,
    sizes=engine_settings,
    visits=st.lists(visits, min_size=1, max_size=12),
    calls=calls,
    failures=failures,
    end=ends,
)
@costly()
def test_any_traffic_gets_its_answers_and_leaves_nothing(
    speculating: int,
    kind: str,
    sizes: dict[str, Any],
    visits: list[Visit],
    calls: list[tuple[str, int]],
    failures: list[bool],
    end: str,
) -> None:
    with kind_of_model(kind):
        engine = small_engine(**sizes, num_speculative_tokens=speculating)
        asyncio.run(Server(engine, failures).run(visits, calls, end))
        gc.collect()
        assert not any(thread.name == "mambaslots-engine" for thread in threading.enumerate())
        assert not engine.has_unfinished_requests()
        assert not engine.core.unclaimed
        engine.check_integrity()
        assert_idle(engine)
        engine.model.errors.clear()  # type: ignore[attr-defined]
        last = engine.generate([HEADS[5]], ms.SamplingParams(max_tokens=5))[0]
        assert last.tokens == answer(tuple(HEADS[5]))[0][:5]
