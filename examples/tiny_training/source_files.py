"""The source files of Python's standard library: the texts that the small model learns from.

Files are read from the Python that runs, or from a pack: one compressed file, for machines that have another
Python.
"""

import hashlib
import io
import platform
import sysconfig
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_SHARE = 0.05
_VERSION_FILE = "PYTHON_VERSION"


@dataclass(frozen=True)
class SourceFiles:
    """Files by their path below the library's folder, sorted.

    Attributes:
        python: version of the Python that the files come with.
        texts: content of each file, valid UTF-8.
    """

    python: str
    texts: dict[str, bytes]

    @classmethod
    def of_this_python(cls) -> "SourceFiles":
        """All `*.py` files of the standard library, but for generated ones that differ between machines."""
        folder = Path(sysconfig.get_path("stdlib"))
        texts = {}
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if SKIPPED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
                text = path.read_bytes()
                if _is_utf8(text):
                    texts[relative.as_posix()] = text
        return cls(platform.python_version(), dict(sorted(texts.items())))

    @classmethod
    def unpack(cls, path: Path) -> "SourceFiles":
        """What `pack` wrote."""
        with tarfile.open(path, "r:xz") as archive:
            texts = {}
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None, "a pack holds files alone"
                texts[member.name] = file.read()
        python = texts.pop(_VERSION_FILE).decode()
        return cls(python, dict(sorted(texts.items())))

    def pack(self, path: Path) -> None:
        """Write all files, and Python's version, into one compressed file."""
        with tarfile.open(path, "w:xz") as archive:
            for name, text in {_VERSION_FILE: self.python.encode(), **self.texts}.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))

    @property
    def digest(self) -> str:
        """SHA-256 of the list of files: a line with the SHA-256 of the content and the path for each."""
        lines = (f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in sorted(self.texts.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.texts.values()))

    @cached_property
    def held_out(self) -> dict[str, bytes]:
        """About one file in twenty, by the hash of its path; no file of it is trained on."""
        return {name: text for name, text in self.texts.items() if _is_held_out(name)}

    @cached_property
    def training(self) -> dict[str, bytes]:
        return {name: text for name, text in self.texts.items() if not _is_held_out(name)}


def _is_held_out(name: str) -> bool:
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return first < HELD_OUT_SHARE * 2**32


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
