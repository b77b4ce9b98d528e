"""Targets of exported prefixes and of the host and disk tiers."""

import errno
import hashlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import msgspec
import torch
from fuzzing.engines import OWN, SENT, WarmEngine, quiet
from fuzzing.target import ACCEPTED, HUGE, REFUSED, any_json, damaged_bytes, damaged_json, end_of
from mambaslots.inference.contexts import state_files
from mambaslots.inference.contexts.cache.state_tiers import StateTiers
from mambaslots.inference.contexts.tier_copies import HostCopies
from mambaslots.net import import_prefixes, load_prefixes, save_prefixes
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.prefix_files import MANIFEST
from mambaslots.net.transfer.shard import encode_prefixes
from oracle.file_starts import wait_for
from oracle.toy_answers import Ask, answer
from oracle.toy_lm import ToyLM
from oracle.transfers import Declared, engine_of, random_export
from safetensors.torch import load, save

_SEAL = re.compile(rb'("sha256": ?")([0-9a-f]{64})"')
_GOOD = "good"
_DESCRIPTION = "description"
_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.bool,
)  # fmt: skip
_INT64 = (0, 1, -1, -2, 3, 2**31, 2**40, 2**63 - 1, -(2**63))


@dataclass(frozen=True)
class Export:
    """Bytes of an export; `kind` says how they were damaged, or that they were not."""

    kind: str
    data: bytes


def sealed(data: bytes) -> bytes:
    """`data` with the checksum that it needs, where it has a place for one."""
    found = _SEAL.search(data[: 1 << 16])
    if found is None:
        return data
    begin, end = found.span(2)
    content = data[:begin] + b"0" * 64 + data[end:]
    return data[:begin] + hashlib.sha256(content).hexdigest().encode() + data[end:]


class Damages:
    """Draws damaged exports."""

    def __init__(self, good: list[bytes], others: list[bytes]) -> None:
        self.good = good
        self._others = others
        self._kinds: dict[str, Callable[[Random, bytes], bytes]] = {
            "bytes": damaged_bytes,
            "sealed bytes": lambda random, data: sealed(damaged_bytes(random, data)),
            "description": self._description,
            "header": self._header,
            "forest": self._forest,
            "tensors": self._tensors,
            "other model": lambda random, data: random.choice(self._others),
            "two exports": self._two,
        }

    def draw(self, random: Random) -> Export:
        good = random.choice(self.good)
        if random.random() < 0.05:
            return Export(_GOOD, good)
        kind = random.choice(list(self._kinds))
        return Export(kind, self._kinds[kind](random, good))

    def _description(self, random: Random, data: bytes) -> bytes:
        """What describes the model, the part and the prefixes."""
        tensors, metadata = load(data), metadata_of(data)
        described = msgspec.msgpack.decode(tensors[_DESCRIPTION].numpy().tobytes())
        name = random.choice(["format", "shard"])
        described[name] = damaged_json(random, described[name])
        if random.random() < 0.1:
            metadata[random.choice(sorted(metadata))] = (
                str(any_json(random))[:1000].replace("\ud800", "").replace("\udcff", "")
            )
        return _described(tensors, metadata, described)

    def _header(self, random: Random, data: bytes) -> bytes:
        """The header of safetensors: dtypes, shapes and offsets of any values."""
        (end,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + end])
        if random.random() < 0.6:
            name = random.choice([name for name in header if name != "__metadata__"])
            entry = header[name]
            field = random.choice(["dtype", "shape", "data_offsets"])
            if field == "dtype":
                entry[field] = random.choice(["F32", "I64", "BOOL", "U64", "F8_E5M2", "C64", "X", "BF16"])
            else:
                at = random.randrange(len(entry[field]))
                entry[field][at] = random.choice([*HUGE, 0, -1, entry[field][at] + 1, entry[field][at] * 2])
        else:
            header = damaged_json(random, header)
        text = json.dumps(header, separators=(",", ":")).encode("utf-8", "surrogatepass")
        length = len(text)
        if random.random() < 0.1:
            length = random.choice([0, 1, len(text) - 1, 2**31, 2**63, 2**64 - 1])
        return sealed(struct.pack("<Q", length) + text + data[8 + end :])

    def _forest(self, random: Random, data: bytes) -> bytes:
        """Nodes, token ids, roots and the order of states."""
        tensors, metadata = load(data), metadata_of(data)
        described = msgspec.msgpack.decode(tensors[_DESCRIPTION].numpy().tobytes())
        for _ in range(random.choice((1, 1, 2))):
            name = random.choice(("parents", "states", "tokens", "roots"))
            values = described["forest"][name]
            way = random.randrange(6)
            if way == 0 and values:
                at = random.randrange(len(values))
                wide = random.choice(_INT64)
                old = values[at]
                values[at] = wide if isinstance(old, int) else damaged_bytes(random, old)
            elif way == 1:
                del values[random.randrange(len(values) + 1) :]
            elif way == 2:
                values += values[: random.randrange(len(values) + 1)]
            elif way == 3:
                random.shuffle(values)
            elif way == 4:
                described["forest"][name] = any_json(random)
                break
            elif len(values) > 1:  # one row said twice
                values[random.randrange(len(values))] = random.choice(values)
        return _described(tensors, metadata, described)

    def _tensors(self, random: Random, data: bytes) -> bytes:
        """KV and states of other shapes, types, lengths and numbers."""
        tensors, metadata = load(data), metadata_of(data)
        name = random.choice([name for name in sorted(tensors) if name != _DESCRIPTION])
        tensor, way = tensors[name], random.randrange(7)
        if way == 0:
            tensor = tensor.to(random.choice(_DTYPES))
        elif way == 1:
            tensor = tensor.narrow(random.randrange(tensor.dim()), 0, 1).clone()
        elif way == 2:
            tensor = tensor.transpose(
                random.randrange(tensor.dim()), random.randrange(tensor.dim())
            ).contiguous()
        elif way == 3:
            flat = tensor.flatten()
            if len(flat):
                flat[random.randrange(len(flat))] = random.choice((float("nan"), float("inf"), float("-inf")))
        elif way == 4:
            del tensors[name]
            tensors[random.choice([name + "x", "ssm.7", "", "kv.0"])] = tensor
            return sealed(save(tensors, metadata))
        elif way == 5:
            tensor = torch.cat([tensor, tensor], random.randrange(tensor.dim()))
        else:
            tensor = tensor.unsqueeze(random.randrange(tensor.dim())).contiguous()
        tensors[name] = tensor
        return sealed(save(tensors, metadata))

    def _two(self, random: Random, data: bytes) -> bytes:
        """The description of one export over the tensors of another."""
        other = random.choice(self.good + self._others)
        try:
            return sealed(save(load(other), metadata_of(data)))
        except Exception:  # an export that safetensors cannot write again
            return data + other


def _described(tensors: dict[str, torch.Tensor], metadata: dict[str, str], described: object) -> bytes:
    try:
        data = msgspec.msgpack.encode(described)
    except (OverflowError, UnicodeEncodeError, RecursionError):  # no peer can say that
        data = b"\x91" * 100
    tensors[_DESCRIPTION] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return sealed(save(tensors, metadata))


def metadata_of(data: bytes) -> dict[str, str]:
    (length,) = struct.unpack_from("<Q", data)
    metadata: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata


class ImportedBytes:
    """Bytes for `import_prefixes`."""

    name = "imported prefixes"
    documented: tuple[type[BaseException], ...] = (TransferError,)

    def __init__(self) -> None:
        self._warm = WarmEngine(OWN)
        self._damages = damages()

    def draw(self, random: Random) -> Export:
        return self._damages.draw(random)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Export)
        return len(drawn.data)

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Export)
        warm = self._warm
        end = end_of(lambda: foreseen(lambda: import_prefixes(warm.engine, drawn.data)), self.documented)
        if end == REFUSED:
            assert drawn.kind != _GOOD, "a good export was refused"
            warm.check_unchanged()
            return end
        try:
            assert drawn.kind != "bytes" or drawn.data in self._damages.good, "altered bytes were accepted"
            warm.check_sane()
            if drawn.kind == _GOOD:
                warm.check_answers(SENT[:1])
        finally:
            warm.renew()
        return end


def foreseen(call: Callable[[], object]) -> None:
    """Call, and raise the error of another kind of which the ranks have made a TransferError."""
    try:
        call()
    except TransferError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, TransferError):
            raise error.__cause__ from None
        raise


def damages() -> Damages:
    """Of exports of small models, one of them the model of `WarmEngine`."""
    whole, bare = WarmEngine(SENT), WarmEngine(SENT[:1])
    others = [
        encode_prefixes(random_export(Declared(pattern).spec())) for pattern in ("M*", "MG*C", "*", "M")
    ]
    other_weights = engine_of(weights_version="weights 2")
    others.append(encode_prefixes(random_export(other_weights.context.spec)))
    return Damages([whole.exported(), bare.exported()], others)


@dataclass(frozen=True)
class Folder:
    """Files by name, and what lies at some names in place of files."""

    kind: str
    files: dict[str, bytes]
    odd: dict[str, str]


class LoadedFolders:
    """Folders for `load_prefixes`."""

    name = "prefix folders"
    documented: tuple[type[BaseException], ...] = (TransferError,)

    def __init__(self, folder: Path) -> None:
        self._warm = WarmEngine(OWN)
        self._folder = folder / "prefixes"
        self._damages = damages()
        source = WarmEngine(SENT)
        self._sets: list[dict[str, bytes]] = []
        for name in ("one", "two"):
            saved = folder / name
            save_prefixes(source.engine, saved)
            self._sets.append({path.name: path.read_bytes() for path in saved.iterdir()})

    def draw(self, random: Random) -> Folder:
        files = dict(random.choice(self._sets))
        (export,) = (name for name in files if name != MANIFEST)
        odd: dict[str, str] = {}
        kind = random.choice(
            ["good", "manifest", "manifest", "bytes", "export", "export", "sets", "odd", "odd"]
        )
        if kind == "good" and random.random() < 0.6:
            kind = "manifest"
        if kind == "manifest":
            content = damaged_json(random, json.loads(files[MANIFEST]))
            files[MANIFEST] = json.dumps(content).encode()
        elif kind == "bytes":
            name = random.choice(sorted(files))
            files[name] = damaged_bytes(random, files[name])
        elif kind == "export":  # the manifest names the checksum of the damaged export
            files[export] = self._damages.draw(random).data
            manifest = json.loads(files[MANIFEST])
            found = _SEAL.search(files[export])
            if found is not None:
                manifest["files"][0]["sha256"] = found.group(2).decode()
            files[MANIFEST] = json.dumps(manifest).encode()
        elif kind == "sets":  # the manifest of one set over the files of another
            files = self._sets[0] | {MANIFEST: self._sets[1][MANIFEST]}
        elif kind == "odd":
            name = random.choice(sorted(files))
            odd[name] = random.choice(["directory", "loop", "nowhere", "missing", "device", "pipe"])
            del files[name]
        return Folder(kind, files, odd)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Folder)
        return sum(map(len, drawn.files.values()))

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, content in drawn.files.items():
            (self._folder / name).write_bytes(content)
        for name, what in drawn.odd.items():
            place(self._folder / name, what)
        warm = self._warm
        end = end_of(lambda: foreseen(lambda: load_prefixes(warm.engine, self._folder)), self.documented)
        if end == REFUSED:
            assert drawn.kind != "good", "a good set was refused"
            warm.check_unchanged()
            return end
        try:
            warm.check_sane()
            if drawn.kind == "good":
                warm.check_answers(SENT[:1])
        finally:
            warm.renew()
        return end


def place(path: Path, what: str) -> None:
    """Put what is no file where a file should be."""
    if what == "directory":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "nowhere":
        path.symlink_to(path.parent / "nowhere")
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)


_BLOCK, _HEADS, _LENGTH = 4, 5, 2
_ROWS = ("flip", "swap", "copy", "zero", "nan", "noise")
_FILES = (
    "flip", "swap", "copy", "bytes", "longer", "head", "number", "missing", "directory", "pipe", "device",
    "loop", "nowhere",
    "other", "folder", "full", "read-only",
)  # fmt: skip


@dataclass(frozen=True)
class Harm:
    """What happens to states while they are not on the device."""

    where: str
    steps: tuple[tuple[str, int], ...] = ()


class Tiers:
    """An engine with one slot: nearly every state is evicted, and comes back from host memory or a file."""

    documented: tuple[type[BaseException], ...] = ()

    def __init__(self, folder: Path, where: str) -> None:
        self.name = "host memory rows" if where == "rows" else "state files"
        self._where = where
        model = ToyLM()
        host_slots = 40 if where == "rows" else 1
        config = ms.InferenceConfig(
            block_size_tokens=_BLOCK, max_requests=2, max_tokens_per_step=32, max_sequence_length=48,
            num_kv_blocks=60,
            num_mamba_slots=1,
            disk_cache=(str(folder / where), 1e-4),
            host_cache_gb=(host_slots + 0.5) * model.state_spec().slot_bytes / (1 << 30),
        )  # fmt: skip
        self._engine = ms.DynamicInferenceEngine(model, config)
        random = Random(1)
        self._prompts = [[random.randrange(29) for _ in range(9)] for _ in range(_HEADS)]

    @property
    def _tier(self) -> StateTiers:
        tier = self._engine.context.prefix_cache.tiers
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
        wait_for(self._files)
        self._sweep()
        is_full = any(what == "full" for what, _ in drawn.steps)
        with patch.object(state_files, "open", _no_space, create=True) if is_full else nullcontext():
            self._ask_all()
            wait_for(self._files)
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
            (result,) = self._engine.generate([prompt], ms.SamplingParams(max_tokens=_LENGTH))
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
            used = [slot for slot, _ in host.entries.values()]
            _harm_rows(self._copies.memory, used, what, random)
        else:
            paths = sorted(self._files.directory.glob("*.state"))
            if paths and what not in ("full",):
                _harm_file(random.choice(paths), random.choice(paths), what, random)


def _lost(stats: Any) -> int:
    return int(stats.num_copies_damaged + stats.num_copies_not_written)


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
