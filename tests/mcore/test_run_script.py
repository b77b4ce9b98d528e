"""Options, exit codes and lines of `python -m mambaslots.mcore`, with scripts that build no context."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import mambaslots as ms
import mambaslots.mcore
import pytest
from mambaslots.mcore.__main__ import main
from mambaslots.mcore.installation import _replaced
from mambaslots.mcore.recurrence import make_context
from mambaslots.mcore.slot_allocator import HostSlotAllocator
from mcore_rig import cpu_as_gpu
from megatron.core.inference.contexts import dynamic_context

NOTHING_BUILT = "mambaslots.mcore: no DynamicInferenceContext was built, so mambaslots had nothing to do"


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arguments, path, environment and megatron-core as they were."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    if _replaced:
        mambaslots.mcore.uninstall()


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("mambaslots.mcore") and "no CUDA device" not in line]


# ---- options


def test_the_options_are_those_of_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--plan",
        "decode=64",
        "--eviction",
        "lru",
        "--no-answers",
    ]
    assert main([*words, script(tmp_path, "")]) == 0
    settings = HostSlotAllocator.settings
    assert settings.plan == ms.CheckpointPlan(decode=64)
    assert (settings.eviction, settings.cache_answers) == ("lru", False)
    line, _ = said(capsys)
    assert line.endswith("plan: decode=64; answers are not cached")


def test_arguments_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import sys; from pathlib import Path; Path(sys.argv[1]).write_text(repr(sys.argv))"
    )
    arguments = [path, str(tmp_path / "seen"), "--json", "--version", "--", "-x"]
    assert main(arguments) == 0
    assert (tmp_path / "seen").read_text() == repr(arguments)
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: SCRIPT"),
        (["none.py"], "argument SCRIPT: none.py is no file"),
        (["--plan", "x=1", "a.py"], "argument --plan: plan has 'x=1'; accepted: fields of CheckpointPlan"),
        (["--plan", "decode=0", "a.py"], "argument --plan: decode is 0; accepted: 'rolling' or 'off'"),
        (
            ["--plan", "states=4", "a.py"],
            "argument --plan: plan has 'states=4'; accepted: fields of CheckpointPlan",
        ),
        (
            ["--json", "/no/x.json", __file__],
            "argument --json: /no/x.json; accepted: a path in an existing d",
        ),
        (["--json", "/tmp", __file__], "argument --json: /tmp; accepted: a path in an existing directory"),
        (["--eviction", "fifo", "a.py"], "argument --eviction: invalid choice: 'fifo'"),
        (["--stat", __file__], "unrecognized arguments: --stat"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mambaslots.mcore: {message}")
    assert line.endswith("usage: python -m mambaslots.mcore [OPTIONS] SCRIPT [ARGUMENTS...]")


def test_version_and_help_are_printed_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as left:
            main([option], command="mambaslots run")
        assert left.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"mambaslots {ms.__version__}, megatron-core {metadata.version('megatron-core')}, "
    )
    assert "usage: mambaslots run [OPTIONS] SCRIPT [ARGUMENTS...]" in printed
    assert "prefill_interval=N" in printed


# ---- what the script comes to


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit()", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no weights')", 1),
    ],
)
def test_the_exit_code_is_the_scripts_and_statistics_follow(
    text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "stats.json"
    with pytest.raises(SystemExit):
        main(["--json", str(written), script(tmp_path, text)])
    assert NOTHING_BUILT in capsys.readouterr().err
    assert json.loads(written.read_text())["exit_code"] == code
    assert json.loads(written.read_text())["contexts"] == []


def test_statistics_follow_an_exception_of_the_script_which_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        main([script(tmp_path, "1 / 0")])
    assert said(capsys)[-1].startswith(NOTHING_BUILT)


@pytest.mark.parametrize(("text", "speaks"), [("raise SystemExit", False), ("raise SystemExit(5)", True)])
def test_a_rank_after_the_first_speaks_only_of_an_error(
    text: str,
    speaks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        main(["--json", str(tmp_path / "stats.json"), script(tmp_path, text)])
    lines = said(capsys)
    assert [line.startswith("mambaslots.mcore: rank 3: no Dynamic") for line in lines] == [True] * speaks
    assert json.loads((tmp_path / "stats-rank3.json").read_text())["rank"] == 3


def test_statistics_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gone" / "stats.json"
    path.parent.mkdir()
    assert main(["--json", str(path), script(tmp_path, f"import os; os.rmdir({str(path.parent)!r})")]) == 0
    assert said(capsys)[-1] == f"mambaslots.mcore: error: {path} cannot be written: No such file or directory"


BUILDS = """
import mambaslots.mcore
from mambaslots.mcore.recurrence import BLOCK, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu

with cpu_as_gpu():
    kept = RecurrenceDriver(make_context())
    for _ in range(2):
        kept.serve(tokens(2 * BLOCK + 1, seed=1))
    RecurrenceDriver(make_context()).serve(tokens(BLOCK, seed=1))
    last = make_context()
    mambaslots.mcore.uninstall()
"""


def test_contexts_that_were_built_before_an_uninstall_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "stats.json"
    assert main(["--json", str(written), script(tmp_path, BUILDS)]) == 0
    lines = said(capsys)
    start = lines.index("mambaslots.mcore: 3 contexts built")
    assert [line.split("mambaslots.mcore: ")[1].split(":")[0] for line in lines[start + 1 :]] == [
        "  context 1", "    computed by reason", "    states",
        "  context 2", "    computed by reason", "    states",
        "  context 3",
    ]  # fmt: skip
    contexts = json.loads(written.read_text())["contexts"]
    assert [(each["number"], each["num_requests"]) for each in contexts] == [(1, 2), (2, 1), (3, 0)]
    assert contexts[0]["num_resumed_tokens"] > 0
    assert main([script(tmp_path, "")]) == 0
    assert said(capsys)[-1].startswith(NOTHING_BUILT)


INSTALLS = """
import mambaslots.mcore
from mambaslots.mcore.recurrence import BLOCK, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu

with cpu_as_gpu():
    with mambaslots.mcore.installed(eviction="lru"):
        host = RecurrenceDriver(make_context())
        host.serve(tokens(2 * BLOCK + 1, seed=1))
    print(mambaslots.mcore.install(None, "lru").describe())
    host.serve(tokens(2 * BLOCK + 1, seed=1))
"""


def test_a_script_that_installs_the_same_settings_is_one_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "stats.json"
    assert main(["--eviction", "lru", "--json", str(written), script(tmp_path, INSTALLS)]) == 0
    out, error = capsys.readouterr()
    assert f"mambaslots.mcore: {out}" in error
    (context,) = json.loads(written.read_text())["contexts"]
    assert (context["num_requests"], context["num_resumed_tokens"]) == (2, 16)


def test_a_script_that_installs_other_settings_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([script(tmp_path, INSTALLS)]) == 2
    assert said(capsys)[1:2] == [
        "mambaslots.mcore: error: eviction is 'lru'; accepted: eviction=None, with which mambaslots.mcore "
        "was installed first, or uninstall() before this call"
    ]


def test_a_relative_path_of_statistics_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["--json", "stats.json", script(tmp_path, "import os; os.chdir('inner')")]) == 0
    assert (tmp_path / "stats.json").is_file()


@pytest.mark.long  # test_runner.py reads our lines of such a process
def test_our_lines_stand_together_whatever_megatron_core_says_at_its_import(tmp_path: Path) -> None:
    """In a process of its own: this one has imported megatron-core."""
    path = script(tmp_path, "import warnings; warnings.warn('the script says so')")
    done = subprocess.run(
        [sys.executable, "-m", "mambaslots.mcore", path], capture_output=True, text=True, check=True
    )
    said = done.stderr.splitlines()
    lines = [line for line in said if not line.startswith("mambaslots.mcore: ") and "No CUDA" not in line]
    assert [line.split(": ", 1)[1] for line in lines[:1]] == ["UserWarning: the script says so"]
    assert len(lines) <= 2


def test_our_log_lines_are_shown_once_whatever_the_script_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import logging; logging.getLogger('mambaslots.mcore').info('a line of ours')"
    before = logging.getLogger("mambaslots.mcore").handlers.copy()
    main([script(tmp_path, text)])
    assert said(capsys).count("mambaslots.mcore: a line of ours") == 1
    assert logging.getLogger("mambaslots.mcore").handlers == before


def test_log_lines_are_on_our_own_logger(caplog: pytest.LogCaptureFixture) -> None:
    with cpu_as_gpu(), mambaslots.mcore.installed(), caplog.at_level(logging.INFO, "mambaslots.mcore"):
        make_context()
    ours = [record for record in caplog.records if "durable slots" in record.getMessage()]
    assert [record.name for record in ours] == ["mambaslots.mcore"]


# ---- hosts


def test_without_megatron_core_a_sentence_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert main([script(tmp_path, "print('not to be run')")]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert re.search(r"^mambaslots.mcore: error: megatron-core is not installed; `pip install", error, re.M)
    assert "Traceback" not in error


def test_an_unknown_host_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dynamic_context.DynamicInferenceContext, "add_request", lambda self: None)
    assert main([script(tmp_path, "")]) == 1
    (line,) = said(capsys)
    assert re.match(r"mambaslots.mcore: error: megatron-core .*add_request is not one we know", line)


def test_without_cuda_only_what_is_not_set_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("MAMBA_DETERMINISTIC", raising=False)
    main([script(tmp_path, "import os; assert os.environ['MAMBA_DETERMINISTIC'] == '1'")])
    assert "no CUDA device is visible; setting MAMBA_DETERMINISTIC=1\n" in capsys.readouterr().err
