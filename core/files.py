"""Files that are read and replaced with care, and a model's folder and JSON."""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from .validation import shown

CONFIG = "config.json"


class ModelFolderError(ValueError):
    """A folder holds no model that can be loaded. The message names the file or the tensor."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered; a FIFO or device raises OSError instead of blocking."""
    opened = FileIO(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(f"{path.name} is no regular file")
    return opened


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file; OSError as `open_regular`."""
    with BufferedReader(open_regular(path)) as opened:
        return opened.read()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to write, which replaces `path` after the block; an error removes it, and `path` stays."""
    draft = path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)  # with the rights that an earlier process gave it
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def existing_folder(name: str, value: object) -> Path | None:
    """`value`, the argument `name`, as a folder; None without such a folder, ModelFolderError for no path."""
    reason = ""
    if isinstance(value, (str, Path)) and str(value):
        try:
            folder = Path(value).expanduser()
            return folder if folder.is_dir() else None
        except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL
            reason = f" ({error})"
    raise ModelFolderError(f"{name} is {shown(value)}{reason}; accepted: a folder, or a name on the hub")


def check_regular(path: Path) -> None:
    """Raise a ModelFolderError unless `path` is a file, or a link to one."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelFolderError(f"{path} cannot be read: it is no file; accepted: a file, or a link to one")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelFolderError for a missing file or other content."""
    check_regular(path)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds a JSON {type(value).__name__}; accepted: an object")
    return value


def read_optional_object(path: Path) -> dict[str, Any]:
    """As `read_object`; an empty dict where the file is missing."""
    return read_object(path) if path.is_file() else {}


def section(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `name` in the content of `path`; empty if missing or null, else a ModelFolderError."""
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: {name} is {shown(value)}; accepted: an object")
    return value
