"""`python -m mambaslots.mcore` on a script that knows nothing of us, and the counts of a context."""

import json
import os
import re
from pathlib import Path
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
import torch
from mambaslots.mcore.run_script import WITHOUT_CUDA
from mcore.engine_cases import tokens
from oracle.fresh_process import run_code, run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "mcore" / "serve_one_prompt.py"


AS_MAIN = """
import runpy, sys
name = sys.argv.pop(1)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def run(*command: str | Path, exit_code: int = 0, warm: bool = False) -> dict[str, Any]:
    """What `python command` prints on its last line, and `stderr`, without mcore_rig's own settings.

    `warm`: megatron-core is imported already, with these settings.
    """
    settings = {name: value for name, value in os.environ.items() if name not in WITHOUT_CUDA}
    paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = settings | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = list(map(str, command))
    if words[0] == "-m":
        done = run_code(AS_MAIN, *words[1:], env=environment, warm=warm)
    else:
        done = run_script(*words, env=environment)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr.splitlines()}


@pytest.fixture(scope="module")
def right_answers(model: Any) -> list[list[int]]:
    """What the script's engine answers without a cache, in this process."""
    engine = mcore_rig.make_engine(model, prefix_caching=False)
    (one,) = mcore_rig.serve(engine, [tokens(2 * mcore_rig.BLOCK + 1, 4)])
    return [one.tokens] * 2


@pytest.mark.long
def test_the_script_says_the_same_without_a_cache(right_answers: list[list[int]]) -> None:
    assert run(SCRIPT, "--no-cache")["answers"] == right_answers


def documented(start: str) -> list[str]:
    """The command of docs/megatron.md that begins with `start` and names a script, word by word."""
    lines = (ROOT / "docs" / "megatron.md").read_text().splitlines()
    command = next(line for line in lines if line.startswith(start) and "SCRIPT" in line)
    return [word for word in command.split() if word != "ARGS..."]


def ours(stderr: list[str]) -> list[str]:
    return [
        line.removeprefix("mambaslots.mcore: ") for line in stderr if line.startswith("mambaslots.mcore:")
    ]


def test_a_script_that_knows_nothing_of_us_serves_right_answers_from_our_cache_and_we_say_so(
    right_answers: Any, tmp_path: Path
) -> None:
    python, *command = documented("python -m mambaslots.mcore --")
    assert python == "python"
    written = tmp_path / "stats.json"
    names = {"SCRIPT": str(SCRIPT), "stats.json": str(written)}
    command = [names.get(word, word) for word in command]
    ran = run(*command, "--fail", "-x", "y", exit_code=3, warm=True)
    assert ran["answers"] == right_answers
    assert ran["resumed"] == [0, 64]
    assert ran["arguments"] == ["--fail", "-x", "y"]
    assert Path(ran["script"]) == SCRIPT
    lines = ours(ran["stderr"])
    if not torch.cuda.is_available():
        assert lines.pop(0).endswith("; setting TRITON_INTERPRET=1 MAMBA_DETERMINISTIC=1")
    assert re.fullmatch(
        r"mambaslots 0\.\d+\.\d+, megatron-core 0\.\d+\.\d+, torch 2\..*: (18|20) methods and the allocator "
        r"replaced; plan: decode=rolling,prefill_interval=1024",
        lines[0],
    )
    assert lines[1:] == [
        "32 durable slots (0.1 MiB), 12 scratch slots (0.0 MiB), 3.0 KiB a state",
        "1 context built",
        "  context 1: requests 2, prompt tokens 130, resumed 64 (hit rate 49.2%), computed 66",
        "    computed by reason: never_seen 65, partial_block 1",
        "    states: 1 of 32 slots hold one, 1 taken, 0 evicted, 0 planned and dropped",
    ]
    report = json.loads(written.read_text())
    assert (report["exit_code"], report["rank"]) == (3, 0)
    assert report["contexts"][0]["num_resumed_tokens"] == 64


@pytest.mark.long
def test_under_torchrun_rank_0_speaks_and_every_rank_writes_its_statistics(tmp_path: Path) -> None:
    torchrun, *options = documented("torchrun")
    assert torchrun == "torchrun"
    where = options.index("SCRIPT")
    command = [*options[:where], "--json", str(tmp_path / "stats.json"), str(SCRIPT), *options[where + 1 :]]
    on_ranks = ("-m", "torch.distributed.run", "--standalone")
    ran = run(*on_ranks, *command)
    alone = run(*on_ranks, *options[: options.index("-m")], SCRIPT, "--no-cache")
    assert ran["answers"] == alone["answers"]  # of a model split over 2 ranks, which has weights of its own
    assert sum("methods and the allocator replaced" in line for line in ours(ran["stderr"])) == 1
    assert ours(ran["stderr"]).count("1 context built") == 1
    ranks = [json.loads((tmp_path / name).read_text()) for name in ("stats.json", "stats-rank1.json")]
    assert [each["rank"] for each in ranks] == [0, 1]
    assert [each["contexts"][0]["num_resumed_tokens"] for each in ranks] == [64, 64]


@pytest.mark.long
def test_a_script_without_a_cache_is_warned(right_answers: Any) -> None:
    ran = run("-m", "mambaslots.mcore", SCRIPT, "--no-cache")
    assert ran["answers"] == right_answers
    lines = [line for line in ours(ran["stderr"]) if "enable_prefix_caching is False" in line]
    assert [line.split(":")[0] for line in lines] == [
        "context 1 caches no states",
        "  context 1 cached no states",
    ]


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
    assert stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots == 3
    assert stats.num_states_committed - stats.num_states_evicted >= stats.num_committed_slots
