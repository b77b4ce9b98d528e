"""Fault 15: the stages of a pipeline skip, evict and admit alike. pipeline_stage.py runs two."""

import json
import os
from pathlib import Path
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
import torch
from mambaslots.mcore.recurrence import SERIES, make_context
from mcore.pipeline_stage import REFUSED, SERVED, SERVED_BY_STOCK, prompts
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "mcore" / "pipeline_stage.py"

AGREED: dict[str, dict[str, int | None]] = {
    "budgets": {"slots": 5, "blocks": 41, "requests": 4},
    "layer counts": {"slots": 6, "blocks": 32, "requests": 4},
    "shares of memory": {"slots": 4, "blocks": 31, "requests": 8},
    "a budget on one stage": {"slots": None, "blocks": 65, "requests": 4},
    "no Mamba layers on one": {"slots": 16, "blocks": 65, "requests": 4},
    "no Mamba layers and no budget": {"slots": 16, "blocks": 65, "requests": 4},
}
PATTERNS = ["M*|M*", "M*-|*-"]
"""With Mamba layers on both stages, and with none on the second, shorter one."""
REFUSAL = {
    "no room for a state": "ValueError: prefix_caching_mamba_gb is 1e-07; accepted: enough",
    "no room for the requests": "ValueError: max_requests is 4; accepted: at most 2",
    "layers not said": "ValueError: pipeline stage 1 has no mamba_inference_state_config",
    "requests not said": "ValueError: max_requests is None; accepted: a number",
    "no attention layers": "NotImplementedError: pipeline stage 1 has the layers 'M-'",
}


def run_stages(folder: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """What the two stages report."""
    paths = [str(ROOT / "tests"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = run_script(str(SCRIPT), str(folder), *map(str, arguments), env=environment, warm=True)
    errors = "\n".join(f"== {path.name}\n{path.read_text()}" for path in folder.glob("errors_of_stage_*"))
    assert done.returncode == 0, f"{errors}\n{done.stderr}"
    return [json.loads((folder / f"output_of_stage_{rank}").read_text()) for rank in range(2)]


def engine_arguments(folder: Path, pattern: str) -> tuple[str | Path, ...]:
    """What makes the stages serve the model of this pattern; the weights are in the folder."""
    torch.save(mcore_rig.hybrid_model(pattern.replace("|", "")).state_dict(), folder / "weights")
    return "engine", folder / "weights", pattern


@pytest.fixture(scope="module")
def ours(machine: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of contexts: the processes start once."""
    return [report["ours"] for report in run_stages(tmp_path_factory.mktemp("stages"), "ours")]


@pytest.mark.parametrize("name", SERVED)
def test_fault_15_the_poorest_stage_decides_for_all(name: str, ours: list[dict[str, Any]]) -> None:
    """Counts, and before every step: tokens to compute, free blocks, KV blocks and states that are found."""
    one, other = (report[name] for report in ours)
    assert one == other
    assert {what: one[what] for what in AGREED[name]} == AGREED[name]
    assert any(one["resumed"]) is (one["slots"] is not None)


@pytest.mark.long
def test_fault_15_stock_stages_of_0_19_skip_differently(machine: None, tmp_path: Path) -> None:
    one, other = (report["stock"] for report in run_stages(tmp_path, "stock"))
    for name in SERVED_BY_STOCK:
        assert (one[name]["resumed"] != other[name]["resumed"]) is (SERIES == "0.19"), name


@pytest.mark.parametrize("name", REFUSED)
def test_fault_15_what_one_stage_cannot_do_every_stage_refuses(name: str, ours: list[dict[str, Any]]) -> None:
    one, other = (report[name]["error"] for report in ours)
    assert REFUSAL[name] in other
    if name == "no room for a state":
        assert "room for 16 durable slots on this pipeline stage, but another stage has" in one
    else:
        assert one == other


def test_a_model_without_mamba_layers_stays_one_without_states(machine: None) -> None:
    with mambaslots.mcore.installed():
        context = make_context(layers="**")
    assert not context.is_hybrid_model
    assert context.config.mamba_inference_state_config is None


def test_gated_delta_nets_have_states_where_megatron_core_gives_them_any(machine: None) -> None:
    with mambaslots.mcore.installed():
        context = make_context(layers="G*", enable_prefix_caching=False)
    assert context.is_hybrid_model is (SERIES == "0.20")
    assert context.num_mamba_layers == (SERIES == "0.20")


@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fault_15_engines_of_two_stages_answer_as_one_without_a_cache(pattern: str, tmp_path: Path) -> None:
    whole = mcore_rig.hybrid_model(pattern.replace("|", ""))
    without = mcore_rig.make_engine(whole, prefix_caching=False)
    answers = [one.tokens for one in mcore_rig.serve(without, prompts(), new_tokens=2)]
    reports = run_stages(tmp_path, *engine_arguments(tmp_path, pattern))
    one, other = (report["engine"] for report in reports)
    assert one == other
    assert one["answers"] == answers
    assert one["resumed"] == [0, 0, 64, 64]
