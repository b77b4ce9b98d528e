"""State events as bytes: a round trip, and bytes that are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.net.routing.state_events import StateEvents
from oracle.state_channel import decode_events, encode_events

KEYS = st.integers(1, 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
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
    assert len(data) <= 80 + len(message.replica.encode()) + 9 * num_keys


@given(events(), st.data())
def test_changed_bytes_are_refused_or_are_a_valid_message(message: StateEvents, data: st.DataObject) -> None:
    encoded = bytearray(encode_events(message))
    kind = data.draw(st.sampled_from(["cut", "longer", "changed"]))
    if kind == "cut":
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    elif kind == "longer":
        encoded += data.draw(st.binary(min_size=1, max_size=40))
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_events(bytes(encoded))
    except ValueError:
        return
    assert kind == "changed"
    assert decode_events(encode_events(found)) == found


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decode_events(data)


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
def test_events_that_contradict_themselves_are_refused_on_both_sides(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        msgspec.structs.replace(EXAMPLE, **wrong)
    if wrong not in ({"replica": "\ud800"}, {"epoch": 2**64}):  # no bytes of msgpack say these
        fields = msgspec.structs.asdict(EXAMPLE) | wrong
        with pytest.raises(ValueError, match="accepted"):
            decode_events(msgspec.msgpack.encode([StateEvents.__struct_config__.tag, *fields.values()]))
