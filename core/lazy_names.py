"""Public names of a package that are imported at their first use."""

import ast
from collections.abc import Callable
from importlib import import_module
from typing import Any


def importer(namespace: dict[str, Any], needed: str | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of the package whose globals are `namespace`.

    It makes the imports of the package's block `if TYPE_CHECKING:`, each when its name is first read. Where a
    module is missing, `needed` is the text of the ImportError.
    """
    package = namespace["__name__"]
    source = namespace["__spec__"].loader.get_source(package)
    block: Any = next(each for each in ast.parse(source).body if isinstance(each, ast.If))
    module_of = {alias.name: node.module for node in block.body for alias in node.names}

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{module_of[name] or name}")
        except ModuleNotFoundError as error:
            if needed is None:
                raise
            raise ImportError(needed) from error
        namespace[name] = getattr(module, name) if module_of[name] else module
        return namespace[name]

    return imported
