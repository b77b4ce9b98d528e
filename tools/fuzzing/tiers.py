"""States in host memory and in files, damaged while they are there: right answers, and misses,
and nothing else.

The answers are those of a toy model, judged token by token in plain numpy (`tests/oracle/toy_answers.py`).
"""

import errno
import os
import shutil
import zlib
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import torch
from fuzzing.damage import damaged_bytes
from fuzzing.engines import quiet
from fuzzing.prefixes import place
from fuzzing.target import ACCEPTED, REFUSED
from mambaslots.inference.contexts import state_files
from mambaslots.inference.contexts.cache.tier import HostTier
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.serving import fetch_always
from oracle.toy_answers import Ask, answer
from oracle.toy_lm import ToyLM

_BLOCK, _HEADS, _LENGTH = 4, 5, 2
_ROWS = ("flip", "swap", "copy", "zero", "nan", "noise")
_FILES = (
    "flip", "swap", "copy", "bytes", "longer", "head", "number", "missing", "directory", "pipe", "device",
    "loop", "nowhere",
    "other", "folder", "full", "read-only",
)  # fmt: skip


@dataclass(frozen=True)
class Harm:
    """What happens to states while they are not on the device.

    Attributes:
        where: "good", "rows" or "files".
        steps: (what, seed of the details), in order.
    """

    where: str
    steps: tuple[tuple[str, int], ...] = ()


class Tiers:
    """An engine with one slot, so that nearly every state leaves,
    and comes back from host memory or a file."""

    documented: tuple[type[BaseException], ...] = ()

    def __init__(self, folder: Path, where: str) -> None:
        self.name = "host memory rows" if where == "rows" else "state files"
        self._where = where
        model = ToyLM()
        host_slots = 40 if where == "rows" else 1
        config = ms.InferenceConfig(
            block_size_tokens=_BLOCK, max_requests=2, max_tokens=32, max_sequence_length=48, num_kv_blocks=60,
            num_mamba_slots=1,
            disk_cache=(str(folder / where), 1e-4),
            host_cache_gb=(host_slots + 0.5) * model.state_spec().slot_bytes / (1 << 30),
        )  # fmt: skip
        self._engine = fetch_always(ms.DynamicInferenceEngine(model, config))
        random = Random(1)
        self._prompts = [[random.randrange(29) for _ in range(9)] for _ in range(_HEADS)]

    @property
    def _tier(self) -> HostTier:
        tier = self._engine.context.prefix_cache.tier
        assert tier is not None
        return tier

    @property
    def _copies(self) -> HostCopies:
        copies = self._tier.copies
        assert isinstance(copies, HostCopies)
        return copies

    @property
    def _files(self) -> state_files.StateFiles:
        files = self._copies._files
        assert files is not None
        return files

    def draw(self, random: Random) -> Harm:
        if random.random() < 0.05:
            return Harm("good")
        kinds = _ROWS if self._where == "rows" else _FILES
        count = random.choice((1, 1, 2, 4))
        return Harm(self._where, tuple((random.choice(kinds), random.getrandbits(32)) for _ in range(count)))

    def size_of(self, drawn: object) -> int:
        return self._engine.context.spec.slot_bytes * _HEADS

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Harm)
        engine = self._engine
        engine.reset_prefix_cache()
        self._files.wait()
        self._sweep()
        is_full = any(what == "full" for what, _ in drawn.steps)
        with patch.object(state_files, "open", _no_space, create=True) if is_full else nullcontext():
            self._ask_all()
            self._files.wait()
        for what, seed in drawn.steps:
            self._harm(drawn.where, what, Random(seed))
        before = engine.stats().cache.tiers
        self._ask_all()
        after = engine.stats().cache.tiers
        engine.check_integrity()
        came = after.num_states_fetched - before.num_states_fetched
        assert came > 0 or drawn.where != "good", "no state came back though none was harmed"
        return REFUSED if _lost(after) > _lost(before) else ACCEPTED

    def _ask_all(self) -> None:
        for prompt in self._prompts:
            (result,) = self._engine.generate([prompt], ms.SamplingParams(num_tokens_to_generate=_LENGTH))
            right = answer(Ask(tuple(prompt), _LENGTH)).tokens
            assert tuple(result.tokens) == right, f"{prompt} is answered with {result.tokens}, not {right}"

    def _sweep(self) -> None:
        """Remove what files were replaced by."""
        directory = self._files.directory
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        for path in directory.iterdir():
            if path.name != "lock":
                _remove(path)

    def _harm(self, where: str, what: str, random: Random) -> None:
        if where == "rows":
            host = self._tier.host
            used = [host.slot_of(key) for key in list(host.keys())]
            _harm_rows(self._copies.rows, used, what, random)
        else:
            paths = sorted(self._files.directory.glob("*.state"))
            if paths and what not in ("full",):
                _harm_file(random.choice(paths), random.choice(paths), what, random)


def _lost(stats: Any) -> int:
    causes = stats.host_copies_left_by_cause, stats.disk_copies_left_by_cause
    return sum(each[cause] for each in causes for cause in ("damaged", "not_written"))


def _harm_rows(rows: torch.Tensor, used: list[int], what: str, random: Random) -> None:
    """Change rows of host memory that hold states."""
    one, other = random.choice(used), random.choice(used)
    at = random.randrange(rows.shape[1])
    if what == "flip":
        rows[one, at] ^= 1 << random.randrange(8)
    elif what == "swap":
        rows[[one, other]] = rows[[other, one]].clone()
    elif what == "copy":
        rows[one] = rows[other].clone()
    elif what == "zero":
        rows[one, at:] = 0
    elif what == "nan":
        rows[one].view(torch.float64).fill_(float("nan"))
    else:
        rows[one, at:] = torch.randint(0, 256, (rows.shape[1] - at,), dtype=torch.uint8)


def _harm_file(path: Path, other: Path, what: str, random: Random) -> None:
    """Change a file, or put something else in its place."""
    with suppress(OSError):  # of a file that was harmed before
        content = _content(path)
        if what in ("flip", "bytes", "longer", "head", "number"):
            _put(path, _changed(content, what, random))
        elif what == "swap":
            _put(path, _content(other))
            _put(other, content)
        elif what == "copy":
            _put(path, _content(other))
        elif what == "folder":
            shutil.rmtree(path.parent)
        elif what == "read-only":
            path.chmod(0)
            path.parent.chmod(0o500)
        elif what == "other":
            _remove(path)
            path.symlink_to(other)
        else:
            _remove(path)
            place(path, what)


def _changed(content: bytes, what: str, random: Random) -> bytes:
    head = state_files._HEAD
    if len(content) <= head.size or what == "bytes":
        return damaged_bytes(random, content)
    if what == "flip":
        at = random.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    if what == "longer":
        return content + random.randbytes(random.choice((1, 100)))
    fields = list(head.unpack_from(content))
    if what == "number":  # of another copy, under a head that holds
        fields[2] += random.choice((1, -1, 2))
    else:
        field = random.choice((1, 2, 3))
        fields[field] = random.choice((0, 1, 2**31, 2**63 - 1, fields[field] ^ 1))
    text = head.pack(*fields)
    return text + zlib.crc32(text).to_bytes(4, "little") + content[head.size + 4 :]


def _content(path: Path) -> bytes:
    return b"" if path.is_symlink() or not path.is_file() else path.read_bytes()


def _put(path: Path, content: bytes) -> None:
    _remove(path)
    path.write_bytes(content)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _FullDisk:
    """A file on a disk that has room for a few bytes."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __enter__(self) -> "_FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write(self, data: Any) -> int:
        if len(data) > 100:
            self._opened.write(bytes(data)[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._opened.write(data))


def _no_space(path: Any, mode: str, opener: Any = None) -> _FullDisk:
    return _FullDisk(open(path, mode, opener=opener))
