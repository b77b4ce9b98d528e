"""Links and pipes of one rank to its peers, and the thread that works with them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from .cache_access import CacheAccess
from .format import TransferError
from .link import PairLink, RefusedError, values_of
from .nccl_pipe import NcclPipe
from .parts import Shard
from .pipe import GlooPipe, Pipe
from .rendezvous import GRACE_S, OTHER_SIDE, AbsentError, Rendezvous, RenewedError, Side
from .staging import PoolGate, Staging, Wait

_SPIN_S, _POLLS_OF_A_SPIN = 0.01, 8
_PAUSE_S = 2e-4
_leaked: list[Any] = []
"""Staging that a pipe may still write to: it is never used again."""


@dataclass(eq=False)
class Peer:
    """A rank of the other side that this rank sends to or receives from.

    Attributes:
        rank: in its replica.
        side: the other side.
        id: of its hello; a rank that has begun anew has another.
        part: what is sent.
        link: carries messages.
        pipe: carries pieces; None until it is made.
        num_turns: hand-overs that were made over the link.
    """

    rank: int
    side: Side
    id: str
    part: Shard
    link: PairLink
    pipe: Any = None
    num_turns: int = 0

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, errors of a link or pipe become a TransferError that names this peer."""
        try:
            yield
        except RefusedError as error:
            raise TransferError(f"rank {self.rank} of the {self.side}: {error}") from error
        except RuntimeError as error:
            raise TransferError(f"rank {self.rank} of the {self.side} was lost: {error}") from error


class Connection:
    """What connects one rank with its peers, from a beginning to its end.

    Attributes:
        rendezvous: where it was made.
        peers: in the order in which all ranks go through them.
        transport: "nccl" or "gloo".
        gate: what a thread passes to touch the pools.
        staging: what pieces pass through.
        is_made: whether all peers are connected.
    """

    def __init__(self, access: CacheAccess, rendezvous: Rendezvous, side: Side) -> None:
        """Connects nothing yet."""
        self.rendezvous = rendezvous
        self.peers: list[Peer] = []
        self.transport = "gloo"
        self.gate = PoolGate()
        self.device = access.spec.device
        self.staging = Staging(self.device, access.scrubs)
        self._side: Side = side
        self.is_made = False

    def meet(self, for_turn: bool = True) -> None:
        """Connect with all peers, unless that is done, and wait until they are there for this hand-over.

        `for_turn` is False where there is no hand-over now. Where a peer has begun anew, this side does, too.

        Raises:
            TransferError: a peer did not come, is lost, or has another model.
        """
        while True:
            try:
                self._make()
                if for_turn:
                    self.rendezvous.await_turn([(peer.rank, peer.num_turns) for peer in self.peers])
                return
            except RenewedError as error:
                if self.rendezvous.remaining_s() <= 0.001:
                    raise AbsentError(f"{error}; not in {self.rendezvous.timeout_s:g} s") from error
                self.is_made = False

    def _make(self) -> None:
        if self.is_made:
            return
        self.rendezvous.arrive()
        own, other = int(self._side == "destination"), OTHER_SIDE[self._side]
        pairs = [pair for pair in self.rendezvous.pairs() if pair[own] == self.rendezvous.rank]
        known = {(peer.rank, peer.id): peer for peer in self.peers}
        ranks = [(source, destination)[1 - own] for source, destination, _ in pairs]
        ids = [self.rendezvous.id_of(rank) for rank in ranks]
        lost = [peer for key, peer in known.items() if key not in set(zip(ranks, ids, strict=True))]
        self.peers = [peer for peer in self.peers if peer not in lost]
        self._end(lost)
        found = []
        for rank, peer_id, (source, destination, part) in zip(ranks, ids, pairs, strict=True):
            if (rank, peer_id) not in known:
                with _named(rank, other):
                    link = self.rendezvous.link(source, destination)
                self.peers.append(Peer(rank, other, peer_id, part, link))
                self._check_open()
                known[rank, peer_id] = self.peers[-1]
            found.append(known[rank, peer_id])
        self.peers = found
        self.transport = "nccl" if self.rendezvous.has_nccl else "gloo"
        for peer in self.peers:
            if peer.pipe is None:
                with peer.named():
                    peer.pipe = self._pipe(peer.link, own)
                self._check_open()
        self.is_made = True

    def _pipe(self, link: PairLink, own: int) -> Pipe:
        if self.transport == "nccl":
            return NcclPipe(self.device, own, link, self.rendezvous.remaining_s)
        return GlooPipe(link)

    def _check_open(self) -> None:
        """A connection that was closed while a thread makes it is closed again by the thread."""
        if self.gate.closed:
            self._close_all()
            raise TransferError("the hand-over was given up")

    def end_turn(self) -> None:
        """The hand-over has been made; the next one is another turn."""
        for peer in self.peers:
            peer.num_turns += 1

    def waiter(self, inbox: "Future[bytes]", keys: set[str]) -> Wait:
        """What waits for a condition as long as the peer and the clock let it.

        Args:
            inbox: the next message of the peer; the wait ends if it is not of these keys.
            keys: see `values_of`.
        """

        is_read = False

        def wait_for(condition: Callable[[], bool]) -> None:
            nonlocal is_read
            began, num_polls = time.monotonic(), 0
            while not condition():
                if self.gate.closed:
                    raise TransferError("the hand-over was given up")
                if not is_read and inbox.done():
                    values_of(inbox.result(), keys)
                    is_read = True
                now = time.monotonic()
                if self.rendezvous.remaining_s() <= 0.001:
                    raise RuntimeError(f"no piece came or went within {self.rendezvous.timeout_s:g} s")
                num_polls += 1
                if now - began > _SPIN_S:
                    time.sleep(_PAUSE_S)
                elif num_polls % _POLLS_OF_A_SPIN == 0:
                    time.sleep(1e-6)  # a thread that waits for the interpreter's lock gets it only in a sleep

        return wait_for

    def in_time[T](self, work: Callable[[], T]) -> T:
        """Do `work` in a thread of its own; return or raise what `work` does.

        The call ends at most `GRACE_S` after the deadline. A thread that is not done by then is left behind,
        touches no pool, and ends when the store and the peer let it. The thread is needed because a store
        that stops answering does not keep to its timeout, and connecting with gloo does not either.

        Raises:
            TransferError: `work` is not done in time.
        """
        outcome: Future[T] = Future()
        self.staging.follow_engine()

        def target() -> None:
            try:
                with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                    result = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        Thread(target=target, name=f"hand-over, {self._side}", daemon=True).start()
        try:
            wait([outcome], self.rendezvous.remaining_s() + GRACE_S)
        finally:
            if not outcome.done():
                self.gate.close()
            self.staging.lead_engine()
        if not outcome.done():
            gave_up = f"gave up after {self.rendezvous.timeout_s:g} s"
            raise TransferError(f"the store or a peer stopped answering; {gave_up}")
        return outcome.result()

    def close(self, reason: str = "") -> Thread:
        """End the connection, in a thread, which is returned; no thread touches a pool any more.

        Args:
            reason: why the hand-over failed, for peers that wait for a message.
        """
        self.gate.close()
        end = Thread(target=self._close_all, args=[reason], name="hand-over, end", daemon=True)
        end.start()
        return end

    def _close_all(self, reason: str = "") -> None:
        peers, self.peers = self.peers, []
        self.is_made = False
        self._end(peers, reason)
        self.rendezvous.forget_links()

    def _end(self, peers: list[Peer], reason: str = "") -> None:
        """End links and pipes."""
        aborts = Thread(target=self._end_pipes, args=[peers], name="hand-over, abort", daemon=True)
        aborts.start()  # first: a message to a frozen peer may take its time
        for peer in peers if reason else ():
            with suppress(Exception):
                peer.link.send_values({"failure": reason})
        for peer in peers:
            with suppress(Exception):
                peer.link.close()
        aborts.join()

    def _end_pipes(self, peers: list[Peer]) -> None:
        """End pipes, and zero what a hand-over that failed has left in the staging."""
        is_leaked = False
        for pipe in [peer.pipe for peer in peers if peer.pipe is not None]:
            is_idle = False
            with suppress(Exception):
                is_idle = pipe.close()
            if not is_idle:
                is_leaked = True
                _leaked.append(self.staging)
        if not is_leaked:
            self.staging.scrub()


def _named(rank: int, side: Side) -> Any:
    return Peer(rank, side, "", {}, None).named()  # type: ignore[arg-type]
