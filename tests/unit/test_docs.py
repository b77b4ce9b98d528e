"""The texts: their examples run and print what they say, and everything that they name exists.

What README.md and the pages of docs/ agree on:

- A block "```python" is complete: it runs in a namespace and a folder of its own. Words behind "python" mark
  it: `long` and `gpu` as pytest's markers do. A block with another word has a test of its own.
- A block "```output" is what the block before it prints.
- Lines of "```sh" blocks, and commands in backticks, name scripts, modules, tests and make targets.
- In backticks, `folder/file.py:Class.method` is that method, `engine.x` a name of DynamicInferenceEngine,
  `ms.x`, `msd.x` and `mambaslots.x` are public, and `Class.x` is a member of a class of that name in core.
"""

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle.disasters import DISASTERS
from oracle.texts import (
    FILES,
    FOLDERS,
    PAGES,
    ROOT,
    TEXTS,
    Block,
    backticked,
    blocks_of,
    commands_of,
    objections,
    objections_to_command,
    prose_of,
)

sys.path.append(str(ROOT / "tools"))
import api_reference
import docs_tables

MARKERS = {"long", "gpu"}
README = ROOT / "README.md"
MAX_README_LINES = 60  # besides the picture and the table: one screen
MAX_WORDS = 30_000

every_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())


# ---- examples


def python_blocks() -> list[Block]:
    return [block for path in PAGES for block in blocks_of(path) if block.words[:1] == ["python"]]


def runnable_blocks() -> Iterator[Any]:
    for block in python_blocks():
        if set(block.words[1:]) <= MARKERS:
            marks = [getattr(pytest.mark, word) for word in block.words[1:]]
            yield pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", list(runnable_blocks()))
def test_an_example_runs_and_prints_what_the_text_says(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_megatron = "mcore" in block.code or "megatron" in block.code
    if on_megatron:
        pytest.importorskip("megatron.core", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")  # a reader runs examples in the repository
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, block.name, "exec"), {"__name__": "__main__"})
    finally:
        if on_megatron:
            with contextlib.suppress(RuntimeError):  # an example may leave the drop-in installed
                importlib.import_module("mambaslots.mcore").uninstall()
    if block.output is not None:
        assert printed.getvalue() == block.output


def test_an_example_that_is_not_run_here_has_a_test_of_its_own() -> None:
    others = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    for block in python_blocks():
        if not set(block.words[1:]) <= MARKERS:
            words = " ".join(block.words)
            assert any(words in source for source in others), f"{block.name}: no test reads its blocks"


def test_output_follows_an_example() -> None:
    for path in PAGES:
        outputs = [block for block in blocks_of(path) if block.words == ["output"]]
        printing = [block for block in python_blocks() if block.path == path and block.output is not None]
        assert len(outputs) == len(printing), path


# ---- names


@every_text
def test_commands_name_what_exists(path: Path) -> None:
    for command in commands_of(path):
        assert list(objections_to_command(command)) == [], command


def test_what_stands_in_backticks_exists() -> None:
    found = [
        f"{path.name}: `{words}`: {objection}"
        for path in TEXTS
        for words in backticked(path)
        for objection in objections(words)
    ]
    assert found == []


WRONG_NAMES = (
    "core/none.py", "core/errors.py:NoError", "core/params_and_results.py:RequestResult.none",
    "examples/none_*.py", "ms.none", "mambaslots.net.none", "engine.none", "engine.generate(prompts, none=4)",
    "InferenceConfig.none", "InferenceConfig(none=4)",
)  # fmt: skip
WRONG_COMMANDS = (
    "make none", "python examples/none.py", "python -m mambaslots.none", "pytest tests/unit -k fault_99",
)  # fmt: skip


def test_a_wrong_name_and_a_wrong_command_are_noticed() -> None:
    assert [wrong for wrong in WRONG_NAMES if not list(objections(wrong))] == []
    assert [wrong for wrong in WRONG_COMMANDS if not list(objections_to_command(wrong))] == []


@every_text
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ +(.*)$", linked.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, target


CITATION = re.compile("|".join((r"\bspecs" + "/", r"\bDESI" + r"GN\b", r"\b[Ii]ss" + r"ues? #?\d")))


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_nothing_cites_a_text_that_is_not_here(folder: str) -> None:
    """`folder` "": the files of the root."""
    citing = []
    for file in FILES:
        here = file.partition("/")[0] == folder if folder else "/" not in file
        if here and file.endswith((".py", ".md", ".toml")):
            lines = (ROOT / file).read_text().splitlines()
            citing += [f"{file}:{number}" for number, line in enumerate(lines, 1) if CITATION.search(line)]
    assert citing == []


# ---- what single texts promise


def test_the_readme_is_one_screen_and_leads_to_every_page() -> None:
    lines = [line for line in README.read_text().splitlines() if line]
    assert max(map(len, (line for line in lines if not line.startswith(("|", "![", "<!--"))))) <= 120
    shown = [line for line in lines if not line.startswith(("|", "![", "<!--", "```"))]
    assert len(shown) <= MAX_README_LINES
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text()))
    assert linked >= {path.relative_to(ROOT).as_posix() for path in PAGES[1:]}


def test_the_readme_says_what_it_is_shows_it_and_names_models() -> None:
    """In this order: a sentence, the picture, commands, what others do not do, limits, links."""
    text = README.read_text()
    title, sentence, picture, *_ = re.split(r"\n\n+", text)
    assert title == "# mambaslots"
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")
    assert picture.startswith("![")
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Try it", "What others do not", "Limits", "Read on",
    ]  # fmt: skip
    first = next(block for block in blocks_of(README) if block.words == ["sh"])
    assert len(first.code.splitlines()) == 3
    served = re.findall(r"mambaslots serve (\S+)", first.code)
    assert [name for name in served if name == name.upper()] == [], "a placeholder is no model"
    assert len(served) == 2
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 5
    assert [what for what, figure, _ in rows if not re.search(r"\d", figure)] == []


def test_no_block_is_still_to_be_filled_in() -> None:
    assert [block.name for path in TEXTS for block in blocks_of(path) if not block.code.strip()] == []
    unfinished = re.compile("|".join(("TO" + "DO", "TB" + "D", "FIX" + "ME")))
    assert [path for path in TEXTS if unfinished.search(path.read_text())] == []


def test_every_fault_of_the_megatron_table_has_the_tests_that_it_names() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", (ROOT / "docs/megatron.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    cases = (ROOT / "tests/mcore/engine_cases.py").read_text()
    folders = {"mcore": ROOT / "tests/mcore", "unit": ROOT / "tests/unit/faults"}
    for number, row in rows:
        tests = row.rpartition("|")[2]
        words = re.findall(r"\w+", re.sub(r"`[^`]*`", "", tests))
        named = [folder for word, folder in folders.items() if word in words]
        assert named or "`" in tests, f"fault {number} names no test"
        for name in re.findall(r"`(\w+)`", tests):
            assert f"def {name}(" in cases, f"fault {number}: no engine case {name}"
        for folder in named:
            sources = [path.read_text() for path in folder.glob("test_*.py")]
            assert any(f"def test_fault_{int(number):02d}_" in source for source in sources), (number, folder)


def test_what_is_generated_is_up_to_date() -> None:
    """Where this fails: `make docs`."""
    assert [path.name for path in docs_tables.PAGES if docs_tables.written(path) != path.read_text()] == []
    assert api_reference.PAGE.read_text() == api_reference.page()


def test_every_disaster_has_a_thread_and_tests() -> None:
    tests = docs_tables.marked_tests()
    assert sorted(tests) == sorted(DISASTERS) == list(range(1, 25))
    assert [number for number, (_, where) in DISASTERS.items() if not re.search(r"\w #\d+", where)] == []


def test_every_benchmark_is_on_the_page_of_benchmarks() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    scripts = [file for file in FILES if re.fullmatch(r"benchmarks/\w+\.py", file)]
    runnable = [file for file in scripts if "parse_args()" in (ROOT / file).read_text()]
    assert [file for file in runnable if file not in page] == []


def test_the_docs_stay_short() -> None:
    """Generated pages do not count, and say so in their first lines."""
    written = [path for path in PAGES if "This page is generated" not in path.read_text()[:200]]
    assert sum(len(path.read_text().split()) for path in written) <= MAX_WORDS
