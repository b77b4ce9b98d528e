"""Where the ranks of two replicas meet for hand-overs: who is there, and who sends what to whom."""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, instance, integer, real, shown
from .cache_access import CacheAccess
from .format import PrefixFormat, TransferError
from .link import STORE_KEYS, PairLink, await_key
from .nccl_pipe import NcclFacts
from .parts import Shard, json_object, shard_from_json, shard_of, shard_to_json
from .shard import sources_for

Side = Literal["source", "destination"]
OTHER_SIDE: dict[Side, Side] = {"source": "destination", "destination": "source"}
PROTOCOL_VERSION = 1
"""Of the messages and the order in which they go; rises with every change. Another one is refused."""
_MAX_RANKS = 1 << 20
GRACE_S = 1.0
"""How long after the deadline a rank still waits for its thread, which can say why nothing came.

So long may a hello that does not fit be replaced, too.
"""
_PAUSE_S = 0.01
_GONE = "gone"  # what the store returns for a key that is not there; no hello


class AbsentError(TransferError):
    """A peer did not come; what connects the two sides is as good as before."""


class RenewedError(Exception):
    """A peer has begun anew, so this side must, too."""


@dataclass(frozen=True)
class Hello:
    """What a rank tells the other replica about itself.

    Attributes:
        id: names this beginning of this rank; a rank that begins anew has another.
        num_ranks: how many ranks its replica has.
        format: the format of its cache.
        shard: the part of the model that it holds.
        nccl: what NCCL can use there; None for nothing.
    """

    id: str
    num_ranks: int
    format: PrefixFormat
    shard: Shard
    nccl: NcclFacts | None = None

    def to_bytes(self) -> bytes:
        """The hello as JSON; `from_bytes` reads it."""
        values = {
            "protocol": PROTOCOL_VERSION,
            "id": self.id,
            "ranks": self.num_ranks,
            "format": self.format.to_json(),
            "shard": shard_to_json(self.shard),
            "nccl": self.nccl,
        }
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Hello":
        """The hello that `to_bytes` encoded; ValueError or RecursionError for anything else."""
        values = json.loads(data)
        if isinstance(values, dict):  # first: another version has other fields
            _check_protocol(values.get("protocol"))
        found = json_object("hello", values, {"protocol", "id", "ranks", "format", "shard", "nccl"})
        form, shard, nccl = (
            PrefixFormat.from_json(found["format"]),
            shard_from_json(found["shard"]),
            found["nccl"],
        )
        form.check_shard(shard)
        name = found["id"]
        if not isinstance(name, str) or len(name) != 32 or not name.isalnum():
            raise ValueError(f"id is {shown(name)}; accepted: 32 letters and digits")
        if nccl is not None and (
            not isinstance(nccl, list) or len(nccl) != 2 or not all(isinstance(fact, str) for fact in nccl)
        ):
            raise ValueError(f"nccl is {shown(nccl)}; accepted: a version and a GPU, or null")
        return cls(
            name,
            integer("ranks", found["ranks"], 1, _MAX_RANKS),
            form,
            shard,
            None if nccl is None else NcclFacts(*nccl),
        )


def _check_protocol(version: object) -> None:
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ValueError(
            f"protocol is {shown(version)}; accepted: {PROTOCOL_VERSION}, of the release of mambaslots here"
        )


class Rendezvous:
    """One rank's part in hand-overs between two replicas, which meet under a name in a store.

    Keys in the store, under the name:

        source/i, destination/i   the hello of rank i of that side
        turn/<ids>/n              one of two ranks is there for the n-th hand-over over their link
        left                      how many ranks have left
        i-j/<ids>/...             the link from source rank i to destination rank j

    A rank that has read all hellos counts itself in `left` when it leaves, and the last one deletes all keys.
    A rank that has not read all hellos deletes its own hello, when it leaves and when the time is over.

    Attributes:
        rank: of this rank in its replica.
        shard: the part of the model that this rank holds.
        form: the format of this replica's cache.
    """

    def __init__(
        self,
        access: CacheAccess,
        store: Store,
        name: str,
        side: Side,
        timeout_s: float,
        nccl: NcclFacts | None = None,
        refused: set[str] | None = None,
    ) -> None:
        """Starts the clock; tells nobody anything yet.

        Args:
            access: the cache of this rank.
            store: a client of a store that both replicas reach.
            name: of these hand-overs alone.
            side: which side this replica is.
            timeout_s: the time for the first hand-over, in seconds.
            nccl: what NCCL can use on this rank; None to do without.
            refused: ids of hellos that are of no use any more: those that the last hand-over refused, and
                those of a connection that was dropped; `pairs` changes it.

        Raises:
            ValueError: a bad argument, or a `timeout_s` that the replica's own groups do not outlast.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {shown(name)}; accepted: a str that names this hand-over alone")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"name is {shown(name)}; accepted: a str that UTF-8 can encode") from error
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._side: Side = side
        self.start_clock(access.parallel, timeout_s)
        self.rank = access.parallel.rank
        self.shard = shard_of(access.spec)
        self.form = PrefixFormat.of(access)
        self._hello = Hello(uuid.uuid4().hex, access.parallel.size, self.form, self.shard, nccl)
        self._hellos: dict[Side, list[Hello]] = {}
        self._link_keys: list[str] = []
        self._turn_keys: list[str] = []
        self._refused: set[str] = set() if refused is None else refused

    def start_clock(self, parallel: ParallelGroups, timeout_s: float) -> None:
        """Give the next hand-over `timeout_s` seconds; ValueError as in the constructor."""
        self.timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        _check_groups_outlast(parallel, self.timeout_s)
        self._deadline = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        """The time to the deadline; never 0, which torch takes for "no timeout"."""
        return max(0.001, self._deadline - time.monotonic())

    def arrive(self) -> None:
        """Tell the other ranks that this rank is there; TransferError where the store is lost."""
        try:
            self._store.set(f"{self._side}/{self.rank}", self._hello.to_bytes().decode())
        except RuntimeError as error:
            raise TransferError(f"the store was lost: {error}") from error

    def leave(self) -> None:
        """There will be no other hand-over under this name."""
        self.forget_links()
        self._delete_turns()
        with suppress(RuntimeError):  # a store that is lost has no keys to delete
            keys = [f"{side}/{rank}" for side, hellos in self._hellos.items() for rank in range(len(hellos))]
            if len(self._hellos) < 2:
                self._delete_hello()
            elif self._store.add("left", 1) == len(keys):
                for key in [*keys, "left"]:
                    self._store.delete_key(key)

    def _delete_hello(self) -> None:
        with suppress(RuntimeError):
            self._store.delete_key(f"{self._side}/{self.rank}")

    def pairs(self) -> list[tuple[int, int, Shard]]:
        """(Source rank, destination rank, the part to send) of every transfer.

        Blocks until all ranks are there. The hello of a rank that fitted no more in the last hand-over may
        still be in the store: the rank gets the time to begin anew. Another hello that does not fit gets
        `GRACE_S` seconds of it: a rank that has died may have left it.

        All ranks get the same list and go through it in this order, so no two ranks wait for each other.

        Raises:
            TransferError: a rank did not come in time, or the two replicas have different models.
        """
        hellos = self._await_fitting_hellos()
        holders = [hello.shard for hello in hellos["source"]]
        return [
            (source, destination, part)
            for destination, hello in enumerate(hellos["destination"])
            for source, part in sources_for(holders, hello.shard).items()
        ]

    @property
    def has_nccl(self) -> bool:
        """Whether all ranks of both sides can use NCCL with each other; the same on all, after `pairs`."""
        hellos = [hello for side in self._hellos.values() for hello in side]
        facts = [hello.nccl for hello in hellos if hello.nccl is not None]
        gpus, versions = {fact.gpu for fact in facts}, {fact.version for fact in facts}
        return len(facts) == len(hellos) == len(gpus) and len(versions) == 1

    def link(self, source: int, destination: int) -> PairLink:
        """A link between two ranks, one of them this rank.

        Raises:
            RenewedError: the peer has begun anew since `pairs`.
            RuntimeError: the peer is lost or the time is over.
        """
        ids = f"{self._hellos['source'][source].id}.{self._hellos['destination'][destination].id}"
        store = PrefixStore(f"{source}-{destination}/{ids}", self._store)
        peer = destination if self._side == "source" else source
        self._link_keys += [f"{source}-{destination}/{ids}/{key}" for key in STORE_KEYS]
        return PairLink(
            store, int(self._side == "destination"), self.remaining_s, partial(self._check_same, peer)
        )

    def forget_links(self) -> None:
        """Delete what links and turns have left in the store; the links are connected, or of no use."""
        self._delete_turns()
        with suppress(RuntimeError):
            while self._link_keys:
                self._store.delete_key(self._link_keys.pop())

    def id_of(self, rank: int) -> str:
        """The id of the hello of a rank of the other side, as `pairs` found it."""
        return self._hellos[OTHER_SIDE[self._side]][rank].id

    @property
    def known_ids(self) -> set[str]:
        """The ids of the hellos of all other ranks, as `pairs` found them; none before."""
        return {hello.id for hellos in self._hellos.values() for hello in hellos} - {self._hello.id}

    def await_turn(self, peers: list[tuple[int, int]]) -> None:
        """Say that this rank is there for the next hand-over, and wait until its peers are.

        Args:
            peers: (rank of the other side, how many hand-overs were made over the link to it).

        Raises:
            RenewedError: a peer has begun anew since `pairs`.
            TransferError: a peer did not come in time, or the store is lost.
        """
        ids = [(self._hello.id, self.id_of(peer), turn) for peer, turn in peers]
        self._delete_turns()
        self._turn_keys = [f"turn/{own}.{other}/{turn}" for own, other, turn in ids]
        peer = 0
        try:
            for key in self._turn_keys:
                self._store.set(key, "")
            for (peer, _), (own, other, turn) in zip(peers, ids, strict=True):
                key = f"turn/{other}.{own}/{turn}"
                await_key(self._store, key, self.remaining_s, partial(self._check_same, peer))
        except DistNetworkError as error:
            raise TransferError(f"the store was lost: {error}") from error
        except RuntimeError as error:
            self._delete_turns()
            text = f"rank {peer} of the {OTHER_SIDE[self._side]} did not come in {self.timeout_s:g} s"
            raise AbsentError(text) from error

    def _delete_turns(self) -> None:
        with suppress(RuntimeError):
            while self._turn_keys:
                self._store.delete_key(self._turn_keys.pop())

    def _check_same(self, peer: int) -> None:
        """RenewedError where a rank of the other side is not the one that `pairs` has found."""
        side = OTHER_SIDE[self._side]
        # `get` would wait for the store's own timeout where there is no such key.
        now = self._store.compare_set(f"{side}/{peer}", _GONE, _GONE)
        if now != _GONE.encode() and now != self._hellos[side][peer].to_bytes():
            raise RenewedError(f"rank {peer} of the {side} has begun anew")

    def _await_fitting_hellos(self) -> dict[Side, list[Hello]]:
        found, since = set[str](), 0.0
        while True:
            hellos = {side: self._await_hellos(side) for side in (self._side, OTHER_SIDE[self._side])}
            self._hellos = hellos
            try:
                for hello in hellos["source"]:
                    hello.format.check_fits(hellos["destination"][0].format)
                for hello in hellos["destination"]:
                    hello.format.check_fits(hellos["source"][0].format)
                return hellos
            except TransferError:
                ids = self.known_ids
                if ids != found:
                    found, since = ids, time.monotonic()
                # Who said these may be gone, or about to begin anew: a little time for a hello never seen.
                is_over = not ids & self._refused and time.monotonic() - since >= GRACE_S
                if is_over or self.remaining_s() <= 0.001:
                    self._refused.clear()
                    self._refused.update(ids)
                    raise
                time.sleep(min(_PAUSE_S, self.remaining_s()))

    def _await_hellos(self, side: Side) -> list[Hello]:
        first = self._await_hello(side, 0)
        return [first, *(self._await_hello(side, rank) for rank in range(1, first.num_ranks))]

    def _await_hello(self, side: Side, rank: int) -> Hello:
        key = f"{side}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self.remaining_s()))
            return Hello.from_bytes(self._store.compare_set(key, _GONE, _GONE))
        except DistNetworkError as error:
            raise TransferError(f"the store was lost: {error}") from error
        except RecursionError as error:
            raise TransferError(f"rank {rank} of the {side} is no rank of a hand-over") from error
        except RuntimeError as error:
            if len(self._hellos) < 2:  # else a peer that comes later takes this rank for one that waits
                self._delete_hello()
            raise TransferError(f"rank {rank} of the {side} did not come in {self.timeout_s:g} s") from error
        except TransferError:
            raise
        except ValueError as error:
            raise TransferError(f"rank {rank} of the {side} is no rank of a hand-over: {error}") from error


def _check_groups_outlast(parallel: ParallelGroups, timeout_s: float) -> None:
    """ValueError where a group of the replica would give up before a hand-over does.

    Ranks that are done wait in the groups for the last rank.
    """
    for name, group in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if group is None or dist.get_world_size(group) == 1:
            continue
        for limit_s in _timeouts_s(group):
            if timeout_s + GRACE_S >= limit_s:
                raise ValueError(
                    f"timeout_s is {timeout_s:g}; accepted: less than {limit_s - GRACE_S:g}, because the "
                    f"{name} group, in which the replica's ranks wait for each other, has a timeout of "
                    f"{limit_s:g} s"
                )


def _timeouts_s(group: Any) -> Iterator[float]:
    """The timeouts of the group's backends, in seconds, as far as the backends tell them."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            yield timeout.total_seconds()
