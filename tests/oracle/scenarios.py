"""The scenarios of the engine's own tests, for other tests to run on other engines."""

import importlib.util
from pathlib import Path
from types import ModuleType

ENGINE_TESTS = Path(__file__).parents[1] / "unit" / "inference" / "engines"


def scenarios(name: str) -> dict[str, object]:
    """The test functions of one of those files, with their marks."""
    return {name: value for name, value in vars(engine_tests(name)).items() if name.startswith("test_")}


def engine_tests(name: str) -> ModuleType:
    """One of those files."""
    spec = importlib.util.spec_from_file_location(f"scenarios_of_{name}", ENGINE_TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
