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

from ...files import read_regular
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import shown
from ..all_ranks import Attempt, Notes
from .cache_access import CacheAccess
from .codec import checksum, decode_prefixes, encode_prefixes
from .export import PrefixName, export_from
from .forest import PrefixForest
from .format import FORMAT_VERSION, PrefixFormat, TransferError, check_version
from .import_ import ReceivedShard, import_received
from .parts import Shard, json_object, shard_from_json, shard_of, shard_to_json
from .placement import ImportReport
from .shard import join, sources_for

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


_OWN_FILES = re.compile(r"prefixes-[0-9a-f]{12}-tp[0-9]+of[0-9]+-pp[0-9]+of[0-9]+\.safetensors(\.tmp)?")


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


@dataclass(frozen=True)
class _SavedFile:
    path: Path
    size: int
    forest: PrefixForest


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
    access = CacheAccess.of(engine, "save_prefixes")
    ranks, parallel = access.ranks, access.parallel
    set_id = ranks.from_first_rank(uuid.uuid4().hex[:12])
    name = (
        f"prefixes-{set_id}-tp{parallel.tensor_rank}of{parallel.tensor_size}"
        f"-pp{parallel.pipeline_rank}of{parallel.pipeline_size}.safetensors"
    )

    def write_own_file(notes: Notes) -> _SavedFile:
        folder = _folder(directory)
        shard = export_from(access, prefixes)
        data = encode_prefixes(shard)
        notes["prefixes or weights"] = shard.forest.digest, shard.format
        notes["entry"] = FileEntry(name, checksum(data), shard.shard)
        notes["size"] = len(data)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / name, data)
        return _SavedFile(folder / name, len(data), shard.forest)

    written = ranks.attempt(write_own_file, same=("prefixes or weights",))
    saved = _result(written, written.value, directory)
    folder, forest = saved.path.parent, saved.forest
    entries: list[FileEntry] = [notes["entry"] for notes in written.notes]

    def write_manifest(_: Notes) -> None:
        if ranks.rank == 0:
            _check_all_here(folder, entries, [notes["size"] for notes in written.notes])
            _write(folder / MANIFEST, Manifest(set_id, entries).to_bytes())

    _result(ranks.attempt(write_manifest), saved, directory)
    files = tuple(entry.file for entry in entries)
    if ranks.rank == 0:
        _remove_other_sets(folder, files)
    return SaveReport(files, len(forest.leaves), len(forest), len(forest.states), saved.size)


def _result[T](attempt: Attempt[T], own_file: _SavedFile | None, directory: object) -> T:
    """This rank's value; where a rank failed, removes this rank's file and raises as `save_prefixes` says."""
    if attempt.reason and own_file is not None:
        with suppress(OSError):
            own_file.path.unlink()
    if isinstance(attempt.error, ValueError):  # this rank's own argument is wrong
        raise attempt.error
    return attempt.result(
        lambda reason: OSError(f"prefixes could not be saved in {str(directory)!r}: {reason}")
    )


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
    access = CacheAccess.of(engine, "load_prefixes")

    def prepare() -> Callable[[], ReceivedShard]:
        folder = _folder(directory)
        return lambda: _read_part(folder, PrefixFormat.of(access), shard_of(access.spec))

    return import_received(access, prepare)


def _read_part(folder: Path, own_format: PrefixFormat, own_shard: Shard) -> ReceivedShard:
    """The part `own_shard` of the set in `folder`; reads only the files that are needed."""
    try:
        text = read_regular(folder / MANIFEST)
    except OSError as error:
        raise TransferError(f"directory is {str(folder)!r}: {error}; accepted: one that has a set") from error
    manifest = Manifest.from_bytes(text)
    shards = [entry.shard for entry in manifest.entries]
    for shard in shards:
        own_format.check_shard(shard)
    pieces = []
    for index, part in sources_for(shards, own_shard).items():
        entry = manifest.entries[index]
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
        pieces.append(piece.cut(part))
    return ReceivedShard(join(pieces, own_shard), manifest.sha256)


def _folder(directory: object) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ValueError(f"directory is {shown(directory)}; accepted: a path")
    try:
        folder = Path(directory)
        has_nul = b"\0" in os.fsencode(folder)
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"directory is {shown(directory)}; accepted: a path") from error
    if has_nul:
        raise ValueError(f"directory is {shown(directory)}; accepted: a path without NUL")
    return folder


def _check_all_here(folder: Path, entries: Sequence[FileEntry], sizes: Sequence[int]) -> None:
    """OSError unless `folder` has the files that all ranks wrote."""
    for rank, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        path = folder / entry.file
        if not path.is_file() or path.stat().st_size != size:
            raise OSError(
                f"{path.name}, which rank {rank} wrote, is not here; accepted: one directory for all ranks"
            )


def _write(path: Path, data: bytes) -> None:
    """Write a file at once: whoever opens `path`, also after a crash, finds all of `data` or no new file.

    The file holds what prompts hold: its owner alone may read it.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)  # with the rights that an earlier call gave it
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_other_sets(folder: Path, own_files: Collection[str]) -> None:
    """Remove the files of earlier sets and of unfinished ones, as far as the system allows."""
    with suppress(Exception):  # the new set is complete, whatever stays beside it
        for path in folder.glob("prefixes-*.safetensors*"):
            if path.name not in own_files and _OWN_FILES.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
