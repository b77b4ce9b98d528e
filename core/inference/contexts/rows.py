"""The rows of running requests: row numbers, live slots and the block table."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .cache.memory import DirtyEntries
from .cache.prefix_cache import PrefixCache
from .mamba_metadata import MambaMetadata
from .request import DynamicInferenceRequest, Holding


class RequestRows:
    """A fixed number of rows. A request keeps its row, and its live slots, until it is released.

    Attributes:
        block_table: [rows, blocks_per_row] int32 on the CPU: each row's KV blocks in order, then -1.
    """

    def __init__(
        self,
        max_requests: int,
        blocks_per_row: int,
        metadata: MambaMetadata,
        cache: PrefixCache,
        slots_per_row: int = 1,
        left: DirtyEntries | None = None,
    ) -> None:
        """`slots_per_row`: live slots of a request; `left`: notes the rows that become free."""
        shape = (max_requests, blocks_per_row)
        self.block_table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        self._table: npt.NDArray[np.integer[Any]] = self.block_table.numpy()
        self._first_slots = metadata.request_to_mamba_state_idx.numpy()  # the same memory
        self._slots_per_row = slots_per_row
        self._metadata = metadata
        self._cache = cache
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._left = left or DirtyEntries()
        self._left.note(self._free)

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        return list(self._requests.values())

    @property
    def holdings(self) -> list[Holding]:
        return [request.holding for request in self._requests.values() if request.holding is not None]

    @property
    def num_rows(self) -> int:
        return len(self._table)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has(self, request: DynamicInferenceRequest) -> bool:
        """Whether the request holds one of these rows."""
        return request.holding is not None and self._requests.get(request.holding.row) is request

    def has_slots(self, resume_slot: int) -> bool:
        """Whether a request could get its live slots now, and resume from durable slot `resume_slot`."""
        return self._metadata.has_room(self._slots_per_row)

    def admit(self, request: DynamicInferenceRequest, resume_slot: int = -1) -> Holding:
        """Give a waiting request a row, live slots and an open path. A row must be free.

        `resume_slot`: see `MambaMetadata.allocate_slots`.
        """
        live = self._metadata.allocate_slots(self._slots_per_row, resume_slot)
        row = self._free.pop()
        self._left.give([row])
        self._first_slots[row] = live[0]
        limit = len(request.tokens) - 1
        if request.max_resume_tokens is not None:
            limit = min(limit, request.max_resume_tokens)
        again = request.num_counted > 0
        path = self._cache.open(
            request.hashes, request.plan, self._table[row], max_resume_tokens=limit, again=again
        )
        request.holding = Holding(row, live, path, prefill_length=len(request.tokens))
        self._requests[row] = request
        return request.holding

    def release(self, request: DynamicInferenceRequest) -> Holding:
        """Free the request's row and live slots; the caller releases the path of the returned Holding."""
        holding, request.holding = request.holding, None
        if holding is None:
            raise RuntimeError(f"request {request.request_id} has no row")
        for slot in holding.live_slots:
            self._metadata.free_slot(slot)
        self._first_slots[holding.row] = -1
        del self._requests[holding.row]
        self._left.note([holding.row])
        self._free.append(holding.row)
        return holding

    def abandon(self) -> None:
        """Take the holdings of all requests without freeing them; do not use these rows afterwards."""
        for request in self._requests.values():
            request.holding = None

    def check_integrity(self) -> None:
        """Raise AssertionError where rows, requests and live slots contradict each other."""
        num_rows = len(self._table)
        assert len(self._requests) + len(self._free) == num_rows, "a row is lost"
        assert not self._requests.keys() & set(self._free), "a row is both free and taken"
        live = [slot for holding in self.holdings for slot in holding.live_slots]
        assert len(set(live)) == len(live), "two rows share a live slot"
        assert self._metadata.free_count == num_rows * self._slots_per_row - len(live), "a live slot leaked"
        for row in range(num_rows):
            request = self._requests.get(row)
            if request is None:
                assert self._first_slots[row] == -1, "a free row names a live slot"
                assert (self._table[row] == -1).all(), "a free row has blocks"
                continue
            holding = request.holding
            assert holding is not None, "a row is taken by a request that holds nothing"
            assert holding.row == row, "a request sits in another row"
            assert len(holding.live_slots) == self._slots_per_row, "a row has too few live slots"
            assert self._first_slots[row] == holding.live_slots[0], "a row names another live slot"
