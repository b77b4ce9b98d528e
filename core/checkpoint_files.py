"""A checkpoint's folder and its JSON files."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .validation import shown

CONFIG = "config.json"


class CheckpointError(ValueError):
    """A folder holds no checkpoint that can be loaded. The message names the file or the tensor."""


def existing_folder(name: str, value: object) -> Path | None:
    """`value`, the argument `name`, as a folder; None where there is no such folder.

    Raises:
        CheckpointError: `value` can be neither a folder nor a name on the hub.
    """
    reason = ""
    if isinstance(value, (str, Path)) and str(value):
        try:
            folder = Path(value).expanduser()
            return folder if folder.is_dir() else None
        except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL
            reason = f" ({error})"
    raise CheckpointError(f"{name} is {shown(value)}{reason}; accepted: a folder, or a name on the hub")


def check_regular(path: Path) -> None:
    """Raise a CheckpointError unless `path` is a file: a pipe or a device, or a link to one, never ends."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is no file; accepted: a file, or a link to one")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        CheckpointError: the file is missing, cannot be read, or holds something else.
    """
    check_regular(path)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; accepted: an object")
    return value


def read_optional_object(path: Path) -> dict[str, Any]:
    """As `read_object`; an empty dict where the file is missing."""
    return read_object(path) if path.is_file() else {}


def section(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `name` in `content`, an object of the file `path`; empty where it is missing or null.

    Raises:
        CheckpointError: `name` is something else.
    """
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {name} is {shown(value)}; accepted: an object")
    return value
