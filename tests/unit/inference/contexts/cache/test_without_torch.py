"""Policies decide over plain integers: they, and all that they import of the package, do without torch."""

import ast
from pathlib import Path

CORE = Path(__file__).parents[5] / "core"


def imported(path: Path) -> tuple[set[Path], set[str]]:
    """The package's files, and the top-level names of other packages, that a source file imports."""
    files, others = set[Path](), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1]
            module = folder.joinpath(*(node.module or "").split("."))
            files |= {file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()}
            inside = [(module / alias.name).with_suffix(".py") for alias in node.names]
            files |= {file for file in inside if file.is_file()}
    return files, others


def test_policies_and_all_they_import_do_without_torch() -> None:
    waiting, seen = set((CORE / "inference/contexts/cache").glob("*.py")), set[Path]()
    assert len(waiting) >= 8
    while waiting:
        path = waiting.pop()
        seen.add(path)
        files, others = imported(path)
        assert not others & {"torch", "triton"}, path
        waiting |= files - seen
    assert CORE / "validation.py" in seen
