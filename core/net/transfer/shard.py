"""One part of an export: cut and joined, and as bytes."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ...model_parts import Part
from ...validation import refused, shown
from .format import (
    FORMAT_VERSION,
    KV,
    Description,
    PrefixForest,
    PrefixFormat,
    Shard,
    TensorPart,
    TransferError,
    check_version,
    decode,
)

_LENGTH = struct.Struct("<Q")  # how long the header is; every safetensors file begins with it
_UNSIGNED = "0" * 64
_DESCRIPTION = "description"


@dataclass(frozen=True, eq=False)
class PrefixShard:
    """One part of an export. Nothing writes its tensors once it is made; `cut` returns views of them.

    Attributes:
        format: of the whole model.
        forest: the prefixes, the same in every part.
        shard: which part of each tensor this is.
        tensors: those of `format`, on the CPU. Each is [layers, entries, units, *shape of a unit]. The
            entries of "kv" are the blocks, in the order of the nodes; those of the others are the states, in
            the order of `forest.states`.
    """

    format: PrefixFormat
    forest: PrefixForest
    shard: Shard
    tensors: Mapping[str, Tensor]

    @property
    def description(self) -> Description:
        return Description(self.format, self.forest, dict(self.shard))

    def check(self) -> None:
        """TransferError unless its parts are consistent, and all numbers finite: requests end at others."""
        self.description.check()
        shapes = shapes_of(self.format, self.forest, self.shard)
        if self.tensors.keys() != shapes.keys():
            raise TransferError(f"tensors are {sorted(self.tensors)}; accepted: {sorted(shapes)}")
        for name, tensor in self.tensors.items():
            shape, dtype = shapes[name], self.format.tensors[name].torch_dtype
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise TransferError(
                    f"{name} is of shape {tuple(tensor.shape)} and {tensor.dtype}; accepted: {shape} and "
                    f"{dtype}"
                )
            if not all(torch.isfinite(layer).all() for layer in tensor):
                raise TransferError(f"{name} holds NaN or an infinite number; accepted: finite numbers")

    def cut(self, shard: Shard) -> "PrefixShard":
        """What this part and `shard` have in common of each tensor, possibly nothing, as views."""
        common = {name: _common(part, shard[name]) for name, part in self.shard.items()}
        tensors = {name: t[_where(self.shard[name], common[name])] for name, t in self.tensors.items()}
        return replace(self, shard=common, tensors=tensors)


def join(pieces: Sequence[PrefixShard], shard: Shard) -> PrefixShard:
    """The part `shard` of pieces of one export, in new tensors unless one is it; else a TransferError."""
    if not pieces:
        raise TransferError("pieces is empty; accepted: at least one part of an export")
    first = pieces[0]
    for index, piece in enumerate(pieces):
        if piece.format != first.format or piece.forest.digest != first.forest.digest:
            raise TransferError(
                f"pieces[{index}] is of another export than pieces[0]; accepted: parts of one"
            )
    whole = next((piece for piece in pieces if piece.shard == shard), None)
    if whole is not None:
        return whole
    sources = sources_for([piece.shard for piece in pieces], shard)
    tensors = {
        name: torch.empty(shape, dtype=first.format.tensors[name].torch_dtype, device="cpu")
        for name, shape in shapes_of(first.format, first.forest, shard).items()
    }
    for index, part in sources.items():
        piece = pieces[index].cut(part)
        for name, tensor in piece.tensors.items():
            tensors[name][_where(shard[name], piece.shard[name])] = tensor
    return replace(first, shard=shard, tensors=tensors)


def sources_for(holders: Sequence[Shard], shard: Shard) -> dict[int, dict[str, TensorPart]]:
    """Index of the first holder of each part of `shard` -> what to read of it; else a TransferError.

    Only where two holders overlap in part may numbers be read twice. What a holder need not give of a tensor
    is an empty part.
    """
    lacking = {name: np.zeros((part.layers.total, part.units.total), bool) for name, part in shard.items()}
    for name, part in shard.items():
        lacking[name][part.slices] = True
    sources = {}
    for index, holder in enumerate(holders):
        common = {name: _common(holder[name], part) for name, part in shard.items()}
        needed_names = {name for name, part in common.items() if lacking[name][part.slices].any()}
        for name, part in common.items():
            if name in needed_names:
                lacking[name][part.slices] = False
            else:
                common[name] = part._replace(units=Part(part.units.start, part.units.start, part.units.total))
        if needed_names:
            sources[index] = common
    for name, cells in lacking.items():
        if cells.any():
            layer, unit = np.argwhere(cells)[0].tolist()
            raise TransferError(
                f"the export lacks unit {unit} of layer {layer} of {name}; accepted: parts that together "
                f"hold {shard[name]}"
            )
    return sources


def shapes_of(form: PrefixFormat, forest: PrefixForest, shard: Shard) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the part `shard`; see `PrefixShard`."""
    shapes = {}
    for name, tensor in form.tensors.items():
        num_entries = len(forest) if name == KV else len(forest.states)
        shapes[name] = shard[name].layers.count, num_entries, shard[name].units.count, *tensor.shape
    return shapes


def _where(whole: TensorPart, part: TensorPart) -> tuple[slice, slice, slice]:
    """The index of `part`'s numbers within a tensor of the part `whole`, which contains `part`."""
    layers, units = (
        slice(inner.start - outer.start, inner.stop - outer.start)
        for outer, inner in zip(whole, part, strict=True)
    )
    return layers, slice(None), units


def _common(part: TensorPart, other: TensorPart) -> TensorPart:
    return TensorPart(_overlap(part.layers, other.layers), _overlap(part.units, other.units))


def _overlap(part: Part, other: Part) -> Part:
    """What both hold; where nothing, an empty part within the bounds of `part`."""
    if part.total != other.total:
        raise TransferError(f"{part} and {other} are parts of different wholes; accepted: of the same total")
    start = min(max(part.start, other.start), part.stop)
    return Part(start, max(start, min(part.stop, other.stop)), part.total)


# ---- as bytes


class _Metadata(msgspec.Struct):
    version: str = msgspec.field(name="mambaslots_prefixes")
    sha256: str


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def _signature(checksum: str) -> bytes:
    return f'"sha256":"{checksum}"'.encode()


def encode_prefixes(shard: PrefixShard) -> bytes:
    """Encode a part of an export as bytes; `decode_prefixes` reads them.

    Works on the CPU. While it works it needs twice the memory of the bytes.

    The bytes are a safetensors file. Its tensors are those of the shard, and `description`, uint8: format,
    forest and shard in msgpack. Its metadata are `mambaslots_prefixes`, the format version, and `sha256`, the
    checksum of the whole file with 64 zeros in place of the checksum.
    """
    tensors = {name: tensor.contiguous() for name, tensor in shard.tensors.items()}
    description = bytearray(msgspec.msgpack.encode(shard.description))
    tensors[_DESCRIPTION] = torch.frombuffer(description, dtype=torch.uint8)
    data = safetensors.torch.save(tensors, {"mambaslots_prefixes": str(FORMAT_VERSION), "sha256": _UNSIGNED})
    return data.replace(_signature(_UNSIGNED), _signature(hashlib.sha256(data).hexdigest()), 1)


def decode_prefixes(data: bytes | bytearray | memoryview) -> PrefixShard:
    """Decode the part that `encode_prefixes` made `data` of.

    The checksum covers every byte. What the description says is checked before the call returns.

    The ranks of a split model had better pass their bytes to `import_prefixes`. A rank that refuses its
    bytes here never calls `import_prefixes`, where the other ranks wait.

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
        raise refused("data", data, "bytes")
    data = bytes(data)
    expected = checksum(data)
    digest = hashlib.sha256(data.replace(_signature(expected), _signature(_UNSIGNED), 1)).hexdigest()
    if digest != expected:
        raise TransferError(
            f"sha256 is {shown(expected)} by the header, {digest} by the {len(data)} bytes: "
            "the export is truncated or altered"
        )
    try:
        with torch.device("cpu"):  # safetensors makes empty tensors where torch's default device is
            tensors = safetensors.torch.load(data)
        described = decode(tensors.pop(_DESCRIPTION).numpy().tobytes(), Description)
    except TransferError:
        raise
    except Exception as error:  # a valid checksum does not make the content valid
        raise TransferError(f"the export is malformed: {error}") from error
    shard = PrefixShard(described.format, described.forest, described.shard, tensors)
    shard.check()
    return shard


def checksum(data: bytes) -> str:
    """The checksum in the header of encoded prefixes; TransferError without a header of this version."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        header = msgspec.json.decode(data[_LENGTH.size : _LENGTH.size + length], type=_Header)
    except (struct.error, ValueError, RecursionError) as error:
        raise TransferError(
            f"the export has no readable header, so it is truncated or altered: {error}"
        ) from error
    check_version(header.metadata.version)
    return header.metadata.sha256
