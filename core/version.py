"""The version of mambaslots, and the newest versions of what it runs on with which its tests pass."""

import functools
import importlib.metadata
import platform
from collections.abc import Callable

from packaging.version import Version

VERSION = "0.1.0"
NEWEST_TESTED = {
    "python": "3.13", "torch": "2.15", "triton": "3.9", "numpy": "2.5", "safetensors": "0.8",
    "transformers": "5.23", "fastapi": "0.165", "uvicorn": "0.54", "prometheus-client": "0.26",
    "fla-core": "0.6", "ray": "2.60",
}  # fmt: skip


def untested() -> list[str]:
    """What is newer here than any tested minor version; empty where nothing is.

    Example: with torch 2.16.1 installed, `["torch 2.16.1 (newest tested: 2.15)"]`.
    """
    found = []
    for name, newest in NEWEST_TESTED.items():
        try:
            here = platform.python_version() if name == "python" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(here).release[:2] > Version(newest).release:
            found.append(f"{name} {here} (newest tested: {newest})")
    return found


def moved_hook(error: Exception) -> ImportError | None:
    """What to raise where a call into transformers fails and its version is not the tested one; else None.

    Example: "transformers 5.24.0 has no transformers.core_model_loading.rename_source_key, on which
    mambaslots.hf relies; tested: transformers 5.23".
    """
    here, tested = importlib.metadata.version("transformers"), NEWEST_TESTED["transformers"]
    if Version(here).release[:2] == Version(tested).release:
        return None
    match error:
        case ImportError() if (error.name or "").partition(".")[0] != "transformers":
            return None
        case ImportError():
            moved = "has no " + ".".join(filter(None, (error.name, error.name_from)))
        case AttributeError() if error.name is not None:
            moved = f"has no {error.name!r} in {getattr(error.obj, '__name__', type(error.obj).__name__)}"
        case _:
            moved = f"differs ({type(error).__name__}: {' '.join(str(error).split())})"
    return ImportError(
        f"transformers {here} {moved}, on which mambaslots.hf relies; tested: transformers {tested}"
    )


def names_moved_hooks[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a call into private parts of transformers: see `moved_hook`."""

    @functools.wraps(call)
    def calling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            if moved := moved_hook(error):
                raise moved from error
            raise

    return calling
