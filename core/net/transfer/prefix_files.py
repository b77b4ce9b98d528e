"""Exports in a directory: a file a rank, and a manifest that says which files belong together."""

import hashlib
import os
import re
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from ...files import read_regular, replacing
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import refused
from ..all_ranks import Attempt, Notes
from .exports import CacheAccess, PrefixName, export_prefixes
from .format import (
    FORMAT_VERSION,
    PrefixForest,
    PrefixFormat,
    Shard,
    TensorPart,
    TransferError,
    check_shard,
    check_version,
    shard_of,
)
from .imports import ReceivedPrefixes, import_received
from .placement import ImportReport
from .shard import PrefixShard, checksum, decode_prefixes, encode_prefixes, join, sources_for

MANIFEST = "prefixes.json"  # the name of a manifest in its directory


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a set."""

    file: Annotated[str, msgspec.Meta(pattern=r"^[^/\0]+$")]  # its name in the directory
    sha256: str  # that the file carries
    shard: dict[str, TensorPart]  # the part of the model whose states and KV the file holds


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of one export, a file a rank, in order of rank. Each file's checksum is checked."""

    files: list[FileEntry]
    format_version: int = FORMAT_VERSION


def _entries_of(text: bytes) -> list[FileEntry]:
    """The files that a manifest names; TransferError where it is no manifest of this version."""
    try:
        check_version(msgspec.json.decode(text, type=_Versioned).format_version)
        return msgspec.json.decode(text, type=Manifest).files
    except TransferError:
        raise
    except (ValueError, RecursionError) as error:
        raise TransferError(f"{MANIFEST} is truncated or altered: {error}") from error


class _Versioned(msgspec.Struct):
    format_version: int


_OWN_FILES = re.compile(r"prefixes-[0-9a-f]{12}-tp[0-9]+of[0-9]+-pp[0-9]+of[0-9]+\.safetensors(\.part)?")


@dataclass(frozen=True)
class SaveReport:
    """What was saved.

    Attributes:
        files: the names of the files of all ranks.
        prefixes: prefixes that no other prefix of the set continues.
        blocks: KV blocks.
        states: states.
        bytes: the size of this rank's file.
    """

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
    """Write cached prefixes to files in a directory; `load_prefixes` reads them, at any split.

    Every rank of a replica calls this, between steps. Synchronises the ranks. The set of files replaces the
    set before it at the very end, by renaming one file. Until then, and where anything fails, the set before
    can be loaded.

    Args:
        engine: the engine to export from.
        directory: one directory that all ranks see and no other replica writes. It is made if it is missing.
        prefixes: the prefixes to save, as in `export_prefixes`; None for all.

    Raises:
        OSError: on every rank, where a rank could not write its file, the ranks have different prefixes or
            directories, or another rank has a wrong argument.
        ValueError: `directory` is no path; or as in `export_prefixes`.
        RuntimeError: as in `export_prefixes`.
    """
    access = CacheAccess(engine, "save_prefixes")
    groups = access.spec.groups
    set_id = groups.gather(uuid.uuid4().hex[:12], access.spec.device)[0]
    name = (
        f"prefixes-{set_id}-tp{groups.tensor_rank}of{groups.tensor_size}"
        f"-pp{groups.pipeline_rank}of{groups.pipeline_size}.safetensors"
    )

    def write_own_file(notes: Notes) -> PrefixForest:
        folder = _folder(directory)
        shard = export_prefixes(engine, prefixes)
        data = encode_prefixes(shard)
        notes["prefixes or weights"] = shard.forest.digest, shard.format
        notes["entry"] = FileEntry(name, checksum(data), dict(shard.shard))
        notes["size"] = len(data)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / name, data)
        return shard.forest

    def write_manifest(_: Notes) -> None:
        if access.rank:
            return
        folder = Path(directory)
        for rank, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            path = folder / entry.file
            if not path.is_file() or path.stat().st_size != size:
                raise OSError(
                    f"{path.name}, which rank {rank} wrote, is not here; accepted: one directory for all "
                    "ranks"
                )
        _write(folder / MANIFEST, msgspec.json.encode(Manifest(entries)))

    try:
        written = access.attempt(write_own_file, same=("prefixes or weights",))
        forest = _result(written, directory)
        entries: list[FileEntry] = [notes["entry"] for notes in written.notes]
        sizes: list[int] = [notes["size"] for notes in written.notes]
        _result(access.attempt(write_manifest), directory)
    except (OSError, ValueError):
        with suppress(Exception):  # the directory may be no path
            (Path(directory) / name).unlink()
        raise
    files = tuple(entry.file for entry in entries)
    if access.rank == 0:
        _remove_other_sets(Path(directory), files)
    return SaveReport(files, len(forest.leaves), len(forest), len(forest.states), sizes[access.rank])


def _result[T](attempt: Attempt[T], directory: object) -> T:
    """This rank's value; where a rank failed, raises as `save_prefixes` says."""
    if isinstance(attempt.error, ValueError):  # this rank's own argument is wrong
        raise attempt.error
    return attempt.result(lambda why: OSError(f"prefixes could not be saved in {str(directory)!r}: {why}"))


def load_prefixes(engine: DynamicInferenceEngine, directory: str | os.PathLike[str]) -> ImportReport:
    """Import the set of files that `save_prefixes` wrote last into a directory.

    Every rank of a replica calls this, between steps. The saving replica may have been split in another way;
    each rank reads the files that overlap its part.

    Args:
        engine: the engine to import into.
        directory: where the files are.

    Returns:
        As `import_prefixes`.

    Raises, on every rank alike:
        TransferError: the set or a file of it is missing; or another set was saved while the ranks read, and
            loading again helps; or as in `import_prefixes`.
        ValueError, RuntimeError, CopyError: as in `import_prefixes`; ValueError also for a `directory` that
            is no path.
    """
    access = CacheAccess(engine, "load_prefixes")

    def received() -> ReceivedPrefixes:
        return ReceivedPrefixes.of(*_read_part(_folder(directory), access.format(), shard_of(access.spec)))

    return import_received(access, received)


def _read_part(folder: Path, own_format: PrefixFormat, own_shard: Shard) -> tuple[PrefixShard, str]:
    """The part `own_shard` of the set in `folder`, and the set's checksum; reads the needed files alone."""
    try:
        text = read_regular(folder / MANIFEST)
    except OSError as error:
        raise TransferError(f"directory is {str(folder)!r}: {error}; accepted: one that has a set") from error
    entries = _entries_of(text)
    for entry in entries:
        check_shard(own_format, entry.shard)
    sources = sources_for([entry.shard for entry in entries], own_shard)
    pieces = []
    for entry in [entries[index] for index in sources] or entries[:1]:  # at least one: it has the prefixes
        try:
            data = read_regular(folder / entry.file)
        except OSError as error:
            raise TransferError(f"{entry.file} of the set cannot be read: {error}") from error
        try:
            piece = decode_prefixes(data)
        except TransferError as error:
            raise TransferError(f"{entry.file}: {error}") from error
        if checksum(data) != entry.sha256 or piece.shard != entry.shard:
            raise TransferError(
                f"{entry.file} is not the file that {MANIFEST} names; accepted: one set's files"
            )
        piece.format.check_fits(own_format)
        pieces.append(piece)
    return join(pieces, own_shard), hashlib.sha256(text).hexdigest()


def _folder(directory: object) -> Path:
    try:
        folder = Path(directory)  # type: ignore[arg-type]
        if b"\0" not in os.fsencode(folder):
            return folder
    except (TypeError, UnicodeEncodeError):
        pass
    raise refused("directory", directory, "a path, without NUL")


def _write(path: Path, data: bytes) -> None:
    """Write a file at once, for its owner alone: a reader, also after a crash, finds all of it or none."""
    private = partial(os.open, mode=0o600)
    with replacing(path) as draft, open(draft, "xb", opener=private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def _remove_other_sets(folder: Path, own_files: Collection[str]) -> None:
    """Remove the files of earlier sets and of unfinished ones, as far as the system allows."""
    with suppress(Exception):  # the new set is complete, whatever else stays
        for path in folder.glob("prefixes-*.safetensors*"):
            if path.name not in own_files and _OWN_FILES.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
