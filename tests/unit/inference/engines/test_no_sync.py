"""On a GPU a step waits once: for its tokens."""

import mambaslots as ms
import pytest
import torch
from oracle.serving import random_tokens, tiny_model
from oracle.synchronisation import no_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_fla_configuration")]
BLOCK = 32


def cuda_engine(
    graphs: int | None, dtype: torch.dtype = torch.float32, **overrides: object
) -> ms.DynamicInferenceEngine:
    model = tiny_model(dtype, "cuda")
    settings: dict[str, object] = {
        "block_size_tokens": BLOCK, "max_requests": 6, "max_tokens_per_step": 192, "max_sequence_length": 400,
        "num_kv_blocks": 100, "num_mamba_slots": 50, "num_cuda_graphs": graphs,
    }  # fmt: skip
    return ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings | overrides))  # type: ignore[arg-type]


SHARED = random_tokens(100, 1)
REQUESTS = [
    ([*SHARED, 1, 2, 3], ms.SamplingParams(max_tokens=40, return_log_probs=True)),
    (
        [*SHARED, 7],
        ms.SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, top_k=50, seed=1),
    ),
    (
        random_tokens(250, 2),
        ms.SamplingParams(max_tokens=9, temperature=1.0, seed=2, return_log_probs=True),
    ),
    (random_tokens(33, 3), ms.SamplingParams(max_tokens=40, num_top_log_probs=5)),
    (random_tokens(40, 4), ms.SamplingParams(max_tokens=3, skip_prompt_log_probs=False)),
]


def serve(engine: ms.DynamicInferenceEngine) -> list[list[int]]:
    plan = ms.CheckpointPlan(prefill_interval=BLOCK)
    ids = [engine.add_request(prompt, params, checkpoint_plan=plan) for prompt, params in REQUESTS]
    results = {}
    while engine.has_unfinished_requests():
        results.update({result.request_id: result.tokens for result in engine.step().finished})
    return [results[request_id] for request_id in ids]


def test_the_guard_sees_a_synchronisation():
    value = torch.ones(1, device="cuda")
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("graphs", [None, 32], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_steps_of_every_kind(dtype, graphs):
    engine = cuda_engine(graphs, dtype)
    first = serve(engine)  # compiles, tunes, captures
    engine.reset_prefix_cache()
    captured = engine.core.step_runner.graphs.shapes if engine.core.step_runner.graphs is not None else ()
    with no_synchronisation():
        again = serve(engine)
    assert again == first
    assert not graphs or (captured and engine.core.step_runner.graphs.shapes == captured)
    assert engine.context.cache_stats().num_resumed_tokens > 0


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("graphs", [None, 32], ids=["eager", "graphs"])
def test_one_copy_there_and_one_back(graphs):
    engine = cuda_engine(graphs)
    for seed in (5, 6):
        engine.add_request(random_tokens(40, seed), ms.SamplingParams(max_tokens=60))
    for _ in range(12):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        engine.step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("Memcpy HtoD" in name for name in names) == 1
    assert sum("Memcpy DtoH" in name for name in names) == 1


@pytest.mark.usefixtures("kind")
def test_a_step_that_samples_nothing_waits_for_nothing():
    """The chunks of a long prompt can all be launched while the device is still busy with the first."""
    engine = cuda_engine(None, max_tokens_per_step=64, num_kv_blocks=40)
    prompt = random_tokens(300, 7)
    engine.generate([prompt], ms.SamplingParams(max_tokens=2))
    engine.reset_prefix_cache()
    engine.add_request(prompt, ms.SamplingParams(max_tokens=2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    assert not engine.step().tokens
    assert not busy.query(), "the step waited for what ran before it"
    while engine.has_unfinished_requests():
        engine.step()
