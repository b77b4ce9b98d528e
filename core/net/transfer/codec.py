"""A part of an export as bytes: a safetensors file whose header describes the part, under one checksum."""

import hashlib
import json
import struct
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ...validation import integers, shown
from .forest import TOKEN_BYTES, PrefixForest
from .format import PrefixFormat, TransferError, check_version
from .parts import json_object, shard_from_json, shard_to_json
from .shard import PrefixShard

_LENGTH = struct.Struct("<Q")  # how long the header is; every safetensors file begins with it
_CHECKSUM, _UNSIGNED = '"sha256":"', "0" * 64
_FOREST = {"parents": torch.int64, "states": torch.int64, "hashes": torch.int64, "tokens": torch.uint8}


def encode_prefixes(shard: PrefixShard) -> bytes:
    """Encode a part of an export as bytes; `decode_prefixes` reads them.

    Works on the CPU. While it works it takes twice the memory of the bytes.

    The bytes are a safetensors file. Its tensors are those of the shard, and of the forest `parents`
    [blocks], `states` [states], `hashes` [blocks], all int64, and `tokens` [blocks, 4 x block size] uint8.
    Its metadata are `mambaslots_prefixes`, the format version; `export`, JSON of the format, the shard, the
    split, the roots and the id of the salt key; and `sha256`, the checksum of the whole file with 64 zeros in
    place of the checksum.
    """
    forest = shard.forest
    tokens = np.frombuffer(b"".join(forest.tokens), dtype=np.uint8).copy()
    tensors = {
        **{name: tensor.contiguous() for name, tensor in shard.tensors.items()},
        "parents": torch.tensor(forest.parents, dtype=torch.int64, device="cpu"),
        "states": torch.tensor(forest.states, dtype=torch.int64, device="cpu"),
        "hashes": torch.tensor(forest.keys, dtype=torch.int64, device="cpu"),
        "tokens": torch.from_numpy(tokens).view(len(forest), TOKEN_BYTES * forest.block_size_tokens),
    }
    export = {
        "format": shard.format.to_json(),
        "shard": shard_to_json(shard.shard),
        "split": list(shard.split),
        "roots": [root.hex() for root in forest.roots],
        "salt_key_id": forest.salt_key_id,
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
    """Decode the part that `encode_prefixes` made `data` of.

    The checksum covers every byte. What the header and the forest say is checked before the call returns.

    The ranks of a split model had better pass their bytes to `import_prefixes`. A rank that refuses its
    bytes here never comes to `import_prefixes`, where the other ranks wait.

    Args:
        data: all bytes of a part.

    Returns:
        The part; its tensors share no memory with `data`.

    Raises:
        TransferError: `data` is truncated, altered, of another format version, or holds NaN or infinite
            numbers.
        ValueError: `data` is no bytes.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ValueError(f"data is {shown(data)}; accepted: bytes")
    data = bytes(data)
    metadata = _metadata(data)
    check_version(_integer(metadata["mambaslots_prefixes"]))
    _check_checksum(data, metadata["sha256"])
    try:
        with torch.device("cpu"):  # safetensors makes empty tensors where torch's default device is
            tensors = safetensors.torch.load(data)
        shard = _shard(json.loads(metadata["export"]), tensors)
    except TransferError:
        raise
    except Exception as error:  # a valid checksum does not make the content valid
        raise TransferError(f"the export is malformed: {error}") from error
    shard.check()
    if tensors["hashes"].tolist() != list(shard.forest.keys):
        raise TransferError("hashes are not those of the export's roots and tokens")
    check_finite(shard)
    return shard


def checksum(data: bytes) -> str:
    """The checksum in the header of encoded prefixes; `decode_prefixes` compares it with the bytes."""
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


def check_finite(shard: PrefixShard) -> None:
    """TransferError for a number that no model takes further: the request that resumes there would end."""
    for name, tensor in shard.tensors.items():
        if not all(torch.isfinite(layer).all() for layer in tensor):
            raise TransferError(f"{name} holds NaN or an infinite number; accepted: finite numbers")


def _shard(export: object, tensors: dict[str, Tensor]) -> PrefixShard:
    found = json_object("export", export, {"format", "shard", "split", "roots", "salt_key_id"})
    form = PrefixFormat.from_json(found["format"])
    names = form.tensors.keys() | _FOREST.keys()
    if tensors.keys() != names:
        raise TransferError(f"tensors are {sorted(tensors)}; accepted: {sorted(names)}")
    for name, dtype in _FOREST.items():
        tensor, dims = tensors[name], 2 if name == "tokens" else 1
        if tensor.dtype != dtype or tensor.dim() != dims:
            raise TransferError(
                f"{name} is of {tensor.dim()} dimensions and {tensor.dtype}; accepted: {dims} and {dtype}"
            )
    tensor_size, pipeline_size = integers("split", found["split"], 1)
    forest = PrefixForest(
        block_size_tokens=form.block_size_tokens,
        roots=tuple(bytes.fromhex(text) for text in found["roots"]),
        salt_key_id=found["salt_key_id"],
        parents=tuple(tensors["parents"].tolist()),
        tokens=tuple(row.tobytes() for row in tensors["tokens"].numpy()),
        states=tuple(tensors["states"].tolist()),
    )
    split = tensor_size, pipeline_size
    shard = shard_from_json(found["shard"])
    return PrefixShard(form, forest, shard, split, {name: tensors[name] for name in form.tensors})


def _integer(text: str) -> Any:
    """`text` as an int, or unchanged where it is no small number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text
