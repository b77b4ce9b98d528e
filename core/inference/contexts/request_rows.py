"""The rows of running requests: who sits where, with which blocks and which live slot."""

import torch

from ...request import DynamicInferenceRequest
from .mamba_metadata import MambaMetadata


class RequestRows:
    """A fixed number of rows; a request keeps its row, and its live slot, until it gives them back.

    Attributes: `block_table` [rows, blocks_per_row] int32 on the CPU, each row's KV blocks in order, then
    -1; the requests' own `blocks` lists say the same.
    """

    def __init__(self, max_requests: int, blocks_per_row: int, metadata: MambaMetadata) -> None:
        self.block_table = torch.full((max_requests, blocks_per_row), -1, dtype=torch.int32)
        self._table = self.block_table.numpy()
        self._live_slots = metadata.request_to_mamba_state_idx.numpy()  # the same memory
        self._metadata = metadata
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._free = list(range(max_requests - 1, -1, -1))

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        return list(self._requests.values())

    @property
    def count(self) -> int:
        return len(self._table)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def holds(self, request: DynamicInferenceRequest) -> bool:
        """Whether the row that the request names is its own, and one of these."""
        return self._requests.get(request.row) is request

    def take(self, request: DynamicInferenceRequest) -> None:
        """Seat a request that has no row; there must be a free one."""
        live = self._metadata.allocate_slot()
        request.row = self._free.pop()
        self._requests[request.row] = request
        self._live_slots[request.row] = live

    def give_back(self, request: DynamicInferenceRequest) -> None:
        """Free the row and the live slot; the request's blocks are the caller's to release."""
        self._metadata.free_slot(self.live_slot(request))
        self._live_slots[request.row] = -1
        self._table[request.row] = -1
        del self._requests[request.row]
        self._free.append(request.row)
        request.row = -1
        request.blocks = []

    def live_slot(self, request: DynamicInferenceRequest) -> int:
        return int(self._live_slots[request.row])

    def append_blocks(self, request: DynamicInferenceRequest, blocks: list[int]) -> None:
        first = len(request.blocks)
        request.blocks += blocks
        self._table[request.row, first : first + len(blocks)] = blocks

    def replace_blocks(self, request: DynamicInferenceRequest, first: int, blocks: list[int]) -> None:
        """Put `blocks` in the place of all from the request's block `first` on."""
        del request.blocks[first:]
        self._table[request.row, first:] = -1
        self.append_blocks(request, blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError where rows, requests and live slots contradict each other."""
        rows = len(self._table)
        assert len(self._requests) + len(self._free) == rows, "a row is lost"
        assert not self._requests.keys() & set(self._free), "a row is both free and taken"
        live = [self.live_slot(request) for request in self._requests.values()]
        assert len(set(live)) == len(live), "two rows share a live slot"
        assert min(live, default=0) >= 0, "a row has no live slot"
        assert self._metadata.free_count == rows - len(live), "a live slot leaked"
        for row in range(rows):
            request = self._requests.get(row)
            blocks = request.blocks if request else []
            assert request is None or request.row == row
            assert self._table[row, : len(blocks)].tolist() == blocks, "the block table is off"
            assert (self._table[row, len(blocks) :] == -1).all(), "the block table has stale entries"
