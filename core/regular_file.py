"""Files that somebody else may have replaced: nothing waits for them, and nothing is read without end."""

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered.

    Raises:
        OSError: there is no such file, or a directory, a pipe or a device is in its place.
    """
    opened = FileIO(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(f"{path.name} is no regular file")
    return opened


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file; OSError as `open_regular`."""
    with BufferedReader(open_regular(path)) as opened:
        return opened.read()
