"""What the texts of the repository hold: examples, commands, and names of files and code.

A text is README.md, a page of docs/, or one of the other Markdown files. The functions that are called
`objections` yield a sentence for each thing that a piece of a text names and that does not exist.
"""

import argparse
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
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import mambaslots as ms
from mambaslots.cli.main import COMMANDS as COMMAND_LINE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_OTHERS = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
    "tools/README.md",
)
TEXTS = [*PAGES, *(ROOT / name for name in _OTHERS)]
FOLDERS = ("core", "tests", "examples", "benchmarks", "tools", "docs", ".ci")
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in chain(ROOT.glob("*"), *((ROOT / name).rglob("*") for name in FOLDERS))
    if path.is_file() and "__pycache__" not in path.parts
]
"""Paths relative to ROOT."""
SHELLS = {"sh", "bash", "console"}
COMMANDS = ("make ", "python ", "pytest ", "torchrun ", "mambaslots ")
FILE = re.compile(
    rf"(?:(?:{'|'.join(FOLDERS)})/[\w./*-]*|[\w./*-]*\.(?:py|md|toml|png))(?:::?[A-Za-z_][\w.]*(?:\(\))?)?"
)
"""A path, in which "*" stands for any characters, and perhaps a name that the file defines."""
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


# ---- blocks


@dataclass
class Block:
    """One fenced block; `words` stand behind its first backticks, `output` is what a ```output block says."""

    path: Path
    line: int
    words: list[str]
    code: str = ""
    output: str | None = None

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
    if inside:
        raise ValueError(f"{found[-1].name}: the block has no end")
    for block, following in pairwise(found):
        if following.words == ["output"]:
            block.output = following.code
    return found


@cache
def prose_of(path: Path) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def backticked(path: Path) -> list[str]:
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose_of(path))]


# ---- commands


def commands_of(path: Path) -> Iterator[str]:
    """Lines of shell blocks, and commands in backticks."""
    for block in blocks_of(path):
        if block.words and block.words[0] in SHELLS:
            yield from (line.removeprefix("$ ") for line in block.code.replace("\\\n", " ").splitlines())
    yield from (words for words in backticked(path) if words.startswith(COMMANDS))


def objections_to_command(command: str) -> Iterator[str]:
    """Make targets, modules, tests and files that it names and that do not exist."""
    words = shlex.split(command, comments=True)
    program = words[0] if words else ""
    tests = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    if program == "mambaslots" and words[1:]:
        yield from _objections_to_our_command(words[1], words[2:])
    for before, word in pairwise(["", *words]):
        if program == "make" and before and re.fullmatch(r"[a-z-]+", word):
            if not re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
                yield f"no make target {word}"
        elif before == "-m" and re.fullmatch(r"[a-z_]\w*(\.\w+)*", word) and "pytest" not in words[:1]:
            if word not in ("gpu", "long") and importlib.util.find_spec(word) is None:
                yield f"no module {word}"
        elif before == "-k":
            sources = [source.read_text() for test in tests for source in test_files(test)]
            if not any(re.search(rf"def \w*{word}|\"{word}", source) for source in sources):
                yield f"no test is called {word}"
        elif word.startswith(tuple(f"{name}/" for name in FOLDERS)):
            yield from objections_to_file(word)


def _objections_to_our_command(command: str, words: list[str]) -> Iterator[str]:
    """To a line `mambaslots COMMAND ...`: commands and options that it does not have."""
    if command.startswith("-"):
        known = {command} & {"--version", "--help", "--print-completion"}
        if not known:
            yield f"mambaslots has no option {command}"
    elif command not in COMMAND_LINE:
        yield f"mambaslots has no command {command}"
    elif command != "run":
        parser = argparse.ArgumentParser()
        importlib.import_module(f"mambaslots.cli.{command}").add_options(parser)
        for word in words:
            if word.startswith("--") and word.partition("=")[0] not in (
                *parser._option_string_actions,
                "--log-level",
            ):
                yield f"mambaslots {command} has no option {word}"


def test_files(path: str) -> list[Path]:
    found = ROOT / path
    return [found] if found.is_file() else list(found.rglob("*.py"))


test_files.__test__ = False  # type: ignore[attr-defined]


# ---- files


def objections_to_file(token: str) -> Iterator[str]:
    """To a path, or its end, with ":name" or "::name" behind it for what the file defines."""
    path, _, name = token.partition(":")
    pattern = re.escape(path.strip("/")).replace(r"\*", "[^/]*")
    found = [file for file in FILES if re.fullmatch(rf"(?:.*/)?{pattern}(?:/.*)?", file)]
    name = name.strip(":").removesuffix("()")
    if not found:
        yield f"no file {path}"
    elif name and not name.isdecimal() and not any(_defines(file, name) for file in found):
        yield f"{path} does not define {name}"


def _defines(file: str, dotted: str) -> bool:
    first, _, member = dotted.partition(".")
    if not file.endswith(".py") or first not in _module_names(file):
        return False
    return not member or (first in classes() and has_member(first, member))


@cache
def _module_names(file: str) -> set[str]:
    """What a module defines or imports at its top."""
    names: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names


# ---- names


@cache
def classes() -> dict[str, set[str]]:
    """Class in core -> its members and its parents' names; classes of one name are taken together."""
    members: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        if file.startswith("core/") and file.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / file).read_text())):
                if isinstance(node, ast.ClassDef):
                    members[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                    members[node.name].update(_members(node))
    return members


def _members(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.id if isinstance(part, ast.Name) else part.attr


def has_member(owner: str, name: str) -> bool:
    members = classes()[owner]
    return name in members or any(has_member(base, name) for base in (members & classes().keys()) - {owner})


def objections_to_name(dotted: str) -> Iterator[str]:
    """To `engine.x`, `ms.x`, `msd.x`, `mambaslots.x` and `Class.x` of core; other names are not judged."""
    first, *rest = dotted.split(".")
    if first == "engine":
        first = "DynamicInferenceEngine"
        if rest[0] == "context" and len(rest) > 1:
            first, rest = "DynamicInferenceContext", rest[1:]
    if first in ("ms", "msd", "mambaslots"):
        yield from _objections_to_public_name("mambaslots.net" if first == "msd" else "mambaslots", rest)
    elif first in classes() and not hasattr(builtins, first) and not has_member(first, rest[0]):
        known = importlib.import_module("mambaslots.mcore.versions")  # names methods of megatron-core
        if dotted not in known.KNOWN_SOURCES:
            yield f"{first} has no {rest[0]}"


def _objections_to_public_name(module: str, names: list[str]) -> Iterator[str]:
    found: Any = importlib.import_module(module)
    for name in names:
        if inspect.isclass(found) and found.__name__ in classes():
            if not has_member(found.__name__, name):
                yield f"{found.__name__} has no {name}"
            return
        if inspect.ismodule(found) and not hasattr(found, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{name}")
        if not hasattr(found, name):
            yield f"{module} has no {name}"
            return
        found = getattr(found, name)


def objections_to_keywords(words: str) -> Iterator[str]:
    """To a call of a public class or of an engine's method, such as `InferenceConfig(num_kv_blocks=4)`."""
    try:
        call = ast.parse(words, mode="eval").body
    except SyntaxError:
        return
    if isinstance(call, ast.Call):
        name = ast.unparse(call.func).removeprefix("ms.")
        owner: Any = ms.DynamicInferenceEngine if name.startswith("engine.") else ms
        target = getattr(owner, name.removeprefix("engine."), None)
        accepted = inspect.signature(target).parameters if callable(target) else None
        for key in call.keywords if accepted is not None else ():
            if key.arg and key.arg not in accepted:
                yield f"{name} takes no {key.arg}"


def objections(words: str) -> Iterator[str]:
    """To what stands in one pair of backticks."""
    if FILE.fullmatch(words):
        yield from objections_to_file(words)
    elif (dotted := DOTTED.match(words)) is not None:
        yield from objections_to_name(dotted[0])
    yield from objections_to_keywords(words)
