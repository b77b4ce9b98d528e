"""A state was findable before it was written: its request was cancelled, and the same prompt came again."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from oracle.budget import thinned
from oracle.cached_states import assert_cached_states
from oracle.drafters import MODES
from oracle.faults import InjectedError
from oracle.float32_rule import Comparison
from oracle.latched_model import PATIENCE_S, LatchedModel
from oracle.serving import assert_answers, random_tokens, run_checked, small_engine, tiny_model
from oracle.workload import assert_idle

BLOCK = 8
BUDGET, CHUNK = 19, 16
PROMPT = random_tokens(61, seed=20)
"""Prefilled in four steps: three of 16 tokens, the most whole blocks of a budget, with a boundary inside."""
NUM_CHUNKS = 4
LENGTH = 6
PARAMS = ms.SamplingParams(max_tokens=LENGTH, return_log_probs=True)
ASKED = ("", "async", "mixed", "in place", "encoded", "encoded, async", "replay", "replay, async")
"""Ways to serve; see `oracle.drafters`."""


class UnwrittenIsNaN:
    """Observes a context: what a step is to write is NaN until then, and nothing finds it."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._context = engine.context
        self.num_reserved = 0
        self._context.observers.append(self)

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: object) -> None:
        cache, pool = self._context.prefix_cache, self._context.memory.durable_pool
        for scheduled in batch:
            for position, slot in scheduled.destinations.items():
                assert scheduled.hash_at(position) not in cache.slots.cached_states.state_block_of_hash
                pool.memory[pool.durable_index(slot)] = 0xFF
                self.num_reserved += 1
            computed = cache.kv_blocks.tree.block_of_hash
            whole = [scheduled.hash_at(end) for end in range(BLOCK, scheduled.stop + 1, BLOCK)]
            found = [cache.kv_blocks.tree.block_of_hash[key] for key in whole if key in computed]
            own = scheduled.allocation.path.blocks[scheduled.allocation.path.num_registered :]
            assert not set(found) & set(own), "a block is found that this step is to write"

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Nothing is to be done."""


def engine_of(mode: str = "") -> ms.DynamicInferenceEngine:
    engine = small_engine(
        max_tokens_per_step=BUDGET,
        checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK),
        **MODES.get(mode, {}),
    )
    engine.watch = UnwrittenIsNaN(engine)  # type: ignore[attr-defined]
    return engine


def assert_the_prompt_resumes(engine: ms.DynamicInferenceEngine, num_computed: int) -> int:
    """Ask the prompt again: the recurrence's answer, from all that was computed; the tokens resumed."""
    request = engine.add_request(PROMPT, PARAMS)
    result = run_checked(engine)[request]
    assert_answers(PROMPT, result)
    assert result.num_resumed_tokens == min(num_computed, len(PROMPT) - 1) // BLOCK * BLOCK
    assert assert_cached_states(engine.context) >= len(PROMPT) // BLOCK
    assert engine.watch.num_reserved  # type: ignore[attr-defined]
    return result.num_resumed_tokens


@pytest.mark.disaster(number=1)
@pytest.mark.sampled(mode=("", "async", "encoded", "replay, async"))
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mode", ASKED)
def test_a_cancelled_prefill_leaves_no_findable_state_that_was_never_written(mode: str) -> None:
    """Cancelled behind each step of its prefill and of its answer, and asked again at once."""
    engine, resumed = engine_of(mode), 0
    for num_steps in range(NUM_CHUNKS + 4):
        engine.reset_prefix_cache()
        request_id = engine.add_request(PROMPT, PARAMS)
        for _ in range(num_steps):
            engine.step()
        request = engine.core.requests.get(request_id)
        computed = request.allocation.num_computed if request and request.allocation else 0
        # What a step completed whose tokens were not read is not findable, and goes with its request.
        computed = min([computed, *(step.start for step in engine.context.uncommitted)])
        if request is not None:
            engine.cancel(request_id)
        assert_cached_states(engine.context)
        resumed += assert_the_prompt_resumes(engine, computed if request else len(PROMPT))
    assert resumed > 0
    assert_idle(engine)


class Calling:
    """A model that makes a call in one of its forwards, before it computes."""

    def __init__(self, engine: ms.DynamicInferenceEngine, number: int, call: Callable[[], None]) -> None:
        """`number`: of the forward, from 0."""
        self._model, self._left, self._call = engine.model, number, call
        self.state_spec = engine.model.state_spec
        engine.model = self

    def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
        self._left -= 1
        if self._left == -1:
            self._call()
        return self._model(inputs)


@pytest.mark.disaster(number=1)
@pytest.mark.sampled
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("fails", [False, True], ids=["the step goes on", "the step fails"])
@pytest.mark.parametrize("asked", ["inside", "behind"])
@pytest.mark.parametrize("mode", ["", "async", "encoded"])
def test_a_stream_dropped_between_admission_and_commit_leaves_no_unwritten_state(
    mode: str, asked: str, fails: bool
) -> None:
    """In the forward of each chunk the client goes; the prompt comes again there, or behind the step."""
    resumed = [drop_in_forward(number, mode, asked == "inside", fails) for number in range(NUM_CHUNKS)]
    assert sum(resumed) > 0


def num_findable_chunks(number: int, mode: str) -> int:
    """Chunks that stay cached where the client goes in the forward of this number, and the step ends.

    With async scheduling, the first step launches two forwards, each later one the next. A chunk inside the
    prompt is findable once it is launched. The last one, whose logits are unread, goes with its request.
    """
    return (2, 2, 3, 3)[number] if mode == "async" else number + 1


def drop_in_forward(number: int, mode: str, asked_inside: bool, fails: bool) -> int:
    """The tokens that the prompt resumes whose stream was dropped in the forward of this number."""
    engine = engine_of(mode)
    streams, again = [engine.stream(PROMPT, PARAMS)], list[int]()

    def drop() -> None:
        streams.clear()
        gc.collect()
        if asked_inside:
            again.append(engine.add_request(PROMPT, PARAMS))
        if fails:
            raise InjectedError

    Calling(engine, number, drop)
    while streams:
        with suppress(InjectedError):
            engine.step()
    engine.check_integrity()
    assert_cached_states(engine.context)
    if asked_inside:
        result = run_checked(engine)[again[0]]
        assert_answers(PROMPT, result)
        resumed = result.num_resumed_tokens
    else:  # a step that ends is registered, whichever request has ended meanwhile
        num_chunks = number if fails else num_findable_chunks(number, mode)
        resumed = assert_the_prompt_resumes(engine, CHUNK * num_chunks)
    assert_cached_states(engine.context)
    assert_idle(engine)
    return resumed


@pytest.mark.disaster(number=1)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mode", ["", "async"])
def test_a_client_that_goes_while_a_step_runs_and_asks_again_gets_the_right_answer(mode: str) -> None:
    """An AsyncEngine: the task is cancelled in the forward of each chunk, and the prompt is asked at once."""
    for number in thinned(range(NUM_CHUNKS), every=3):
        engine = engine_of(mode)
        result = asyncio.run(cancel_and_ask(engine, number))
        assert_answers(PROMPT, result)
        num_computed = CHUNK * num_findable_chunks(number, mode)
        assert result.num_resumed_tokens == min(len(PROMPT) - 1, num_computed) // BLOCK * BLOCK > 0
        assert assert_cached_states(engine.context) >= len(PROMPT) // BLOCK
        assert_idle(engine)


async def cancel_and_ask(engine: ms.DynamicInferenceEngine, number: int) -> ms.RequestResult:
    """Cancel the prompt in the forward of this number, and ask it again while the forward waits."""
    latch = LatchedModel(engine)
    async with ms.AsyncEngine(engine) as server:
        first = asyncio.create_task(server.generate(PROMPT, PARAMS))
        for _ in range(number):
            await asyncio.to_thread(latch.wait_for_forward)
            latch.allow()
        await asyncio.to_thread(latch.wait_for_forward)
        first.cancel()
        again = asyncio.create_task(server.generate(PROMPT, PARAMS))
        await asyncio.sleep(0)
        latch.open()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await asyncio.wait_for(again, PATIENCE_S)


@pytest.mark.disaster(number=1)
@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("graphs", [None, 64], ids=["eager", "graphs"])
def test_on_a_gpu_a_prefill_cancelled_in_flight_leaves_no_unwritten_state(graphs: int | None) -> None:
    """Scheduling is async; the client goes after some of them, the device behind, and asks again."""
    model, block, prompt = tiny_model(torch.float32, "cuda"), 32, random_tokens(400, seed=21)
    settings: dict[str, Any] = {
        "block_size_tokens": block, "max_requests": 4, "max_tokens_per_step": 64, "max_sequence_length": 512,
        "num_kv_blocks": 100, "num_mamba_slots": 40,
    }  # fmt: skip
    params = ms.SamplingParams(max_tokens=12, return_log_probs=True)
    plain = ms.InferenceConfig(**settings | {"enable_prefix_caching": False, "num_mamba_slots": None})
    (expected,) = ms.DynamicInferenceEngine(tiny_model(torch.float32), plain).generate([prompt], params)
    plan = ms.CheckpointPlan.every_block(block)
    engine = ms.DynamicInferenceEngine(
        model, ms.InferenceConfig(**settings, num_cuda_graphs=graphs, checkpoint_plan=plan)
    )
    resumed, comparison = 0, Comparison()
    for num_steps in (1, 2, 3, 5, 7, 9):
        engine.reset_prefix_cache()
        pool = engine.context.memory.state_pool
        free = list(engine.context.prefix_cache.slots.free_slots)
        pool.memory[[pool.durable_index(slot) for slot in free]] = 0xFF
        request_id = engine.add_request(prompt, params)
        for _ in range(num_steps):
            torch.cuda._sleep(20_000_000)  # the device is behind, so that what follows is done in flight
            engine.step()
        engine.cancel(request_id)
        (result,) = engine.generate([prompt], params)
        comparison.add(model, prompt, expected.tokens, result.tokens)
        resumed += result.num_resumed_tokens
        assert assert_cached_states(engine.context, tiny_model(torch.float32), atol=2e-3, rtol=2e-3) > 3
        engine.check_integrity()
    assert resumed > 6 * block
    assert not graphs or engine.core.step_runner.graphs.shapes
