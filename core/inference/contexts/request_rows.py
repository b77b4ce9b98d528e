"""The rows of running requests: who sits where, with which blocks and which live slot."""

import torch

from ...request import DynamicInferenceRequest
from .mamba_metadata import MambaMetadata


class RequestRows:
    """A fixed number of rows; a request keeps its row, and its live slots, until it gives them back.

    It has one live slot, and one more for each token that it may draft: the state after every token of a
    decode goes into another, and where the last accepted one went the request goes on from.

    Attributes: `block_table` [rows, blocks_per_row] int32 on the CPU, each row's KV blocks in order, then
    -1; the requests' own `blocks` lists say the same.
    """

    def __init__(
        self, max_requests: int, blocks_per_row: int, metadata: MambaMetadata, slots_per_row: int = 1
    ) -> None:
        self.block_table = torch.full((max_requests, blocks_per_row), -1, dtype=torch.int32)
        self._table = self.block_table.numpy()
        self._first_slots = metadata.request_to_mamba_state_idx.numpy()  # the same memory
        self._slots_per_row = slots_per_row
        self._live_slots: list[list[int]] = [[] for _ in range(max_requests)]
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
        live = [self._metadata.allocate_slot() for _ in range(self._slots_per_row)]
        request.row = self._free.pop()
        self._requests[request.row] = request
        self._live_slots[request.row] = live
        self._first_slots[request.row] = live[0]

    def give_back(self, request: DynamicInferenceRequest) -> None:
        """Free the row and the live slots; the request's blocks are the caller's to release."""
        for slot in self._live_slots[request.row]:
            self._metadata.free_slot(slot)
        self._live_slots[request.row] = []
        self._first_slots[request.row] = -1
        self._table[request.row] = -1
        del self._requests[request.row]
        self._free.append(request.row)
        request.row = -1
        request.blocks = []

    def live_slot(self, request: DynamicInferenceRequest, place: int = 0) -> int:
        """Where the state after a step goes, or after token `place` of a decode with drafts."""
        return self._live_slots[request.row][place]

    def live_slots(self, request: DynamicInferenceRequest) -> list[int]:
        return list(self._live_slots[request.row])

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
        live = [slot for slots in self._live_slots for slot in slots]
        assert len(set(live)) == len(live), "two rows share a live slot"
        assert self._metadata.free_count == rows * self._slots_per_row - len(live), "a live slot leaked"
        for row in range(rows):
            request = self._requests.get(row)
            slots = self._live_slots[row]
            assert len(slots) == (self._slots_per_row if request else 0), "a row has too few live slots"
            assert self._first_slots[row] == (slots[0] if slots else -1), "a row names another live slot"
            blocks = request.blocks if request else []
            assert request is None or request.row == row
            assert self._table[row, : len(blocks)].tolist() == blocks, "the block table is off"
            assert (self._table[row, len(blocks) :] == -1).all(), "the block table has stale entries"
