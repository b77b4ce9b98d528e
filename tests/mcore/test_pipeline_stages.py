"""Fault 15: the stages of a pipeline skip, evict and admit alike. Two processes run pipeline_stage.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
import torch
from mcore.pipeline_stage import REFUSED, SERVED, prompts
from mcore.recurrent_host import make_context

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "mcore" / "pipeline_stage.py"
LIMIT_SECONDS, PEER_SECONDS = 200.0, 5.0  # of both stages; of one after the other has failed

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
    """What the two stages report; a stage whose peer has failed, or that takes too long, is ended."""
    paths = [str(ROOT / "tests"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    errors = [folder / f"errors_of_stage_{rank}" for rank in range(2)]
    outputs = [folder / f"output_of_stage_{rank}" for rank in range(2)]
    stages = []
    for rank in range(2):
        with outputs[rank].open("w") as out, errors[rank].open("w") as err:
            command = [sys.executable, SCRIPT, str(rank), folder / "store", *arguments]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            stages.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
    end = time.monotonic() + LIMIT_SECONDS
    while None in (codes := [stage.poll() for stage in stages]) and time.monotonic() < end:
        if any(codes):
            end = min(end, time.monotonic() + PEER_SECONDS)
        time.sleep(0.05)
    for stage in stages:
        stage.kill()
        stage.wait()
    assert codes == [0, 0], "\n".join(f"== {path.name}\n{path.read_text()}" for path in errors)
    return [json.loads(path.read_text().splitlines()[-1]) for path in outputs]


def engine_arguments(folder: Path, pattern: str) -> tuple[str | Path, ...]:
    """What makes the stages serve the model of this pattern; the weights are in the folder."""
    torch.save(mcore_rig.hybrid_model(pattern.replace("|", "")).state_dict(), folder / "weights")
    return "engine", folder / "weights", pattern


@pytest.fixture(scope="module")
def reports(machine: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of contexts: the processes start once."""
    return run_stages(tmp_path_factory.mktemp("stages"), "contexts")


@pytest.mark.parametrize("name", SERVED)
def test_fault_15_the_poorest_stage_decides_for_all(name: str, reports: list[dict[str, Any]]) -> None:
    """Counts, and before every step: tokens to compute, free blocks, KV blocks and states that are found."""
    one, other = (report["ours"][name] for report in reports)
    assert one == other
    assert {what: one[what] for what in AGREED[name]} == AGREED[name]
    assert any(one["resumed"]) is (one["slots"] is not None)


@pytest.mark.parametrize("name", SERVED)
def test_fault_15_stock_stages_skip_differently(name: str, reports: list[dict[str, Any]]) -> None:
    one, other = (report["stock"][name] for report in reports)
    assert one["resumed"] != other["resumed"]


@pytest.mark.parametrize("name", REFUSED)
def test_fault_15_what_one_stage_cannot_do_every_stage_refuses(
    name: str, reports: list[dict[str, Any]]
) -> None:
    one, other = (report["ours"][name] for report in reports)
    assert one == other
    assert REFUSAL[name] in one["error"]


def test_a_model_without_mamba_layers_stays_one_without_states(machine: None) -> None:
    with mambaslots.mcore.installed():
        context = make_context(layers="**")
    assert not context.is_hybrid_model
    assert context.config.mamba_inference_state_config is None


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
