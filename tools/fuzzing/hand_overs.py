"""Hand-overs with a peer that says anything at any point,
to the side that receives and to the side that sends.

The peer's frames are those of a real hand-over, damaged. They come through memory in place of gloo, because
gloo ends the process where a peer sends more bytes than are expected. A peer that says nothing more is lost.
"""

import hashlib
import json
import logging
import queue
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fuzzing.engines import OWN, SENT, WarmEngine
from fuzzing.target import ACCEPTED, HUGE, REFUSED, any_json, damaged_bytes, damaged_json
from mambaslots.net.transfer import exchange
from mambaslots.net.transfer.cache_access import CacheAccess
from mambaslots.net.transfer.exchange import Exchange
from mambaslots.net.transfer.link import PairLink
from mambaslots.net.transfer.rendezvous import Rendezvous, Side
from torch.distributed import HashStore

Frame = tuple[int, bytes]
"""The tag of gloo, and the bytes."""
_MESSAGES, _PIECES = 0, 1
_SEAL = 32
_NAME = "fuzz"


class MemoryLink(PairLink):
    """A link whose other end is a queue for each tag; `said` is what went through this end."""

    def __init__(self, ends: bool = True) -> None:
        """`ends`: whether the peer is lost where its queue is empty; else it may still say something."""
        self.said: list[Frame] = []
        self.inbox: dict[int, queue.SimpleQueue[bytes]] = {tag: queue.SimpleQueue() for tag in (0, 1)}
        self.other: MemoryLink | None = None
        self._ends = ends

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        self.said.append((tag, data))
        if self.other is not None:
            self.other.inbox[tag].put(data)

    def _receive(self, tensor: torch.Tensor, tag: int) -> torch.Tensor:
        try:
            data = self.inbox[tag].get(timeout=None if not self._ends else 0)
        except queue.Empty:
            raise RuntimeError("the connection is closed by the peer") from None
        if len(data) > tensor.nbytes:
            raise RuntimeError("more bytes than expected; here gloo ends the process")
        whole = tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
        whole[: len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
        return tensor

    def close(self) -> None:
        self.other = None


@dataclass(frozen=True)
class Said:
    """All that a peer says: its hello in the store, and its frames."""

    kind: str
    hello: bytes
    frames: tuple[Frame, ...]
    timeout_s: float = 5.0


def recorded(source: WarmEngine, target: WarmEngine) -> dict[Side, Said]:
    """What each side says in a hand-over between two engines."""
    links: dict[Side, MemoryLink] = {"source": MemoryLink(ends=False), "destination": MemoryLink(ends=False)}
    links["source"].other, links["destination"].other = links["destination"], links["source"]
    store = HashStore()
    sides: dict[Side, WarmEngine] = {"source": source, "destination": target}
    exchanges: dict[Side, Exchange] = {side: Exchange(store, _NAME, side, "gloo") for side in sides}
    with patch.object(Rendezvous, "link", lambda self, *_: links[self._side]), _no_turns():
        with ThreadPoolExecutor(2) as threads:
            access = {side: CacheAccess.of(warm.engine, "fuzz") for side, warm in sides.items()}
            sent = threads.submit(exchanges["source"].send, access["source"], None, "all", 20.0)
            received = threads.submit(exchanges["destination"].receive, access["destination"], 20.0)
            assert (sent.result().failure, received.result().failure) == ("", "")
        assert received.result().imported.states > 0
        hellos = {side: bytes(store.get(f"mambaslots/handover/{_NAME}/{side}/0")) for side in sides}
        said = {side: Said("good", hellos[side], tuple(links[side].said)) for side in sides}
        for each in exchanges.values():
            each.close()
    return said


def _no_turns() -> Any:
    return patch.object(Rendezvous, "await_turn", lambda self, peers: None)


class HandOver:
    """One side of a hand-over, whose peer says what is drawn."""

    documented: tuple[type[BaseException], ...] = ()

    def __init__(self, side: Side) -> None:
        self._unforeseen = _Unforeseen()
        self._logger = logging.Logger("fuzz")
        self._logger.addHandler(self._unforeseen)
        self.name = "hand-overs received" if side == "destination" else "hand-overs sent"
        self._side = side
        source, target = WarmEngine(SENT), WarmEngine(OWN)
        self._warm = target if side == "destination" else source
        peer: Side = "source" if side == "destination" else "destination"
        self._peer = peer
        self._good = recorded(source, target)[peer]
        self._warm.renew()

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Said)
        return len(drawn.hello) + sum(len(data) for _, data in drawn.frames)

    def draw(self, random: Random) -> Said:
        if random.random() < 0.05:
            return self._good
        kind = random.choice(["hello", "order", "frames", "message", "message", "message", "refusal"])
        return getattr(self, f"_with_{kind}")(random)  # type: ignore[no-any-return]

    def _with_hello(self, random: Random) -> Said:
        hello = self._good.hello
        if random.random() < 0.3:
            hello = damaged_bytes(random, hello)
        else:
            hello = json.dumps(damaged_json(random, json.loads(hello))).encode()
        return Said("hello", hello, self._good.frames, timeout_s=0.05)

    def _with_order(self, random: Random) -> Said:
        frames = list(self._good.frames)
        for _ in range(random.choice((1, 2))):
            at, way = random.randrange(len(frames)), random.randrange(4)
            if way == 0:
                del frames[at:]
            elif way == 1:
                del frames[at]
            elif way == 2:
                frames.insert(random.randrange(len(frames)), frames[at])
            else:
                frames[at] = 1 - frames[at][0], frames[at][1]
            if not frames:
                break
        return Said("order", self._good.hello, tuple(frames))

    def _with_frames(self, random: Random) -> Said:
        """Bytes as they are, and lengths that are announced."""
        frames = list(self._good.frames)
        at = random.randrange(len(frames))
        tag, data = frames[at]
        if random.random() < 0.5:
            number = random.choice(
                [*(n for n in HUGE if n < 2**63), -1, 0, 1, 4088, 4089, len(data) + 1, -(2**63)]
            )
            data = struct.pack("<q", number) + data[8:]
        else:
            data = damaged_bytes(random, data)[: len(data)]
        frames[at] = tag, data
        return Said("frames", self._good.hello, tuple(frames))

    def _with_refusal(self, random: Random) -> Said:
        messages = _messages(self._good.frames)
        at = random.randrange(len(messages))
        messages[at] = _sealed(json.dumps({"failure": any_json(random)}).encode())
        return Said("refusal", self._good.hello, _frames(messages, self._good.frames))

    def _with_message(self, random: Random) -> Said:
        """Messages whose content is damaged under a checksum that holds."""
        messages = _messages(self._good.frames)
        at = random.randrange(len(messages))
        content = messages[at][_SEAL:]
        if self._side == "destination" and at == 0:
            content = _damaged_offer(random, content)
        elif random.random() < 0.3:
            content = damaged_bytes(random, content)
        else:
            content = json.dumps(damaged_json(random, json.loads(content))).encode("utf-8", "surrogatepass")
        messages[at] = _sealed(content)
        return Said("message", self._good.hello, _frames(messages, self._good.frames))

    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Said)
        failure = self._exchanged(drawn)
        if "allocate memory" in failure or "MemoryError" in failure:
            raise MemoryError(failure)
        warm = self._warm
        if failure or self._side == "source":
            assert not (failure and drawn.kind == "good"), failure
            warm.check_unchanged()
            return REFUSED if failure else ACCEPTED
        try:
            if drawn.kind == "frames":
                assert _pieces(drawn) == _pieces(self._good), "altered pieces were accepted"
            warm.check_sane()
            if drawn.kind == "good":
                warm.check_answers(SENT[:1])
        finally:
            warm.renew()
        return ACCEPTED

    def _exchanged(self, drawn: Said) -> str:
        """Why the hand-over failed; "" where it did not."""
        link = MemoryLink()
        for tag, data in drawn.frames:
            link.inbox[tag].put(data)
        store = HashStore()
        store.set(f"mambaslots/handover/{_NAME}/{self._peer}/0", drawn.hello)  # type: ignore[arg-type]
        own = Exchange(store, _NAME, self._side, "gloo")
        access = CacheAccess.of(self._warm.engine, "fuzz")
        with (
            patch.object(Rendezvous, "link", lambda self, *_: link),
            patch.object(exchange, "logger", self._logger),
            _no_turns(),
        ):
            self._unforeseen.error = None
            try:
                if self._side == "destination":
                    failure = own.receive(access, drawn.timeout_s).failure
                else:
                    failure = own.send(access, None, "all", drawn.timeout_s).failure
            finally:
                own.close()
            if self._unforeseen.error is not None:
                raise self._unforeseen.error
            return failure


def _pieces(said: Said) -> list[bytes]:
    return [data for tag, data in said.frames if tag == _PIECES]


class _Unforeseen(logging.Handler):
    """Keeps the error of a hand-over that failed in a way that is not foreseen."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.error = record.exc_info[1]


def _messages(frames: tuple[Frame, ...]) -> list[bytes]:
    """The messages among the frames of a peer."""
    link = MemoryLink()
    for tag, data in frames:
        link.inbox[tag].put(data)
    found = []
    while not link.inbox[_MESSAGES].empty():
        found.append(link.receive())
    return found


def _frames(messages: list[bytes], frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of `messages`, and the pieces among `frames`."""
    link = MemoryLink()
    for message in messages:
        link.send(message)
    return (*link.said, *((tag, data) for tag, data in frames if tag == _PIECES))


def _sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def _damaged_offer(random: Random, content: bytes) -> bytes:
    length, num_nodes = struct.unpack_from("<QQ", content)
    text, rest = content[16 : 16 + length], content[16 + length :]
    way = random.randrange(4)
    if way == 0:
        return damaged_bytes(random, content)
    if way == 1:
        text = json.dumps(damaged_json(random, json.loads(text))).encode("utf-8", "surrogatepass")
        return struct.pack("<QQ", len(text), num_nodes) + text + rest
    if way == 2:
        numbers = [length, num_nodes]
        numbers[random.randrange(2)] = random.choice([0, 1, 2**20, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
        return struct.pack("<QQ", *numbers) + text + rest
    at = 8 * random.randrange(len(rest) // 8)
    number = random.choice([0, 1, -1, -2, -3, 2, 3, 2**31, 2**62, -(2**63)])
    return content[: 16 + length] + rest[:at] + struct.pack("<q", number) + rest[at + 8 :]
