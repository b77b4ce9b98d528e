"""Who takes part in a hand-over, and who sends what to whom."""

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

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard
from ..parallel_groups import ParallelGroups
from ..validation import LONGEST_TIMEOUT_S, instance, integer, real, shown
from .handover_link import KEYS, HandoverLink
from .prefix_format import PrefixFormat, TransferError, json_object, shard_from_json, shard_of, shard_to_json
from .prefix_shard import check_totals, sources_for

Side = Literal["source", "destination"]
_OTHER: dict[Side, Side] = {"source": "destination", "destination": "source"}
_MOST_RANKS = 1 << 20
GRACE_S = 1.0
"""How long after the deadline a rank still waits to hear why nothing came; all waits end at the deadline."""
_GONE = "gone"  # no seat: what a store returns in place of one that is not there


@dataclass(frozen=True)
class _Seat:
    """What a rank tells the other replica about itself."""

    ranks: int
    format: PrefixFormat
    shard: ModelShard

    def to_bytes(self) -> bytes:
        values = {
            "ranks": self.ranks,
            "format": self.format.to_json(),
            "shard": shard_to_json(self.shard),
        }
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "_Seat":
        found = json_object("seat", json.loads(data), {"ranks", "format", "shard"})
        form, shard = PrefixFormat.from_json(found["format"]), shard_from_json(found["shard"])
        check_totals(form, shard)
        return cls(integer("ranks", found["ranks"], 1, _MOST_RANKS), form, shard)


class Meeting:
    """The ranks of two replicas under one name of a store: who is there, and who sends what to whom.

    The clock starts when it is made; then it is used as a context, in a thread (`attend`), because neither a
    store that stops answering nor gloo's connecting keeps to its timeout. Keys: `source/i` and
    `destination/i`, a seat each; `left`, how many have left. Who knows all seats counts itself out, and the
    last one deletes all keys; who does not deletes its own seat.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, store: Store, name: str, side: Side, timeout_s: float
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {shown(name)}; accepted: a str that names this hand-over alone")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"name is {shown(name)}; accepted: a str that UTF-8 can encode") from error
        self._timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._side: Side = side
        groups = engine.context.spec.groups
        _check_ranks_wait(groups, self._timeout_s)
        self.rank = groups.rank
        self.shard = shard_of(engine)
        self._seat = _Seat(groups.size, PrefixFormat.of(engine), self.shard)
        self._seats: dict[Side, list[_Seat]] = {}
        self._link_keys: list[str] = []
        self._deadline = time.monotonic() + self._timeout_s

    def attend[T](self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done in this context by a thread that no wait for it outlasts.

        TransferError once the deadline is over by `GRACE_S`. The thread is then left behind, and ends when
        the store and the peer let it: `work` must change nothing but what it returns.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                with self:
                    result = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        Thread(target=run, name=f"hand-over, {self._side}", daemon=True).start()
        wait([outcome], self._remaining_s() + GRACE_S)
        if not outcome.done():
            raise TransferError(f"the store or a peer stopped answering; gave up after {self._timeout_s:g} s")
        return outcome.result()

    def __enter__(self) -> "Meeting":
        try:
            self._store.set(f"{self._side}/{self.rank}", self._seat.to_bytes().decode())
        except RuntimeError as error:
            raise TransferError(f"the store was lost: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # a store that is gone keeps no keys
            keys = [f"{side}/{rank}" for side, seats in self._seats.items() for rank in range(len(seats))]
            if len(self._seats) < 2:
                self._store.delete_key(f"{self._side}/{self.rank}")
            elif self._store.add("left", 1) == len(keys):
                for key in [*keys, *self._link_keys, "left"]:
                    self._store.delete_key(key)

    def pairs(self) -> list[tuple[int, int, ModelShard]]:
        """(source rank, destination rank, what goes from one to the other), in the order all ranks go by.

        Waits for all seats. TransferError where the two models are not one.
        """
        seats = {side: self._await_seats(side) for side in (self._side, _OTHER[self._side])}
        self._seats = seats
        for seat in seats["source"]:
            seat.format.check_fits(seats["destination"][0].format)
        for seat in seats["destination"]:
            seat.format.check_fits(seats["source"][0].format)
        held = [seat.shard for seat in seats["source"]]
        pairs = [
            (source, destination, part)
            for destination, seat in enumerate(seats["destination"])
            for source, part in sources_for(held, seat.shard).items()
        ]
        self._link_keys = [f"{pair[0]}-{pair[1]}/{key}" for pair in pairs for key in KEYS]
        return pairs

    def _await_seats(self, side: Side) -> list[_Seat]:
        first = self._await_seat(side, 0)
        return [first, *(self._await_seat(side, rank) for rank in range(1, first.ranks))]

    def _await_seat(self, side: Side, rank: int) -> _Seat:
        key = f"{side}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._remaining_s()))
            # Not `get`: it would wait, as long as the store does, for a seat that was just given up.
            return _Seat.from_bytes(self._store.compare_set(key, _GONE, _GONE))
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
        """Never 0, which would mean for ever."""
        return max(0.001, self._deadline - time.monotonic())

    @contextmanager
    def link(self, source: int, destination: int) -> Iterator[HandoverLink]:
        """The two-party group of a pair that this rank is in, for as long as the context is open."""
        store = PrefixStore(f"{source}-{destination}", self._store)
        link = None
        try:
            link = HandoverLink(store, int(self._side == "destination"), self._remaining_s)
            yield link
        except RuntimeError as error:
            other = destination if self._side == "source" else source
            raise TransferError(f"rank {other} of the {_OTHER[self._side]} was lost: {error}") from error
        finally:
            if link is not None:
                link.close()


def _check_ranks_wait(groups: ParallelGroups, timeout_s: float) -> None:
    """ValueError where the replica's own groups would not let ranks that are done wait for the last one."""
    for name, group in (("tensor", groups.tensor), ("pipeline", groups.pipeline)):
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
    """Of each of its backends that tells."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            yield timeout.total_seconds()
