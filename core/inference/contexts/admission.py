"""The rows of running requests, and what a request needs for its next step: a row, a state and KV blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import InferenceConfig
from ...errors import RequestOverflowError
from .cache.checkpoint_plan import Boundary, checked_boundaries
from .cache.memory import DirtyEntries
from .cache.prefix_cache import PrefixCache
from .cache.prefix_match import PrefixMatch
from .mamba_metadata import MambaMetadata
from .request import DynamicInferenceRequest, Holding, RequestStep
from .states import RequestStates


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


class Admission:
    """Allocates what requests need for their next step, all of it or nothing.

    This class alone writes `Holding.branch_tokens` and `Holding.spans`.
    """

    def __init__(
        self,
        config: InferenceConfig,
        chunk_size: int,
        cache: PrefixCache,
        rows: RequestRows,
        states: RequestStates,
    ) -> None:
        self._config = config
        self._block_size = config.block_size_tokens
        self._chunk_size = chunk_size
        self._cache = cache
        self._rows = rows
        self._states = states

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What is cached of a request's tokens; changes only the request's hash chain and its last match."""
        path = request.holding.path if request.holding is not None else None
        if self._config.enable_prefix_caching and (path is None or path.shares):
            request.hashes.extend_to(request.tokens)
        num_tokens, limit = len(request.tokens), request.max_resume_tokens
        request.match = self._cache.match(request.hashes, num_tokens, path, limit, request.match)
        return request.match

    def schedule(self, request: DynamicInferenceRequest, token_budget: int) -> RequestStep | None:
        """The request's next step of at most `token_budget` tokens; None where blocks or tokens are short."""
        holding = request.holding
        if holding is not None and holding.num_computed == len(request.tokens):
            return self._following(request, holding)
        if holding is not None and holding.decoding:
            return self._schedule_decode(request, holding)
        if holding is None and not self._rows.num_free:
            raise RequestOverflowError(self._rows.num_rows + 1, self._rows.num_rows)
        match = self.match(request)
        num_computed = holding.num_computed if holding is not None else 0
        if self._fetch(request, match, num_computed, token_budget):
            match = self.match(request)
        ahead = match.resume_tokens > num_computed
        start = match.resume_tokens if ahead else num_computed
        stop = self._stop(start, len(request.tokens), token_budget)
        if stop <= start or not self._affords(request, match, stop):
            return None
        if holding is None:
            if not self._has_slots(match.resume_slot):
                return None
            holding = self._rows.admit(request, match.resume_slot)
        self._cache.hold(holding.path, match)
        if ahead:  # first: to grow may evict states
            self._states.start_from(holding, match.resume_slot, start)
        self._cache.grow(holding.path, self._num_blocks(stop))
        if ahead or not num_computed:
            holding.spans = match.spans
        holding.branch_tokens = self._branch_tokens(match, request)
        return RequestStep.of(
            request,
            holding,
            start,
            stop,
            num_resumed=start - num_computed,
            spans=holding.spans,
            boundaries=self._boundaries(holding, start, stop),
        )

    def _fetch(
        self, request: DynamicInferenceRequest, match: PrefixMatch, num_computed: int, token_budget: int
    ) -> bool:
        """Fetch a deeper state for a request that can go on at once; whether the match is stale now."""
        tier, holding = self._cache.tier, request.holding
        if tier is None or (holding is not None and not holding.path.shares):
            return False
        start, length, size = max(num_computed, match.resume_tokens), len(request.tokens), self._block_size
        stop = self._stop(start, length, token_budget)
        if stop <= start or not self._affords(request, match, stop):
            return False
        if holding is None and not self._has_slots(match.resume_slot):
            return False
        limit = length - 1
        if request.max_resume_tokens is not None:
            limit = min(limit, request.max_resume_tokens)
        num_reachable = min(len(match.blocks), limit // size)
        return tier.bring_back(
            self._cache.slots, match.blocks[:num_reachable], request.hashes.keys, start, size
        )

    def _schedule_decode(self, request: DynamicInferenceRequest, holding: Holding) -> RequestStep | None:
        start, path = holding.num_computed, holding.path
        if start == len(path.blocks) * self._block_size:
            if not self._cache.kv_blocks.is_memory_available(1):
                return None
            self._cache.grow(path, len(path.blocks) + 1)
        boundaries = self._boundaries(holding, start, start + 1)
        return RequestStep.of(request, holding, start, start + 1, decoding=True, boundaries=boundaries)

    def _following(self, request: DynamicInferenceRequest, holding: Holding) -> RequestStep | None:
        """The decode of a token that only the device knows; None where it needs or completes a KV block."""
        start = holding.num_computed
        if start == len(holding.path.blocks) * self._block_size or (start + 1) % self._block_size == 0:
            return None
        return RequestStep.of(request, holding, start, start + 1, decoding=True, follows=True)

    def draft(self, step: RequestStep, tokens: Sequence[int]) -> RequestStep:
        """The step with as many of the drafts `tokens` as there are free KV blocks for; evicts nothing."""
        path = step.holding.path
        if self._config.replays:  # a draft may be wrong, and so may not complete a chunk
            tokens = tokens[: max(0, -step.stop % self._chunk_size - 1)]
        room = len(path.blocks) * self._block_size - step.stop
        num_missing = self._num_blocks(max(0, len(tokens) - room))
        num_missing = min(num_missing, self._cache.kv_blocks.total_avail)
        self._cache.grow(path, len(path.blocks) + num_missing)
        drafts = tuple(tokens[: room + num_missing * self._block_size])
        if not drafts:
            return step
        stop = step.stop + len(drafts)
        boundaries = self._boundaries(step.holding, step.start, stop)
        return replace(step, stop=stop, drafts=drafts, boundaries=boundaries)

    def trim(self, holding: Holding) -> None:
        """Release the KV blocks that only drafts needed."""
        self._cache.trim(holding.path, self._num_blocks(holding.num_computed))

    def _stop(self, start: int, length: int, budget: int) -> int:
        """Where the step ends. A cut step ends on a block or chunk; where decodes replay it must."""
        if length - start <= budget:
            return length
        replays = self._config.replays
        for grid in (self._block_size, self._chunk_size):
            if replays and grid % self._chunk_size:  # blocks without states may be shorter than chunks
                continue
            stop = (start + budget) // grid * grid
            if stop > start:
                return stop
        return start if replays else start + budget

    def _affords(self, request: DynamicInferenceRequest, match: PrefixMatch, stop: int) -> bool:
        """Whether the step's blocks are available; a waiting request needs the blocks of its whole prompt."""
        holding = request.holding
        if holding is None:
            return self._cache.affords(self._num_blocks(len(request.tokens)), match, None)
        return self._cache.affords(self._num_blocks(stop), match, holding.path)

    def _has_slots(self, resume_slot: int) -> bool:
        """Whether a waiting request can get live slots, once running ones unpin what they resumed from."""
        for holding in self._rows.holdings:
            if self._rows.has_slots(resume_slot):
                return True
            self._states.move_to_live(holding)
        return self._rows.has_slots(resume_slot)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _branch_tokens(self, match: PrefixMatch, request: DynamicInferenceRequest) -> int:
        """Tokens that the sequence shares with an earlier one before the two differ, else 0.

        Seen [a b c d], sequence [a b x]: 2 blocks. A sequence that only continues or repeats one: 0.
        """
        depth, keys = match.seen_tokens // self._block_size, request.hashes.keys
        if not 0 < depth < len(keys):
            return 0
        return match.seen_tokens if self._cache.tree.was_continued(keys[depth - 1]) else 0

    def _boundaries(self, holding: Holding, start: int, stop: int) -> tuple[Boundary, ...]:
        """The boundaries in (start, stop] whose states the request's plan stores."""
        if not holding.path.shares or start // self._block_size == stop // self._block_size:
            return ()
        return checked_boundaries(
            holding.path.plan, start, stop, holding.prefill_length, self._block_size, holding.branch_tokens
        )
