"""Steps are padded to buckets: every padded step holds the step, fits the step buffer, and stays as it is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.padding import (
    MAX_PADDING,
    invariant_bucket,
    invariant_buckets,
    invariant_padding,
    largest_shape,
    power_of_two,
)
from mambaslots.inference.contexts.step_inputs import StepShape
from mambaslots.inference.engines.cuda_graphs import GraphBuckets, GraphRunner
from oracle.serving import small_engine, small_model


def is_bucket(rows: int) -> bool:
    return rows in (0, 32, 64, 128) or rows % 256 == 0


class TestBuckets:
    @given(st.integers(0, 100_000))
    def test_the_next_bucket(self, rows):
        padded = invariant_bucket(rows)
        assert is_bucket(padded)
        assert rows <= padded <= rows + MAX_PADDING
        assert not any(is_bucket(between) for between in range(rows, padded) if between)
        assert invariant_bucket(padded) == padded

    @given(st.integers(0, 5_000))
    def test_all_buckets(self, rows):
        assert invariant_buckets(rows) == [
            size for size in range(1, invariant_bucket(rows) + 1) if is_bucket(size)
        ]

    @given(st.integers(1, 5_000))
    def test_powers_of_two(self, count):
        assert count <= power_of_two(count) < 2 * count
        assert power_of_two(count).bit_count() == 1


@st.composite
def contexts(draw: st.DrawFn) -> tuple[StepShape, int]:
    """The largest sizes of some context's steps, and the tokens of a chunk."""
    chunk_size = draw(st.sampled_from([1, 4, 64]))
    requests = draw(st.integers(1, 400))
    sizes = (
        requests,
        draw(st.integers(requests, 3000)),
        draw(st.integers(1, 64)),
        draw(st.integers(1, 9)),
        chunk_size,
    )
    return largest_shape(*sizes), chunk_size, largest_shape(*sizes, batch_invariant=True)


@st.composite
def steps(draw: st.DrawFn, largest: StepShape, chunk_size: int) -> StepShape:
    """A step's shape without padding."""
    decodes = draw(st.integers(0, largest.decodes))
    prefills = draw(st.integers(0 if decodes else 1, min(largest.prefills, 5)))
    width = draw(st.integers(1, largest.decode_tokens)) if decodes else 1
    tokens = draw(st.integers(prefills, max(prefills, largest.prefill_tokens))) if prefills else 0
    return StepShape(
        decodes=decodes,
        prefills=prefills,
        prefill_tokens=tokens,
        max_query_tokens=draw(st.integers(-(-tokens // prefills), tokens)) if prefills else 0,
        block_columns=draw(st.integers(1, largest.block_columns)),
        kv_writes=draw(st.integers(0, decodes * width + tokens)),
        chunks=draw(st.integers(0, tokens // chunk_size + prefills)),
        checkpoints=draw(st.integers(0, tokens // chunk_size)),
        logits=draw(st.integers(0, decodes * width + draw(st.sampled_from([prefills, tokens])))),
        decode_tokens=width,
    )


def assert_padded(shape: StepShape, padded: StepShape, bound: StepShape, few_tokens: bool = False) -> None:
    few = few_tokens and padded.tokens == padded.logits == 8 and not padded.prefills
    assert few or (is_bucket(padded.tokens) and is_bucket(padded.logits))
    assert padded.tokens
    assert all(has >= needs for has, needs in zip(padded, shape, strict=True))
    assert all(has <= most for has, most in zip(padded, bound, strict=True))


class TestSteps:
    @given(st.data())
    def test_a_padded_step_is_a_bucket_and_holds_the_step(self, data):
        largest, chunk_size, bound = data.draw(contexts())
        shape = data.draw(steps(largest, chunk_size))
        padded = invariant_padding(shape)
        assert_padded(shape, padded, bound)
        assert invariant_padding(padded) == padded
        assert padded.prefills == shape.prefills
        assert padded.tokens - shape.tokens <= MAX_PADDING or padded.decode_tokens > shape.decode_tokens
        if shape.prefills:
            assert (padded.decodes, padded.decode_tokens) == (shape.decodes, shape.decode_tokens)
        else:
            assert padded.decode_tokens == power_of_two(shape.decode_tokens)

    @given(st.data())
    def test_captured_shapes_are_too(self, data):
        largest, chunk_size, bound = data.draw(contexts())
        shape = data.draw(steps(largest, chunk_size))
        most = data.draw(st.integers(0, largest.prefill_tokens))
        buckets = GraphBuckets(
            largest.prefills,
            largest.block_columns,
            most,
            chunk_size,
            64,
            largest.decode_tokens,
            min_decode_tokens=data.draw(st.sampled_from([8, 32])),
        )  # fmt: skip
        for asked in (shape, invariant_padding(shape, 8), invariant_padding(shape)):
            fitting = buckets.smallest(asked)
            if fitting is not None:
                assert_padded(asked, fitting, bound, few_tokens=buckets.min_decode_tokens == 8)
                assert buckets.smallest(fitting) == fitting
                padded = invariant_padding(fitting, buckets.min_decode_tokens)
                assert (padded.tokens, padded.logits) == (fitting.tokens, fitting.logits)
                assert fitting.tokens >= (32 if fitting.prefills else buckets.min_decode_tokens)
        usual = shape.logits <= shape.decodes * shape.decode_tokens + shape.prefills
        fits = shape.checkpoints <= shape.prefill_tokens // 64 + shape.prefills
        if shape.prefill_tokens <= most and usual and fits:
            assert buckets.smallest(shape) is not None
        if shape.prefills and not most:
            assert buckets.smallest(shape) is None

    def test_captured_shapes_are_few(self):
        buckets = GraphBuckets(100, 8, 512, 64, 64, min_decode_tokens=32)
        decodes = {buckets.smallest(StepShape(n, 0, 0, 0, 8, n, 0, 0, n)).decodes for n in range(1, 101)}
        assert decodes == {32, 64, 128}
        few = replace(buckets, min_decode_tokens=8)
        assert [few.smallest(StepShape(n, 0, 0, 0, 8, n, 0, 0, n)).decodes for n in (1, 8, 9)] == [8, 8, 32]
        assert [invariant_padding(StepShape(n, 0, 0, 0, 8, n, 0, 0, n, 3), 8).decodes for n in (2, 3)] == [
            2,
            8,
        ]
        tokens = {
            buckets.smallest(StepShape(0, 1, n, n, 8, n, n // 64 + 1, 0, 1)).tokens for n in range(1, 513)
        }
        assert tokens == {32, 64, 128, 256, 512}
        drafts = GraphBuckets(100, 8, 512, 64, 64, decode_tokens=4, min_decode_tokens=32)
        shape = drafts.smallest(StepShape(3, 0, 0, 0, 8, 12, 0, 0, 12, 3))
        assert (shape.decodes, shape.decode_tokens, shape.logits) == (8, 4, 32)

    @pytest.mark.parametrize("invariant", [False, True])
    def test_runners_pad(self, invariant):
        spec = small_model().state_spec()
        buckets = GraphBuckets(
            8, 4, max_prefill_tokens=0, chunk_size=4, block_size=8, min_decode_tokens=32 * invariant
        )
        prefill, decode = StepShape(1, 1, 7, 7, 3, 8, 3, 1, 1), StepShape(3, 0, 0, 0, 3, 3, 0, 0, 3)
        eager, graphed = (small_engine(decode_by_replay=True).core.step_runner for _ in range(2))
        graphed.graphs = GraphRunner(spec, buckets, 10)
        for runner in (eager, graphed):
            object.__setattr__(runner._context.config, "batch_invariant", invariant)
            padded = prefill._replace(prefill_tokens=31, logits=32) if invariant else prefill
            assert runner.padded(prefill) == padded
        assert eager.padded(decode).tokens == (32 if invariant else 3)
        assert graphed.padded(decode).tokens == (32 if invariant else 4)
