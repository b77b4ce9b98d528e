"""Hand-overs of one rank under one name: the messages between a source and a destination.

For each pair of ranks, in this order:

    source -> destination   the offer: prefixes that the source has
    destination -> source   the blocks and states that the destination lacks and has room for
    source -> destination   the pieces, over a pipe; both sides compute which these are
    source -> destination   the checksum of each piece
    destination -> source   that all pieces have arrived whole

Either side may end this with the reason of a failure.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Thread

from torch.distributed import Store  # type: ignore[attr-defined]

from ..all_ranks import described
from .cache_access import CacheAccess
from .connection import Connection, Peer
from .export import PrefixName
from .forest import PrefixForest
from .format import PrefixFormat, TransferError
from .import_ import CopyError, import_filled
from .link import check_not_refused, values_of
from .nccl_pipe import nccl_facts
from .offer import Offer, decode_offers
from .pieces import PartCopies, PieceLayout
from .placement import ImportReport, Placement
from .rendezvous import GRACE_S, AbsentError, Rendezvous, Side
from .staging import receive_pieces, send_pieces

logger = logging.getLogger(__name__)
_ANSWER, _SUMS, _VERDICT = {"blocks", "states"}, {"checksums"}, {"arrived"}


@dataclass(frozen=True)
class SendReport:
    """What this rank sent.

    Attributes:
        prefixes: prefixes that were offered and that no other one of them continues.
        states: states that were offered.
        receivers: ranks that this rank sent something to.
        bytes: bytes of KV and states that this rank sent, to all receivers together.
        seconds: from the first piece that was packed to the word that all have arrived, of all receivers
            together.
        failure: why not everything arrived; empty where everything did.
    """

    prefixes: int = 0
    states: int = 0
    receivers: int = 0
    bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    failure: str = ""


class Exchange:
    """One rank's hand-overs under one name; what a peer does ends as a failure that is reported.

    Attributes:
        connection: what connects this rank with its peers; None before the first hand-over, and after one
            that failed.
    """

    def __init__(self, store: Store, name: str, side: Side, transport: str | None) -> None:
        """Checks nothing: each hand-over does."""
        self._store, self._name, self._side, self._transport = store, name, side, transport
        self.connection: Connection | None = None
        self._rendezvous: Rendezvous | None = None
        self._refused: set[str] = set()  # ids of hellos
        self._ends: list[Thread] = []

    def begin(self, access: CacheAccess, timeout_s: float) -> Connection:
        """Start the clock of a hand-over; ValueError for bad arguments.

        What connected the two sides is used on, unless this engine's cache has got another format.
        """
        connection = self.connection
        if connection is not None:
            connection.rendezvous.start_clock(access.parallel, timeout_s)
            if connection.rendezvous.form == PrefixFormat.of(access):
                return connection
            self.drop()
        facts = None if self._transport == "gloo" else nccl_facts(access.spec.device)
        self._ends = [end for end in self._ends if end.is_alive()]
        rendezvous = Rendezvous(access, self._store, self._name, self._side, timeout_s, facts, self._refused)
        self._rendezvous = rendezvous
        self.connection = Connection(access, rendezvous, self._side)
        return self.connection

    def send(
        self, access: CacheAccess, prefixes: Iterable[PrefixName] | None, states: str, timeout_s: float
    ) -> SendReport:
        """As `TransferChannel.send`."""
        offer = Offer.of(access, prefixes, states)
        connection = self.begin(access, timeout_s)
        try:
            return connection.in_time(lambda: self._send(connection, access, offer))
        except Exception as error:
            self._lost("sent", error, error)
            return SendReport(failure=described(error))

    def receive(self, access: CacheAccess, timeout_s: float) -> ImportReport:
        """As `TransferChannel.receive`."""

        def prepare() -> Callable[[], tuple[PrefixFormat, PrefixForest, str]]:
            connection = self.begin(access, timeout_s)
            return lambda: connection.in_time(lambda: self._offers(connection, access))

        def fill(placement: Placement) -> None:
            connection = self.connection
            assert connection is not None
            connection.in_time(lambda: self._fill(connection, access, placement))

        try:
            return import_filled(access, prepare, fill)
        except (TransferError, CopyError) as error:
            self._lost("received", error, error.__cause__ or error)
            return ImportReport(failure=described(error))
        except BaseException as error:
            self.drop(described(error))
            raise

    def drop(self, reason: str = "") -> None:
        """End what connects the two sides; the next hand-over connects them anew."""
        if self.connection is not None:
            ids = self.connection.rendezvous.known_ids
            if not ids <= self._refused:  # who said these begins anew, too, and perhaps later
                self._refused.clear()
                self._refused.update(ids)
            self._ends.append(self.connection.close(reason))
            self.connection = None

    def close(self) -> None:
        """Leave the rendezvous, within `GRACE_S`; the name is of no use any more."""
        rendezvous, self._rendezvous = self._rendezvous, None
        self.drop()

        def target() -> None:
            for end in self._ends:
                end.join()
            if rendezvous is not None:
                rendezvous.leave()

        leave = Thread(target=target, name=f"hand-over, {self._side}, leave", daemon=True)
        leave.start()
        leave.join(GRACE_S)

    def _lost(self, what: str, error: Exception, cause: BaseException) -> None:
        unforeseen = cause if not isinstance(cause, TransferError) else None
        logger.warning(
            "mambaslots: hand-over %r was not %s: %s", self._name, what, error, exc_info=unforeseen
        )
        connection = self.connection
        if not isinstance(cause, AbsentError) or connection is None or not connection.is_made:
            self.drop(described(error))

    def _send(self, connection: Connection, access: CacheAccess, offer: Offer) -> SendReport:
        connection.meet()
        message = offer.to_bytes()
        for peer in connection.peers:
            with peer.named():
                peer.link.send(message)
        num_bytes, seconds = 0, 0.0
        for peer in connection.peers:
            with peer.named():
                copies = PartCopies(access, peer.part)
                answer = values_of(peer.link.receive(), _ANSWER)
                begin = time.perf_counter()
                num_bytes += self._send_part(connection, peer, copies, *offer.rows_of(answer))
                seconds += time.perf_counter() - begin
        connection.end_turn()
        forest = offer.forest
        return SendReport(len(forest.leaves), len(forest.states), len(connection.peers), num_bytes, seconds)

    def _send_part(
        self, connection: Connection, peer: Peer, copies: PartCopies, blocks: list[int], slots: list[int]
    ) -> int:
        layout = PieceLayout(connection.rendezvous.form, peer.part, len(blocks), len(slots))
        with connection.staging.on_stream():
            copies.locate(blocks, slots)
        verdict = peer.link.receive_later()
        wait = connection.waiter(verdict, _VERDICT)
        try:
            sums, under_way = send_pieces(
                peer.pipe, layout, copies, connection.staging, connection.gate, wait
            )
            peer.link.send_values({"checksums": sums})
            for passage in under_way:
                wait(passage.is_done)
            connection.staging.scrub()
        except RuntimeError:
            if verdict.done() and verdict.exception() is None:  # the peer has said why
                values_of(verdict.result(), _VERDICT)
            raise
        values_of(verdict.result(), _VERDICT)
        return layout.num_bytes

    def _offers(self, connection: Connection, access: CacheAccess) -> tuple[PrefixFormat, PrefixForest, str]:
        connection.meet()
        messages = []
        for peer in connection.peers:
            with peer.named():
                messages.append(peer.link.receive())
                check_not_refused(messages[-1])
        form, forest = decode_offers(access, messages)
        return form, forest, ""

    def _fill(self, connection: Connection, access: CacheAccess, placement: Placement) -> None:
        blocks, slots = placement.new_blocks, placement.new_slots
        form = connection.rendezvous.form
        for peer in connection.peers:
            with peer.named():
                peer.link.send_values({"blocks": list(blocks), "states": list(slots)})
        inboxes = [peer.link.receive_later() for peer in connection.peers]
        copies = [PartCopies(access, peer.part) for peer in connection.peers]
        with connection.staging.on_stream():
            for copy in copies:
                copy.locate(list(blocks.values()), list(slots.values()))
        for peer, copy, inbox in zip(connection.peers, copies, inboxes, strict=True):
            layout = PieceLayout(form, peer.part, len(blocks), len(slots))
            with peer.named():
                wait = connection.waiter(inbox, _SUMS)
                sums = receive_pieces(peer.pipe, layout, copy, connection.staging, connection.gate, wait)
                connection.staging.scrub()
                told = values_of(inbox.result(), _SUMS)
                if told["checksums"] != sums:
                    raise TransferError(
                        f"pieces from rank {peer.rank} of the source have other checksums than it says: they "
                        "were altered on their way"
                    )
                peer.link.send_values({"arrived": len(sums)})
        connection.end_turn()
