"""A channel between two running replicas, over which one hands cached prefixes to the other."""

from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import shown
from ..all_ranks import described
from .cache_access import CacheAccess
from .exchange import Exchange, SendReport, logger
from .export import PrefixName
from .nccl_pipe import nccl_facts
from .placement import ImportReport
from .rendezvous import OTHER_SIDE, Rendezvous, Side

Transport = Literal["nccl", "gloo"]


class TransferChannel:
    """Hands cached prefixes from a source to a destination, again and again.

    Every rank of both replicas makes one, under one name. What connects them is made by the first call and
    lives on: a communicator of NCCL takes hundreds of milliseconds. A hand-over that fails ends it, and the
    next call makes it anew. The channel is a context manager.

    Each call is made between steps. A thread does the work, and the call ends at most about two seconds after
    its timeout, whatever a peer or the store does.
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
            name: of this channel alone; not of a hand-over or a channel that was closed.
            side: "source" or "destination".
            timeout_s: of a call that says none, in seconds; as in `send`.
            transport: "gloo" for host memory also between GPUs; None or "nccl" for NCCL where every rank has
                a GPU of its own and nccl4py, and else gloo. One rank that says "gloo" says it for all.

        Raises:
            ValueError: a bad argument; or as in `export_prefixes` for the engine.
            RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
        """
        if not isinstance(side, str) or side not in OTHER_SIDE:
            raise ValueError(f"side is {shown(side)}; accepted: 'source' or 'destination'")
        if transport not in (None, "nccl", "gloo"):
            raise ValueError(f"transport is {shown(transport)}; accepted: 'nccl', 'gloo' or None")
        access = CacheAccess.of(engine, "TransferChannel")
        Rendezvous(access, store, name, side, timeout_s)  # checks what each call will need
        self._engine, self._side, self._timeout_s = engine, side, timeout_s
        self._transport: Transport = "gloo"
        if transport != "gloo" and nccl_facts(access.spec.device) is not None:
            self._transport = "nccl"
        self._exchange: Exchange | None = Exchange(store, name, side, transport)

    @property
    def transport(self) -> str:
        """ "nccl" or "gloo": what the two sides agreed on, or before that what this rank would take."""
        connection = None if self._exchange is None else self._exchange.connection
        return connection.transport if connection is not None and connection.is_made else self._transport

    def connect(self, *, timeout_s: float | None = None) -> str:
        """Meet the other side, so that the next hand-over need not; why that failed, or an empty text.

        Every rank of both sides calls it.
        """
        exchange, access = self._open("connect")
        connection = exchange.begin(access, self._timeout_s if timeout_s is None else timeout_s)
        try:
            connection.in_time(lambda: connection.meet(for_turn=False))
        except Exception as error:
            logger.warning("mambaslots: a channel was not connected: %s", error)
            exchange.drop(described(error))
            return described(error)
        return ""

    def send(
        self,
        prefixes: Iterable[PrefixName] | None = None,
        *,
        states: Literal["deepest", "all"] = "deepest",
        timeout_s: float | None = None,
    ) -> SendReport:
        """Hand cached prefixes of this replica to the other one, which calls `receive`.

        Only what the receiver lacks and has room for is sent. A hand-over that fails raises nothing: a peer
        does not come, dies, or has another model. The failure is logged as a warning and reported.

        Args:
            prefixes: as in `export_prefixes`; None for all that are cached, with all states.
            states: of each of `prefixes`, the "deepest" cached state, from which a request resumes, or "all".
            timeout_s: the time to meet and to send, in seconds; None for the channel's.

        Raises:
            ValueError: the channel is of the other side; a bad argument; or as in `export_prefixes`; or
                `timeout_s` is not below the timeout of this replica's own process groups (those of gloo and
                nccl are known), in which ranks that are done wait for the last rank.
            RuntimeError: as in `export_prefixes`; or the channel is closed.
        """
        exchange, access = self._open("send", "source")
        return exchange.send(access, prefixes, states, self._timeout_s if timeout_s is None else timeout_s)

    def receive(self, *, timeout_s: float | None = None) -> ImportReport:
        """Import what the other side sends.

        Either every rank imports its part, or none does; see `import_prefixes`. A hand-over that fails is a
        miss: a rank does not get its part in time and whole. Then nothing new is found, the failure is logged
        as a warning and reported, and the engines serve on. Hits may be lost: to make room, the cache may
        have evicted what was used longest ago.

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
        exchange, access = self._open("receive", "destination")
        return exchange.receive(access, self._timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """End the channel on this rank; its name is of no use any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def __enter__(self) -> "TransferChannel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, call: str, side: Side | None = None) -> tuple[Exchange, CacheAccess]:
        if side is not None and side != self._side:
            raise ValueError(f"side is {self._side!r}; accepted: {side!r}, which alone calls {call}")
        if self._exchange is None:
            raise RuntimeError(f"{call} is called on a channel that was closed")
        return self._exchange, CacheAccess.of(self._engine, call)
