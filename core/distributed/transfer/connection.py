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

_leaked: list[Any] = []
"""Staging that a pipe may still write to: it is never used again."""


@dataclass(frozen=True, eq=False)
class Peer:
    """A rank of the other side that this rank sends to or receives from.

    Attributes:
        rank: in its replica.
        side: the other side.
        part: what is sent.
        link: carries messages.
        pipe: carries pieces.
    """

    rank: int
    side: Side
    part: Shard
    link: PairLink
    pipe: Pipe

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
        self.staging = Staging(self.device)
        self._side: Side = side
        self._links: list[PairLink] = []
        self._pipes: list[Pipe] = []
        self.is_made = False

    def meet(self) -> None:
        """Connect with all peers, unless that is done, and wait until they are there for this hand-over.

        Where a peer has begun anew, this side does, too.

        Raises:
            TransferError: a peer did not come, is lost, or has another model.
        """
        while True:
            try:
                self.make()
                self.rendezvous.await_turn([peer.rank for peer in self.peers])
                return
            except RenewedError as error:
                self._close_all()
                self.rendezvous.renew()
                if self.rendezvous.remaining_s() <= 0.001:
                    raise AbsentError(f"{error}; not in {self.rendezvous.timeout_s:g} s") from error

    def make(self) -> None:
        """Connect with all peers, unless that is done; blocks until they are there.

        Raises:
            RenewedError: a peer has begun anew.
            TransferError: a peer did not come, is lost, or has another model.
        """
        if self.is_made:
            return
        self.rendezvous.arrive()
        pairs = self.rendezvous.pairs()
        own = 0 if self._side == "source" else 1
        mine = [(pair[1 - own], pair) for pair in pairs if pair[own] == self.rendezvous.rank]
        has_nccl = self.rendezvous.has_nccl
        other = OTHER_SIDE[self._side]
        for rank, (source, destination, _) in mine:
            with _named(rank, other):
                self._links.append(self.rendezvous.link(source, destination))
            self._check_open()
        for (rank, (_, _, part)), link in zip(mine, self._links, strict=True):
            with _named(rank, other):
                self._pipes.append(self._pipe(link, own, has_nccl))
            self._check_open()
            self.peers.append(Peer(rank, other, part, link, self._pipes[-1]))
        self.transport = "nccl" if has_nccl else "gloo"
        self.is_made = True

    def _pipe(self, link: PairLink, own: int, has_nccl: bool) -> Pipe:
        if has_nccl:
            return NcclPipe(self.device, own, link, self.rendezvous.remaining_s)
        return GlooPipe(link)

    def _check_open(self) -> None:
        """A connection that was closed while a thread makes it is closed again by the thread."""
        if self.gate.closed:
            self._close_all()
            raise TransferError("the hand-over was given up")

    def waiter(self, inbox: "Future[bytes]", keys: set[str]) -> Wait:
        """What waits for a condition as long as the peer and the clock let it.

        Args:
            inbox: the next message of the peer; the wait ends if it is not of these keys.
            keys: see `values_of`.
        """

        def wait_for(condition: Callable[[], bool]) -> None:
            began = time.monotonic()
            while not condition():
                if self.gate.closed:
                    raise TransferError("the hand-over was given up")
                if inbox.done():
                    values_of(inbox.result(), keys)
                now = time.monotonic()
                if self.rendezvous.remaining_s() <= 0.001:
                    raise RuntimeError(f"no piece came or went within {self.rendezvous.timeout_s:g} s")
                time.sleep(0 if now - began < 0.01 else 1e-4)

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
        pipes, self._pipes = self._pipes, []
        links, self._links = self._links, []
        self.is_made = False
        aborts = Thread(target=self._close_pipes, args=[pipes], name="hand-over, abort", daemon=True)
        aborts.start()  # first: a message to a frozen peer may take its time
        for peer in peers if reason else ():
            with suppress(Exception):
                peer.link.send_values({"failure": reason})
        for link in links:
            with suppress(Exception):
                link.close()
        self.rendezvous.forget_links()
        aborts.join()

    def _close_pipes(self, pipes: list[Pipe]) -> None:
        for pipe in pipes:
            is_idle = False
            with suppress(Exception):
                is_idle = pipe.close()
            if not is_idle:
                _leaked.append(self.staging)


def _named(rank: int, side: Side) -> Any:
    return Peer(rank, side, {}, None, None).named()  # type: ignore[arg-type]
