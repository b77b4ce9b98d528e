"""An export's part as bytes: a safetensors file whose header says what it is of, under one checksum."""

import hashlib
import json
import struct
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..validation import integers, shown
from .prefix_forest import TOKEN_BYTES, PrefixForest
from .prefix_format import (
    PrefixFormat,
    TransferError,
    check_version,
    json_object,
    shard_from_json,
    shard_to_json,
)
from .prefix_shard import SPLITS, PrefixShard

_LENGTH = struct.Struct("<Q")  # of the header, at the head of every safetensors file
_CHECKSUM, _UNSIGNED = '"sha256":"', "0" * 64
_FOREST = {"parents": torch.int64, "states": torch.int64, "hashes": torch.int64, "tokens": torch.uint8}


def encode_prefixes(shard: PrefixShard) -> bytes:
    """The bytes that `decode_prefixes` reads. On the CPU; takes their size twice while it works.

    A safetensors file of the shard's tensors and of `parents` [blocks], `states` [states] and `hashes`
    [blocks] int64, `tokens` [blocks, 4 x block size] uint8. Its metadata: `mambaslots_prefixes`, the format
    version; `export`, JSON of the format, the part, the split and the salts; `sha256`, of all bytes of the
    file with 64 zeros in its own place.
    """
    forest = shard.forest
    tokens = np.frombuffer(b"".join(forest.tokens), dtype=np.uint8).copy()
    tensors = {
        **{name: tensor.contiguous() for name, tensor in shard.tensors.items()},
        "parents": torch.tensor(forest.parents, dtype=torch.int64),
        "states": torch.tensor(forest.states, dtype=torch.int64),
        "hashes": torch.tensor(forest.keys, dtype=torch.int64),
        "tokens": torch.from_numpy(tokens).view(len(forest), TOKEN_BYTES * forest.block_size_tokens),
    }
    export = {
        "format": shard.format.to_json(),
        "shard": shard_to_json(shard.shard),
        "split": list(shard.split),
        "salts": [salt.hex() for salt in forest.salts],
    }
    metadata = {
        "mambaslots_prefixes": str(shard.format.format_version),
        "export": json.dumps(export),
        "sha256": _UNSIGNED,
    }
    data = safetensors.torch.save(tensors, metadata)
    at = data.index(f'{_CHECKSUM}{_UNSIGNED}"'.encode()) + len(_CHECKSUM)
    signature, view = hashlib.sha256(data).hexdigest().encode(), memoryview(data)
    return b"".join((view[:at], signature, view[at + len(signature) :]))


def decode_prefixes(data: bytes | bytearray | memoryview) -> PrefixShard:
    """The part that `encode_prefixes` made `data` of; its tensors may share memory with nothing else.

    Every byte is covered by the checksum, and everything that the header and the forest say is checked
    before anything is returned. TransferError where data is truncated, altered, or of another format version.
    The ranks of a split model give their bytes to `import_prefixes` instead: what one of them refuses here,
    before that call, the others cannot know, and wait for it there.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ValueError(f"data is {shown(data)}; accepted: bytes")
    data = bytes(data)
    metadata = _metadata(data)
    check_version(_integer(metadata["mambaslots_prefixes"]))
    _check_checksum(data, metadata["sha256"])
    try:
        tensors = safetensors.torch.load(data)
        shard = _shard(json.loads(metadata["export"]), tensors)
    except TransferError:
        raise
    except Exception as error:  # what a valid checksum does not forbid
        raise TransferError(f"the export is malformed: {error}") from error
    shard.check()
    if tensors["hashes"].tolist() != list(shard.forest.keys):
        raise TransferError("hashes are not those of the export's salts and tokens")
    return shard


def checksum(data: bytes) -> str:
    """What the header says; `decode_prefixes` compares it with the bytes."""
    return _metadata(data)["sha256"]


def _metadata(data: bytes) -> dict[str, str]:
    try:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length].decode())
        found = json_object("metadata", header["__metadata__"], {"mambaslots_prefixes", "export", "sha256"})
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransferError(
            f"the export has no readable header, so it is truncated or altered: {error}"
        ) from error
    if not all(isinstance(text, str) for text in found.values()):
        raise TransferError("the export has a header of other types, so it is altered")
    return dict(found)


def _check_checksum(data: bytes, expected: str) -> None:
    at = data.find(f'{_CHECKSUM}{expected}"'.encode()) + len(_CHECKSUM)
    view, unsigned = memoryview(data), hashlib.sha256()
    for part in (view[:at], _UNSIGNED.encode(), view[at + len(_UNSIGNED) :]):
        unsigned.update(part)
    if unsigned.hexdigest() != expected:
        raise TransferError(
            f"sha256 is {shown(expected)} by the header, {unsigned.hexdigest()} by the {len(data)} bytes: "
            "the export is truncated or altered"
        )


def _shard(export: object, tensors: dict[str, Tensor]) -> PrefixShard:
    found = json_object("export", export, {"format", "shard", "split", "salts"})
    form = PrefixFormat.from_json(found["format"])
    if tensors.keys() != SPLITS.keys() | _FOREST.keys():
        raise TransferError(
            f"tensors are {sorted(tensors)}; accepted: {sorted(SPLITS.keys() | _FOREST.keys())}"
        )
    for name, dtype in _FOREST.items():
        tensor, dims = tensors[name], 2 if name == "tokens" else 1
        if tensor.dtype != dtype or tensor.dim() != dims:
            raise TransferError(
                f"{name} is of {tensor.dim()} dimensions and {tensor.dtype}; accepted: {dims} and {dtype}"
            )
    tensor_size, pipeline_size = integers("split", found["split"], 1)
    forest = PrefixForest(
        block_size_tokens=form.block_size_tokens,
        salts=tuple(bytes.fromhex(text) for text in found["salts"]),
        parents=tuple(tensors["parents"].tolist()),
        tokens=tuple(row.tobytes() for row in tensors["tokens"].numpy()),
        states=tuple(tensors["states"].tolist()),
    )
    split = tensor_size, pipeline_size
    return PrefixShard(
        form, forest, shard_from_json(found["shard"]), split, {name: tensors[name] for name in SPLITS}
    )


def _integer(text: str) -> Any:
    """A number as one, and what is none as it is."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text
