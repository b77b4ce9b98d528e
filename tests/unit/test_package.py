"""The package: what it imports, in which direction, and what it promises to be."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType

import mambaslots as ms
import mambaslots.net
import pytest
from oracle.fresh_process import printed_by

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"


def rows_of_table(first_column: str) -> list[tuple[str, str]]:
    """The first and the last cell of each row of a table of packages in docs/architecture.md."""
    section = (ROOT / "docs/architecture.md").read_text().split("## Packages\n")[1].split("\n## ")[0]
    table = section.split(f"| {first_column} |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(name, allowed) for name, _, allowed in rows]


def imports_of_table() -> dict[str, set[str]]:
    """What each package and file of the root may import by docs/architecture.md, from the top down."""
    rows = [(re.findall(r"`([\w/]+)`", name), allowed) for name, allowed in rows_of_table("package")]
    may_import: dict[str, set[str]] = {}
    below: set[str] = set()
    for names, allowed in reversed(rows):
        named = set(re.findall(r"`(\w+)`", allowed))
        packages = {owner for owner in below if owner.split(".")[-1] in named}
        assert len(packages) == len(named), f"{names} may import {named}, of which only {packages} are below"
        for owner in (name.replace("/", ".") for name in reversed(names)):
            in_root = {other for other in may_import if (CORE / f"{other}.py").is_file()}
            may_import[owner] = in_root | (below if allowed == "all" else packages)
        below = set(may_import)
    return dict(reversed(may_import.items()))


MAY_IMPORT = imports_of_table()


def imports_of_folders() -> dict[str, set[str]]:
    """What the folders of packages may import by docs/architecture.md: packages and other folders."""
    rows = rows_of_table("folder of a package")
    may_import = {name.strip("`").replace("/", "."): set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}
    owners = MAY_IMPORT.keys() | may_import.keys()
    return {
        folder: {owner for owner in owners if owner.split(".")[-1] in named}
        for folder, named in may_import.items()
    }


FOLDERS_MAY_IMPORT = imports_of_folders()

PUBLIC_PACKAGES = {
    f"mambaslots.{name}"
    for name in ("monitor", "mcore", "vllm", "replay", "net", "hf", "models", "testing", "text")
}


def owner_of(module: str) -> str:
    owners = (owner for owner in MAY_IMPORT if module == owner or module.startswith(f"{owner}."))
    return max(owners, key=len)


def folder_of(module: str) -> str:
    """The folder in the second table, else the package or file of the root, that a module belongs to."""
    return next((name for name in FOLDERS_MAY_IMPORT if module.startswith(f"{name}.")), owner_of(module))


def forbidden(module: str, imported: str) -> bool:
    own, other = owner_of(module), owner_of(imported)
    if other != own and other not in MAY_IMPORT[own]:
        return True
    own_folder, other_folder = folder_of(module), folder_of(imported)
    in_common = {own_folder, own, *(name for name in MAY_IMPORT if (CORE / f"{name}.py").is_file())}
    return own_folder != own and other_folder not in FOLDERS_MAY_IMPORT[own_folder] | in_common


@cache
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


def test_a_package_imports_only_what_its_row_names() -> None:
    graph = imports_of_modules()
    assert [(module, other) for module in graph for other in graph[module] if forbidden(module, other)] == []
    found = {(owner_of(module), owner_of(other)) for module in graph for other in graph[module]}
    named = {
        (own, other)
        for own in MAY_IMPORT
        for other in MAY_IMPORT[own]
        if not (CORE / f"{other}.py").is_file()
    }
    assert {pair for pair in named - found if pair[0] not in ("__init__", "__main__")} == set()
    found = {(folder_of(module), folder_of(other)) for module in graph for other in graph[module]}
    assert {(own, other) for own, named in FOLDERS_MAY_IMPORT.items() for other in named} - found == set()


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("inference.contexts.cache.state_tiers", "inference.contexts.step_inputs"),
        ("inference.kernels.conv", "inference.contexts.cache.hashing"),
        ("layers.mixer_step", "inference.engines.scheduler"),
        ("files", "state_spec"),
        ("validation", "inference.contexts.cache.paths"),
        ("inference.contexts.cache.state_tiers", "params_and_results"),
        ("config", "loaded_model"),
        ("hf.tokenizer", "serve.answer_text"),
        ("net.transfer.exports", "net.routing.state_events"),
        ("net.transfer.exports", "monitor.__init__"),
        ("net.routing.state_router", "inference.engines.step_runner"),
        ("net.lockstep.rank_connections", "net.transfer.exports"),
        ("net.lockstep.rank_connections", "inference.kernels.state_copy"),
        ("inference.kernels.reference.torch_conv", "inference.contexts.request_states"),
    ],
)
def test_an_import_that_the_table_does_not_name_is_noticed(module: str, imported: str) -> None:
    assert forbidden(module, imported)
    assert not forbidden("cli.main", "mcore.run_script")


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
    printed = printed_by(code)
    assert printed.split() == []


def test_importing_mambaslots_imports_no_torch() -> None:
    rooms = "errors", "cache_stats", "inference.contexts.cache", "text", "net.routing.state_router"
    modules = "mambaslots, " + ", ".join(f"mambaslots.{room}" for room in rooms)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("package", [ms, mambaslots.net])
def test_every_public_name_exists(package: ModuleType) -> None:
    for name in package.__all__:
        assert hasattr(package, name)
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
    assert package.__file__ is not None
    imported_for_types = {
        alias.asname or alias.name
        for block in ast.parse(Path(package.__file__).read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported_for_types - {"hf"} == set(package.__all__)


def test_the_package_is_small_and_typed() -> None:
    assert len(ms.__all__) <= 45
    assert (resources.files("mambaslots") / "py.typed").is_file()


@pytest.mark.parametrize("error", [ms.KVBlockCapacityError, ms.MambaSlotCapacityError])
def test_capacity_errors_say_what_was_required_and_available(error: type) -> None:
    raised = error(5, 3)
    assert isinstance(raised, RuntimeError)
    assert (raised.required, raised.available) == (5, 3)
    assert "5" in str(raised)
    assert "3" in str(raised)


NAMES_OF_ROW = re.compile(r"^([\w/*]+(?:, [\w/*]+)*)(?:,? {2,}\S|: |,?\n {2,}\S)", re.MULTILINE)
"""The modules and folders before the two spaces, colon or line break of a row in a text of `__init__`."""


def files_of_name(room: Path, name: str) -> set[Path]:
    return set(room.glob(name if name.endswith("/") else f"{name}.py"))


def names_in_text(room: Path) -> list[str]:
    """The names in the rows of a room's text, without its first line, a sentence."""
    text = (ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").partition("\n")[2]
    return [name for row in NAMES_OF_ROW.finditer(text) for name in row[1].split(", ")]


def test_rows_of_an_init_text_name_the_modules_of_its_room() -> None:
    rooms = [init.parent for init in CORE.rglob("__init__.py")]
    named = [
        (room.relative_to(CORE), name, files_of_name(room, name))
        for room in rooms
        for name in names_in_text(room)
    ]
    assert [f"{room}: {name}" for room, name, files in named if not files] == []
    modules = {path for path in CORE.rglob("*.py") if path.name != "__init__.py"}
    missing = modules - {file for _, _, files in named for file in files}
    assert sorted(str(path.relative_to(CORE)) for path in missing) == []


# Of what users do, of what goes wrong anywhere, and of the folders beside core.
OTHER_TESTS = {"bad_input", "benchmarks", "disasters", "examples", "faults", "hf/configs", "tools"}


def test_the_folders_of_tests_are_those_of_the_package() -> None:
    unit = ROOT / "tests" / "unit"
    folders = {
        path.parent.relative_to(unit).as_posix() for path in unit.rglob("*.*") if path.suffix != ".pyc"
    }
    missing = {folder for folder in folders - OTHER_TESTS if not (CORE / folder).is_dir()}
    assert {folder for folder in missing if folder.split("/")[0] not in OTHER_TESTS} == set()
