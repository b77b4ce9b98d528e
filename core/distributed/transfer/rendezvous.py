"""Where the ranks of two replicas meet for a hand-over: who is there, and who sends what to whom."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, instance, integer, real, shown
from .cache_access import CacheAccess
from .format import PrefixFormat, TransferError
from .link import STORE_KEYS, PairLink
from .parts import Shard, json_object, shard_from_json, shard_of, shard_to_json
from .shard import sources_for

Side = Literal["source", "destination"]
_OTHER: dict[Side, Side] = {"source": "destination", "destination": "source"}
_MAX_RANKS = 1 << 20
GRACE_S = 1.0
"""How long after the deadline a rank still waits for its thread, which can say why nothing came."""
_GONE = "gone"  # what the store returns for a hello that was taken back; no hello


@dataclass(frozen=True)
class Hello:
    """What a rank tells the other replica about itself.

    Attributes:
        num_ranks: how many ranks its replica has.
        format: the format of its cache.
        shard: the part of the model that it holds.
    """

    num_ranks: int
    format: PrefixFormat
    shard: Shard

    def to_bytes(self) -> bytes:
        """The hello as JSON; `from_bytes` reads it."""
        values = {
            "ranks": self.num_ranks,
            "format": self.format.to_json(),
            "shard": shard_to_json(self.shard),
        }
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Hello":
        """The hello that `to_bytes` encoded; ValueError or RecursionError for anything else."""
        found = json_object("hello", json.loads(data), {"ranks", "format", "shard"})
        form, shard = PrefixFormat.from_json(found["format"]), shard_from_json(found["shard"])
        form.check_shard(shard)
        return cls(integer("ranks", found["ranks"], 1, _MAX_RANKS), form, shard)


class Rendezvous:
    """One rank's part in a hand-over between two replicas, which meet under a name in a store.

    `run` does the work in a thread, within the rendezvous as a context. The thread is needed because a store
    that stops answering does not keep to its timeout, and connecting with gloo does not either.

    Keys in the store, under the name:

        source/i, destination/i   the hello of rank i of that side
        left                      how many ranks have left
        i-j/...                   the link from source rank i to destination rank j

    A rank that has read all hellos counts itself in `left` when it leaves, and the last one deletes all keys.
    A rank that has not read all hellos deletes its own hello.

    Attributes:
        rank: of this rank in its replica.
        shard: the part of the model that this rank holds.
    """

    def __init__(self, access: CacheAccess, store: Store, name: str, side: Side, timeout_s: float) -> None:
        """Starts the clock; tells nobody anything yet.

        Args:
            access: the cache of this rank.
            store: a client of a store that both replicas reach.
            name: of this hand-over alone.
            side: which side this replica is.
            timeout_s: the time for the whole hand-over, in seconds.

        Raises:
            ValueError: a bad argument, or a `timeout_s` that the replica's own groups do not outlast.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {shown(name)}; accepted: a str that names this hand-over alone")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"name is {shown(name)}; accepted: a str that UTF-8 can encode") from error
        self._timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._side: Side = side
        parallel = access.parallel
        _check_groups_outlast(parallel, self._timeout_s)
        self.rank = parallel.rank
        self.shard = shard_of(access.spec)
        self._hello = Hello(parallel.size, PrefixFormat.of(access), self.shard)
        self._hellos: dict[Side, list[Hello]] = {}
        self._link_keys: list[str] = []
        self._deadline = time.monotonic() + self._timeout_s

    def run[T](self, work: Callable[[], T]) -> T:
        """Do `work` in a thread of its own, within this context; return or raise what `work` does.

        The call ends at most `GRACE_S` after the deadline. A thread that is not done by then is left behind,
        and ends when the store and the peer let it. So `work` must change nothing but what it returns.

        Raises:
            TransferError: `work` is not done in time.
        """
        outcome: Future[T] = Future()

        def target() -> None:
            try:
                with self:
                    result = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        Thread(target=target, name=f"hand-over, {self._side}", daemon=True).start()
        wait([outcome], self._remaining_s() + GRACE_S)
        if not outcome.done():
            raise TransferError(f"the store or a peer stopped answering; gave up after {self._timeout_s:g} s")
        return outcome.result()

    def __enter__(self) -> "Rendezvous":
        try:
            self._store.set(f"{self._side}/{self.rank}", self._hello.to_bytes().decode())
        except RuntimeError as error:
            raise TransferError(f"the store was lost: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # a store that is lost has no keys to delete
            keys = [f"{side}/{rank}" for side, hellos in self._hellos.items() for rank in range(len(hellos))]
            if len(self._hellos) < 2:
                self._store.delete_key(f"{self._side}/{self.rank}")
            elif self._store.add("left", 1) == len(keys):
                for key in [*keys, *self._link_keys, "left"]:
                    self._store.delete_key(key)

    def pairs(self) -> list[tuple[int, int, Shard]]:
        """(Source rank, destination rank, the part to send) of every transfer.

        Blocks until all ranks are there.

        All ranks get the same list and go through it in this order, so no two ranks wait for each other.

        Raises:
            TransferError: a rank did not come in time, or the two replicas have different models.
        """
        hellos = {side: self._await_hellos(side) for side in (self._side, _OTHER[self._side])}
        self._hellos = hellos
        for hello in hellos["source"]:
            hello.format.check_fits(hellos["destination"][0].format)
        for hello in hellos["destination"]:
            hello.format.check_fits(hellos["source"][0].format)
        holders = [hello.shard for hello in hellos["source"]]
        pairs = [
            (source, destination, part)
            for destination, hello in enumerate(hellos["destination"])
            for source, part in sources_for(holders, hello.shard).items()
        ]
        self._link_keys = [f"{pair[0]}-{pair[1]}/{key}" for pair in pairs for key in STORE_KEYS]
        return pairs

    def _await_hellos(self, side: Side) -> list[Hello]:
        first = self._await_hello(side, 0)
        return [first, *(self._await_hello(side, rank) for rank in range(1, first.num_ranks))]

    def _await_hello(self, side: Side, rank: int) -> Hello:
        key = f"{side}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._remaining_s()))
            # `get` would wait for the store's own timeout if the hello has just been deleted.
            return Hello.from_bytes(self._store.compare_set(key, _GONE, _GONE))
        except DistNetworkError as error:
            raise TransferError(f"the store was lost: {error}") from error
        except RecursionError as error:
            raise TransferError(f"rank {rank} of the {side} is no rank of a hand-over") from error
        except RuntimeError as error:
            raise TransferError(f"rank {rank} of the {side} did not come in {self._timeout_s:g} s") from error
        except TransferError:
            raise
        except ValueError as error:
            raise TransferError(f"rank {rank} of the {side} is no rank of a hand-over: {error}") from error

    def _remaining_s(self) -> float:
        """The time to the deadline; never 0, which torch takes for "no timeout"."""
        return max(0.001, self._deadline - time.monotonic())

    @contextmanager
    def link(self, source: int, destination: int) -> Iterator[PairLink]:
        """A link between two ranks, one of them this rank; closed at the end of the context.

        Raises:
            TransferError: the peer is lost or the time is over, here or inside the context.
        """
        store = PrefixStore(f"{source}-{destination}", self._store)
        link = None
        try:
            link = PairLink(store, int(self._side == "destination"), self._remaining_s)
            yield link
        except RuntimeError as error:
            peer = destination if self._side == "source" else source
            raise TransferError(f"rank {peer} of the {_OTHER[self._side]} was lost: {error}") from error
        finally:
            if link is not None:
                link.close()


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
