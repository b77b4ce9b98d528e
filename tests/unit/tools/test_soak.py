"""The soak runs for a few seconds, notices what is wrong, and says so."""

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from mambaslots.inference.engines.engine_core import EngineCore
from oracle.ledger import LeftWrongError

pytestmark = pytest.mark.usefixtures("without_logs")

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    """The script as a module: a process of its own would spend most of its time on importing torch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(TOOLS)
        yield importlib.import_module("soak")


def run(soak: ModuleType, *arguments: str) -> int:
    with patch.object(sys, "argv", ["soak.py", *arguments]):
        return soak.main()


def test_a_short_soak(soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    code = run(soak, "--minutes", "0.04", "--rounds", "engine", "--seed", "5", "--json", str(figures))
    printed = capsys.readouterr().out
    assert code == 0, printed
    last = printed.splitlines()[-1]
    assert "0 mismatches" in last
    assert "MiB" in last
    written = json.loads(figures.read_text())
    assert written["rounds"]["engine"] > 0
    for name in ("requests", "comparisons", "hits", "resumed_tokens", "tokens_compared"):
        assert written[name] > 0, name


@pytest.mark.parametrize("shape", [*(pytest.param(one, marks=pytest.mark.long) for one in range(3)), 3])
def test_the_rounds_of_a_gpu_on_the_cpu(soak: ModuleType, shape: int) -> None:
    """The same engines in float64: a mistake in the script is not first seen on a GPU."""
    engine = importlib.import_module("soaking.engine")
    worlds = importlib.import_module("soaking.worlds")

    def world(self: object, random: Random, turn: int) -> object:
        return worlds.bits_world(random, turn, "cpu")

    with patch.object(engine.EngineRound, "_new_world", world):
        tally = engine.run_round(shape, 1.0, "cpu")
    assert not tally.mismatches
    assert tally.comparisons > 0


def test_a_cache_that_keeps_states_of_old_weights_is_noticed(soak: ModuleType, tmp_path: Path) -> None:
    engine = importlib.import_module("soaking.engine")
    with patch.object(EngineCore, "_clear_prefixes", lambda _: None):
        one = engine.EngineRound(0, "cpu", tmp_path)
        one._share_compared = 1.0
        with pytest.raises(LeftWrongError, match=r"answer|stale"):
            serve_and_swap(one)


def serve_and_swap(one: Any) -> None:
    for _ in range(20):
        one._do(one._serve)
        one._do(one._swap_weights)
        one._mend()


def test_a_round_that_raises_is_a_mismatch(soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = importlib.import_module("soaking.rounds")
    broken = ModuleType("soaking.engine")
    with patch.dict(sys.modules, {"soaking.engine": broken}):
        tally = rounds.run_round("engine", 7, 1.0, "cpu")
    assert tally.mismatches[0].startswith("engine round, seed 7: AttributeError")
    assert "Traceback" in capsys.readouterr().err


def test_what_makes_a_soak_fail(soak: ModuleType) -> None:
    done = soak.Soak(["engine"], 0, 300.0, "cpu")
    tally, mib = done.tally, 1 << 20
    assert done.faults()[:2] == ["nothing was resumed", "nothing was compared"]
    tally.hits = tally.comparisons = 1
    required = soak.required_events("engine", "cpu")
    assert {"cancelled", "int8 rounds", "imports"} <= set(required)
    assert f"engine rounds: never {required[0]}" in done.faults()
    tally.events = Counter(required)
    assert done.faults() == ["memory was read 0 times only"]
    done.memory.resident = [1000 * mib] * 10
    done.memory.on_device = [0] * 10
    assert done.faults() == []
    done.memory.resident = [1000 * mib] * 5 + [1009 * mib] * 3 + [5000 * mib] * 2
    assert done.faults() == []
    done.memory.resident = [1000 * mib] * 5 + [1011 * mib] * 5
    assert done.faults() == ["resident memory grew from 1000.0 to 1011.0 MiB"]
    tally.mismatches.append("one")
    assert done.faults()[0] == "1 mismatches"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--minutes", "-1"], "'-1'; accepted: a number of minutes above 0"),
        (["--rounds", "engine,other"], "'other'; accepted: engine, server, replicas"),
        (["--repeat", "other", "1"], "'other'; accepted: engine, server, replicas"),
        (["--repeat", "engine", "one"], "'one'; accepted: a round's seed"),
    ],
)
def test_wrong_arguments(
    soak: ModuleType, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(soak, *arguments)
    assert text in capsys.readouterr().err


def test_prompts_are_short_and_of_all_shapes(soak: ModuleType) -> None:
    prompts = importlib.import_module("soaking.worlds")
    drawn = prompts.Prompts(Random(1), 50, 29)
    for _ in range(400):
        prompt = drawn.prompt()
        assert 1 <= len(prompt) <= 50
        assert set(prompt) <= set(range(29))
        drawn.finished(prompt)
    kinds = {f"prompts: {shape}" for shape in prompts.SHAPES}
    assert drawn.counts.keys() == kinds | {
        "prompts: repeated",
        "prompts: forked",
        "prompts: behind an answer",
    }
