"""Prefixes from one running replica to another, over a store that outlives both."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from .handover_meeting import Meeting
from .prefix_codec import decode_prefixes, encode_prefixes
from .prefix_export import PrefixName, export_prefixes
from .prefix_format import TransferError
from .prefix_import import ImportReport, checked_importer, import_obtained
from .prefix_replica import described
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
    the way (a peer that does not come, or dies; another model) is logged and reported, and raises nothing;
    it takes at most about `timeout_s`. ValueError and RuntimeError as in `export_prefixes`.
    """
    export = export_prefixes(engine, prefixes)
    meeting = Meeting(engine, store, name, "source", timeout_s)
    try:
        with meeting:
            return _send(meeting, export)
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
    one rank does not get its part, in time and whole, nothing is imported on any: that is a miss, logged and
    reported as `failure`, and the engines serve on. ValueError and RuntimeError for what `import_prefixes`
    refuses of the engine.
    """
    checked_importer(engine, "receive_prefixes")
    meeting = Meeting(engine, store, name, "destination", timeout_s)

    def obtain() -> PrefixShard:
        with meeting:
            pieces = []
            for source, destination, part in meeting.pairs():
                if destination == meeting.rank:
                    with meeting.link(source, destination) as link:
                        piece = decode_prefixes(link.receive())
                    if piece.shard != part:
                        raise TransferError(f"shard is {piece.shard}; accepted: {part}, as was agreed")
                    pieces.append(piece)
            return join(pieces, meeting.shard)

    try:
        return import_obtained(engine, "receive_prefixes", obtain)
    except Exception as error:
        logger.warning(
            "mambaslots: hand-over %r was not received: %s", name, error, exc_info=_unforeseen(error)
        )
        return ImportReport(failure=described(error))


def _unforeseen(error: Exception) -> bool:
    return not isinstance(error, TransferError)
