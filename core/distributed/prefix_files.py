"""Exports in a directory: a file a rank, and a manifest that says which files belong together."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard
from ..validation import shown
from .prefix_codec import checksum, decode_prefixes, encode_prefixes
from .prefix_export import PrefixName, checked_slots, export_prefixes
from .prefix_failures import described, differences, failures
from .prefix_format import (
    FORMAT_VERSION,
    PrefixFormat,
    TransferError,
    check_version,
    json_object,
    shard_from_json,
    shard_of,
    shard_to_json,
)
from .prefix_import import ImportReport, Obtained, import_obtained
from .prefix_shard import check_totals, join, sources_for

MANIFEST = "prefixes.json"
_OURS = re.compile(r"prefixes-[0-9a-f]{12}-tp[0-9]+of[0-9]+-pp[0-9]+of[0-9]+\.safetensors(\.tmp)?")


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
    OSError on all ranks where one cannot write, or where they have different prefixes or directories; what
    `export_prefixes` raises, and ValueError for what is no path, where only some ranks have a wrong argument
    an OSError on the others.
    """
    checked_slots(engine, "save_prefixes")
    spec = engine.context.spec
    groups = spec.groups
    set_id: str = groups.gather(uuid.uuid4().hex[:12], spec.device)[0]
    name = (
        f"prefixes-{set_id}-tp{groups.tensor_rank}of{groups.tensor_size}"
        f"-pp{groups.pipeline_rank}of{groups.pipeline_size}.safetensors"
    )
    entry: dict[str, Any] = {}
    cause, reason, size, folder, shard, content = None, "", 0, None, None, None
    try:
        folder = _folder(directory)
        shard = export_prefixes(engine, prefixes)
        data = encode_prefixes(shard)
        size = len(data)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / name, data)
        content = shard.forest.digest, shard.format
        entry = {"file": name, "sha256": checksum(data), "shard": shard_to_json(shard.shard)}
    except Exception as error:
        cause, reason = error, described(error)
    told = groups.gather((reason, content, entry, size), spec.device)
    entries = [entry for _, _, entry, _ in told]
    failure = failures([text for text, _, _, _ in told])
    failure = failure or differences("prefixes or weights", [content for _, content, _, _ in told])
    if not failure and groups.rank == 0 and folder is not None:
        try:
            _check_sees(folder, entries, [size for _, _, _, size in told])
            _write(folder / MANIFEST, _manifest(set_id, entries))
        except Exception as error:
            cause, reason = error, described(error)
    failure = failure or failures(groups.gather(reason, spec.device))
    if failure or folder is None or shard is None:
        if folder is not None:
            with suppress(OSError):
                (folder / name).unlink()
        if isinstance(cause, ValueError):  # of an argument
            raise cause
        raise OSError(f"prefixes could not be saved in {str(directory)!r}: {failure}") from cause
    forest = shard.forest
    files = tuple(entry["file"] for entry in entries)
    if groups.rank == 0:
        _remove_others(folder, files)
    return SaveReport(files, len(forest.leaves), len(forest), len(forest.states), size)


def load_prefixes(engine: DynamicInferenceEngine, directory: str | os.PathLike[str]) -> ImportReport:
    """Import what `save_prefixes` wrote last into a directory, at whatever split it was.

    Called by every rank of a replica; each reads the files that overlap its part. Errors and effects are
    those of `import_prefixes`; TransferError also where the set or a file of it is not there, or where
    another set was saved while the ranks read: loading again then helps.
    """

    def prepare() -> Callable[[], Obtained]:
        folder = _folder(directory)
        return lambda: _load(folder, engine)

    return import_obtained(engine, "load_prefixes", prepare)


def _load(folder: Path, engine: DynamicInferenceEngine) -> Obtained:
    wanted, own = shard_of(engine), PrefixFormat.of(engine)
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise TransferError(f"directory is {str(folder)!r}: {error}; accepted: one that has a set") from error
    files, shards, checksums, source = _read_manifest(text, own)
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
    return Obtained(join(pieces, wanted), source)


def _folder(directory: object) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(f"directory is {shown(directory)}; accepted: a path")
    try:
        folder = Path(directory)
        nameable = b"\0" not in os.fsencode(folder)
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"directory is {shown(directory)}; accepted: a path") from error
    if not nameable:
        raise ValueError(f"directory is {shown(directory)}; accepted: a path without NUL")
    return folder


def _check_sees(folder: Path, entries: Sequence[dict[str, Any]], sizes: Sequence[int]) -> None:
    """OSError unless the files of all ranks are here."""
    for rank, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        path = folder / entry["file"]
        if not path.is_file() or path.stat().st_size != size:
            raise OSError(
                f"{path.name}, which rank {rank} wrote, is not here; accepted: one directory for all ranks"
            )


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


def _remove_others(folder: Path, kept: Collection[str]) -> None:
    """The files of earlier sets, and of ones that were never finished, as far as they can be removed."""
    with suppress(Exception):  # the set is whole without
        for path in folder.glob("prefixes-*.safetensors*"):
            if path.name not in kept and _OURS.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


def _manifest(set_id: str, entries: list[dict[str, Any]]) -> bytes:
    content = {"format_version": FORMAT_VERSION, "set": set_id, "files": entries}
    return json.dumps({"content": content, "sha256": _content_digest(content)}, indent=1).encode()


def _content_digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(text: bytes, own: PrefixFormat) -> tuple[list[str], list[ModelShard], list[str], str]:
    """File names, their parts and their checksums; the checksum of all that, which names the set."""
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
    return files, shards, [entry["sha256"] for entry in entries], found["sha256"]


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not value or Path(value).name != value:
        raise TransferError(f"file is {shown(value)}; accepted: the name of a file beside {MANIFEST}")
    return value
