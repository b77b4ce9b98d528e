"""Where the files of a checkpoint are: in a folder here, or on the hub."""

import errno
import re
from pathlib import Path

from ..files import CheckpointError, existing_folder

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_SUBFOLDERS = ["*/*"]
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def checkpoint_folder(path_or_name: str | Path) -> Path:
    """The folder of a checkpoint, which is downloaded where `path_or_name` is a name on the hub.

    Args:
        path_or_name: a folder, or a name like "organisation/model". A folder of that name comes first.

    Raises:
        CheckpointError: there is no such folder, and no such name on the hub.
        ConnectionError: the name has not been downloaded, and the hub cannot be reached. The cause is
            its `__cause__`.
        OSError: the files cannot be written.
    """
    if folder := existing_folder("path_or_name", path_or_name):
        return folder
    name = str(path_or_name)
    if not isinstance(path_or_name, str) or not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is no folder; accepted: a folder, or 'organisation/model' of the hub"
        )
    return _downloaded(name)


def _downloaded(name: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_SUBFOLDERS))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        message = f"{name!r} is no folder here, and no model on the hub that can be read without an account"
        raise CheckpointError(message) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name!r} is no folder here, and no name on the hub: {error}") from error
    except Exception as error:  # the HTTP client has errors of its own
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        raise ConnectionError(
            f"{name!r} is no folder here and not in the cache of huggingface_hub, and the hub cannot be "
            "reached; accepted without a network: a folder"
        ) from error
