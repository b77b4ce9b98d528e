"""State events as bytes: a round trip, and bytes that are refused."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net import StateEvents, decode_events, encode_events

KEYS = st.integers(1, 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
EXAMPLE = StateEvents("replica 0", 7, 3, (5, 2**63 - 1), (9,))


@st.composite
def events(draw: st.DrawFn) -> StateEvents:
    keys = draw(st.lists(KEYS, unique=True, max_size=20))
    is_snapshot = draw(st.booleans())
    cut = len(keys) if is_snapshot else draw(st.integers(0, len(keys)))
    return StateEvents(draw(NAMES), draw(U64), draw(U64), tuple(keys[:cut]), tuple(keys[cut:]), is_snapshot)


@given(events())
def test_what_is_encoded_is_decoded(message: StateEvents) -> None:
    data = encode_events(message)
    assert decode_events(data) == message
    num_keys = len(message.inserted) + len(message.removed)
    assert len(data) == 36 + len(message.replica.encode()) + 8 * num_keys


@given(events(), st.data())
def test_changed_bytes_are_refused_or_are_another_message(message: StateEvents, data: st.DataObject) -> None:
    encoded = bytearray(encode_events(message))
    kind = data.draw(st.sampled_from(["cut", "longer", "changed"]))
    if kind == "cut":
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    elif kind == "longer":
        encoded += data.draw(st.binary(min_size=1, max_size=40))
    else:
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_events(bytes(encoded))
    except ValueError:
        return
    assert kind == "changed"
    assert found != message
    assert encode_events(found) == bytes(encoded)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_one_message(data: bytes) -> None:
    for one in (data, b"MSSE\1\0" + data):
        try:
            found = decode_events(one)
        except ValueError:
            continue
        assert encode_events(found) == one


@pytest.mark.parametrize(
    ("offset", "field", "says"),
    [
        (0, b"MSSX", "begins with"),
        (4, b"\2\0", "has version 2"),
        (6, b"\2\0", "has flags 0x2"),
        (24, struct.pack("<I", 2**32 - 1), "the header announces"),
        (28, struct.pack("<I", 0), "the header announces"),
        (32, struct.pack("<I", 2**32 - 1), "the header announces"),
        (36, b"\xff", "no UTF-8"),
        (45, struct.pack("<Q", 0), "a hash is 0"),
        (45, struct.pack("<Q", 2**63), "a hash is 9223372036854775808"),
        (45, struct.pack("<Q", 9), "named twice"),
        (6, b"\1\0", "events.removed has 1 hashes"),
    ],
)
def test_a_wrong_field_is_named(offset: int, field: bytes, says: str) -> None:
    data = bytearray(encode_events(EXAMPLE))
    data[offset : offset + len(field)] = field
    with pytest.raises(ValueError, match=says):
        decode_events(bytes(data))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": ""},
        {"replica": "\ud800"},
        {"epoch": -1},
        {"epoch": 2**64},
        {"sequence": -1},
        {"inserted": (0,)},
        {"inserted": (2**63,)},
        {"inserted": (9,)},
        {"is_snapshot": True},
    ],
    ids=str,
)
def test_events_that_no_replica_tells_are_not_encoded(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        encode_events(replace(EXAMPLE, **wrong))  # type: ignore[arg-type]


def test_what_is_no_bytes_is_refused() -> None:
    for wrong in ("text", None, 3, [1]):
        with pytest.raises(ValueError, match="data is"):
            decode_events(wrong)  # type: ignore[arg-type]
