"""Private parts of transformers that a version without tests has moved: refused by name."""

import functools
import importlib.metadata
from collections.abc import Callable

from packaging.version import Version

from ..version import NEWEST_TESTED


def moved_hook(error: Exception) -> ImportError | None:
    """What to raise where a call into transformers fails and its version is newer than tested; else None.

    Example: "transformers 5.25.0 has no transformers.core_model_loading.rename_source_key, on which
    mambaslots.hf relies; newest tested: transformers 5.24".
    """
    version = importlib.metadata.version("transformers")
    tested = NEWEST_TESTED["transformers"]
    if Version(version).release[:2] <= Version(tested).release:
        return None
    match error:
        case ImportError() if (error.name or "").partition(".")[0] != "transformers":
            return None
        case ImportError():
            fault = "has no " + ".".join(filter(None, (error.name, error.name_from)))
        case AttributeError() if error.name is not None:
            fault = f"has no {error.name!r} in {getattr(error.obj, '__name__', type(error.obj).__name__)}"
        case _:
            fault = f"differs ({type(error).__name__}: {' '.join(str(error).split())})"
    return ImportError(
        f"transformers {version} {fault}, on which mambaslots.hf relies; newest tested: transformers {tested}"
    )


def names_moved_hooks[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a call into private parts of transformers: see `moved_hook`."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            if moved := moved_hook(error):
                raise moved from error
            raise

    return wrapped
