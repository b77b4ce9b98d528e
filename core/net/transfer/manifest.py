"""The manifest of a directory of exported prefixes: which files belong together."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...validation import shown
from .format import FORMAT_VERSION, TransferError, check_version
from .parts import Shard, json_object, shard_from_json, shard_to_json

MANIFEST = "prefixes.json"
"""The name of a manifest in its directory."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a set.

    Attributes:
        file: its name in the directory.
        sha256: the checksum that the file carries.
        shard: the part of the model whose states and KV the file holds.
    """

    file: str
    sha256: str
    shard: Shard


@dataclass(frozen=True)
class Manifest:
    """The files of one export, a file a rank.

    Attributes:
        set_id: the name of the set, part of each file's name.
        entries: the files, in order of rank.
    """

    set_id: str
    entries: Sequence[FileEntry]

    @property
    def sha256(self) -> str:
        """Tells this set from every other."""
        return _digest(self._content())

    def to_bytes(self) -> bytes:
        """The manifest as JSON; `from_bytes` reads it."""
        content = self._content()
        return json.dumps({"content": content, "sha256": _digest(content)}, indent=1).encode()

    def _content(self) -> dict[str, object]:
        files = [
            {"file": entry.file, "sha256": entry.sha256, "shard": shard_to_json(entry.shard)}
            for entry in self.entries
        ]
        return {"format_version": FORMAT_VERSION, "set": self.set_id, "files": files}

    @classmethod
    def from_bytes(cls, text: bytes) -> "Manifest":
        """The manifest that `to_bytes` encoded.

        Raises:
            TransferError: `text` is truncated, altered, or of another format version.
        """
        try:
            found = json_object(MANIFEST, json.loads(text), {"content", "sha256"})
            content = json_object("content", found["content"], {"format_version", "set", "files"})
            check_version(content["format_version"])
            if found["sha256"] != _digest(content):
                raise TransferError(f"sha256 of {MANIFEST} is another: it was altered")
            files = [json_object("file", entry, {"file", "sha256", "shard"}) for entry in content["files"]]
            shards = [shard_from_json(entry["shard"]) for entry in files]
            entries = [
                FileEntry(_file_name(entry["file"]), entry["sha256"], shard)
                for entry, shard in zip(files, shards, strict=True)
            ]
        except TransferError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise TransferError(f"{MANIFEST} is truncated or altered: {error}") from error
        return cls(content["set"], entries)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not value or Path(value).name != value:
        raise TransferError(f"file is {shown(value)}; accepted: the name of a file beside {MANIFEST}")
    return value
