"""The package: what it imports, in which direction, and what it promises to be."""

import ast
import graphlib
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import mambaslots as ms
import pytest
from oracle.fresh_process import run_code

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
# From the top down; a room imports only from itself and from those after it. Files count as rooms.
ROOMS = (
    "__init__", "__main__", "replay.__main__", "cli", "fleet", "serve", "monitor", "testing", "mcore", "vllm",
    "replay", "net", "loaded_model", "hf", "models",
    "inference.engines", "inference.contexts", "inference.kernels", "config", "state_spec",
    "text", "request", "cache_stats", "inference.contexts.cache", "parallel_groups", "files", "errors",
    "validation", "version",
)  # fmt: skip

PUBLIC_PACKAGES = {
    f"mambaslots.{name}"
    for name in ("monitor", "mcore", "vllm", "replay", "net", "hf", "models", "testing", "text")
}


def room_of(module: str) -> str:
    return max((room for room in ROOMS if module == room or module.startswith(room + ".")), key=len)


def relative_imports(path: Path) -> list[str]:
    """Dotted names within the package that a source file imports."""
    package = path.relative_to(CORE).parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [".".join((*base, name)) for name in names if name]
    return found


SOURCES = sorted(path for path in CORE.rglob("*.py") if path.stem != "__init__" or path.parent == CORE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CORE)))
def test_imports_point_only_down(path: Path) -> None:
    own = room_of(".".join(path.relative_to(CORE).with_suffix("").parts))
    for imported in relative_imports(path):
        assert ROOMS.index(room_of(imported)) >= ROOMS.index(own), f"{own} imports {imported}"


def imports_of_modules() -> dict[str, set[str]]:
    """For each module of the package, the modules of the package that the module imports anywhere in it."""
    paths = {".".join(path.relative_to(CORE).with_suffix("").parts): path for path in CORE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        package = module.split(".")[:-1]
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                for alias in node.names:
                    ends = (alias.name, f"{alias.name}.__init__", "", "__init__")
                    names = (".".join(filter(None, [*base, end])) for end in ends)
                    imported.add(next(name for name in names if name in paths))
        graph[module] = imported
    return graph


def test_no_import_circles() -> None:
    try:
        graphlib.TopologicalSorter(imports_of_modules()).prepare()
    except graphlib.CycleError as error:
        pytest.fail("an import circle: " + " -> ".join(reversed(error.args[1])), pytrace=False)


def test_nothing_imports_the_source_folder_by_its_name() -> None:
    files = [
        p
        for folder in ("core", "tests", "examples", "benchmarks", "tools")
        for p in (ROOT / folder).rglob("*.py")
    ]
    for path in files:
        text = path.read_text()
        if not re.search(r"\b(import|from)\s[^\n]*\bcore\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] != "core", path
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "core" for alias in node.names), path


def test_examples_import_only_the_public_api() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mambaslots."):
                assert node.module in PUBLIC_PACKAGES, path


def test_importing_mambaslots_imports_none_of_its_hosts_and_no_triton() -> None:
    others = {
        "triton", "megatron", "transformers", "vllm", "fastapi", "uvicorn", "prometheus_client", "ray",
        "nccl",
    }  # fmt: skip
    code = f"import sys; from mambaslots import *; print(*{others} & sys.modules.keys())"
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_importing_mambaslots_imports_no_torch() -> None:
    modules = "mambaslots, mambaslots.errors, mambaslots.cache_stats, mambaslots.inference.contexts.cache"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_every_public_name_exists_and_the_package_is_typed() -> None:
    assert len(ms.__all__) <= 45
    for name in ms.__all__:
        assert hasattr(ms, name)
    with pytest.raises(AttributeError, match="nothing"):
        ms.nothing  # noqa: B018
    imported_for_types = {
        alias.asname or alias.name
        for block in ast.parse((CORE / "__init__.py").read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported_for_types == {*ms.__all__, "hf"}
    assert (resources.files("mambaslots") / "py.typed").is_file()


@pytest.mark.parametrize(
    "error", [ms.KVBlockCapacityError, ms.MambaSlotCapacityError, ms.RequestOverflowError]
)
def test_capacity_errors_say_what_was_required_and_available(error: type) -> None:
    raised = error(5, 3)
    assert isinstance(raised, RuntimeError)
    assert (raised.required, raised.available) == (5, 3)
    assert "5" in str(raised)
    assert "3" in str(raised)
