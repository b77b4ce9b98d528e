"""Captured steps on a GPU: the bits of eager ones, the CPU's tokens, no graph older than its pools."""

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.engines import cuda_graphs
from mambaslots.inference.engines.cuda_graphs import CapturedForward, GraphBuckets
from oracle.context_driver import make_request
from oracle.float32_rule import Comparison
from oracle.serving import random_tokens, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kind", "one_fla_configuration")]
BLOCK = 32
GREEDY = ms.SamplingParams(max_tokens=40, return_log_probs=True)
SHARED = random_tokens(70, 1)
PROMPTS = [
    *([*SHARED, *tail] for tail in ([1], [2, 3], random_tokens(90, 2))),
    *(random_tokens(length, length) for length in (5, 33, 64, 130, 200)),
]


def model_on(device: str, dtype: torch.dtype = torch.float32) -> ms.models.HybridLM:
    return tiny_model(dtype, device)


def engine_of(model: ms.models.HybridLM, **overrides: object) -> ms.DynamicInferenceEngine:
    settings: dict[str, object] = {
        "block_size_tokens": BLOCK, "max_requests": 6, "max_tokens_per_step": 192, "max_sequence_length": 400,
        "num_kv_blocks": 100, "num_mamba_slots": 50,
    }  # fmt: skip
    settings |= overrides
    if not settings.get("enable_prefix_caching", True):
        settings["num_mamba_slots"] = None
    return ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings))  # type: ignore[arg-type]


class TestBits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_replay_writes_and_returns_what_the_eager_step_does(self, dtype):
        """Prefills with states inside them, mixed steps and decode steps, all padded to their buckets."""
        model = model_on("cuda", dtype)
        context = engine_of(model, batch_invariant=False).context  # else steps end at the grid
        buckets = GraphBuckets.of(context)
        plan = ms.CheckpointPlan(prefill_interval=BLOCK)
        one, two = (make_request(random_tokens(n, n), plan) for n in (150, 40))
        for request in (one, two):
            request.chain = type(request.chain)(BLOCK)
        steps = [[(one, 70)], [(one, 192), (two, 20)], [(one, 1), (two, 192)], *[[(one, 1), (two, 1)]] * 3]
        for work in steps:
            chunks = [context.admission.schedule_request(request, budget) for request, budget in work]
            with torch.inference_mode():
                self._both_ways(
                    model, context, context.begin_step(chunks, lambda s: buckets.smallest(s) or s)
                )
            context.end_step()
            for (request, _), chunk in zip(work, chunks, strict=True):
                if chunk.samples_token:
                    request.tokens.append(11)
        assert context.cache_stats().num_states_committed > 3

    def _both_ways(self, model, context, inputs) -> None:
        assert GraphBuckets.of(context).smallest(inputs.shape) == inputs.shape
        pools = (*context.memory.state_pool.tensors, context.memory.kv_cache)
        before = [pool.clone() for pool in pools]
        logits = model(inputs)[: inputs.num_logits].clone()
        eager = [pool.clone() for pool in pools]
        for pool, saved in zip(pools, before, strict=True):
            pool.copy_(saved)
        graph = CapturedForward(model, inputs, None)
        for pool, saved in zip(pools, before, strict=True):
            assert torch.equal(pool, saved), "a capture wrote"
        assert torch.equal(graph.launch()[: inputs.num_logits], logits)
        for pool, expected in zip(pools, eager, strict=True):
            assert torch.equal(pool, expected)
        for pool, saved in zip(pools, before, strict=True):
            pool.copy_(saved)
        assert torch.equal(graph.launch()[: inputs.num_logits], logits), "a second launch differs"

    def test_padding_alone_writes_nothing(self):
        model = model_on("cuda")
        context = engine_of(model).context
        request = make_request(random_tokens(40, 1))
        request.chain = type(request.chain)(BLOCK)
        inputs = context.begin_step(
            [context.admission.schedule_request(request, 192)], GraphBuckets.of(context).smallest
        )
        for indices in (inputs.state_sources, inputs.state_destinations, inputs.chunks.destinations,
                        inputs.checkpoints.destinations, inputs.kv_write_positions):  # fmt: skip
            indices.fill_(-1)
        pool = context.memory.state_pool
        for states in pool.tensors:
            states.fill_(float("nan"))
        with torch.inference_mode():
            model(inputs)
        assert all(states.isnan().all() for states in pool.tensors)
        assert context.memory.kv_cache.count_nonzero() == 0


class TestTokens:
    @pytest.mark.parametrize("graphs", [None, 64], ids=["eager", "graphs"])
    @pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
    def test_they_are_the_cpus_by_the_rule_of_float32(self, graphs, cached, record_property):
        model = model_on("cpu")
        expected = engine_of(model, enable_prefix_caching=False).generate(PROMPTS, GREEDY)
        engine = engine_of(model_on("cuda"), enable_prefix_caching=cached, num_cuda_graphs=graphs)
        comparison = Comparison()
        for _ in range(2):  # the second time with all that the first left in the cache
            results = engine.generate(PROMPTS, GREEDY)
            for prompt, result, other in zip(PROMPTS, results, expected, strict=True):
                comparison.add(model, prompt, other.tokens, result.tokens)
        assert bool(engine.context.cache_stats().num_resumed_tokens) == cached
        assert not graphs or len(engine.core.step_runner.graphs.shapes) > 3
        print(f"{comparison.same} answers the same, {comparison.ties} parted at a tie")
        record_property("cases", {"answers compared with the CPU's": comparison.same + comparison.ties})

    def test_float64_is_exact(self):
        params = ms.SamplingParams(max_tokens=12, return_log_probs=True)
        cpu = engine_of(model_on("cpu", torch.float64)).generate(PROMPTS[:4], params)
        gpu_engine = engine_of(model_on("cuda", torch.float64), num_cuda_graphs=8)
        assert gpu_engine.core.step_runner.graphs is None
        for result, other in zip(gpu_engine.generate(PROMPTS[:4], params), cpu, strict=True):
            assert result.tokens == other.tokens
            assert result.log_probs == pytest.approx(other.log_probs, abs=1e-9)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_serves(self, dtype):
        engine = engine_of(model_on("cuda", dtype), num_cuda_graphs=64)
        first, again = (engine.generate(PROMPTS[:3], GREEDY) for _ in range(2))
        for result in (*first, *again):
            assert len(result.tokens) == 40
            assert all(-50 < value <= 0 for value in result.log_probs)


class TestDropping:
    def test_new_pools_and_new_weights_drop_the_graphs(self):
        engine = engine_of(model_on("cuda"), num_cuda_graphs=64)
        expected = engine.generate(PROMPTS[:3], GREEDY)
        assert engine.core.step_runner.graphs.shapes
        engine.suspend()
        assert not engine.core.step_runner.graphs.shapes
        occupied = torch.full((1 << 24,), float("nan"), device="cuda")  # where the pools may have been
        engine.resume()
        again = engine.generate(PROMPTS[:3], GREEDY)
        assert [r.tokens for r in again] == [r.tokens for r in expected]
        assert engine.core.step_runner.graphs.shapes
        engine.set_weights_version("new")
        assert not engine.core.step_runner.graphs.shapes
        assert occupied.isnan().all()

    def test_a_context_suspended_behind_the_engines_back(self):
        engine = engine_of(model_on("cuda"), num_cuda_graphs=64)
        expected = engine.generate(PROMPTS[3:5], GREEDY)
        engine.context.suspend()
        occupied = torch.full((1 << 20,), float("nan"), device="cuda")
        engine.context.resume()
        results = engine.generate(PROMPTS[3:5], GREEDY)
        assert [r.tokens for r in results] == [r.tokens for r in expected]
        assert occupied.isnan().all()


def same_answers(model, expected, results) -> None:
    """By the rule of float32: the shapes of products differ with padding, and with them the last bits."""
    comparison = Comparison()
    for prompt, result, other in zip(PROMPTS, results, expected, strict=False):
        comparison.add(model, prompt, other.tokens, result.tokens)


class TestOtherModels:
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
    @pytest.mark.parametrize("spoil", ["synchronises", "raises"])
    def test_one_that_cannot_be_captured_is_warned_of_and_served(self, spoil):
        """And leaves nothing of the broken capture behind: memory, streams and kernels work on."""
        model = model_on("cuda")

        class Spoilt:
            state_spec = staticmethod(model.state_spec)

            def __call__(self, inputs):
                if spoil == "synchronises":
                    inputs.token_ids.sum().item()
                elif torch.cuda.is_current_stream_capturing():
                    raise ValueError("not while capturing")
                return model(inputs)

        expected = engine_of(model).generate(PROMPTS[:4], GREEDY)
        engine = engine_of(Spoilt(), num_cuda_graphs=8)
        with pytest.warns(UserWarning, match="cannot be captured"):
            results = engine.generate(PROMPTS[:4], GREEDY)
        on_cpu = model_on("cpu")
        same_answers(on_cpu, expected, results)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
        assert not engine.core.step_runner.graphs.shapes
        other = engine_of(model, num_cuda_graphs=8)  # can still capture
        same_answers(on_cpu, expected, other.generate(PROMPTS[:4], GREEDY))
        assert other.core.step_runner.graphs.shapes

    def test_steps_beyond_every_captured_shape_run_eagerly(self, monkeypatch):
        monkeypatch.setattr(cuda_graphs, "MAX_PREFILL_TOKENS", 48)
        engine = engine_of(model_on("cuda"), num_cuda_graphs=2)
        expected = engine_of(model_on("cuda")).generate(PROMPTS, GREEDY)
        same_answers(model_on("cpu"), expected, engine.generate(PROMPTS, GREEDY))
        shapes = engine.core.step_runner.graphs.shapes
        assert len(shapes) >= 2
        assert max(shape.prefill_tokens for shape in shapes) <= 48


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [None, 16], ids=["eager", "graphs"])
def test_a_model_on_a_gpu_that_is_not_the_current_one(graphs):
    """Both in one process, by turns; kernels, copies, events and captures go where the weights are."""
    engines = [engine_of(model_on(f"cuda:{index}"), num_cuda_graphs=graphs) for index in (0, 1)]
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        first, second = (engine.generate(PROMPTS, GREEDY) for engine in engines)
        same_answers(model_on("cpu"), first, second)
    assert torch.cuda.current_device() == 0
    for engine in engines:
        assert not graphs or engine.core.step_runner.graphs.shapes
        engine.reset_prefix_cache()
