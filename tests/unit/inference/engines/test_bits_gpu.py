"""On a GPU, tokens and the bits of log-probs depend on a request alone: small models, every condition."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_fla_configuration")]
ROOT = Path(__file__).parents[4]
GROUPS = (
    "batch", "cache", "conversations", "cuts", "drafts", "preempted", "traffic", "prompts", "scores",
    "graphs", "together", "engine",
)  # fmt: skip
"""Of `promise.conditions.CONDITIONS`; a second process is the benchmark's own."""
PATTERNS = {"Mamba-2": "M-*-M-", "delta net": "G-*-G-", "mix": "M-G*C-M"}
MODELS = (*PATTERNS, "float16", "Nemotron-H-8B", "Qwen3.5-4B")


def served_model(name: str) -> Any:
    """A `ServingModel` of few layers."""
    import mambaslots as ms
    from serving.models import TINY, ServingModel, build
    from soaking.worlds import BITS_MODEL

    device = torch.device("cuda")
    if name not in PATTERNS and name != "float16":
        served = build(name, "tiny", device)
        served.serve()
        return served
    dtype = torch.float16 if name == "float16" else torch.bfloat16
    config = ms.models.HybridConfig(pattern=PATTERNS.get(name, PATTERNS["mix"]), dtype=dtype, **BITS_MODEL)
    model = ms.models.HybridLM(config, seed=0, device=device)
    return ServingModel(name, device, TINY, model, [], model.lm_head, 0, 0)


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Requests to one model, and their answers alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        patch.syspath_prepend(ROOT / "benchmarks")
        from promise.bench import BitsBench
        from promise.traffic import SMALL, Batch

        sizes = replace(
            SMALL,
            batches=(Batch(8, 1, 120, 8), Batch(8, 130, 500, 20, num_families=2), Batch(2, 600, 800, 140)),
            block=128, max_length=1024, step=1024, cuts=(256, 384), turn=150,
        )  # fmt: skip
        bench = BitsBench(served_model(request.param), sizes, {"batch_invariant": True})
        bench.serve_alone()
        yield bench


@pytest.mark.parametrize("group", GROUPS)
def test_no_condition_changes_bits(bench: Any, group: str) -> None:
    from promise.conditions import CONDITIONS

    bench.rows.clear()
    CONDITIONS[group](bench)
    bench.free()
    assert bench.rows
    for row in bench.rows:
        assert row.equal, row.line()
        assert row.positions > 100
    evidence = sum((Counter(row.evidence) for row in bench.rows), Counter())
    expected = {
        "cache": "resumed tokens", "cuts": "points cut at", "drafts": "drafted", "traffic": "random requests",
        "conversations": "resumed inside an answer", "preempted": "preempted requests",
        "scores": "resumed tokens", "together": "accepted",
    }  # fmt: skip
    if group in expected:
        assert evidence[expected[group]] > 0
    assert not evidence["off the grid"]
