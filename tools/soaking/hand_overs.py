"""Hand-overs between two replicas of one process: good ones, and ones with a peer that fails or lies."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import mambaslots.net as msd
import torch.distributed as dist
from mambaslots.net.transfer import pieces
from mambaslots.net.transfer.link import PairLink
from mambaslots.net.transfer.offer import Offer
from mambaslots.net.transfer.pipe import GlooPipe
from mambaslots.serve.served_engine import LocalEngine

FAULTS = (
    "late", "absent", "torn", "order", "cut piece", "slow", "checksums", "blocks", "states", "garbage",
    "huge", "offer",
)  # fmt: skip
PIECE_BYTES = 1 << 13
"""Small, so that a hand-over has several pieces."""
_PATIENCE_S = 10.0
_SHORT_S = 1.0


class Places:
    """The store where replicas meet, and the channels between them, which live on.

    Attributes:
        failures: of the last hand-over: what the source says, and what the destination says.
    """

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        """`engines`: the replicas, which may be replaced; each call looks."""
        self.failures = "", ""
        self._engines = engines
        self._host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_MINUTE)
        self._names = count()
        self._channels: dict[tuple[int, int], tuple[msd.TransferChannel, msd.TransferChannel]] = {}

    async def hand_over(
        self, source: int, target: int, prefixes: Any, fault: str, random: Random
    ) -> msd.ImportReport | None:
        """Hand prefixes from one replica to another.

        Args:
            source, target: numbers of replicas.
            prefixes: as in `TransferChannel.send`.
            fault: one of `FAULTS`, or "" for none.
            random: draws what lies say.

        Returns:
            What the target imported; None where only one side came.
        """
        sending, receiving = await self._ends(source, target)
        timeout_s = _SHORT_S if fault else _PATIENCE_S
        late_s = _SHORT_S / 2 if fault == "late" else 0.0
        sent = self._engines[source].engine.call(lambda _: sending.send(prefixes, timeout_s=timeout_s))

        def receive(_: ms.DynamicInferenceEngine) -> msd.ImportReport:
            time.sleep(late_s)
            return receiving.receive(timeout_s=timeout_s)

        received = self._engines[target].engine.call(receive)
        if fault == "absent":
            one = random.choice([sent, received])
            (received if one is sent else sent).close()
            report = await one
            assert report.failure, "a hand-over without a peer succeeded"
            self.failures = report.failure, report.failure
            return None
        with lying(fault, random):
            both = await asyncio.gather(sent, received)
        self.failures = both[0].failure, both[1].failure
        return both[1]

    async def _ends(self, source: int, target: int) -> tuple[msd.TransferChannel, msd.TransferChannel]:
        if (source, target) not in self._channels:
            name = f"channel {next(self._names)}"

            def end(side: Any) -> Callable[[ms.DynamicInferenceEngine], msd.TransferChannel]:
                store = dist.TCPStore("127.0.0.1", self._host.port, is_master=False, timeout=_MINUTE)
                return lambda engine: msd.TransferChannel(engine, store, name, side)

            made = (
                await self._engines[source].engine.call(end("source")),
                await self._engines[target].engine.call(end("destination")),
            )
            self._channels[source, target] = made
        return self._channels[source, target]

    def forget(self, replica: int) -> None:
        """End the channels of a replica that is gone."""
        for pair in [pair for pair in self._channels if replica in pair]:
            for end in self._channels.pop(pair):
                end.close()

    def close(self) -> list[str]:
        """End all channels. Returns what is left in the store."""
        for replica in range(len(self._engines)):
            self.forget(replica)
        return [key for key in self._host.list_keys() if "handover" in key]


@contextmanager
def small_pieces() -> Iterator[None]:
    """Hand-overs within it have several pieces."""
    with patch.object(pieces, "PIECE_BYTES", PIECE_BYTES):
        yield


@contextmanager
def lying(fault: str, random: Random) -> Iterator[None]:
    """Hand-overs within it have a peer that sends or says something wrong; "" and other faults lie not."""
    send, values = GlooPipe.send, PairLink.send_values

    def wrong_piece(self: GlooPipe, piece: Any, packed: Any) -> Any:
        sent = piece.clone()
        if fault == "torn":
            sent[random.randrange(len(sent))] ^= 1 << random.randrange(8)
        elif fault == "order":
            sent[8:] = piece[:-8]
            sent[0] ^= 1
        elif fault == "cut piece":
            sent = sent[: len(sent) // 2]
        elif fault == "slow":
            time.sleep(_SHORT_S / 3)
        return send(self, sent, packed)

    def wrong_values(self: PairLink, told: dict[str, Any]) -> None:
        lies: dict[str, Callable[[Any], Any]] = {
            "checksums": lambda sums: [value ^ 1 for value in sums],
            "blocks": lambda nodes: [*nodes, 1 << 40],
            "states": lambda nodes: nodes * 1000 or [7],
        }
        if fault == "garbage":
            self.send(os.urandom(500))
        elif fault == "huge":
            self.send(json.dumps({"blocks": [2**70], "states": [-(10**30)], "checksums": [None]}).encode())
        else:
            values(self, {key: lies[fault](value) if key == fault else value for key, value in told.items()})

    patches: dict[str, Any] = {
        **dict.fromkeys(("torn", "order", "cut piece", "slow"), (GlooPipe, "send", wrong_piece)),
        **dict.fromkeys(
            ("checksums", "blocks", "states", "garbage", "huge"), (PairLink, "send_values", wrong_values)
        ),
        "offer": (Offer, "to_bytes", lambda self: random.randbytes(random.randrange(1, 5000))),
    }
    if fault not in patches:
        yield
        return
    with patch.object(*patches[fault]):
        yield


_MINUTE = timedelta(seconds=60)
