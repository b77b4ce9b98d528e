"""How large the house is: sizes by package, widest classes, import circles, public names, one request.

    python tools/house.py            (make house)

Packages are folders of core/. Code lines have neither docstrings nor comments nor blanks. The walk serves a
prompt and its extension, and counts the files and functions of core/ that run, without models, their
layers and kernels.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"
MAX_SHOWN = 10


def code_lines(source: str) -> int:
    """Lines with code."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def room_of(file: Path) -> str:
    """ "replay", "inference/contexts", or "." for the root."""
    parts = file.relative_to(CORE).parts[:-1]
    return "/".join(parts[: 3 if "cache" in parts else 2 if parts[:1] == ("inference",) else 1]) or "."


def imports_of(file: Path, modules: set[str]) -> set[str]:
    """The modules of core/ that a module imports when it is imported."""
    package = file.relative_to(CORE).parts[:-1]
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            name = ".".join((*base, *filter(None, (node.module or "").split("."))))
            inner = {f"{name}.{alias.name}".strip(".") for alias in node.names}
            found |= (inner & modules) or ({name} & modules)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def public_names(source: str) -> int:
    """Entries of `__all__`."""
    entries = re.search(r"^__all__ = \[(.*?)\]", source, re.DOTALL | re.MULTILINE)
    return entries[1].count('"') // 2 if entries else 0


def walk() -> str:
    """The files and functions of core/ that one prompt and its extension run, outside of the model."""
    import mambaslots as ms

    config = ms.InferenceConfig(
        block_size_tokens=32, max_tokens_per_step=512, num_kv_blocks=64, num_mamba_slots=16
    )
    engine = ms.DynamicInferenceEngine(ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0), config)
    params, prompt = ms.SamplingParams(max_tokens=4), list(range(1, 100))
    ran: set[CodeType] = set()
    watch, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    watch.use_tool_id(tool, "house")
    watch.register_callback(tool, watch.events.PY_START, lambda code, _: ran.add(code))
    watch.set_events(tool, watch.events.PY_START)
    resumed = [engine.generate([prompt[:length]], params)[0].num_resumed_tokens for length in (80, 99)]
    watch.set_events(tool, 0)
    assert resumed[1] == 64, resumed
    functions = []
    for code in ran:
        file = Path(code.co_filename).resolve()
        own = file.is_relative_to(CORE) and room_of(file).split("/")[-1] not in (
            "models",
            "kernels",
            "layers",
        )
        if own and not code.co_name.startswith("<"):
            functions.append((file, max(line or 0 for *_, line in code.co_lines()) - code.co_firstlineno + 1))
    files = {file for file, _ in functions}
    return f"{len(files)} files, {len(functions)} functions of {sum(lines for _, lines in functions):,} lines"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    files = sorted(CORE.rglob("*.py"))
    sources = {file: file.read_text() for file in files}
    lines = {file: source.count("\n") for file, source in sources.items()}
    code = {file: code_lines(source) for file, source in sources.items()}
    print(f"{'package':<28}{'files':>7}{'lines':>9}{'code':>9}")
    for room in [*sorted({room_of(file) for file in files}), ""]:
        own = [file for file in files if not room or room_of(file) == room]
        sizes = [sum(counts[file] for file in own) for counts in (lines, code)]
        print(f"{room or 'all':<28}{len(own):>7}{sizes[0]:>9,}{sizes[1]:>9,}")
    print("\nlargest files: ", end="")
    largest = sorted(files, key=lambda file: -lines[file])[:MAX_SHOWN]
    print(", ".join(f"{file.relative_to(CORE)} {lines[file]}" for file in largest))
    classes = Counter(
        {
            f"{file.stem}.{node.name}": sum(isinstance(part, ast.FunctionDef) for part in node.body)
            for file, source in sources.items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ClassDef)
        }
    )
    print("widest classes: ", ", ".join(f"{name} {count}" for name, count in classes.most_common(MAX_SHOWN)))
    names = {".".join(file.relative_to(CORE).with_suffix("").parts): file for file in files}
    graph = {name: imports_of(file, set(names)) for name, file in names.items()}
    print("import circles: ", circles(graph) or "none")
    public = {
        file.parent.name: public_names(source)
        for file, source in sources.items()
        if file.name == "__init__.py"
    }
    print(f"public names: {sum(public.values())}: ", {name: count for name, count in public.items() if count})
    print("one request: ", walk())


if __name__ == "__main__":
    main()
