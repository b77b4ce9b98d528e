"""Exports in a directory: a file a rank, and a manifest that says which files belong together."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard
from ..validation import shown
from .prefix_codec import checksum, decode_prefixes, encode_prefixes
from .prefix_export import PrefixName, checked_slots, export_prefixes
from .prefix_format import (
    PrefixFormat,
    TransferError,
    check_version,
    json_object,
    shard_from_json,
    shard_of,
    shard_to_json,
)
from .prefix_import import ImportReport, import_obtained
from .prefix_replica import described, failures, gathered, replica_rank
from .prefix_shard import PrefixShard, check_totals, join, sources_for

MANIFEST = "prefixes.json"


@dataclass(frozen=True)
class SaveReport:
    """`files`: those of all ranks. `prefixes`: longest ones. `bytes`: of this rank's file."""

    files: tuple[str, ...]
    prefixes: int
    blocks: int
    states: int
    bytes: int


def save_prefixes(
    engine: DynamicInferenceEngine,
    directory: str | os.PathLike[str],
    prefixes: Iterable[PrefixName] | None = None,
) -> SaveReport:
    """Write the prefixes of an engine's cache, all or those named, as `export_prefixes` does, to files.

    Called by every rank of a replica, with one directory that all of them see and no other replica writes;
    it is made where it does not exist. A set replaces the one before at the very end, in one rename: until
    then, and where anything fails, the former set can be loaded. Between steps; synchronises the ranks.
    OSError on all ranks where one cannot write, and what `export_prefixes` raises.
    """
    checked_slots(engine, "save_prefixes")
    PrefixFormat.of(engine)
    folder, spec = _folder(directory), engine.context.spec
    groups = spec.groups
    set_id: str = gathered(spec, uuid.uuid4().hex[:12])[0]
    name = (
        f"prefixes-{set_id}-tp{groups.tensor_rank}of{groups.tensor_size}"
        f"-pp{groups.pipeline_rank}of{groups.pipeline_size}.safetensors"
    )
    entry: dict[str, Any] = {}
    cause, reason, size, shard = None, "", 0, None
    try:
        shard = export_prefixes(engine, prefixes)
        data = encode_prefixes(shard)
        size = len(data)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / name, data)
        entry = {"file": name, "sha256": checksum(data), "shard": shard_to_json(shard.shard)}
    except Exception as error:
        cause, reason = error, described(error)
    told = gathered(spec, (reason, entry))
    failure = failures([text for text, _ in told])
    entries = [entry for _, entry in told]
    if not failure and replica_rank(groups) == 0:
        try:
            _write(folder / MANIFEST, _manifest(set_id, entries))
            _remove_others(folder, {entry["file"] for entry in entries})
        except OSError as error:
            cause, reason = error, described(error)
    failure = failure or failures(gathered(spec, reason))
    if failure or shard is None:
        with suppress(OSError):
            (folder / name).unlink()
        if isinstance(cause, ValueError):  # of an argument: the same on all ranks
            raise cause
        raise OSError(f"prefixes could not be saved in {str(folder)!r}: {failure}") from cause
    forest = shard.forest
    files = tuple(entry["file"] for entry in entries)
    return SaveReport(files, len(forest.leaves), len(forest), len(forest.states), size)


def load_prefixes(engine: DynamicInferenceEngine, directory: str | os.PathLike[str]) -> ImportReport:
    """Import what `save_prefixes` wrote last into a directory, at whatever split it was.

    Called by every rank of a replica; each reads the files that overlap its part. Errors and effects are
    those of `import_prefixes`; TransferError also where the set or a file of it is not there.
    """
    folder = _folder(directory)
    return import_obtained(engine, "load_prefixes", lambda: _load(folder, engine))


def _load(folder: Path, engine: DynamicInferenceEngine) -> PrefixShard:
    wanted, own = shard_of(engine), PrefixFormat.of(engine)
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise TransferError(f"directory is {str(folder)!r}: {error}; accepted: one that has a set") from error
    files, shards, checksums = _read_manifest(text, own)
    pieces = []
    for index, part in sources_for(shards, wanted).items():
        try:
            data = (folder / files[index]).read_bytes()
        except OSError as error:
            raise TransferError(f"{files[index]} of the set cannot be read: {error}") from error
        try:
            piece = decode_prefixes(data)
        except TransferError as error:
            raise TransferError(f"{files[index]}: {error}") from error
        if checksum(data) != checksums[index] or piece.shard != shards[index]:
            raise TransferError(
                f"{files[index]} is not the file that {MANIFEST} names; accepted: one set's files"
            )
        piece.format.check_fits(own)
        pieces.append(piece.cut(part))
    return join(pieces, wanted)


def _folder(directory: object) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(f"directory is {shown(directory)}; accepted: a path")
    return Path(directory)


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing under this name, also through a crash."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_others(folder: Path, kept: set[str]) -> None:
    """The files of earlier sets, and of ones that were never finished, as far as they can be removed."""
    for path in folder.glob("prefixes-*.safetensors*"):
        if path.name not in kept:
            with suppress(OSError):
                path.unlink()


def _manifest(set_id: str, entries: list[dict[str, Any]]) -> bytes:
    content = {"format_version": 1, "set": set_id, "files": entries}
    return json.dumps({"content": content, "sha256": _content_digest(content)}, indent=1).encode()


def _content_digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(text: bytes, own: PrefixFormat) -> tuple[list[str], list[ModelShard], list[str]]:
    """File names, their parts and their checksums."""
    try:
        found = json_object(MANIFEST, json.loads(text), {"content", "sha256"})
        content = json_object("content", found["content"], {"format_version", "set", "files"})
        check_version(content["format_version"])
        if found["sha256"] != _content_digest(content):
            raise TransferError(f"sha256 of {MANIFEST} is another: it was altered")
        entries = [json_object("file", entry, {"file", "sha256", "shard"}) for entry in content["files"]]
        shards = [shard_from_json(entry["shard"]) for entry in entries]
        files = [_file_name(entry["file"]) for entry in entries]
    except TransferError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise TransferError(f"{MANIFEST} is truncated or altered: {error}") from error
    for shard in shards:
        check_totals(own, shard)
    return files, shards, [entry["sha256"] for entry in entries]


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not value or Path(value).name != value:
        raise TransferError(f"file is {shown(value)}; accepted: the name of a file beside {MANIFEST}")
    return value
