"""The texts: their examples run and print what they say, and everything that they name exists.

Conventions of README.md and docs/*.md that are checked here:

- A block "```python" is complete: it runs in a namespace and a folder of its own. Words after "python" mark it:
  `long` and `gpu` as pytest's markers do; a block with another word has a test of its own.
- A block "```output" right after it is what it prints.
- Lines of "```sh" blocks, and commands in backticks, name scripts, modules, tests and make targets that exist.
- `folder/file.py:Class.method` in backticks is that method; `engine.x` is one of DynamicInferenceEngine's names,
  `ms.x`, `msd.x` and `mambaslots.x` are public, and `Class.x` belongs to a class of that name in core.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/results/README.md"]
FOLDERS = ("core", "tests", "examples", "benchmarks", "docs")
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*"), ROOT / ".ci/run", *(p for name in FOLDERS for p in (ROOT / name).rglob("*"))]
    if path.is_file() and "__pycache__" not in path.parts
]
MARKERS = {"long", "gpu"}
SHELLS = {"sh", "bash", "console"}
MAX_README_LINES = 150

every_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@dataclass
class Block:
    """One fenced block; `words` are what stands behind its first three backticks."""

    path: Path
    line: int
    words: list[str]
    code: str = ""
    output: str | None = field(default=None)

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.line}"


@cache
def blocks_of(path: Path) -> list[Block]:
    found: list[Block] = []
    inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append(Block(path, number, line.removeprefix("```").split()))
        elif inside:
            found[-1].code += line + "\n"
    assert not inside, f"{path}: a block has no end"
    for block, following in zip(found, found[1:], strict=False):
        if following.words[:1] == ["output"]:
            block.output = following.code
    return found


@cache
def prose_of(path: Path) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def backticked(path: Path) -> list[str]:
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose_of(path))]


# ---- examples


def python_blocks() -> Iterator[Any]:
    for block in (block for path in PAGES for block in blocks_of(path)):
        if block.words[:1] == ["python"] and set(block.words[1:]) <= MARKERS:
            marks = [getattr(pytest.mark, word) for word in block.words[1:]]
            yield pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", list(python_blocks()))
def test_an_example_runs_and_prints_what_the_text_says(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_megatron = "mcore" in block.code or "megatron" in block.code
    if on_megatron:
        pytest.importorskip("megatron.core", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(block.code, block.name, "exec"), {"__name__": "__main__"})
    finally:
        if on_megatron:
            with contextlib.suppress(RuntimeError):  # an example may leave the drop-in installed
                importlib.import_module("mambaslots.mcore").uninstall()
    if block.output is not None:
        assert capsys.readouterr().out == block.output


def test_an_example_that_is_not_run_here_has_a_test_of_its_own() -> None:
    others = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    for block in (block for path in PAGES for block in blocks_of(path)):
        if block.words[:1] == ["python"] and not set(block.words[1:]) <= MARKERS:
            info = " ".join(block.words)
            assert any(info in source for source in others), f"{block.name}: no test reads ```{info} blocks"


def test_output_follows_an_example() -> None:
    for path in PAGES:
        outputs = [block.words[0] for block in blocks_of(path) if block.words[:1] == ["output"]]
        assert len(outputs) == sum(block.output is not None for block in blocks_of(path)), path


# ---- commands


def commands(path: Path) -> Iterator[str]:
    for block in blocks_of(path):
        if block.words[:1] and block.words[0] in SHELLS:
            yield from (line.removeprefix("$ ") for line in block.code.replace("\\\n", " ").splitlines())
    starts = ("make ", "python ", "pytest ", "torchrun ")
    yield from (words for words in backticked(path) if words.startswith(starts))


def objections_to_command(command: str) -> Iterator[str]:
    words = shlex.split(command, comments=True)
    tests = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    for before, word in zip(["", *words], words, strict=False):
        if "make" in words[:1] and re.fullmatch(r"[a-z-]+", word) and word != "make":
            if not re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
                yield f"no make target {word}"
        elif before == "-m" and words[0] in ("python", "torchrun") and word.islower() and word.count(" ") == 0:
            if word not in MARKERS and importlib.util.find_spec(word) is None:
                yield f"no module {word}"
        elif before == "-k":
            sources = [source.read_text() for test in tests for source in test_files(test)]
            if not any(re.search(rf"(def \w*|\")(?:{word})", source) for source in sources):
                yield f"no test is called {word}"
        elif word.startswith(tuple(f"{name}/" for name in FOLDERS)):
            yield from objections_to_file(word.rstrip(","))


def test_files(path: str) -> list[Path]:
    return [ROOT / path] if path.endswith(".py") else list((ROOT / path).rglob("*.py"))


test_files.__test__ = False  # type: ignore[attr-defined]


@every_text
def test_commands_name_what_exists(path: Path) -> None:
    for command in commands(path):
        assert list(objections_to_command(command)) == [], command


# ---- names


def objections_to_file(token: str) -> Iterator[str]:
    """Of a path, which may have "*", with ":name" or "::name" behind it for what it defines."""
    path, _, name = token.partition(":")
    pattern = re.escape(path.strip("/")).replace(r"\*", "[^/]*")
    found = [file for file in FILES if re.fullmatch(rf"(?:.*/)?{pattern}(?:/.*)?", file)]
    if not found:
        yield f"no file {path}"
    elif name.strip(":") and not name.isdecimal() and not any(defines(file, name.strip(":")) for file in found):
        yield f"{path} does not define {name.strip(':')}"


@cache
def classes() -> dict[str, set[str]]:
    """Name of a class in core -> its members and its parents' names, of all classes with that name."""
    members: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        if file.startswith("core/") and file.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / file).read_text())):
                if isinstance(node, ast.ClassDef):
                    members[node.name] |= set(members_of(node))
                    members[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    return members


def members_of(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            for target in (name for target in targets for name in ast.walk(target)):
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    yield target.attr


def has_member(owner: str, name: str) -> bool:
    members = classes()[owner]
    return name in members or any(has_member(base, name) for base in members & classes().keys() - {owner})


@cache
def module_names(file: str) -> dict[str, ast.stmt]:
    """What a module defines or imports at its top."""
    names: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        else:
            stored = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            names |= {part.id: node for part in stored if isinstance(part.ctx, ast.Store)}
    return names


def defines(file: str, dotted: str) -> bool:
    first, _, member = dotted.removesuffix("()").partition(".")
    if not file.endswith(".py") or first not in module_names(file):
        return False
    return not member or (first in classes() and has_member(first, member))


def objections_to_name(dotted: str) -> Iterator[str]:
    """Of `engine.x`, `ms.x`, `msd.x`, `mambaslots.x` and `Class.x`; of others none."""
    first, *rest = dotted.split(".")
    if first == "engine":
        owner = "DynamicInferenceContext" if rest[:1] == ["context"] and rest[1:] else "DynamicInferenceEngine"
        if not has_member(owner, rest[1] if owner == "DynamicInferenceContext" else rest[0]):
            yield f"{owner} has no such name"
    elif first in ("ms", "msd", "mambaslots"):
        found: Any = importlib.import_module("mambaslots.distributed" if first == "msd" else "mambaslots")
        for name in rest:
            if inspect.ismodule(found) and not hasattr(found, name):
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{found.__name__}.{name}")
            if inspect.isclass(found) and found.__name__ in classes() and has_member(found.__name__, name):
                return
            if not hasattr(found, name):
                yield f"{found.__name__} has no {name}"
                return
            found = getattr(found, name)
    elif first in classes() and rest and not hasattr(builtins, first):
        known = importlib.import_module("mambaslots.mcore.known_sources")  # names methods of megatron-core
        if dotted not in known.KNOWN_SOURCES and not has_member(first, rest[0]):
            yield f"no class {first} in core has {rest[0]}"


def objections_to_keywords(words: str) -> Iterator[str]:
    """Of a call of a public class or of an engine's method, such as `InferenceConfig(num_kv_blocks=4)`."""
    try:
        call = ast.parse(words, mode="eval").body
    except SyntaxError:
        return
    if isinstance(call, ast.Call):
        named = ast.unparse(call.func).removeprefix("ms.")
        owner: Any = ms.DynamicInferenceEngine if named.startswith("engine.") else ms
        target = getattr(owner, named.removeprefix("engine."), None)
        accepted = inspect.signature(target).parameters if callable(target) else {}
        if accepted:
            yield from (
                f"{named} takes no {key.arg}" for key in call.keywords if key.arg and key.arg not in accepted
            )


FILE = re.compile(rf"(?:(?:{'|'.join(FOLDERS)})/[\w./*-]*|[\w./*-]*\.(?:py|md|toml|png))(?:::?[A-Za-z_][\w.]*(?:\(\))?)?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


@every_text
def test_what_stands_in_backticks_exists(path: Path) -> None:
    objections = []
    for words in backticked(path):
        if FILE.fullmatch(words):
            objections += [f"`{words}`: {objection}" for objection in objections_to_file(words)]
        elif (name := NAME.match(words)) is not None:
            objections += [f"`{words}`: {objection}" for objection in objections_to_name(name[0])]
        objections += [f"`{words}`: {objection}" for objection in objections_to_keywords(words)]
    assert objections == []


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


# ---- what single texts promise


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_readme_leads_to_every_page_of_the_documentation() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {path.relative_to(ROOT).as_posix() for path in PAGES[1:]}


def test_no_block_is_still_to_be_filled_in() -> None:
    assert [block.name for path in TEXTS for block in blocks_of(path) if not block.code.strip()] == []
    words = re.compile("|".join(("TO" + "DO", "TB" + "D", "FIX" + "ME")))
    assert [path for path in TEXTS if words.search(path.read_text())] == []


CITATION = re.compile("|".join((r"\bspecs" + "/", r"\bDESI" + r"GN\b", r"\b[Ii]ss" + r"ues? #?\d")))


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_nothing_cites_a_text_that_is_not_here(folder: str) -> None:
    """`folder` "": the files of the root."""
    files = [file for file in FILES if file.partition("/")[0] == folder or (not folder and "/" not in file)]
    citing = []
    for file in files:
        if file.endswith((".py", ".md", ".toml")) or file == "Makefile":
            lines = (ROOT / file).read_text().splitlines()
            citing += [f"{file}:{number}" for number, line in enumerate(lines, 1) if CITATION.search(line)]
    assert citing == []


def test_every_fault_of_the_megatron_table_has_the_tests_that_it_names() -> None:
    page = ROOT / "docs/megatron.md"
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    folders = {"mcore": ROOT / "tests/mcore", "unit": ROOT / "tests/unit/faults"}
    cases = (ROOT / "tests/mcore/engine_cases.py").read_text()
    for number, row in rows:
        tests = row.rpartition("|")[2]
        for name in re.findall(r"`(\w+)`", tests):
            assert f"def {name}(" in cases, f"fault {number}: no engine case {name}"
        named = [folder for word, folder in folders.items() if re.search(rf"\b{word}\b", tests)]
        for folder in named:
            sources = [path.read_text() for path in folder.glob("test_*.py")]
            assert any(f"def test_fault_{int(number):02d}_" in source for source in sources), (number, folder)
        assert named or "`" in tests, f"fault {number} names no test"


def test_every_benchmark_has_its_question_on_the_page_of_benchmarks() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    scripts = [file for file in FILES if re.fullmatch(r"benchmarks/\w+\.py", file)]
    runnable = [file for file in scripts if '__name__ == "__main__"' in (ROOT / file).read_text()]
    assert [file for file in runnable if file not in page] == []
