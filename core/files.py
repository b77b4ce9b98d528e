"""Files that are read and replaced with care, and a model's folder and JSON."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from .validation import shown

CONFIG = "config.json"
SERVED_MODEL_TYPES = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "mambaslots_hybrid_lm", "nemotron_h",
    "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Every `model_type` of a config.json that is served; known without torch and transformers."""
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


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


def can_be_written(path: Path) -> bool:
    """Whether a file can be at `path`: in a folder, no folder itself, and of a name that is not too long."""
    with suppress(OSError):
        if path.parent.is_dir() and not path.is_dir():
            with suppress(FileNotFoundError):
                path.stat()
            return True
    return False


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


def model_folder(name: str, value: object) -> Path:
    """The folder of a model: `value`, the argument `name`, or where it is downloaded by its name on the hub.

    Raises:
        ModelFolderError: there is no such folder, and no such model on the hub.
        OSError: the hub cannot be reached, or its files cannot be written.
        ImportError: a name on the hub, without the extra `mambaslots[hf]`.
    """
    if folder := existing_folder(name, value):
        return folder
    if not isinstance(value, str) or not _HUB_NAME.fullmatch(value) or Path(value).exists():
        accepted = "a folder, or 'organisation/model' of the hub"
        raise ModelFolderError(f"{str(value)!r} is no folder; accepted: {accepted}")
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{value!r} is no folder here; the hub needs: pip install 'mambaslots[hf]'"
        ) from error
    try:
        return Path(hub.snapshot_download(value, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        message = f"{value!r} is no folder here, and no model on the hub that can be read without an account"
        raise ModelFolderError(f"{message}: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{value!r} is no folder here and not in the cache of huggingface_hub, and the hub cannot be "
            "reached; accepted without a network: a folder"
        ) from error


def check_served(config: Path) -> None:
    """Raise a ModelFolderError unless a config.json can be read and names one of `SERVED_MODEL_TYPES`."""
    model_type = read_object(config).get("model_type")
    if model_type not in SERVED_MODEL_TYPES:
        accepted = ", ".join(SERVED_MODEL_TYPES)
        raise ModelFolderError(f"{config}: model_type is {shown(model_type)}; accepted: {accepted}")


def check_regular(path: Path) -> None:
    """Raise a ModelFolderError unless `path` is a file, or a link to one."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"{path.parent} has no {path.name}; accepted: a folder with {path.name}"
        ) from error
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


def section(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `name` in the content of `path`; empty if missing or null, else a ModelFolderError."""
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: {name} is {shown(value)}; accepted: an object")
    return value
