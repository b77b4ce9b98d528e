"""The load test of a server, small: five clients talk, one is killed, each answer is the engine's own."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
from oracle.served import TINY_CODE, serving, small_config

ROOT = Path(__file__).parents[3]
CLIENTS, TURNS = 5, 3


@pytest.fixture
def server_load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import server_load

    return server_load


def test_five_clients_get_their_answers_and_a_killed_one_frees_its_slot(server_load: Any) -> None:
    loaded = ms.load(TINY_CODE, dtype=torch.float64)
    with serving(loaded, small_config(max_requests=4), model_name="tiny-code") as served:
        load = server_load.Load(
            served.url.removesuffix("/v1"), "tiny-code", TURNS, max_tokens=6, until_s=None, conversations=1
        )
        figures = asyncio.run(server_load.drive(load, CLIENTS, kills=1))
    figures |= {"wrong": server_load.check(load.answers, loaded, small_config())}
    figures |= {"growth": None, "exit_code": 0}
    assert server_load.failures_of(figures) == []
    assert (figures["requests"], figures["killed"]) == (CLIENTS * TURNS, 1)
    by_turn = figures["mean_cached_tokens_by_turn"]
    assert by_turn == sorted(by_turn)
    assert by_turn[1] > 0

    broken = load.answers[0][1]
    load.answers[0][1] = replace(broken, tokens=[*broken.tokens[:-1], (broken.tokens[-1] + 1) % 256])
    load.answers[1][2] = replace(load.answers[1][2], num_cached_tokens=0)
    load.answers[2][0] = replace(load.answers[2][0], text="of another conversation")
    load.answers[3][1] = replace(load.answers[3][1], num_prompt_tokens=1)
    wrong = server_load.check(load.answers, loaded, small_config())
    assert len(wrong) == 3
    assert server_load.num_not_resumed(load.answers) == 1


@pytest.mark.parametrize(
    ("samples", "growth"),
    [([], None), ([5.0] * 7, None), ([1.0, 2.0, 9.0, 9.0, 10.0, 10.0, 11.0, 10.0], 0.1), ([7.0] * 40, 0.0)],
)
def test_growth_is_that_of_the_last_quarter(
    server_load: Any, samples: list[float], growth: float | None
) -> None:
    assert server_load.growth_of(samples) == pytest.approx(growth)


@pytest.mark.long
def test_the_script_serves_a_load_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/server_load.py", "--clients", "5", "--seconds", "20"]
    command += ["--num-mamba-slots", "300", "--num-kv-blocks", "800", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["failed"] == []
    assert figures["requests"] >= 5
    assert "as it must be: yes" in done.stdout
