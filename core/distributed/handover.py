"""Prefixes from one running replica to another, over a store that outlives both."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard
from .handover_meeting import Meeting
from .prefix_codec import decode_prefixes, encode_prefixes
from .prefix_export import PrefixName, export_prefixes
from .prefix_failures import described
from .prefix_format import TransferError
from .prefix_import import CopyError, ImportReport, Obtained, import_obtained
from .prefix_shard import PrefixShard, join

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendReport:
    """What this rank sent: `bytes`, to `receivers` ranks, of `prefixes` (longest ones) with so many states.

    `failure`: why it did not all arrive, or empty.
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
    """Hand prefixes of this replica's cache, all or those named, to the replica that receives `name`.

    Called by every rank of the source, between steps, while every rank of the destination calls
    `receive_prefixes`. `store`: a client of a store that both replicas reach, for instance a TCPStore of a
    process that outlives them. `name`: of this one hand-over; no other may have used it. What goes wrong on
    the way (a peer that does not come, or dies; another model) is logged and reported, and raises nothing.

    `timeout_s` is for meeting and for sending: this returns at most about a second later, also where the
    store stops answering. The clock starts once the export is made, which takes as long as `export_prefixes`
    does. A thread of its own does the work; where a store does not answer it outlasts the call, and keeps
    this client of it until the store does. No clone of it, because a new connection may wait for a name
    server.

    ValueError and RuntimeError as in `export_prefixes`; ValueError also for a `timeout_s` that the replica's
    own process groups do not outlast, as far as their backends tell (gloo and nccl do): ranks that are done
    wait there for the last one.
    """
    export = export_prefixes(engine, prefixes)
    meeting = Meeting(engine, store, name, "source", timeout_s)
    try:
        return meeting.attend(lambda: _send(meeting, export))
    except Exception as error:
        logger.warning("mambaslots: hand-over %r was not sent: %s", name, error, exc_info=_unforeseen(error))
        return SendReport(failure=described(error))


def _send(meeting: Meeting, export: PrefixShard) -> SendReport:
    receivers = size = 0
    for source, destination, part in meeting.pairs():
        if source == meeting.rank:
            data = encode_prefixes(export.cut(part))
            with meeting.link(source, destination) as link:
                link.send(data)
            receivers += 1
            size += len(data)
    forest = export.forest
    return SendReport(len(forest.leaves), len(forest.states), receivers, size)


def receive_prefixes(
    engine: DynamicInferenceEngine, store: Store, name: str, *, timeout_s: float = 60.0
) -> ImportReport:
    """Import the prefixes that the replica which sends `name` has in its cache, at whatever split it is.

    Called by every rank of the destination, between steps; the arguments are those of `send_prefixes`. Where
    one rank does not get its part, in time and whole, or cannot copy it, nothing is imported on any: that is
    a miss, which all ranks have agreed on, logged and reported as `failure`, and the engines serve on.

    `timeout_s` is for meeting and for receiving, as in `send_prefixes`. Then the ranks of this replica check
    and tell each other what they have, and again once they have copied it: a rank waits there for the slowest
    one, at most as long as the replica's own groups let it.

    ValueError and RuntimeError for what `import_prefixes` refuses of the engine; ValueError, on all ranks,
    for an argument that is wrong on one, and for a `timeout_s` as in `send_prefixes`. What fails within this
    replica, such as a rank of it that is lost, is no miss: it raises, because ranks may then differ.
    """

    def prepare() -> Callable[[], Obtained]:
        meeting = Meeting(engine, store, name, "destination", timeout_s)

        def obtain() -> Obtained:
            pieces = []
            received = meeting.attend(lambda: _receive(meeting))
            while received:
                part, data = received.pop(0)
                piece = decode_prefixes(data)
                if piece.shard != part:
                    raise TransferError(f"shard is {piece.shard}; accepted: {part}, as was agreed")
                pieces.append(piece)
            return Obtained(join(pieces, meeting.shard))

        return obtain

    try:
        return import_obtained(engine, "receive_prefixes", prepare)
    except (TransferError, CopyError) as error:
        shown = _unforeseen(error.__cause__ or error)
        logger.warning("mambaslots: hand-over %r was not received: %s", name, error, exc_info=shown)
        return ImportReport(failure=described(error))


def _receive(meeting: Meeting) -> list[tuple[ModelShard, bytes]]:
    """Parts, as agreed, and their bytes; they are read later, out of the thread that has to end in time."""
    received = []
    for source, destination, part in meeting.pairs():
        if destination == meeting.rank:
            with meeting.link(source, destination) as link:
                received.append((part, link.receive()))
    return received


def _unforeseen(error: BaseException) -> bool:
    return not isinstance(error, TransferError)
