"""The JSON files of a checkpoint's folder."""

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"


class CheckpointError(ValueError):
    """A folder holds no checkpoint that can be loaded. The message names the file or the tensor."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; accepted: an object")
    return value


def read_optional_object(path: Path) -> dict[str, Any]:
    """As `read_object`; an empty dict where the file is missing."""
    return read_object(path) if path.is_file() else {}
