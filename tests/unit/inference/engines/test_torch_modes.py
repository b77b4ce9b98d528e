"""An engine serves alike whatever torch's inference mode and default device were when it was built."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import pytest
import torch
from oracle.budget import thinned
from oracle.drafters import RightDrafter
from oracle.serving import assert_answers, random_tokens, serve_checked, small_config, small_engine

BLOCK = 8
LONG, SHORT, OTHER = random_tokens(61, seed=1), random_tokens(11, seed=2), random_tokens(32, seed=3)
PARAMS = ms.SamplingParams(max_tokens=8, return_log_probs=True)
Operation = Callable[[ms.DynamicInferenceEngine], object]


# ---- the default device


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "set_default_device": lambda: default_device("meta"),
    "with torch.device": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"num_speculative_tokens": 3, "make_drafter": RightDrafter},
    "n-grams": {"num_speculative_tokens": 3},
    "in place": {"in_place": True, "num_speculative_tokens": 2},
    "few slots": {"num_mamba_slots": 2, "num_kv_blocks": 20, "max_tokens_per_step": 13},
    "poisoned": {"poisoned": True},
}


def operate(engine: ms.DynamicInferenceEngine, folder: Path) -> list[ms.RequestResult]:
    """Everything that an engine can do; the results of the requests that ended."""
    engine.set_weights_version(1)
    results = engine.generate([LONG, SHORT], PARAMS)
    stream = engine.stream(LONG, PARAMS)
    next(stream)
    engine.cancel(engine.add_request(OTHER, PARAMS))
    engine.warm(OTHER)
    pinned = engine.pin(OTHER)
    list(stream)
    assert stream.result is not None
    results.append(stream.result)
    msd.save_prefixes(engine, folder)
    engine.unpin(pinned)
    running = engine.stream(OTHER, PARAMS)
    next(running)
    engine.suspend()
    engine.resume()
    msd.load_prefixes(engine, folder)
    list(running)
    assert running.result is not None
    results += [running.result, *engine.generate([OTHER, LONG], PARAMS)]
    engine.reset_prefix_cache()
    results += engine.generate([SHORT], PARAMS)
    engine.set_weights_version(2)
    engine.check_integrity()
    engine.reset()
    return results + engine.generate([OTHER], PARAMS)


def essence(results: list[ms.RequestResult]) -> list[tuple[object, ...]]:
    return [(r.tokens, r.log_probs, r.num_resumed_tokens, r.finish_reason) for r in results]


@cache
def expected(settings: str, kind: str) -> list[tuple[object, ...]]:
    with TemporaryDirectory() as folder:
        return essence(operate(small_engine(**SETTINGS[settings]), Path(folder) / "outside"))


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        *(("set_default_device", settings) for settings in SETTINGS),
        ("with torch.device", "plain"),
        ("inference_mode", "plain"),
        ("inference_mode", "in place"),
    ],
)
@pytest.mark.sampled(settings=("plain",))
def test_an_engine_built_and_served_in_a_mode_answers_the_same(
    mode: str, settings: str, kind: str, tmp_path: Path
) -> None:
    outside = expected(settings, kind)
    with MODES[mode]():
        results = operate(small_engine(**SETTINGS[settings]), tmp_path / "inside")
    assert essence(results) == outside
    for prompt, result in zip([LONG, SHORT, LONG, OTHER, OTHER, LONG, SHORT, OTHER], results, strict=True):
        assert_answers(prompt, result)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mode", list(MODES))
def test_a_model_built_in_a_mode_is_the_same(mode: str) -> None:
    outside = ms.models.HybridLM(small_config(), seed=5)
    with MODES[mode]():
        inside = ms.models.HybridLM(small_config(), seed=5)
    parameters = dict(inside.named_parameters())
    assert parameters
    for name, parameter in outside.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


# ---- inference mode, left between two calls


def in_the_middle(num_steps: int, **settings: object) -> ms.DynamicInferenceEngine:
    """An engine built in inference mode whose request, of `LONG`, has made some steps."""
    with torch.inference_mode():
        plan = ms.CheckpointPlan.every_block(BLOCK)
        engine = small_engine(checkpoint_plan=plan, max_tokens_per_step=16, **settings)
        engine.add_request(LONG, PARAMS)
        for _ in range(num_steps):
            engine.step()
    return engine


def resume_inside(engine: ms.DynamicInferenceEngine) -> None:
    engine.suspend()
    with torch.inference_mode():
        engine.resume()
    for _ in range(5):
        engine.step()
    engine.reset_prefix_cache()


OPERATIONS: dict[str, Operation] = {
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "weights_version": lambda engine: engine.set_weights_version(1),
    "suspend": lambda engine: (engine.suspend(), engine.resume()),
    "resume inside": resume_inside,
}


@pytest.mark.sampled(settings=("in place",))
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("settings", ["plain", "drafts", "in place"])
def test_an_engine_of_inference_mode_is_operated_outside_it(name: str, settings: str) -> None:
    num_in_durable_slot = 0
    for num_steps in thinned(range(2, 8), 3):
        engine = in_the_middle(num_steps, **SETTINGS[settings])
        allocations = [r.allocation for r in engine.context.requests if r.allocation is not None]
        num_in_durable_slot += sum(allocation.path.state_slot >= 0 for allocation in allocations)
        OPERATIONS[name](engine)
        finished: list[ms.RequestResult] = []
        while engine.has_unfinished_requests():
            finished += engine.step().finished
            engine.check_integrity()
        for result in finished:
            assert_answers(LONG, result)
        serve_checked(engine, [LONG, SHORT])
    assert num_in_durable_slot or settings == "in place"
