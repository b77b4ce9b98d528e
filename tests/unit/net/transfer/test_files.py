"""Exports in files: what was saved is loaded, whole and of one set, or nothing is."""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mambaslots as ms
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net.transfer import prefix_files
from mambaslots.net.transfer.exports import CacheAccess, export_prefixes
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.prefix_files import FileEntry, Manifest, load_prefixes, save_prefixes
from mambaslots.net.transfer.shard import PrefixShard, checksum, decode_prefixes, encode_prefixes
from oracle.serving import random_tokens, serve_checked, small_model
from oracle.transfers import engine_of, maps_of, shard_of_rank, tensors_of

pytestmark = pytest.mark.usefixtures("kind")

PROMPTS = [random_tokens(40, 1), random_tokens(30, 2)]


@cache
def source_of_kind(kind: str) -> ms.DynamicInferenceEngine:
    engine = engine_of()
    serve_checked(engine, PROMPTS)
    return engine


@pytest.fixture
def source(kind: str) -> ms.DynamicInferenceEngine:
    return source_of_kind(kind)


def write_set(folder: Path, export: PrefixShard, tp: int, pp: int = 1, set_id: str = "byhand") -> list[Path]:
    """As `save_prefixes` on tp x pp ranks leaves a folder."""
    entries = []
    for p in range(pp):
        for t in range(tp):
            part = export.cut(shard_of_rank(small_model().config, (t, tp), (p, pp)))
            data, name = encode_prefixes(part), f"prefixes-{set_id}-tp{t}of{tp}-pp{p}of{pp}.safetensors"
            (folder / name).write_bytes(data)
            entries.append(FileEntry(name, checksum(data), dict(part.shard)))
    (folder / prefix_files.MANIFEST).write_bytes(msgspec.json.encode(Manifest(entries)))
    return [folder / entry.file for entry in entries]


def refused(target: ms.DynamicInferenceEngine, folder: Path) -> str:
    maps, tensors = maps_of(target), tensors_of(target)
    with pytest.raises(TransferError) as error:
        load_prefixes(target, folder)
    assert maps_of(target) == maps
    assert all(map(torch.equal, tensors, tensors_of(target)))
    return str(error.value)


def test_round_trip(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    saved = save_prefixes(source, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*saved.files, "prefixes.json"])
    assert saved.bytes == (folder / saved.files[0]).stat().st_size
    target = engine_of()
    report = load_prefixes(target, str(folder))
    assert (report.imported.prefixes, report.imported.blocks) == (saved.prefixes, saved.blocks)
    assert report.imported.states == saved.states
    again = [result.num_resumed_tokens for result in serve_checked(target, PROMPTS)]
    assert again == [result.num_resumed_tokens for result in serve_checked(source, PROMPTS)]
    assert min(again) > 0


def test_a_later_set_replaces_the_one_before(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    write_set(tmp_path, export_prefixes(source), 4, set_id="0123456789ab")
    (tmp_path / "prefixes-0123456789ac-tp0of1-pp0of1.safetensors.part").write_bytes(b"half")
    others = [
        "notes.txt",
        "prefixes-backup.safetensors",
        "prefixes-0123456789ab-tp0of1-pp0of1.safetensors.bak",
    ]
    for name in others:
        (tmp_path / name).write_text("the user's")
    saved = save_prefixes(source, tmp_path, [(PROMPTS[0], None)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*saved.files, *others, "prefixes.json"]
    )
    assert load_prefixes(engine_of(), tmp_path).imported.prefixes == 1


def test_a_save_that_fails_leaves_the_set_before(
    source: ms.DynamicInferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_prefixes(source, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError("disk full")

    for fails_at in (0, 1):
        calls = []

        def fsync(file: int, fails_at: int = fails_at, calls: list[int] = calls) -> None:
            calls.append(file)
            if len(calls) > fails_at:
                full()

        monkeypatch.setattr(prefix_files.os, "fsync", fsync)
        with pytest.raises(OSError, match=r"could not be saved .* disk full"):
            save_prefixes(source, tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_removed_stays(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    (tmp_path / "prefixes-0123456789ab-tp0of1-pp0of1.safetensors").mkdir()
    saved = save_prefixes(source, tmp_path)
    assert load_prefixes(engine_of(), tmp_path).imported.blocks == saved.blocks


def test_a_folder_that_cannot_be_listed_keeps_the_new_set(
    source: ms.DynamicInferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_prefixes(source, tmp_path)

    def glob(*_: object) -> None:
        raise OSError("stale handle")

    monkeypatch.setattr(Path, "glob", glob)
    saved = save_prefixes(source, tmp_path)
    assert load_prefixes(engine_of(), tmp_path).imported.blocks == saved.blocks > 0


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_sets_of_any_split_load(source: ms.DynamicInferenceEngine, tmp_path: Path, tp: int, pp: int) -> None:
    export, target = export_prefixes(source), engine_of()
    write_set(tmp_path, export, tp, min(pp, len(small_model().config.pattern)))
    report = load_prefixes(target, tmp_path)
    assert report.imported.blocks == len(export.forest)
    for name, tensor in export_prefixes(target).tensors.items():
        assert torch.equal(tensor, export.tensors[name])


def test_files_that_no_rank_needs_are_not_read(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    export = export_prefixes(source)
    for path in write_set(tmp_path, export, 4)[2:]:  # of heads that are another rank's
        path.write_bytes(b"")
    shard = shard_of_rank(small_model().config, (0, 2))
    own_format = CacheAccess(source, "load_prefixes").format()
    piece, _ = prefix_files._read_part(tmp_path, own_format, shard)
    for name, tensor in export.cut(shard).tensors.items():
        assert torch.equal(piece.tensors[name], tensor)


def test_a_file_of_another_set(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    export = export_prefixes(source)
    first, second = write_set(tmp_path, export, 2)
    good = second.read_bytes()
    fewer = export_prefixes(source, [(PROMPTS[0], None)]).cut(decode_prefixes(good).shard)
    second.write_bytes(encode_prefixes(fewer))
    assert "is not the file that prefixes.json names" in refused(engine_of(), tmp_path)
    second.write_bytes(first.read_bytes())
    assert "is not the file that prefixes.json names" in refused(engine_of(), tmp_path)
    second.unlink()
    assert f"{second.name} of the set cannot be read" in refused(engine_of(), tmp_path)
    second.write_bytes(good)
    load_prefixes(engine_of(), tmp_path)


def test_another_model(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    save_prefixes(source, tmp_path)
    text = refused(engine_of(weights_version="weights 2"), tmp_path)
    assert "weights_version is 'weights 1'; accepted: 'weights 2', as here" in text


@given(data=st.data())
def test_any_damage(source: ms.DynamicInferenceEngine, tmp_path: Path, data: st.DataObject) -> None:
    paths = [*write_set(tmp_path, export_prefixes(source), 2), tmp_path / "prefixes.json"]
    path = data.draw(st.sampled_from(paths))
    content = path.read_bytes()
    if path.suffix == ".json":  # white space in a manifest means nothing
        content = json.dumps(json.loads(content), separators=(",", ":")).encode()
    at = data.draw(st.integers(0, len(content) - 1))
    mask = data.draw(st.integers(0, 255))
    path.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :] if mask else content[:at])
    refused(engine_of(), tmp_path)


def edited(change: Callable[[dict], None]) -> Callable[[bytes], bytes]:  # type: ignore[type-arg]
    def edit(text: bytes) -> bytes:
        content = json.loads(text)
        change(content)
        return json.dumps(content).encode()

    return edit


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda text: b"", "truncated or altered"),
        (lambda text: b"[]", "truncated or altered"),
        (lambda text: b"[" * 100_000, "truncated or altered"),
        (lambda text: text.replace(b"tp0", b"tp1"), "is not the file that prefixes.json names"),
        (edited(lambda content: content.update(format_version=3)), "format_version is 3; accepted: 4"),
        (edited(lambda content: content.update(files=[])), "the export lacks"),
        (edited(lambda content: content["files"].pop()), "the export lacks"),
        (edited(lambda content: content["files"][0].pop("shard")), "missing required field `shard`"),
        (edited(lambda content: content["files"][0].update(file=5)), "at `$.files[0].file`"),
        (edited(lambda content: content["files"][0].update(file="../x")), "Expected `str` matching regex"),
        (
            edited(lambda content: content["files"][0]["shard"]["kv"][1].update(total=9)),
            "shard.kv is of 9 units; accepted: 2",
        ),
        (edited(lambda content: content["files"][0]["shard"].pop("kv")), "shard is of ['"),
        (edited(lambda content: content["files"][0].update(shard=5)), "at `$.files[0].shard`"),
    ],
)  # fmt: skip
def test_manifests_that_are_none(
    source: ms.DynamicInferenceEngine, tmp_path: Path, edit: Callable[[bytes], bytes], text: str
) -> None:
    write_set(tmp_path, export_prefixes(source), 2)
    path = tmp_path / prefix_files.MANIFEST
    path.write_bytes(edit(path.read_bytes()))
    assert text in refused(engine_of(), tmp_path)


@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
@pytest.mark.parametrize("name", [prefix_files.MANIFEST, "prefixes-*.safetensors"])
def test_what_is_no_file_is_not_waited_for(
    source: ms.DynamicInferenceEngine, tmp_path: Path, name: str, what: str
) -> None:
    """A pipe without a writer would block all ranks; a device would fill the memory."""
    save_prefixes(source, tmp_path)
    (path,) = tmp_path.glob(name)
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    expected = "directory" if what == "directory" else "is no regular file"
    assert expected in refused(engine_of(), tmp_path)


class PathOfBytes(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"bytes"


def test_no_set_and_no_directory(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    assert "accepted: one that has a set" in refused(engine_of(), tmp_path / "nowhere")
    for directory in (None, 5, b"bytes", "a\0b", "\ud800", PathOfBytes()):
        for call in (save_prefixes, load_prefixes):
            with pytest.raises(ValueError, match="directory is"):
                call(source, directory)  # type: ignore[arg-type, operator]
    with pytest.raises(ValueError, match=r"prefixes\[0\]"):
        save_prefixes(source, tmp_path, [5.0])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_read_the_files(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    """Whatever the umask: the files hold token ids, and what the model made of them."""
    folder, before = tmp_path / "set", os.umask(0)
    try:
        save_prefixes(source, folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = list(folder.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
