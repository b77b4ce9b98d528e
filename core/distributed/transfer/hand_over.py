"""Prefixes from one running replica to another, over a store that outlives both."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ..all_ranks import described
from .cache_access import CacheAccess
from .codec import decode_prefixes, encode_prefixes
from .export import PrefixName, export_from
from .format import TransferError
from .import_ import CopyError, ReceivedShard, import_received
from .parts import Shard
from .placement import ImportReport
from .rendezvous import Rendezvous
from .shard import PrefixShard, join

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendReport:
    """What this rank sent.

    Attributes:
        prefixes: prefixes of the export that no other prefix of it continues.
        states: states of the export.
        receivers: ranks that this rank sent something to.
        bytes: bytes that this rank sent, to all receivers together.
        failure: why not everything arrived; empty where everything did.
    """

    prefixes: int = 0
    states: int = 0
    receivers: int = 0
    bytes: int = 0
    failure: str = ""


def send_prefixes(
    engine: DynamicInferenceEngine,
    store: Store,
    name: str,
    prefixes: Iterable[PrefixName] | None = None,
    *,
    timeout_s: float = 60.0,
) -> SendReport:
    """Hand cached prefixes of this replica to the replica that receives `name`.

    Every rank of the source calls this, between steps, while every rank of the destination calls
    `receive_prefixes`. A hand-over that fails on the way raises nothing: a peer does not come or dies, or has
    another model. The failure is logged as a warning and reported.

    A thread does the work. A store that stops answering does not hold the call up, but the thread: the thread
    then uses `store` until the store answers or closes the connection.

    Args:
        engine: the engine to export from.
        store: a client of a store that both replicas reach and that outlives them, for instance a TCPStore of
            another process. It is not cloned, because a new connection may wait for a name server.
        name: the name of this one hand-over; no other hand-over may have used it.
        prefixes: the prefixes to hand over, as in `export_prefixes`; None for all.
        timeout_s: the time to meet and to send, in seconds. The clock starts once the export is made, which
            takes as long as `export_prefixes`. The call returns at most about a second after the timeout.

    Raises:
        ValueError: a bad argument; or as in `export_prefixes`; or `timeout_s` is not below the timeout of
            this replica's own process groups (those of gloo and nccl are known), in which ranks that are done
            wait for the last rank.
        RuntimeError: as in `export_prefixes`.
    """
    access = CacheAccess.of(engine, "send_prefixes")
    export = export_from(access, prefixes)
    rendezvous = Rendezvous(access, store, name, "source", timeout_s)
    try:
        return rendezvous.run(lambda: _send(rendezvous, export))
    except Exception as error:
        logger.warning("mambaslots: hand-over %r was not sent: %s", name, error, exc_info=_unforeseen(error))
        return SendReport(failure=described(error))


def _send(rendezvous: Rendezvous, export: PrefixShard) -> SendReport:
    num_receivers = num_bytes = 0
    for source, destination, part in rendezvous.pairs():
        if source == rendezvous.rank:
            data = encode_prefixes(export.cut(part))
            with rendezvous.link(source, destination) as link:
                link.send(data)
            num_receivers += 1
            num_bytes += len(data)
    forest = export.forest
    return SendReport(len(forest.leaves), len(forest.states), num_receivers, num_bytes)


def receive_prefixes(
    engine: DynamicInferenceEngine, store: Store, name: str, *, timeout_s: float = 60.0
) -> ImportReport:
    """Import the prefixes that the replica which sends `name` has cached.

    Every rank of the destination calls this, between steps. The source may be split in another way. A
    hand-over that fails is a miss: a rank does not get its part in time and whole, or cannot copy it. Then no
    rank imports anything, the failure is logged as a warning and reported, and the engines serve on.

    Args:
        engine: the engine to import into; its eviction policy must not be "ref_zero".
        store: as in `send_prefixes`.
        name: as in `send_prefixes`.
        timeout_s: the time to meet and to receive, in seconds, as in `send_prefixes`. Afterwards the ranks of
            this replica check their parts and wait for each other, and once more when all have copied. These
            waits end with the timeout of the replica's own process groups.

    Returns:
        As `import_prefixes`; `failure` says why a hand-over failed.

    Raises:
        ValueError: on every rank, where an argument is wrong on any rank; or as in `import_prefixes` for the
            engine; or `timeout_s` as in `send_prefixes`.
        RuntimeError: as in `import_prefixes` for the engine.

    A failure within this replica, for instance a lost rank, is no miss: it raises, because ranks may then
    differ.
    """
    access = CacheAccess.of(engine, "receive_prefixes")

    def prepare() -> Callable[[], ReceivedShard]:
        rendezvous = Rendezvous(access, store, name, "destination", timeout_s)

        def receive() -> ReceivedShard:
            pieces = []
            parts = rendezvous.run(lambda: _receive(rendezvous))
            while parts:  # each part's bytes are freed once they are decoded
                part, data = parts.pop(0)
                piece = decode_prefixes(data)
                if piece.shard != part:
                    raise TransferError(f"shard is {piece.shard}; accepted: {part}, as was agreed")
                pieces.append(piece)
            return ReceivedShard(join(pieces, rendezvous.shard))

        return receive

    try:
        return import_received(access, prepare)
    except (TransferError, CopyError) as error:
        unforeseen = _unforeseen(error.__cause__ or error)
        logger.warning("mambaslots: hand-over %r was not received: %s", name, error, exc_info=unforeseen)
        return ImportReport(failure=described(error))


def _receive(rendezvous: Rendezvous) -> list[tuple[Shard, bytes]]:
    """The parts for this rank, as agreed, with their bytes.

    Decoding comes later: it takes time, and the thread that runs this has to end at the timeout.
    """
    parts = []
    for source, destination, part in rendezvous.pairs():
        if destination == rendezvous.rank:
            with rendezvous.link(source, destination) as link:
                parts.append((part, link.receive()))
    return parts


def _unforeseen(error: BaseException) -> bool:
    """Whether a log should show the stack of this error."""
    return not isinstance(error, TransferError)
