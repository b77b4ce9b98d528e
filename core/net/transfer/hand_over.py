"""Cached prefixes from one running replica to another."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, instance, one_of, real, refused
from ..all_ranks import described
from ..message_sockets import PeerLostError
from .exports import CacheAccess, PrefixName, chosen_states, forest_of
from .format import Description, TransferError, shard_of
from .imports import CopyError, ReceivedPrefixes, import_received
from .pipe import nccl_facts
from .placement import ImportReport, Placement
from .session import GRACE_S, Destination, OfferedPrefixes, Source

logger = logging.getLogger(__name__)
Side = Literal["source", "destination"]
Transport = Literal["nccl", "messages"]


@dataclass(frozen=True)
class SendReport:
    """What this rank sent.

    Attributes:
        prefixes: prefixes that were offered and that no other one of them continues.
        states: states that were offered.
        receivers: ranks that this rank sent something to.
        bytes: bytes of KV and states that this rank sent, to all receivers together.
        seconds: from the first piece that was packed until all had arrived, of all receivers together.
        failure: why not everything arrived; empty where everything did.
    """

    prefixes: int = 0
    states: int = 0
    receivers: int = 0
    bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    failure: str = ""


class TransferChannel:
    """Hands cached prefixes from a source to a destination, again and again.

    Every rank of both replicas makes one, under one name. The first call connects them, and the connections
    live on: a communicator of NCCL takes hundreds of milliseconds. A hand-over that fails ends them, and the
    next call makes them anew. The channel is a context manager.

    Each call is made between steps. A thread does the work, and the call ends at most about two seconds after
    its timeout, whatever a peer or the store does. Connections are encrypted, and only processes that can
    read the store can make them.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        store: Store,
        name: str,
        side: Side,
        *,
        timeout_s: float = 60.0,
        transport: Transport | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
            engine: of this rank.
            store: a client of a store that both replicas reach and that outlives them, for instance a
                TCPStore of another process. It is not cloned, because a new connection may wait for a name
                server.
            name: of this channel alone, printable; not of a channel that was closed.
            side: "source" or "destination".
            timeout_s: of a call that gives none, in seconds; as in `send`.
            transport: "messages" for host memory also between GPUs; None or "nccl" for NCCL between two ranks
                with a GPU each and nccl4py, and else messages.

        Raises:
            ValueError: a bad argument; or as in `export_prefixes` for the engine.
            RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
        """
        one_of("side", side, ("source", "destination"))
        if transport not in (None, "nccl", "messages"):
            raise refused("transport", transport, "'nccl', 'messages' or None")
        access = CacheAccess(engine, "TransferChannel")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise refused("name", name, "a printable str, of this channel alone")
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._timeout_s = _check_timeout(access.spec.groups, timeout_s)
        access.format()  # what each call will need
        self._engine, self._name, self._side = engine, name, side
        self._nccl = None if transport == "messages" else nccl_facts(access.spec.device)
        self._session: Source | Destination | None = None
        self._is_closed = False
        self._rank = access.rank

    @property
    def transport(self) -> str:
        """ "nccl" or "messages": that of the last hand-over, or before that what this rank would take."""
        used = "" if self._session is None else self._session.transport
        return used or ("nccl" if self._nccl is not None else "messages")

    @property
    def num_bytes(self) -> int:
        """The bytes of KV and states that this rank sent or received in the last hand-over."""
        return 0 if self._session is None else self._session.num_bytes

    def connect(self, *, timeout_s: float | None = None) -> str:
        """Meet the other side, so that the next hand-over need not; why that failed, or an empty text."""
        access = self._new_access("connect", None)
        try:
            session = self._begin(access, timeout_s)
            session.run_until_deadline(session.connect)
        except (TransferError, PeerLostError) as error:
            self._fail("was not connected", error, error)
            return described(error)
        return ""

    def send(
        self, prefixes: Iterable[PrefixName] | None = None, *, timeout_s: float | None = None
    ) -> SendReport:
        """Hand cached prefixes of this replica to the other one, which calls `receive`.

        Only what the receiver lacks and has room for is sent. A hand-over that fails raises nothing: a peer
        does not come, dies, or has another model. The failure is logged as a warning and reported.

        Args:
            prefixes: as in `export_prefixes`; of each, the deepest cached state is sent, from which a request
                resumes. None for all that are cached, with all states.
            timeout_s: the time to meet and to send, in seconds; None for the channel's.

        Raises:
            ValueError: the channel is of the other side; a bad argument; or as in `export_prefixes`; or
                `timeout_s` is not below the timeout of this replica's own process groups (those of gloo and
                nccl are known), in which ranks that are done wait for the last rank.
            RuntimeError: as in `export_prefixes`; or the channel is closed.
        """
        access = self._new_access("send", "source")
        form, state_slots = access.format(), chosen_states(access, prefixes, deepest=True)
        blocks, forest = forest_of(access, list(state_slots))
        offered = OfferedPrefixes(
            Description(form, forest, dict(shard_of(access.spec))),
            dict(enumerate(blocks)),
            dict(zip(forest.states, state_slots.values(), strict=True)),
        )
        session = self._begin(access, timeout_s)
        assert isinstance(session, Source)
        try:
            totals = session.run_until_deadline(lambda: session.send(offered))
        except Exception as error:
            self._fail("was not sent", error, error)
            return SendReport(failure=described(error))
        return SendReport(len(forest.leaves), len(forest.states), *totals)

    def receive(self, *, timeout_s: float | None = None) -> ImportReport:
        """Import what the other side sends.

        Either every rank imports its part, or none does; see `import_prefixes`. A hand-over that fails is a
        miss: a rank does not get its part in time and whole. Then nothing new is found, the failure is logged
        as a warning and reported, and the engines serve on. Hits may be lost: to make room, the cache may
        have evicted the least recently used.

        Args:
            timeout_s: the time to meet and to receive, in seconds; None for the channel's. The ranks of this
                replica wait for each other twice more. These waits end with the timeout of the replica's own
                process groups.

        Returns:
            As `import_prefixes`; `failure` says why a hand-over failed.

        Raises:
            ValueError: on every rank, where an argument is wrong on any rank; or the channel is of the other
                side; or as in `import_prefixes` for the engine; or `timeout_s` as in `send`.
            RuntimeError: as in `import_prefixes` for the engine; or the channel is closed.

        A failure within this replica, for instance a lost rank, is no miss: it raises, because ranks may then
        differ.
        """
        access = self._new_access("receive", "destination")

        def received() -> ReceivedPrefixes:
            session = self._begin(access, timeout_s)
            assert isinstance(session, Destination)
            offers = session.run_until_deadline(session.collect)

            def fill(placement: Placement) -> None:
                session.run_until_deadline(lambda: session.fill(offers, placement))

            return ReceivedPrefixes(offers[0][2].forest, fill)

        try:
            return import_received(access, received)
        except (TransferError, CopyError) as error:
            self._fail("was not received", error, error.__cause__ or error)
            return ImportReport(failure=described(error))
        except BaseException as error:
            self._disconnect(described(error))
            raise

    def close(self) -> None:
        """End the channel on this rank; its name is of no use any more."""
        self._is_closed = True
        self._disconnect()
        if self._side == "destination":
            thread = Thread(target=self._delete_address, name="hand-over, end", daemon=True)
            thread.start()
            thread.join(GRACE_S)

    def _delete_address(self) -> None:
        with suppress(RuntimeError):  # the store is lost
            self._store.delete_key(f"{self._rank}")

    def __enter__(self) -> "TransferChannel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _new_access(self, call: str, side: Side | None) -> CacheAccess:
        if side is not None and side != self._side:
            raise refused("side", self._side, f"{side!r}, which alone calls {call}")
        if self._is_closed:
            raise RuntimeError(f"{call} is called on a channel that was closed")
        return CacheAccess(self._engine, call)

    def _begin(self, access: CacheAccess, timeout_s: float | None) -> Source | Destination:
        """Start the clock of a call."""
        timeout_s = _check_timeout(access.spec.groups, self._timeout_s if timeout_s is None else timeout_s)
        if self._session is None:
            kind = Source if self._side == "source" else Destination
            self._session = kind(self._store, self._nccl, access, timeout_s)
        else:
            self._session.begin(access, timeout_s)
        return self._session

    def _fail(self, what: str, error: Exception, cause: BaseException) -> None:
        unforeseen = cause if not isinstance(cause, TransferError) else None
        logger.warning("mambaslots: hand-over %r %s: %s", self._name, what, error, exc_info=unforeseen)
        self._disconnect(described(error))

    def _disconnect(self, reason: str = "") -> None:
        """End the connections; the next call makes them anew."""
        session, self._session = self._session, None
        if session is not None:
            session.end(reason)


def _check_timeout(parallel: ParallelGroups, timeout_s: float) -> float:
    """The timeout; ValueError where a group of the replica has a shorter one, in which ranks wait."""
    timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
    for name, group in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if group is None or dist.get_world_size(group) == 1:
            continue
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            limit = getattr(options, "_timeout", None)
            if isinstance(limit, timedelta) and timeout_s + GRACE_S >= limit.total_seconds():
                limit_s = limit.total_seconds()
                raise ValueError(
                    f"timeout_s is {timeout_s:g}; accepted: less than {limit_s - GRACE_S:g}, because the "
                    f"{name} group, in which the replica's ranks wait for each other, has a timeout of "
                    f"{limit_s:g} s"
                )
    return timeout_s
