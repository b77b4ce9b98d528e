"""Where decodes replay, every cut of every step lies on the chunk grid, and states are of grid points."""

from collections.abc import Sequence
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from oracle.budget import costly
from oracle.drafters import MixedDrafter
from oracle.model_kinds import kind_of_model, kinds
from oracle.plans import SwitchedPlan
from oracle.serving import assert_answers, random_tokens, resumable, small_engine


class GridWatch:
    """Asserts of each step what a replay relies on."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        spec, config = engine.context.spec, engine.config
        self._chunk = spec.chunk_tokens(config.block_size_tokens)
        self._pool = engine.context.memory.state_pool
        engine.context.observers.append(self)

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: ms.StepInputs) -> None:
        replay, chunk = inputs.replay, self._chunk
        assert replay is not None
        for row, scheduled in enumerate(batch):
            assert replay.starts[row] == scheduled.start
            assert replay.input_rows[row] == scheduled.allocation.row
            completed = int(replay.destinations[row])
            if scheduled.decoding:
                first = scheduled.start // chunk * chunk
                assert scheduled.stop <= first + chunk, "a decode goes beyond its chunk"
                assert not scheduled.drafts or scheduled.stop < first + chunk, "a draft completes a chunk"
                assert (completed >= 0) == (scheduled.stop == first + chunk)
            else:
                assert completed == -1
                assert scheduled.start % chunk == 0, "a prefill starts beside the grid"
                is_cut = scheduled.stop < len(scheduled.request.tokens)
                assert not is_cut or scheduled.stop % chunk == 0, "a prefill is cut beside the grid"
                self._check_prefill(scheduled, row - inputs.num_decodes, inputs)

    def _check_prefill(self, scheduled: ScheduledRequest, row: int, inputs: ms.StepInputs) -> None:
        replay, chunks, chunk = inputs.replay, inputs.chunks, self._chunk
        assert replay is not None
        last = scheduled.stop // chunk * chunk
        begin, end = chunks.query_start_loc[row : row + 2].tolist()
        assert replay.tail_starts[row] == begin + last - scheduled.start
        ends = chunks.cu_chunk_seqlens[1:].tolist()
        written = {
            scheduled.start + stop - begin: index
            for stop, index in zip(ends, chunks.destinations.tolist(), strict=True)
            if begin < stop <= end and index >= 0
        }
        final = int(inputs.prefill_destinations[row])
        if scheduled.stop == last:
            assert final >= 0
        else:
            assert final == -1
            assert last == scheduled.start or last in written, "the state of the last grid point is lost"

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        for scheduled in batch:
            allocation = scheduled.allocation
            if scheduled.request.allocation is allocation and allocation.num_computed < self._chunk:
                assert allocation.state_index == -1


@costly()
@given(
    kind=kinds,
    max_tokens_per_step=st.integers(11, 40),
    slots=st.integers(1, 20),
    drafts=st.integers(0, 9),
    lengths=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 20), st.booleans()), min_size=1, max_size=5
    ),
    caching=st.booleans(),
    block=st.sampled_from([2, 3, 8]),
)
def test_every_cut_lies_on_the_grid(
    kind: str,
    max_tokens_per_step: int,
    slots: int,
    drafts: int,
    lengths: list[tuple[int, int, bool]],
    caching: bool,
    block: int,
) -> None:
    with kind_of_model(kind):
        settings: dict[str, Any] = {"make_drafter": MixedDrafter} if drafts else {}
        engine = small_engine(
            decode_by_replay=True, max_tokens_per_step=max_tokens_per_step, num_mamba_slots=slots,
            num_kv_blocks=24 if caching else 96, num_speculative_tokens=drafts,
            enable_prefix_caching=caching, block_size_tokens=8 if caching else block, **settings,
        )  # fmt: skip
        GridWatch(engine)
        stem = random_tokens(60, seed=1)
        asked: dict[int, list[int]] = {}
        results: dict[int, ms.RequestResult] = {}
        for index, (prompt_length, answer, shares) in enumerate(lengths):
            prompt = stem[:prompt_length] if shares else random_tokens(prompt_length, seed=2 + index)
            params = ms.SamplingParams(max_tokens=answer, return_log_probs=True)
            asked[engine.add_request(prompt, params)] = prompt
            results |= {result.request_id: result for result in engine.step().finished}
            engine.check_integrity()
        while engine.has_unfinished_requests():
            results |= {result.request_id: result for result in engine.step().finished}
            engine.check_integrity()
        for request_id, result in results.items():
            assert_answers(asked[request_id], result)
        assert results.keys() == asked.keys()


def test_a_decode_evicts_no_other_requests_state() -> None:
    """Its own older state goes first, as without replay, though it has just continued from that state."""
    engine = small_engine(decode_by_replay=True, block_size_tokens=4, num_mamba_slots=2, num_kv_blocks=96)
    nothing: dict[str, Any] = {"tail": False, "branch": False, "step_ends": False}
    prompt, params = random_tokens(17, seed=5), ms.SamplingParams(max_tokens=60)
    marked = SwitchedPlan(marks=(16,), decode="off", **nothing)
    engine.generate([prompt], ms.SamplingParams(max_tokens=1), checkpoint_plan=marked)
    engine.add_request(random_tokens(4, seed=1), params, checkpoint_plan=SwitchedPlan(**nothing))
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
        assert resumable(engine.context, prompt) == 16
    assert engine.stats().cache.num_states_evicted == 0


def test_decodes_leave_a_prefill_its_cuts() -> None:
    engine = small_engine(decode_by_replay=True, max_tokens_per_step=8, num_kv_blocks=96)
    chunk = engine.context.spec.chunk_tokens(8)
    prompts = [random_tokens(length, seed=length) for length in (2, 3, 4 * chunk)]
    asked = {}
    for prompt, length in zip(prompts, (40, 40, 3), strict=True):
        params = ms.SamplingParams(max_tokens=length, return_log_probs=True)
        asked[engine.add_request(prompt, params)] = prompt
    finished = []
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            assert_answers(asked[result.request_id], result)
            finished.append(result.request_id)
    assert finished[0] == max(asked), "the long prompt does not wait for the long answers"


@pytest.mark.parametrize("drafts", range(1, 9))
def test_rings_hold_decodes_that_are_padded(drafts: int) -> None:
    """The tokens of a decode row are padded to a power of two where steps are padded to invariant buckets."""
    engine = small_engine(decode_by_replay=True, num_speculative_tokens=drafts)
    for tensor in engine.context.spec.states:
        for entry in tensor.inputs:
            if entry.layout == "ring":
                width = 1 << drafts.bit_length()
                assert engine.context.memory.input_pool[entry.name].shape[2] >= entry.taps - 1 + width
