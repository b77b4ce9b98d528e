"""Messages between two ends: who may connect, what is refused, and how an end that is lost is known."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import zmq
from mambaslots.net import message_sockets
from mambaslots.net.message_sockets import Link, Listener, PeerLostError

WAIT_S = 5.0


class Word(msgspec.Struct, tag=True):
    text: bytes


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(message_sockets, "MAX_BYTES", 1 << 20)
    listener = Listener(Word, hosts=("127.0.0.1",))
    yield listener
    listener.close()


@pytest.fixture
def link(listener: Listener) -> Iterator[Link]:
    link = Link(listener.address, Word, WAIT_S)
    yield link
    link.close()


def peer_of(listener: Listener, link: Link) -> bytes:
    link.send(Word(b"hello"))
    received = listener.receive(WAIT_S)
    assert received is not None
    return received[0]


def wait_until_lost(listener: Listener, peer: bytes) -> None:
    """Receive until a peer is lost, which sends no valid message."""
    deadline = time.monotonic() + WAIT_S
    while listener.is_connected(peer):
        assert listener.receive(0.01) is None
        assert time.monotonic() < deadline


def test_messages_of_any_length_arrive_whole_and_in_order(listener: Listener, link: Link) -> None:
    peer = peer_of(listener, link)
    words = [Word(b""), Word(b"x"), Word(bytes(range(256)) * 4_000)]
    for word in words:
        link.send(word, b"payload")
        listener.send(peer, word)
    for word in words:
        received, answered = listener.receive(WAIT_S), link.receive(WAIT_S)
        assert received is not None
        assert answered is not None
        assert received[1] == answered[0] == word
        assert received[2] == b"payload"
    assert listener.receive(0.0) is None
    assert link.receive(0.0) is None


def test_another_key_does_not_connect(listener: Listener) -> None:
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises(PeerLostError, match=r"it cannot be reached at port \d+ \(127.0.0.1: another process"):
        Link(msgspec.structs.replace(listener.address, key=other), Word, 0.3)
    assert listener.receive(0.0) is None


def test_strangers_say_nothing(listener: Listener) -> None:
    with socket.create_connection((listener.address.hosts[0], listener.address.port)) as stranger:
        with suppress(ConnectionError):  # it may be refused before all is sent
            stranger.sendall(bytes(200))
        assert listener.receive(0.3) is None


def test_an_address_without_a_listener(listener: Listener) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen; a listener that was closed may accept a while
        address = msgspec.structs.replace(listener.address, port=silent.getsockname()[1])
        with pytest.raises(PeerLostError, match="it cannot be reached at port"):
            Link(address, Word, 0.5)


def test_all_addresses_are_tried(listener: Listener) -> None:
    address = msgspec.structs.replace(listener.address, hosts=("127.0.0.3", "127.0.0.1"))
    Link(address, Word, WAIT_S).close()


def test_a_listener_that_ends_is_lost_once_its_messages_are_received(listener: Listener, link: Link) -> None:
    listener.send(peer_of(listener, link), Word(b"last"))
    assert link.is_connected()
    listener.close()
    received = link.receive(WAIT_S)
    assert received is not None
    assert received[0] == Word(b"last")
    with pytest.raises(PeerLostError, match="its connection is closed"):
        link.receive(12 * WAIT_S)
    assert not link.is_connected()
    with pytest.raises(PeerLostError):
        link.send(Word(b"more"))


def test_a_link_that_ends_is_lost(listener: Listener, link: Link) -> None:
    peer = peer_of(listener, link)
    assert listener.is_connected(peer)
    link.close()
    wait_until_lost(listener, peer)
    with pytest.raises(PeerLostError, match="its connection is closed"):
        listener.send(peer, Word(b"more"))


def test_messages_are_bounded_in_size(listener: Listener, link: Link) -> None:
    peer = peer_of(listener, link)
    link.send(Word(bytes(2 << 20)))
    with pytest.raises(PeerLostError, match="its connection is closed"):
        link.receive(WAIT_S)
    wait_until_lost(listener, peer)


def test_a_peer_that_reads_nothing_is_lost() -> None:
    listener = Listener(Word, hosts=("127.0.0.1",), max_queued=3)
    link = Link(listener.address, Word, WAIT_S, max_queued=3)
    try:
        peer = peer_of(listener, link)
        with pytest.raises(PeerLostError, match="it does not read what it is sent"):
            any(listener.send(peer, Word(bytes(1 << 20))) for _ in range(1000))
        assert listener.is_connected(peer)
    finally:
        link.close()
        listener.close()


def test_a_peer_that_goes_on_sending_what_is_invalid_delays_no_reader(
    listener: Listener, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [zmq.Frame(peer_of(listener, link)), zmq.Frame(b"\xc1")]
    end = time.monotonic() + WAIT_S

    def received(timeout_s: float) -> list[zmq.Frame]:
        assert time.monotonic() < end
        return frames

    monkeypatch.setattr(listener, "_received", received)
    assert listener.receive(0.1) is None


def test_a_reader_without_time_gets_what_arrived_after_invalid_messages(
    listener: Listener, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peer_of(listener, link)
    for _ in range(3):
        link._socket.send(b"\xc1")
    other = Link(listener.address, Word, WAIT_S)
    other.send(Word(b"valid"))
    arrived = [frames for _ in range(4) if (frames := listener._received(WAIT_S)) is not None]
    arrived.sort(key=lambda frames: frames[0].bytes != peer)
    monkeypatch.setattr(listener, "_received", lambda timeout_s: arrived.pop(0) if arrived else None)
    found = listener.receive(0.0)
    other.close()
    assert found is not None
    assert (found[0] != peer, found[1]) == (True, Word(b"valid"))
    assert not arrived


@pytest.mark.parametrize("sent", [b"\xc1", b"\x81\xa4type\xa4What", b"\x93\x01\x02\x03"])
def test_who_sends_no_message_is_lost(listener: Listener, link: Link, sent: bytes) -> None:
    peer = peer_of(listener, link)
    listener._socket.send_multipart([peer, sent])
    with pytest.raises(PeerLostError, match="it sent an invalid message"):
        link.receive(WAIT_S)
    link._socket.send(sent)
    wait_until_lost(listener, peer)
