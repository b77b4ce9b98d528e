"""Who takes part in a hand-over, and who sends what to whom."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed import DistNetworkError, PrefixStore, Store  # type: ignore[attr-defined]

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..model_shard import ModelShard
from ..validation import instance, integer, real, shown
from .handover_link import KEYS, HandoverLink
from .prefix_format import PrefixFormat, TransferError, json_object, shard_from_json, shard_of, shard_to_json
from .prefix_replica import replica_rank, replica_size
from .prefix_shard import sources_for

Side = Literal["source", "destination"]
LONGEST_TIMEOUT_S = 1e6
_OTHER: dict[Side, Side] = {"source": "destination", "destination": "source"}
_MOST_RANKS = 1 << 20
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
        return cls(integer("ranks", found["ranks"], 1, _MOST_RANKS), form, shard)


class Meeting:
    """The ranks of two replicas under one name of a store: who is there, and who sends what to whom.

    Used as a context. Keys: `source/i` and `destination/i`, a seat each; `left`, how many have left. Who
    knows all seats counts itself out, and the last one deletes all keys; who does not deletes its own seat.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, store: Store, name: str, side: Side, timeout_s: float
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {shown(name)}; accepted: a str that names this hand-over alone")
        self._timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._side: Side = side
        spec = engine.context.spec
        self.rank = replica_rank(spec.groups)
        self.shard = shard_of(engine)
        self._seat = _Seat(replica_size(spec.groups), PrefixFormat.of(engine), self.shard)
        self._seats: dict[Side, list[_Seat]] = {}
        self._link_keys: list[str] = []
        self._deadline = 0.0

    def __enter__(self) -> "Meeting":
        self._deadline = time.monotonic() + self._timeout_s
        self._store.set(f"{self._side}/{self.rank}", self._seat.to_bytes().decode())
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
