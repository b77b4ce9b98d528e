"""`python -m mambaslots.mcore` on a script that knows nothing of us, and the counts of a context."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
import torch
from mambaslots.mcore.__main__ import WITHOUT_CUDA
from mcore.engine_cases import tokens

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "mcore" / "serve_one_prompt.py"


def run(*command: str | Path, exit_code: int = 0) -> dict[str, Any]:
    """What the script prints on its last line, and `stderr`; mcore_rig's own settings are not inherited."""
    settings = {name: value for name, value in os.environ.items() if name not in WITHOUT_CUDA}
    paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *command],
        env=settings | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr.splitlines()}


@pytest.fixture(scope="module")
def right_answers(model: Any) -> list[list[int]]:
    """What the script's engine answers without a cache, in this process."""
    engine = mcore_rig.make_engine(model, prefix_caching=False)
    (one,) = mcore_rig.serve(engine, [tokens(2 * mcore_rig.BLOCK + 1, 4)])
    return [one.tokens] * 3


@pytest.mark.long
def test_the_script_says_the_same_without_a_cache(right_answers: list[list[int]]) -> None:
    assert run(SCRIPT, "--no-cache")["answers"] == right_answers


def test_a_script_that_knows_nothing_of_us_serves_right_answers_from_our_cache(right_answers: Any) -> None:
    ours = run("-m", "mambaslots.mcore", SCRIPT, "--fail", "-x", "y", exit_code=3)
    assert ours["answers"] == right_answers
    assert ours["resumed"] == [0, 64, 64]
    assert ours["arguments"] == ["--fail", "-x", "y"]
    assert Path(ours["script"]) == SCRIPT
    lines = [line for line in ours["stderr"] if line.startswith("mambaslots.mcore:")]
    setting = "setting TRITON_INTERPRET=1 MAMBA_DETERMINISTIC=1"
    assert lines == (
        [] if torch.cuda.is_available() else [f"mambaslots.mcore: no CUDA device is visible; {setting}"]
    )


@pytest.mark.long
def test_the_same_script_without_the_runner_is_on_stock(right_answers: Any) -> None:
    stock = run(SCRIPT)
    assert not stock["mambaslots"]
    assert stock["answers"] != right_answers  # fault 1


@pytest.mark.long
def test_stats_account_for_every_prompt_token_and_every_slot(model: Any) -> None:
    prompts = [tokens(2 * mcore_rig.BLOCK + 9, 1), tokens(3 * mcore_rig.BLOCK, 2)]
    with mambaslots.mcore.installed():
        engine = mcore_rig.make_engine(model, num_mamba_slots=3)
        served = mcore_rig.serve(engine, [prompts[0], prompts[1], prompts[0], prompts[1]])
        stats = mambaslots.mcore.stats(engine.context)
    assert stats.num_requests == 4
    assert stats.num_prompt_tokens == sum(one.num_prompt_tokens for one in served)
    assert stats.num_resumed_tokens == sum(one.num_resumed_tokens for one in served) > 0
    assert stats.num_computed_tokens == stats.num_prompt_tokens - stats.num_resumed_tokens
    assert sum(stats.computed_by_reason.values()) == stats.num_computed_tokens
    assert stats.num_recomputed_tokens == 0
    assert stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots == 3
    assert stats.num_states_committed - stats.num_states_evicted >= stats.num_committed_slots
