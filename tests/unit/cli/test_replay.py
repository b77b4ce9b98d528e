"""`mambaslots replay`: what it prints and writes, and how it says mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from mambaslots.cli.main import main
from mambaslots.replay.generate import KINDS
from mambaslots.replay.report import TraceSource, load_trace

SMALL = ("--requests", "60", "--budget-gb", "1,4")
FIELDS = {
    "trace", "row", "num_requests", "state_gb", "kv_gb", "total_gb", "share", "flops_saved", "refusal",
    "prompt_tokens", "resumed_tokens", "lost_by_reason", "num_states_taken", "state_capacity",
}  # fmt: skip


@pytest.fixture
def own_trace(tmp_path: Path) -> Path:
    """Two conversations and a stranger, token by token."""
    asked = [
        (0.0, "a", 0, 600), (1.0, "b", 5000, 700), (20.0, "a", 0, 1300), (21.0, "b", 5000, 1500),
        (40.0, "c", 9000, 300), (50.0, "a", 0, 2000),
    ]  # fmt: skip
    lines = [
        {"arrival_s": at_s, "session": name, "tokens": list(range(first, first + length)), "answer_count": 9}
        for at_s, name, first, length in asked
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_table_the_sentence_and_the_files(
    own_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "r.json"
    words = ["replay", "--trace", f"chat,{own_trace}", *SMALL, "--total-gb", "22"]
    assert main([*words, "--json", str(written)]) == 0
    printed = capsys.readouterr()
    results = json.loads(written.read_text())
    assert printed.out.count("% of the prompt tokens resumed") == 2
    assert "How much memory do I give it?" in printed.out
    assert results["answers"] == list(dict.fromkeys(printed.out.split("give it?\n")[1].splitlines()))
    assert printed.err.splitlines()[-1].startswith("replay: 8 of 8 cells, ")
    assert results.keys() == {"settings", "unlimited", "results", "answers"}
    settings = results["settings"]
    assert settings["trace"] == ["chat", str(own_trace)]
    assert settings["shape"]["name"] == "nemotron-h-8b"
    assert (settings["max_requests"], settings["requests"], settings["seed"]) == (32, 60, 0)
    for one in results["results"]:
        assert one.keys() == FIELDS
        assert one["resumed_tokens"] + sum(one["lost_by_reason"].values()) == one["prompt_tokens"]
        assert one["share"] == one["resumed_tokens"] / one["prompt_tokens"]
        assert 0 <= one["flops_saved"] <= 1
    order = [(one["row"], one["state_gb"], one["total_gb"]) for one in results["results"]]
    assert order == 2 * [("ours", 1, None), ("ours", 4, None), ("ours", None, 22), ("unlimited", None, None)]
    assert [one["num_requests"] for one in results["results"]] == [60] * 4 + [6] * 4
    *_, unlimited = results["results"]
    assert unlimited["share"] == results["unlimited"]["own.jsonl"] == results["results"][4]["share"]


def test_requests_can_come_faster() -> None:
    slow, fast = (load_trace(TraceSource("chat", 0, 50, speed)) for speed in (1, 8))
    assert fast.name == "chat, seed 0, 8 x as fast"
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert other.arrival_s == one.arrival_s / 8
        assert other.session == one.session
        assert other.prompt.tolist() == one.prompt.tolist()


@pytest.mark.long
def test_runs_are_equal(own_trace: Path, tmp_path: Path) -> None:
    written: list[dict[str, Any]] = []
    for run in ("1", "2"):
        path = tmp_path / f"{run}.json"
        words = ["replay", "--trace", str(own_trace), "--budget-gb", "0.2,1"]
        assert main([*words, "--json", str(path)]) == 0
        written.append(json.loads(path.read_text()))
    assert written[0] == written[1]


def test_one_after_another_with_another_model(own_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "--trace", str(own_trace), "--model", "qwen3.5-35b", "--state-dtype", "int8"]
    assert main([*words, "--budget-gb", "0.05,1", "--concurrency", "1", "--kv-gb", "3"]) == 0
    assert "0.05+3 GB" in capsys.readouterr().out


def test_a_budget_that_buys_nothing_is_refused_in_its_cell(
    own_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--trace", str(own_trace), "--budget-gb", "0.01,1", "--total-gb", "2"]) == 0
    printed = capsys.readouterr().out
    assert "ours at 0.01+20 GB: state_gb is 0.01" in printed
    assert "ours at 2 GB in all: total_gb is 2" in printed
    assert printed.count("refused") == 2
    assert main(["replay", "--trace", str(own_trace), "--budget-gb", "0.01"]) == 1
    assert "ours at 0.01+20 GB: state_gb is 0.01" in capsys.readouterr().out


def test_policies_of_ones_own_are_rows(
    own_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "--trace", str(own_trace), "--budget-gb", "0.2", "--policy", "value,lru"]
    assert main([*words, "--plan", "every=256"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["ours-value", "ours-lru"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "cat"], f"'cat'; accepted: {', '.join(KINDS)}, all, or a file that is there"),
        (["--trace", ","], "','; accepted: one or more, divided by commas"),
        (["--budget-gb", "2,x"], "'x'; accepted: a number > 0"),
        (["--total-gb", "0"], "'0'; accepted: a number > 0"),
        (["--concurrency", "0"], "'0'; accepted: an integer >= 1"),
        (["--state-dtype", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_a_wrong_option_is_said_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *words])
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt"], "model is 'gpt'; accepted: nemotron-h-8b, qwen3.5-35b, or the path"),
        (
            ["--block-size-tokens", "100"],
            "--block-size-tokens is 100; accepted for nemotron-h-8b: a multiple",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *words]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"mambaslots replay: {said}")
    assert stderr.count("\n") == 1


OWN = {
    "broken.py": "class Own(:",
    "raises.py": "import no_such_module",
    "none.py": "Own = None",
    "name.py": "Own = 'lru'",
    "lacks.py": "class Own:\n    def insert(self, slots): ...",
}


@pytest.mark.parametrize("option", ["policy", "plan"])
@pytest.mark.parametrize("file", [*OWN, "missing.py"])
def test_a_policy_or_plan_of_ones_own_that_is_none_is_said_in_one_line(
    option: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / file
    if file in OWN:
        path.write_text(OWN[file])
    assert main(["replay", f"--{option}", f"{path}:Own"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"mambaslots replay: {option} is ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "fifo"], "policy is 'fifo'; accepted: one of"),
        (["--policy", "README.md:X"], "policy is 'README.md:X'; accepted: one of 'value', 'lru', "),
        (["--plan", "sometimes"], "plan has 'sometimes'"),
    ],
)
def test_a_policy_or_plan_without_a_meaning_is_a_wrong_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *words]) == 2
    assert capsys.readouterr().err.startswith(f"mambaslots replay: {said}")
