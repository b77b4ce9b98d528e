"""Files that hold states: one for each slot of the disk tier, written by a thread."""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from torch import Tensor

from ...files import open_regular

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sQqq32s")  # magic, bytes of a state, serial number, checksum, model
_MAGIC = b"MSSTATE1"
_PREFIX, _LOCK = "mambaslots-", "lock"
_ZEROS_AT_ONCE = 1 << 20

Remove = Callable[[Path], None]


class StateFiles:
    """A locked directory of files with a state each, below `path`, read only by the engine that wrote them.

    A file is written under another name first, and begins with serial number, checksum, size, model, and a
    checksum of these: it is whole, or is refused. The directory of a process that died is removed by the next
    engine.
    """

    def __init__(self, path: str, state_bytes: int, model: str, scrubs: bool = False) -> None:
        """`model`: how a state is encoded, of what model and rank; `scrubs`: zero files that go."""
        root = Path(path)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove = _overwrite_and_unlink if scrubs else Path.unlink
        _remove_leftovers(root, remove)
        self.directory, lock = _locked_directory(root)
        self._state_bytes = state_bytes
        self._model = hashlib.sha256(model.encode()).digest()
        self._writer = _Writer(self.directory, lock, remove)
        self.close = weakref.finalize(self, self._writer.close)

    def _name(self, file: int) -> Path:
        return self.directory / f"{file}.state"

    def save(self, file: int, serial: int, state: Tensor, checksum: Callable[[], int | None]) -> None:
        """Let the thread save a state. `checksum` waits for it; None: another state is there."""
        size, model = self._state_bytes, self._model

        def head(value: int) -> bytes:
            return _HEAD.pack(_MAGIC, size, serial, value, model)

        self._writer.work.put(partial(self._writer.write, self._name(file), head, state, checksum))

    def load(self, file: int, serial: int, state: Tensor) -> int | None:
        """Read into `state`; its stored checksum, or None where the file cannot be read or has another state.

        ValueError for a file that is damaged.
        """
        size, damaged = _HEAD.size + 4, f"{self._name(file)} is damaged"
        try:
            with open_regular(self._name(file)) as opened:
                text = opened.read(size)
                if len(text) < size or text[-4:] != _crc(text[:-4]):
                    raise ValueError(damaged)
                magic, state_bytes, written, checksum, model = _HEAD.unpack(text[:-4])
                if (magic, state_bytes, written, model) != (_MAGIC, self._state_bytes, serial, self._model):
                    return None
                room, done = memoryview(state.numpy()), 0
                while done < state_bytes:
                    if not (num_read := opened.readinto(room[done:])):
                        raise ValueError(damaged)
                    done += num_read
                return int(checksum)
        except OSError:
            return None

    def delete(self, files: Sequence[int] | None) -> None:
        """Let the thread remove these files, or all, after earlier saves."""
        names = None if files is None else [self._name(file) for file in files]
        self._writer.work.put(partial(self._writer.delete, names))


class _Writer:
    """Writes and removes files of a locked directory, on a thread of its own that does the queued `work`."""

    def __init__(self, directory: Path, lock: IO[str], remove: Remove) -> None:
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._directory = directory
        self._lock = lock
        self._remove = remove
        self._closed = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="mambaslots-files", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (todo := self.work.get()) is not None:
            try:
                if not self._closed:
                    todo()
            except Exception:
                logger.exception("a state could not be written to a file")

    def write(
        self, name: Path, head: Callable[[int], bytes], state: Tensor, checksum: Callable[[], int | None]
    ) -> None:
        """Write a file under another name, then rename it. The file's former state is removed in any case."""
        self.delete([name])
        if (value := checksum()) is None:
            return
        text = head(value)
        draft = name.with_suffix(".part")
        try:
            with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
                opened.write(text + _crc(text))
                opened.write(memoryview(state.numpy()))
            if checksum() == value:
                os.replace(draft, name)
            else:
                self._remove(draft)
        except OSError as error:
            with suppress(OSError):
                self._remove(draft)
            if not self._has_failed:
                logger.warning("a state could not be written to %s: %s", self._directory, error)
            self._has_failed = True

    def delete(self, names: Sequence[Path] | None) -> None:
        _remove_files(self._directory.glob("*.state") if names is None else names, self._remove)

    def close(self) -> None:
        self._closed = True
        self.work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        _remove_all(self._directory, self._remove)
        self._lock.close()


def _crc(text: bytes) -> bytes:
    return zlib.crc32(text).to_bytes(4, "little")


def _remove_files(names: Iterable[Path], remove: Remove) -> None:
    for name in names:
        with suppress(OSError):
            remove(name)


def _overwrite_and_unlink(name: Path) -> None:
    """Overwrite and remove this user's file that has no other name; a link is only removed."""
    try:
        with open(name, "r+b", buffering=0, opener=_open_no_link) as opened:
            status = os.fstat(opened.fileno())
            owned = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
            num_left = status.st_size if owned else 0
            while num_left > 0:
                num_left -= opened.write(bytes(min(num_left, _ZEROS_AT_ONCE)))
            os.fsync(opened.fileno())
    finally:
        name.unlink(missing_ok=True)


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove_all(directory: Path, remove: Remove) -> None:
    _remove_files((*directory.glob("*.state"), *directory.glob("*.part")), remove)
    shutil.rmtree(directory, ignore_errors=True)


def _locked_directory(root: Path) -> tuple[Path, IO[str]]:
    """A new directory and its lock; another one where an engine that starts now has taken it."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = (directory / _LOCK).open("w")
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (directory / _LOCK).exists():
                return directory, lock
        lock.close()


def _remove_leftovers(root: Path, remove: Remove) -> None:
    """Remove the unlocked directories of engines that have died."""
    for directory in root.glob(f"{_PREFIX}*"):
        if directory.is_symlink():
            continue
        with suppress(OSError), open(directory / _LOCK, "r+", opener=_open_no_link) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_all(directory, remove)
