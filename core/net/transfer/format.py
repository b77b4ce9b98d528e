"""What is saved or sent of cached prefixes, typed and bounded: tensors, parts of them, trees of blocks."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta

from ...inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain
from ...model_parts import Part, StateSegment
from ...state_spec import HybridStateSpec, StateTensor
from ...validation import INT32_MAX, shown

KV = "kv"  # the name of the tensor of keys and values. Those of states have a dot: see `segments_of`
TOKEN_BYTES = 4  # bytes of a token id, little-endian, as the KV index keeps it
FORMAT_VERSION = 4
_ROOT_BYTES = len(PUBLIC_ROOT)

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=INT32_MAX)]


class TransferError(ValueError):
    """An export is damaged, or does not fit this engine; the call that raised has changed nothing."""


# ---- which part of each tensor a rank holds


class TensorPart(NamedTuple):
    """Some layers of a tensor, and some units of these layers: heads, groups or channels."""

    layers: Part
    units: Part

    @property
    def slices(self) -> tuple[slice, slice]:
        """The part's layers and units, of those of the whole model."""
        return slice(self.layers.start, self.layers.stop), slice(self.units.start, self.units.stop)


Shard = Mapping[str, TensorPart]  # the name of each tensor -> the part that a rank holds of it


def segments_of(tensor: StateTensor) -> dict[str, StateSegment]:
    """The segments of a state tensor by their names in an export: "conv.0" is the first of "conv"."""
    return {f"{tensor.name}.{index}": segment for index, segment in enumerate(tensor.parts.segments)}


def shard_of(spec: HybridStateSpec) -> Shard:
    """The part of the model that this rank holds; ValueError where a split model does not say which part."""
    undeclared = [f"states[{i}].split" for i, tensor in enumerate(spec.states) if tensor.split is None]
    undeclared += ["shard"] if spec.shard is None else []
    if spec.groups.is_split and undeclared:
        raise ValueError(
            f"{', '.join(undeclared)} of state_spec() is None; accepted: the part of each tensor that this "
            f"rank holds, because {spec.groups.size} ranks hold the model"
        )
    counts = spec.num_attention_layers, spec.num_kv_heads
    kv = TensorPart(*(Part(0, count, count) for count in counts))
    if spec.shard is not None:
        kv = TensorPart(spec.shard.attention_layers, spec.shard.kv_heads)
        if (kv.layers.count, kv.units.count) != counts:
            raise ValueError(
                f"state_spec().shard is {spec.shard}; accepted: one of {counts[0]} attention layers and "
                f"{counts[1]} KV heads"
            )
    shard = {KV: kv}
    for tensor in spec.states:
        for name, segment in segments_of(tensor).items():
            shard[name] = TensorPart(tensor.parts.layers, segment.part)
    return shard


# ---- the tensors of the whole model


class TensorFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of an export, of the whole model."""

    num_layers: Count  # that have the tensor
    num_units: Count  # heads, groups or channels of a layer
    shape: tuple[Size, ...]  # of one unit of one state, or of one KV block: [2, block size, head dim]
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int8"]
    grid: Size = 1  # `StateTensor.grid`; 1 for KV

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class PrefixFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensors of the whole model, and what else the meaning of its states and KV depends on.

    States travel as they are stored: one in int8 has int8 numbers under its own name, and bfloat16
    "ssm_scales.0". So an engine with another `durable_state_dtype` refuses them.
    """

    weights_version: str  # `repr` of the engine's, so that 1 and "1" differ
    block_size_tokens: Size
    vocab_size: Size
    tensors: dict[str, TensorFormat]  # by name: "kv", and "conv.0" for the first segment of "conv"

    @classmethod
    def of(cls, spec: HybridStateSpec, block_size_tokens: int, weights_version: object) -> "PrefixFormat":
        """The format of an engine's cache; ValueError for another `weights_version`, or as in `shard_of`."""
        if type(weights_version) not in (str, int, bytes):
            raise ValueError(
                f"engine.weights_version is {shown(weights_version)}; accepted: a str, int or bytes that "
                "names the model's weights, because prefixes of other weights of the same shape must be "
                "refused"
            )
        kv_shape: tuple[int, ...] = 2, block_size_tokens, spec.head_dim
        shapes = {KV: (kv_shape, spec.kv_dtype, 1)}
        for tensor in spec.states:
            for name, segment in segments_of(tensor).items():
                shapes[name] = (segment.width, *tensor.shape[1:]), tensor.dtype, tensor.grid
        shard = shard_of(spec)
        return cls(
            weights_version=repr(weights_version),
            block_size_tokens=block_size_tokens,
            vocab_size=spec.vocab_size,
            tensors={
                name: TensorFormat(
                    shard[name].layers.total,
                    shard[name].units.total,
                    shape,
                    str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
                    grid,
                )
                for name, (shape, dtype, grid) in shapes.items()
            },
        )

    def check_fits(self, own_format: "PrefixFormat") -> None:
        """Raises a TransferError that names everything in which this format differs from `own_format`."""
        texts, own_texts = self._texts(), own_format._texts()
        differences = [
            f"{name} is {text}; accepted: {own_texts[name]}, as here"
            for name, text in texts.items()
            if name in own_texts and text != own_texts[name]
        ]
        if differences:
            raise TransferError("the export does not fit: " + "; and ".join(differences))

    def _texts(self) -> dict[str, str]:
        """What `check_fits` compares; the names of tensors stand for the tensors that only one side has."""
        values = msgspec.structs.asdict(self) | {"tensors": sorted(self.tensors)}
        for name, tensor in self.tensors.items():
            fields = msgspec.structs.asdict(tensor)
            values |= {f"{name}.{field}": value for field, value in fields.items()}
        texts = {name: shown(value) for name, value in values.items()}
        return texts | {"weights_version": self.weights_version}


# ---- the prefixes


class PrefixForest(msgspec.Struct, frozen=True, eq=False, dict=True, forbid_unknown_fields=True):
    """Trees whose nodes 0 .. n-1 are blocks; a path from a root is a prefix. Parents come before children.

    Attributes:
        roots: the root digests of the prefixes' hash chains, each once; see `SaltKey.root`. No salts.
        salt_key_id: of the key that made the roots, or empty where no prefix has a salt.
        parents: node -> the node before it in the prefix; -1 - i for the first block under `roots[i]`.
        tokens: node -> the bytes of its token ids, `TOKEN_BYTES` each.
        states: the nodes whose state is exported, the most recently used state first. Every leaf is among
            them.
    """

    roots: tuple[Annotated[bytes, Meta(min_length=_ROOT_BYTES, max_length=_ROOT_BYTES)], ...]
    salt_key_id: Annotated[str, Meta(max_length=64)]
    parents: tuple[int, ...]
    tokens: tuple[bytes, ...]
    states: tuple[Count, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The nodes without children: each ends a prefix that no other prefix continues."""
        return frozenset(range(len(self))) - frozenset(self.parents)

    def under_other_key(self, salt_key_id: str) -> frozenset[int]:
        """The nodes of prefixes with salts, where their roots were made under another key than this one."""
        if self.salt_key_id in ("", salt_key_id):
            return frozenset()
        nodes: set[int] = set()
        for node, parent in enumerate(self.parents):
            if parent in nodes or (parent < 0 and self.roots[-1 - parent] != PUBLIC_ROOT):
                nodes.add(node)
        return frozenset(nodes)

    @cached_property
    def hashes(self) -> tuple[int, ...]:
        """Node -> the hash of the prefix that ends there, computed from root and tokens."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        hashes = [0] * len(self)
        size = len(self.tokens[0]) // TOKEN_BYTES if self.tokens else 1
        for index, root in enumerate(self.roots):
            chain = PrefixHashChain(size, root)
            waiting = [(node, 0) for node in children.get(-1 - index, ())]
            while waiting:
                node, depth = waiting.pop()
                chain.cut_to(depth * size)
                chain.append(self.tokens[node])
                hashes[node] = chain.hashes[-1]
                waiting += [(child, depth + 1) for child in children.get(node, ())]
        return tuple(hashes)

    @cached_property
    def digest(self) -> str:
        """Equal for two forests whose nodes, order and states are equal."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    def check(self, block_size_tokens: int, vocab_size: int) -> None:
        """TransferError unless the forest is as the class says, of such blocks and tokens."""
        nodes, width = len(self), block_size_tokens * TOKEN_BYTES
        if len(set(self.roots)) < len(self.roots):
            raise TransferError("the export names a root twice")
        if bool(self.salt_key_id) != bool(set(self.roots) - {PUBLIC_ROOT}):
            raise TransferError(
                f"salt_key_id is {shown(self.salt_key_id)}; accepted: a str, empty where no prefix has a salt"
            )
        for node, parent in enumerate(self.parents):
            if not -len(self.roots) <= parent < node:
                raise TransferError(
                    f"parents[{node}] is {parent}; accepted: an earlier node, or from {-len(self.roots)} to "
                    "-1 for one of the roots"
                )
        if len(self.tokens) != nodes or any(len(content) != width for content in self.tokens):
            raise TransferError(f"tokens are those of other blocks; accepted: {nodes} times {width} bytes")
        largest = np.frombuffer(b"".join(self.tokens), dtype="<u4").max(initial=0)
        if largest >= vocab_size:
            raise TransferError(f"a token is {largest}; accepted: from 0 to {vocab_size - 1}")
        if len(set(zip(self.parents, self.tokens, strict=True))) < nodes:
            raise TransferError("the export holds a block twice")
        if len(set(self.states)) < len(self.states) or max(self.states, default=-1) >= nodes:
            raise TransferError(f"states is {shown(self.states)}; accepted: distinct nodes below {nodes}")
        if not self.leaves <= set(self.states):
            raise TransferError("the export holds blocks below the deepest state of their prefix")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of a part of an export but its numbers: the head of a file, and what a source offers."""

    format: PrefixFormat  # of the whole model
    forest: PrefixForest  # the same in every part
    shard: dict[str, TensorPart]  # which part of each tensor this is

    def check(self) -> None:
        """TransferError unless format, forest and shard are consistent. Costs O(blocks)."""
        self.forest.check(self.format.block_size_tokens, self.format.vocab_size)
        check_shard(self.format, self.shard)


def check_version(version: int | str) -> None:
    """TransferError unless bytes or a manifest are of the version that this code reads."""
    if str(version) != str(FORMAT_VERSION):
        raise TransferError(f"format_version is {shown(version)}; accepted: {FORMAT_VERSION}")


def check_shard(form: PrefixFormat, shard: Shard) -> None:
    """TransferError unless `shard` is a part of a model of this format."""
    if shard.keys() != form.tensors.keys():
        raise TransferError(f"shard is of {sorted(shard)}; accepted: {sorted(form.tensors)}")
    for name, tensor in form.tensors.items():
        totals = tensor.num_layers, tensor.num_units
        for axis, part, total in zip(TensorPart._fields, shard[name], totals, strict=True):
            if part.total != total:
                raise TransferError(
                    f"shard.{name} is of {part.total} {axis}; accepted: {total}, as the format says"
                )


def decode[T](data: bytes | memoryview, kind: type[T]) -> T:
    """A value of this kind from msgpack; TransferError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"the export is malformed: {error}") from error
