"""Which steps run by a graph, on which shapes; on the CPU with something in the place of graphs."""

from dataclasses import replace

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.step_inputs import StepShape
from mambaslots.inference.engines import cuda_graphs
from mambaslots.inference.engines.cuda_graphs import GraphBuckets, GraphRunner
from mambaslots.inference.kernels import few_rows
from mambaslots.inference.kernels.chunk_grid import chunk_grid
from oracle.recorded_graphs import Recorded, graphed_engine, recording
from oracle.serving import (
    assert_answers,
    random_tokens,
    run_checked,
    serve_checked,
    small_engine,
    small_model,
)
from torch import Tensor

BUCKETS = GraphBuckets(max_requests=24, block_columns=11, max_prefill_tokens=100, chunk_size=4, block_size=8)


@st.composite
def steps(draw: st.DrawFn) -> StepShape:
    """The shape of some step, by the chunk grid itself."""
    decodes = draw(st.integers(0, 24))
    rows = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=24 - decodes))
    if not rows and not decodes:
        rows = [(3, 5)]
    grid = chunk_grid([start for start, _ in rows], [new for _, new in rows], 4)
    tokens = sum(new for _, new in rows)
    inner = sum(1 for start, new in rows for position in range(start + 1, start + new) if position % 8 == 0)
    return StepShape(
        decodes=decodes,
        prefills=len(rows),
        prefill_tokens=tokens,
        max_query_tokens=max((new for _, new in rows), default=0),
        block_columns=draw(st.integers(1, 11)),
        kv_writes=draw(st.integers(decodes, decodes + tokens)),
        chunks=len(grid.seq_idx),
        checkpoints=draw(st.integers(0, inner)),
        logits=decodes + draw(st.integers(0, len(rows))),
    )


class TestBuckets:
    @given(steps())
    def test_they_hold_every_step_up_to_their_limit(self, shape):
        fitting = BUCKETS.smallest(shape)
        if shape.prefill_tokens > 100:
            assert fitting is None
            return
        assert fitting is not None
        assert all(has >= needs for has, needs in zip(fitting, shape, strict=True))
        assert BUCKETS.smallest(fitting) == fitting
        assert fitting.rows <= 48
        assert fitting.decodes < max(2, 4 * shape.decodes)

    def test_a_step_that_wants_prompt_log_probs_fits_nowhere(self):
        shape = StepShape(0, 1, 16, 16, 2, 16, 5, 0, 16)
        assert BUCKETS.smallest(shape) is None
        assert BUCKETS.smallest(shape._replace(logits=1)) is not None

    def test_there_are_few(self):
        decode = {
            BUCKETS.smallest(StepShape(rows, 0, 0, 0, blocks, rows, 0, 0, rows))
            for rows in range(1, 25)
            for blocks in range(1, 12)
        }
        assert len(decode) == 6 * 5
        tokens = {
            BUCKETS.smallest(StepShape(0, 1, n, n, 1, n, n // 4 + 1, 0, 1)).prefill_tokens
            for n in range(1, 101)
        }
        assert tokens == {16, 24, 32, 48, 64, 96, 100}

    def test_decode_steps_alone(self):
        buckets = GraphBuckets(8, 4, max_prefill_tokens=0, chunk_size=4, block_size=8)
        assert buckets.smallest(StepShape(3, 0, 0, 0, 3, 3, 0, 0, 3)) is not None
        assert buckets.smallest(StepShape(3, 1, 1, 1, 3, 3, 1, 0, 3)) is None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type:
    return recording(monkeypatch)


PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((37, 5, 64, 20, 41, 33))]


@pytest.mark.usefixtures("kind")
class TestEngine:
    def test_answers_are_the_oracles(self, recorded):
        engine = graphed_engine()
        shared = [[*PROMPTS[0], *tail] for tail in ([1, 2], [3], list(range(30)))]
        for prompts in (PROMPTS, shared, PROMPTS[:2]):
            serve_checked(engine, prompts, length=9)
        assert engine.context.cache_stats().num_resumed_tokens > 0
        kinds = {shape.prefills == 0 for shape in engine.core.step_runner.graphs.shapes}
        assert kinds == {True, False}
        assert recorded.captures == len(engine.core.step_runner.graphs.shapes)

    def test_decodes_of_few_rows_have_products_of_their_own(self, recorded, monkeypatch):
        sizes = list[int]()

        def product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
            sizes.append(len(rows))
            return torch.mm(rows, weight).to(dtype)

        monkeypatch.setattr(few_rows, "is_taken", lambda rows, weight: True)
        monkeypatch.setattr(few_rows, "product", product)
        engine = graphed_engine(min_decode_tokens=8, max_tokens_per_step=256)  # as with batch invariance
        serve_checked(engine, PROMPTS, length=9)
        decodes = {shape.tokens for shape in engine.core.step_runner.graphs.shapes if not shape.prefills}
        assert decodes == set(sizes) == {8}
        sizes.clear()
        engine.reset_prefix_cache()
        before = recorded.captures
        serve_checked(engine, PROMPTS, length=9)
        assert recorded.captures == before
        assert set(sizes) == {8}  # a captured step has them, too

    def test_a_known_shape_is_not_captured_again(self, recorded):
        engine = graphed_engine()
        serve_checked(engine, PROMPTS[:1], length=9)
        before = recorded.captures
        engine.reset_prefix_cache()
        serve_checked(engine, PROMPTS[:1], length=9)
        assert recorded.captures == before > 0

    def test_no_more_than_allowed_of_each_kind(self, recorded):
        engine = graphed_engine(max_graphs=1)
        serve_checked(engine, PROMPTS, length=9)
        assert sorted(shape.prefills == 0 for shape in engine.core.step_runner.graphs.shapes) == [False, True]

    def test_a_step_of_few_rows_takes_the_graph_of_more_where_there_is_no_room(self, recorded):
        runner = GraphRunner(small_model().state_spec(), replace(BUCKETS, min_decode_tokens=8), 1)
        few, more = (StepShape(rows, 0, 0, 0, 1, rows, 0, 0, rows) for rows in (3, 20))
        padded = [runner.padded(shape) for shape in (few, more)]
        assert [shape and shape.decodes for shape in padded] == [8, 32]
        runner._graphs[padded[1]] = Recorded(small_model(), None, None)
        assert runner.padded(few) == runner.padded(more) == padded[1]
        runner._graphs.clear()
        runner._graphs[padded[0]] = Recorded(small_model(), None, None)
        assert [runner.padded(few), runner.padded(more)] == [padded[0], None]

    def test_prompt_log_probs_and_draws_go_along(self, recorded):
        engine, eager = graphed_engine(), small_engine()
        params = [
            ms.SamplingParams(max_tokens=6, return_log_probs=True, skip_prompt_log_probs=False),
            ms.SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=3),
        ]
        results, expected = (e.generate(PROMPTS[:2], params) for e in (engine, eager))
        for result, other in zip(results, expected, strict=True):
            assert result.tokens == other.tokens
        assert results[0].prompt_log_probs == pytest.approx(expected[0].prompt_log_probs, abs=1e-9)

    def test_pools_that_moved_drop_the_graphs(self, recorded):
        engine = graphed_engine()
        serve_checked(engine, PROMPTS[:1], length=4)
        assert engine.core.step_runner.graphs.shapes
        engine.suspend()
        assert not engine.core.step_runner.graphs.shapes
        assert engine.core.step_runner.graphs._kv_cache is None  # it would keep the pools' memory
        engine.resume()
        serve_checked(engine, PROMPTS[:1], length=4)
        assert engine.core.step_runner.graphs.shapes

    def test_other_weights_drop_the_graphs(self, recorded):
        engine = graphed_engine()
        serve_checked(engine, PROMPTS[:1], length=4)
        engine.set_weights_version(2)
        assert not engine.core.step_runner.graphs.shapes

    def test_a_failed_step_captures_nothing(self, recorded):
        engine = graphed_engine()
        request = engine.add_request(PROMPTS[0], ms.SamplingParams(return_log_probs=True))
        model = engine.model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "model", lambda inputs: model(inputs)[:0])
            with pytest.raises(ValueError, match="accepted: logits of shape"):
                engine.step()
        assert recorded.captures == 0
        assert_answers(PROMPTS[0], run_checked(engine)[request])

    @pytest.mark.parametrize("error", [RuntimeError, ValueError])
    def test_a_model_that_cannot_be_captured_runs_on_without(self, monkeypatch, error):
        def refuse(*_: object) -> None:
            raise error("operation not permitted when stream is capturing")

        monkeypatch.setattr(cuda_graphs, "CapturedForward", refuse)
        engine = graphed_engine()
        with pytest.warns(UserWarning, match="cannot be captured.*not permitted"):
            result = engine.generate([PROMPTS[0]], ms.SamplingParams(return_log_probs=True))[0]
        assert_answers(PROMPTS[0], result)
        serve_checked(engine, PROMPTS[1:3])
        assert not engine.core.step_runner.graphs.shapes

    def test_none_on_a_cpu(self):
        engine = small_engine(num_cuda_graphs=8)
        assert engine.core.step_runner.graphs is None
        serve_checked(engine, PROMPTS[:1])


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"num_cuda_graphs is 0; accepted: "):
        small_engine(num_cuda_graphs=0)
