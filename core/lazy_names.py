"""Public names of a package that are imported at their first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(
    namespace: dict[str, Any], names_of_modules: Mapping[str, str], packages: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of the package whose globals are `namespace`.

    `names_of_modules`: module of the package -> its public names, separated by blanks. `packages`: those of
    the package that are public themselves. AttributeError: neither has the name.
    """
    package = namespace["__name__"]
    sources = {name: module for module, names in names_of_modules.items() for name in names.split()}

    def imported(name: str) -> Any:
        if name in sources:
            namespace[name] = getattr(import_module(f"{package}.{sources[name]}"), name)
        elif name in packages:
            namespace[name] = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace[name]

    return imported
