"""An export's bytes: what is written comes back, and whatever else comes is refused."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.distributed.transfer import codec
from mambaslots.distributed.transfer.codec import decode_prefixes, encode_prefixes
from mambaslots.distributed.transfer.format import TransferError
from mambaslots.distributed.transfer.shard import PrefixShard
from mambaslots.inference.policies.prefix_hash import PUBLIC_ROOT, PrefixHashChain
from oracle.transfers import random_export, shard_of_rank, with_forest
from safetensors.torch import load, save

CONFIG = ms.models.HybridConfig.tiny(
    pattern="M*M", mamba_num_heads=2, mamba_head_dim=2, mamba_num_groups=2, mamba_state_dim=2,
    num_attention_heads=2, num_kv_heads=2, head_dim=2, ssd_chunk_size=4,
)  # fmt: skip
EXPORT = random_export(CONFIG)
PUBLIC = PUBLIC_ROOT.hex()
BYTES = encode_prefixes(EXPORT)
HEADER = 8 + struct.unpack_from("<Q", BYTES)[0]


def equal(one: PrefixShard, other: PrefixShard) -> bool:
    return (
        (one.format, one.shard, one.split) == (other.format, other.shard, other.split)
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
    export = random_export(replace(CONFIG, dtype=dtype), seed=2)
    export = replace(export, format=replace(export.format, weights_version=version), split=(4, 2))
    decoded = decode_prefixes(encode_prefixes(export))
    assert equal(decoded, export)
    assert type(decoded.format.weights_version) is type(version)
    assert decoded.forest.roots == export.forest.roots


def test_bytes_of_other_types() -> None:
    assert equal(decode_prefixes(bytearray(BYTES)), EXPORT)
    assert equal(decode_prefixes(memoryview(BYTES)), EXPORT)
    assert "truncated" in refused(memoryview(BYTES)[:-1])  # type: ignore[arg-type]
    for data in (None, 5, "text", [1]):
        with pytest.raises(ValueError, match="data is"):
            decode_prefixes(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("pipeline", [(0, 3), (1, 3), (2, 3)])
def test_round_trip_of_a_stage_without_some_layers(pipeline: tuple[int, int]) -> None:
    part = EXPORT.cut(shard_of_rank(CONFIG, (1, 2), pipeline))
    assert equal(decode_prefixes(encode_prefixes(part)), part)


def test_round_trip_of_nothing() -> None:
    nothing = random_export(CONFIG)
    nothing = with_forest(nothing, roots=(), salt_key_id="", parents=(), tokens=(), states=())
    tensors = {n: t[:, :, :0] if n == "kv" else t[:, :0] for n, t in nothing.tensors.items()}
    nothing = replace(nothing, tensors=tensors)
    assert equal(decode_prefixes(encode_prefixes(nothing)), nothing)


def test_it_is_a_safetensors_file_of_the_tensors() -> None:
    tensors = load(BYTES)
    assert torch.equal(tensors["ssm"], EXPORT.tensors["ssm"])
    assert tensors["tokens"].shape == (len(EXPORT.forest), 16)


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
        assert forest.keys[node] == chain.keys[-1]


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
    other = encode_prefixes(random_export(CONFIG, seed=seed + 1))
    length = 8 + struct.unpack_from("<Q", other)[0]
    refused(BYTES[:HEADER] + other[length:])
    refused(other[:length] + BYTES[HEADER:])


def signed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """A file with a checksum that holds, whatever it says."""
    data = bytearray(save(tensors, metadata | {"sha256": "0" * 64}))
    at = data.index(b'"sha256":"') + len('"sha256":"')
    data[at : at + 64] = codec.hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def forged(**changes: object) -> bytes:
    """`export.x` changes a value of the header, other names a tensor."""
    metadata = json.loads(BYTES[8:HEADER])["__metadata__"]
    export, tensors = json.loads(metadata["export"]), load(BYTES)
    for name, change in changes.items():
        if name in tensors:
            tensors[name] = change(tensors[name])  # type: ignore[operator]
        elif name in export:
            export[name] = change
        elif name in metadata:
            metadata[name] = change
        else:
            export["format"][name] = change
    return signed(tensors, metadata | {"export": json.dumps(export)})


def set_at(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mambaslots_prefixes": "1"}, "format_version is 1; accepted: 2"),
        ({"mambaslots_prefixes": "x"}, "format_version is 'x'; accepted: 2"),
        ({"format_version": 1}, "format_version is 1; accepted: 2"),
        ({"weights_version": None}, "weights_version is None; accepted: a str, int or bytes"),
        ({"weights_version": ["int", True]}, "weights_version"),
        ({"weights_version": ["bytes", "xy"]}, "malformed"),
        ({"block_size_tokens": 0}, "block_size_tokens is 0"),
        ({"block_size_tokens": 8}, "accepted: 12 times 32 bytes"),
        ({"block_size_tokens": "4"}, "block_size_tokens is '4'"),
        ({"kv_dtype": "float16"}, "kv is of shape .* accepted: .*float16"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'"),
        ({"vocab_size": 5}, "a token is .*accepted: from 0 to 4"),
        ({"head_dim": 4}, "kv is of shape"),
        ({"mamba_state_dim": 3}, "is of shape"),
        ({"mamba_heads": 4}, "shard.mamba_heads is of 2; accepted: 4"),
        ({"shard": {}}, "shard is"),
        ({"split": [1]}, "malformed"),
        ({"split": [0, 1]}, "split"),
        ({"roots": [PUBLIC, PUBLIC]}, "names a root twice"),
        ({"roots": [PUBLIC], "salt_key_id": ""}, r"parents\[1\] is -2"),
        ({"roots": [PUBLIC, "79" * 32]}, "hashes are not those"),
        ({"roots": [PUBLIC, "79"]}, "a root that is not of 32 bytes"),
        ({"roots": 3}, "malformed"),
        ({"salt_key_id": ""}, "salt_key_id is ''; accepted: a str, empty where no prefix has a salt"),
        ({"salt_key_id": 7}, "salt_key_id is 7"),
        ({"parents": set_at(3, 3)}, r"parents\[3\] is 3"),
        ({"parents": set_at(3, -3)}, r"parents\[3\] is -3"),
        ({"parents": lambda t: t[:-1]}, "tokens are those of other blocks"),
        ({"parents": lambda t: t.int()}, "parents is of 1 dimensions and torch.int32"),
        ({"tokens": set_at(1, 1)}, "a token is"),
        ({"tokens": set_at(0, 1)}, "hashes are not those"),
        ({"tokens": lambda t: t[:, :-4].contiguous()}, "tokens are those of other blocks"),
        ({"states": set_at(0, 12)}, "states is"),
        ({"states": set_at(0, -1)}, "states is"),
        ({"states": lambda t: t[:-1]}, "ssm is of shape|below the deepest state"),
        ({"hashes": set_at(2, 5)}, "hashes are not those"),
        ({"hashes": lambda t: t[:-1]}, "hashes are not those"),
        ({"ssm": lambda t: t[:, :, :1].contiguous()}, "ssm is of shape"),
        ({"conv_B": lambda t: t.double()}, "conv_B is of shape .*float64; accepted: .*float32"),
        ({"kv": lambda t: t.flatten()}, "kv is of shape"),
    ],
)  # fmt: skip
def test_forgeries_with_a_checksum_that_holds(changes: dict[str, object], text: str) -> None:
    with pytest.raises(TransferError, match=text):
        decode_prefixes(forged(**changes))


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
