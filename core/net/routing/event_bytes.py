"""State events as bytes; docs/routing.md describes the format."""

import struct

import numpy as np

from ...validation import INT64_MAX, instance, shown
from .state_events import StateEvents

MAGIC = b"MSSE"
VERSION = 1
_HEADER = struct.Struct("<4sHHQQIII")
_IS_SNAPSHOT = 1
_KEY_BYTES = 8
_LARGEST = {"epoch": (1 << 64) - 1, "sequence": (1 << 64) - 1, "inserted": (1 << 32) - 1}


def encode_events(events: StateEvents) -> bytes:
    """The bytes of one message: 36 bytes, the replica's name in UTF-8, and 8 bytes a hash.

    Raises:
        ValueError: a field is out of its range, or the events contradict themselves.
    """
    instance("events", events, StateEvents)
    for field in ("epoch", "sequence"):
        number = getattr(events, field)
        if not 0 <= number <= _LARGEST[field]:
            raise ValueError(f"events.{field} is {shown(number)}; accepted: an integer from 0 to 2**64 - 1")
    try:
        name = events.replica.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"events.replica is {shown(events.replica)}; accepted: a str that UTF-8 can encode"
        ) from error
    _check(events)
    header = _HEADER.pack(
        MAGIC, VERSION, _IS_SNAPSHOT if events.is_snapshot else 0, events.epoch, events.sequence,
        len(events.inserted), len(events.removed), len(name),
    )  # fmt: skip
    keys = np.asarray(events.inserted + events.removed, dtype="<u8")
    return header + name + keys.tobytes()


def decode_events(data: bytes) -> StateEvents:
    """The message that these bytes are. Takes memory in proportion to `data` alone.

    Raises:
        ValueError: `data` is no message of this format, is cut off, or has bytes behind its end.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"data is {shown(data)}; accepted: bytes of a message")
    data = bytes(data)
    if len(data) < _HEADER.size:
        raise _refused(f"has {len(data)} bytes", f"at least {_HEADER.size}")
    magic, version, flags, epoch, sequence, num_inserted, num_removed, name_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _refused(f"begins with {magic!r}", repr(MAGIC))
    if version != VERSION:
        raise _refused(f"has version {version}", f"version {VERSION}")
    if flags & ~_IS_SNAPSHOT:
        raise _refused(f"has flags {flags:#x}", "flag 1 or none")
    start = _HEADER.size + name_bytes
    stop = start + _KEY_BYTES * (num_inserted + num_removed)
    if len(data) != stop:
        raise _refused(f"has {len(data)} bytes", f"the {stop} bytes that the header announces")
    try:
        name = data[_HEADER.size : start].decode()
    except UnicodeDecodeError as error:
        raise _refused("names the replica in no UTF-8", "UTF-8") from error
    keys = np.frombuffer(data, dtype="<u8", offset=start).tolist()
    events = StateEvents(
        name, epoch, sequence, tuple(keys[:num_inserted]), tuple(keys[num_inserted:]),
        is_snapshot=bool(flags & _IS_SNAPSHOT),
    )  # fmt: skip
    _check(events)
    return events


def _check(events: StateEvents) -> None:
    """Raise a ValueError for events that no replica tells."""
    if not events.replica:
        raise ValueError("events.replica is ''; accepted: a name")
    if events.is_snapshot and events.removed:
        raise ValueError(f"events.removed has {len(events.removed)} hashes; accepted: none in a snapshot")
    keys = events.inserted + events.removed
    if not keys:
        return
    for key in (min(keys), max(keys)):
        if not 0 < key <= INT64_MAX:
            raise ValueError(f"a hash is {shown(key)}; accepted: an integer from 1 to 2**63 - 1")
    if len(set(keys)) < len(keys):
        raise ValueError("a hash is named twice; accepted: distinct hashes")


def _refused(found: str, accepted: str) -> ValueError:
    return ValueError(f"data {found}; accepted: {accepted}")
