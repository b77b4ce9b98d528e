"""An export's bytes: what is written comes back, and whatever else comes is refused."""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace

import mambaslots as ms
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain
from mambaslots.net import export_prefixes, import_prefixes
from mambaslots.net.transfer.format import PrefixFormat, TransferError
from mambaslots.net.transfer.shard import PrefixShard, decode_prefixes, encode_prefixes
from oracle.serving import random_tokens
from oracle.transfers import Declared, engine_of, random_export, with_forest
from safetensors.torch import load, save

MODEL = Declared("MG*C")
EXPORT = random_export(MODEL.spec())
BYTES = encode_prefixes(EXPORT)
HEADER = 8 + struct.unpack_from("<Q", BYTES)[0]


def equal(one: PrefixShard, other: PrefixShard) -> bool:
    return (
        (one.format, one.shard) == (other.format, other.shard)
        and one.forest.digest == other.forest.digest
        and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    )


def refused(data: bytes) -> str:
    with pytest.raises(TransferError) as error:
        decode_prefixes(data)
    return str(error.value)


@pytest.mark.parametrize(
    "version", ["weights 1", "", 'ü\0"sha256":"' + "0" * 64, 7, -(2**70), b"", b"\xff\0"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(version: str | int | bytes, dtype: torch.dtype) -> None:
    export = random_export(replace(MODEL, dtype=dtype).spec(), seed=2)
    spec = replace(MODEL, dtype=dtype).spec()
    export = replace(export, format=PrefixFormat.of(spec, 4, version))
    decoded = decode_prefixes(encode_prefixes(export))
    assert equal(decoded, export)
    assert decoded.format.weights_version == repr(version)
    assert decoded.forest.roots == export.forest.roots


def test_bytes_of_other_types() -> None:
    assert equal(decode_prefixes(bytearray(BYTES)), EXPORT)
    assert equal(decode_prefixes(memoryview(BYTES)), EXPORT)
    assert "truncated" in refused(memoryview(BYTES)[:-1])  # type: ignore[arg-type]
    for data in (None, 5, "text", [1]):
        with pytest.raises(ValueError, match="data is"):
            decode_prefixes(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["M", "G", "C", "*", "GC*", "-"])
def test_round_trip_of_any_kinds_of_layer(pattern: str) -> None:
    export = random_export(Declared(pattern).spec())
    assert equal(decode_prefixes(encode_prefixes(export)), export)


@pytest.mark.parametrize("pipeline", range(3))
def test_round_trip_of_a_stage_without_some_layers(pipeline: int) -> None:
    part = EXPORT.cut(MODEL.shards(2, 3)[2 * pipeline + 1])
    assert equal(decode_prefixes(encode_prefixes(part)), part)


def test_round_trip_of_nothing() -> None:
    nothing = EXPORT
    nothing = with_forest(nothing, roots=(), salt_key_id="", parents=(), tokens=(), states=())
    nothing = replace(nothing, tensors={name: t[:, :0] for name, t in nothing.tensors.items()})
    assert equal(decode_prefixes(encode_prefixes(nothing)), nothing)


def test_it_is_a_safetensors_file_of_the_tensors() -> None:
    tensors = load(BYTES)
    for name in EXPORT.tensors:
        assert torch.equal(tensors[name], EXPORT.tensors[name])
    assert tensors.keys() - EXPORT.tensors.keys() == {"description"}


def test_keys_are_those_of_the_hash_chain() -> None:
    forest = EXPORT.forest
    for node in range(len(forest)):
        path, before = [], node
        while before >= 0:
            path.insert(0, before)
            before = forest.parents[before]
        chain = PrefixHashChain(4, forest.roots[-1 - before])
        ids = b"".join(forest.tokens[n] for n in path)
        chain.extend_to(torch.frombuffer(bytearray(ids), dtype=torch.int32).tolist())
        assert forest.hashes[node] == chain.hashes[-1]


def test_every_byte_of_the_header_counts() -> None:
    for at in range(HEADER):
        for mask in (0x01, 0x20, 0xFF):
            refused(BYTES[:at] + bytes([BYTES[at] ^ mask]) + BYTES[at + 1 :])
    print(f"{3 * HEADER} damaged headers refused, of an export of {len(BYTES)} bytes")


@given(at=st.integers(0, len(BYTES) - 1), mask=st.integers(1, 255))
def test_any_other_byte_counts(at: int, mask: int) -> None:
    refused(BYTES[:at] + bytes([BYTES[at] ^ mask]) + BYTES[at + 1 :])


@given(length=st.integers(0, len(BYTES) - 1))
def test_truncated_anywhere(length: int) -> None:
    refused(BYTES[:length])


@given(first=st.integers(0, len(BYTES)), second=st.integers(0, len(BYTES)), extra=st.binary(max_size=40))
def test_pieces_removed_doubled_or_inserted(first: int, second: int, extra: bytes) -> None:
    changed = BYTES[:first] + extra + BYTES[second:]
    if changed != BYTES:
        refused(changed)


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize("seed", range(5))
def test_headers_swapped(seed: int) -> None:
    other = encode_prefixes(random_export(MODEL.spec(), seed=seed + 1))
    length = 8 + struct.unpack_from("<Q", other)[0]
    refused(BYTES[:HEADER] + other[length:])
    refused(other[:length] + BYTES[HEADER:])


def signed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """A file with a checksum that holds, whatever it says."""
    data = bytearray(save(tensors, metadata | {"sha256": "0" * 64}))
    at = data.index(b'"sha256":"') + len('"sha256":"')
    data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def forged(**changes: object) -> bytes:
    """Each names a tensor, a field of the forest, or as "tensor field" a value of a tensor's format."""
    metadata = json.loads(BYTES[8:HEADER])["__metadata__"]
    tensors = load(BYTES)
    found = msgspec.msgpack.decode(tensors.pop("description").numpy().tobytes())
    for name, change in changes.items():
        tensor, dot, field = name.rpartition(" ")
        if dot:
            found["format"]["tensors"][tensor][field] = change
        elif name in tensors:
            tensors[name] = change(tensors[name])  # type: ignore[operator]
        elif name in found["forest"]:
            forest = found["forest"]
            forest[name] = change(forest[name]) if callable(change) else change
        elif name in metadata:
            metadata[name] = change
        else:
            (found if name in found else found["format"])[name] = change
    tensors["description"] = torch.frombuffer(bytearray(msgspec.msgpack.encode(found)), dtype=torch.uint8)
    return signed(tensors, metadata)


def put(index: int, value: object) -> Callable[[list[object]], list[object]]:
    return lambda values: [*values[:index], value, *values[index + 1 :]]


def set_at(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mambaslots_prefixes": "3"}, "format_version is '3'; accepted: 4"),
        ({"mambaslots_prefixes": "x"}, "format_version is 'x'; accepted: 4"),
        ({"weights_version": None}, "malformed: Expected `str`.*weights_version"),
        ({"weights_version": 7}, "weights_version"),
        ({"other": 7}, "unknown field `other`"),
        ({"block_size_tokens": 0}, "malformed: Expected `int` >= 1.*block_size_tokens"),
        ({"block_size_tokens": 8}, "accepted: 12 times 32 bytes"),
        ({"block_size_tokens": "4"}, "block_size_tokens"),
        ({"vocab_size": 5}, "a token is .*accepted: from 0 to 4"),
        ({"tensors": 3}, "Expected `object`.*tensors"),
        ({"tensors": {}}, "shard is of .*; accepted: .."),
        ({"tensors": {"conv.0": {}}}, "missing required field `num_layers`.*tensors"),
        ({"kv dtype": "float16"}, "kv is of shape .* accepted: .*float16"),
        ({"kv dtype": "int8"}, "kv is of shape .* accepted: .*int8"),
        ({"kv dtype": "int16"}, "Invalid enum value 'int16'"),
        ({"kv shape": [2, 4, 4]}, "kv is of shape"),
        ({"kv shape": [2, 4, 0]}, "Expected `int` >= 1.*shape"),
        ({"kv shape": 4}, "Expected `array`.*shape"),
        ({"delta.0 shape": []}, "delta.0 is of shape"),
        ({"ssm.0 num_units": 4}, "shard.ssm.0 is of 2 units; accepted: 4"),
        ({"ssm.0 num_units": 1 << 40}, "Expected `int` <= .*num_units"),
        ({"short_conv.0 num_layers": 2}, "shard.short_conv.0 is of 1 layers; accepted: 2"),
        ({"short_conv.0 num_layers": -1}, "Expected `int` >= 0.*num_layers"),
        ({"gdn_conv.1 grid": 0}, "Expected `int` >= 1.*grid"),
        ({"gdn_conv.1 other": 0}, "unknown field `other`"),
        ({"shard": {}}, r"shard is of \[\]; accepted: .'conv.0', 'conv.1'"),
        ({"shard": []}, r"Expected `object`.*shard"),
        ({"shard": {"kv": [0, 1, 1]}}, "Expected `array` of length 2.*shard"),
        ({"shard": {"kv": [[0, 1], [0, 1, 1]]}}, "Expected `object`, got `array`.*shard"),
        ({"shard": {"kv": [{"start": 0, "stop": 2, "total": 1}] * 2}}, "stop is 2"),
        ({"roots": [PUBLIC_ROOT, PUBLIC_ROOT]}, "names a root twice"),
        ({"roots": [PUBLIC_ROOT], "salt_key_id": ""}, r"parents\[1\] is -2"),
        ({"roots": [PUBLIC_ROOT, b"79"]}, "Expected `bytes` of length >= 32.*roots"),
        ({"roots": 3}, "malformed"),
        ({"salt_key_id": ""}, "salt_key_id is ''; accepted: a str, empty where no prefix has a salt"),
        ({"salt_key_id": 7}, "Expected `str`.*salt_key_id"),
        ({"parents": put(3, 3)}, r"parents\[3\] is 3"),
        ({"parents": put(3, -3)}, r"parents\[3\] is -3"),
        ({"parents": put(3, 1.5)}, "Expected `int`"),
        ({"parents": lambda nodes: nodes[:-1]}, "tokens are those of other blocks"),
        ({"tokens": put(0, b"\0\1\0\0" * 4)}, "a token is"),
        ({"tokens": put(0, b"\0" * 12)}, "tokens are those of other blocks"),
        ({"states": put(0, 12)}, "states is"),
        ({"states": put(0, -1)}, "Expected `int` >= 0.*states"),
        ({"states": lambda nodes: nodes[:-1]}, "is of shape|below the deepest state"),
        ({"ssm.0": lambda t: t[:, :, :1].contiguous()}, "ssm.0 is of shape"),
        ({"conv.1": lambda t: t.double()}, "conv.1 is of shape .*float64; accepted: .*float32"),
        ({"kv": lambda t: t.flatten()}, "kv is of shape"),
        ({"kv": set_at(3, math.nan)}, "kv holds NaN or an infinite number; accepted: finite numbers"),
        ({"ssm.0": set_at(-1, math.inf)}, "ssm.0 holds NaN"),
        ({"delta.0": set_at(0, -math.inf)}, "delta.0 holds NaN"),
    ],
)  # fmt: skip
def test_forgeries_with_a_checksum_that_holds(changes: dict[str, object], text: str) -> None:
    with pytest.raises(TransferError, match=text):
        decode_prefixes(forged(**changes))


def test_an_export_that_never_was_bytes_holds_numbers_or_is_refused() -> None:
    source, target = engine_of(), engine_of()
    source.generate([random_tokens(40, 1)], ms.SamplingParams(max_tokens=1))
    export = export_prefixes(source)
    name = next(name for name in export.tensors if name != "kv")
    export.tensors[name].view(-1)[0] = math.nan
    with pytest.raises(TransferError, match=f"{re.escape(name)} holds NaN"):
        import_prefixes(target, export)
    target.check_integrity()
    assert target.stats().cache.num_cached_kv_blocks == 0


def test_a_forgery_without_a_change_is_none() -> None:
    assert equal(decode_prefixes(forged()), EXPORT)


def test_tensors_too_few_or_too_many() -> None:
    metadata, tensors = json.loads(BYTES[8:HEADER])["__metadata__"], load(BYTES)
    for changed in ({k: v for k, v in tensors.items() if k != "kv"}, tensors | {"more": torch.zeros(1)}):
        assert "tensors are" in refused(signed(changed, metadata))


def test_a_block_held_twice_and_one_below_the_deepest_state() -> None:
    forest = EXPORT.forest
    twice = with_forest(
        EXPORT, parents=(-1, -1, *forest.parents[2:]), tokens=(forest.tokens[0],) * 2 + forest.tokens[2:]
    )
    with pytest.raises(TransferError, match="holds a block twice"):
        twice.check()
    leaf = min(forest.leaves)
    useless = with_forest(EXPORT, states=tuple(node for node in forest.states if node != leaf))
    with pytest.raises(TransferError, match="below the deepest state"):
        useless.check()
