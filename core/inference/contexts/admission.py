"""The rows and live slots of running requests, and how a request gets what its next step needs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...config import InferenceConfig
from ...validation import ceil_div
from .cache.cached_states import PrefixMatch
from .cache.checkpoint_plan import Boundary, best_shared_depth, checked_boundaries
from .cache.prefix_cache import PrefixCache
from .device_memory import DeviceMemory
from .dynamic_request import Allocation, DynamicInferenceRequest, ScheduledRequest
from .input_blocks import InputBlockTable
from .pool_sizes import num_live_slots
from .request_states import RequestStates


class Admission:
    """Rows, and what requests need for their next step: all of it is allocated, or nothing.

    A free row always finds live slots, because no pin of a running request lasts
    (`RequestStates.move_to_live`).
    """

    def __init__(
        self, config: InferenceConfig, chunk_size: int, cache: PrefixCache, request_states: RequestStates,
        memory: DeviceMemory,
    ) -> None:  # fmt: skip
        self._caches = config.enable_prefix_caching
        self._replays = config.replays
        self._block_size = config.block_size_tokens
        self._chunk_size = chunk_size
        self._cache = cache
        self._request_states = request_states
        self._scrubber = memory.scrubber
        input_blocks = memory.sizes.input_blocks
        self._has_input_blocks = input_blocks.tokens > 0
        self.input_table = InputBlockTable(input_blocks, config.max_requests, chunk_size, cache.kv_blocks)
        self.max_blocks = cache.kv_blocks.total_count - input_blocks.per_chunk  # of KV, of one request
        shape = config.max_requests, min(self.max_blocks, self._num_blocks(config.max_sequence_length))
        self.block_table: npt.NDArray[np.integer[Any]] = np.full(shape, -1, np.int32)
        self.slots_per_row = num_live_slots(config) // config.max_requests
        self._shares_pool = memory.state_pool.is_shared
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._free_rows = list(range(config.max_requests - 1, -1, -1))
        self._scrubber.inputs.add(self._free_rows)
        if not self._shares_pool:
            self._scrubber.live.add(self.idle_slots())

    # ---- rows

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        return list(self._requests.values())

    @property
    def allocations(self) -> list[Allocation]:
        return [request.allocation for request in self._requests.values() if request.allocation is not None]

    def idle_slots(self) -> list[int]:
        """The live slots of free rows, in a pool of their own."""
        return [slot for row in self._free_rows for slot in self._own_slots(row)]

    def _own_slots(self, row: int) -> range:
        """The live slots of a row, in a pool of their own."""
        return range(row * self.slots_per_row, (row + 1) * self.slots_per_row)

    @property
    def num_available_slots(self) -> int:
        """The live slots that one more request could get; a row has its own where they have a pool."""
        return self._cache.slots.num_available if self._shares_pool else self.slots_per_row

    def admit(
        self, request: DynamicInferenceRequest, resume_slot: int = -1, evict_last: Iterable[int] = ()
    ) -> Allocation:
        """Give a waiting request a row, an open path, and live slots as `StateSlots.allocate_live` does."""
        row = self._free_rows[-1]
        if self._shares_pool:
            live = tuple(self._cache.slots.allocate_live(self.slots_per_row, resume_slot, evict_last))
        else:
            live = tuple(self._own_slots(row))
            self._scrubber.live.scrub(live)
        if self._scrubber.inputs.scrubs:
            self._scrubber.inputs.scrub([row])
        self._free_rows.pop()
        path = self._cache.open(
            request.chain, request.plan, self.block_table[row], max_resume_tokens=request.max_resume_tokens,
            was_preempted=request.num_counted > 0,
        )  # fmt: skip
        request.allocation = Allocation(row, live, path, prefill_length=len(request.tokens))
        self._requests[row] = request
        return request.allocation

    def release(self, request: DynamicInferenceRequest) -> Allocation:
        """Free the request's row and live slots; the caller releases the path of the returned Allocation."""
        allocation, request.allocation = request.allocation, None
        assert allocation is not None, "a request without a row is released"
        if self._shares_pool:
            self._cache.slots.free_live(allocation.live_slots)
        else:
            self._scrubber.live.add(allocation.live_slots)
        if allocation.input_blocks:
            self.input_table.release(allocation)
        del self._requests[allocation.row]
        if self._scrubber.inputs.scrubs:
            self._scrubber.inputs.add([allocation.row])
        self._free_rows.append(allocation.row)
        return allocation

    def clear(self) -> None:
        """Remove all requests from their rows, and free nothing; use this object no more."""
        for request in self._requests.values():
            request.allocation = None

    def check_integrity(self) -> None:
        """Raise AssertionError where rows, requests and live slots contradict each other."""
        num_rows = len(self.block_table)
        assert len(self._requests) + len(self._free_rows) == num_rows, "a row is lost"
        assert not self._requests.keys() & set(self._free_rows), "a row is both free and taken"
        live = [slot for allocation in self.allocations for slot in allocation.live_slots]
        assert len(set(live)) == len(live), "two rows share a live slot"
        if self._shares_pool:
            assert self._cache.slots.live_slots == set(live), "a live slot leaked"
        for row in range(num_rows):
            if (request := self._requests.get(row)) is None:
                assert (self.block_table[row] == -1).all(), "a free row has blocks"
                continue
            allocation = request.allocation
            assert allocation is not None, "a row is taken by a request that holds nothing"
            assert allocation.row == row, "a request has another row"
            assert len(allocation.live_slots) == self.slots_per_row, "a row has too few live slots"
            self.input_table.check_integrity(allocation)
            if not self._shares_pool:
                assert list(allocation.live_slots) == [*self._own_slots(row)], "a row has another's live slot"

    # ---- what the next step needs

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What is cached of a request's tokens; changes only the request's hash chain and its last match."""
        path = request.allocation.path if request.allocation is not None else None
        if self._caches and (path is None or path.caches):
            request.chain.extend_to(request.tokens)
        num_tokens, limit = len(request.tokens), request.max_unscored_tokens
        request.match = self._cache.match(request.chain, num_tokens, path, limit, request.match)
        return request.match

    def resume_slots(self, requests: Sequence[DynamicInferenceRequest]) -> list[int]:
        """The slots that waiting requests resume from; none where rows for all of them evict no state."""
        num_slots = len(requests) * self.slots_per_row
        if not self._shares_pool or len(self._cache.slots.free_slots) >= num_slots:
            return [-1] * len(requests)
        return [self.match(request).resume_slot for request in requests]

    def schedule_request(
        self, request: DynamicInferenceRequest, token_budget: int, evict_last: Iterable[int] = (),
        waiting: Iterable[DynamicInferenceRequest] = (),
    ) -> ScheduledRequest | None:  # fmt: skip
        """Allocate what up to `token_budget` tokens of a request need; None, and nothing, where that lacks.

        Every part of a prefill is matched again, because others may have stored states since. The search for
        room may change cached states, also where it ends in None: running requests copy and unpin those that
        they resumed from, and a fetch may evict some. An admitted request stores a state for `waiting` ones.
        """
        allocation = request.allocation
        if allocation is not None and allocation.decoding:
            return self._schedule_decode(request, allocation)
        assert allocation is not None or self._free_rows, "more requests are scheduled than there are rows"
        num_computed = allocation.num_computed if allocation is not None else 0
        if (part := self._part(request, token_budget)) is None:
            return None
        match, start, stop = part
        fetchable = match.blocks[: request.max_resume_tokens // self._block_size]
        if self._cache.slots.fetch_state(fetchable, request.chain.hashes, start, self._block_size):
            if (part := self._part(request, token_budget)) is None:  # states have changed
                return None
            match, start, stop = part
        resumes, admits = match.resume_tokens > num_computed, allocation is None
        if allocation is None:
            request.shared_tokens = self._shared_tokens(request, match, waiting)
            allocation = self.admit(request, match.resume_slot, evict_last)
        self._cache.hold(allocation.path, match)
        if resumes:  # first: to grow may evict states
            self._request_states.start_from(allocation, match.resume_slot, start)
        self._cache.grow(allocation.path, self._num_blocks(stop))
        if self._has_input_blocks:
            self.input_table.grow(allocation, stop % self._chunk_size)
        if resumes or not num_computed:
            allocation.spans = match.spans
        allocation.branch_tokens = self._branch_tokens(match, request)
        return ScheduledRequest(
            allocation.path, request.tokens, start, stop, request=request, allocation=allocation,
            boundaries=self._boundaries(allocation, start, stop), num_resumed=start - num_computed,
            spans=allocation.spans, admits=admits,
        )  # fmt: skip

    def _part(self, request: DynamicInferenceRequest, budget: int) -> tuple[PrefixMatch, int, int] | None:
        """A request's match, and tokens [start, stop) to compute next; None: blocks or live slots lack."""
        match = self.match(request)
        allocation = request.allocation
        num_computed = allocation.num_computed if allocation is not None else 0
        start = max(num_computed, match.resume_tokens)
        stop = self._stop(start, len(request.tokens), budget)
        if stop <= start or not self._can_hold(request, match, stop):
            return None
        if allocation is None and not self._unpin_resumed():
            return None
        return match, start, stop

    def _schedule_decode(
        self, request: DynamicInferenceRequest, allocation: Allocation
    ) -> ScheduledRequest | None:
        """A decode, perhaps of a token that only the device knows."""
        start, path = allocation.num_computed, allocation.path
        num_kv_blocks, num_input_blocks = self._num_missing(allocation)
        if num_kv_blocks or num_input_blocks:
            if not self._cache.kv_blocks.is_memory_available(num_kv_blocks + num_input_blocks):
                return None
            self._cache.grow(path, len(path.blocks) + num_kv_blocks)
            if num_input_blocks:
                self.input_table.grow(allocation, start % self._chunk_size + 1)
        return ScheduledRequest(
            path, request.tokens, start, start + 1, request=request, allocation=allocation, decoding=True,
            boundaries=self._boundaries(allocation, start, start + 1),
            decodes_unread=start == len(request.tokens),
        )  # fmt: skip

    def _num_missing(self, allocation: Allocation) -> tuple[int, int]:
        """How many KV blocks and input blocks a decode lacks for its next token."""
        start = allocation.num_computed
        num_kv_blocks = 1 if start == len(allocation.path.blocks) * self._block_size else 0
        if not self._has_input_blocks:
            return num_kv_blocks, 0
        return num_kv_blocks, self.input_table.num_missing(allocation, start % self._chunk_size + 1)

    def can_decode(self, allocations: Iterable[Allocation]) -> bool:
        """Whether there are KV and input blocks for one more token of all these decodes; evicts nothing."""
        num_blocks = sum(sum(self._num_missing(allocation)) for allocation in allocations)
        return not num_blocks or self._cache.kv_blocks.is_memory_available(num_blocks)

    def add_drafts(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> ScheduledRequest:
        """Allocate free KV blocks for as many of the drafts `tokens` as fit; the decode with these drafts."""
        path = scheduled.allocation.path
        if self._replays:  # a draft may be wrong, and so may not complete a chunk
            tokens = tokens[: max(0, -scheduled.stop % self._chunk_size - 1)]
            tokens = self.input_table.grow_for_drafts(scheduled, tokens)
        room = len(path.blocks) * self._block_size - scheduled.stop
        num_missing = self._num_blocks(max(0, len(tokens) - room))
        num_missing = min(num_missing, self._cache.kv_blocks.total_avail)
        self._cache.grow(path, len(path.blocks) + num_missing)
        drafts = tuple(tokens[: room + num_missing * self._block_size])
        if not drafts:
            return scheduled
        stop = scheduled.stop + len(drafts)
        boundaries = self._boundaries(scheduled.allocation, scheduled.start, stop)
        return replace(scheduled, stop=stop, drafts=drafts, boundaries=boundaries)

    def num_input_blocks(self, num_tokens: int) -> int:
        """KV blocks for the inputs of a request with so many tokens: of those since the last grid point."""
        return self.input_table.num_input_blocks(num_tokens) if self._has_input_blocks else 0

    # ---- blocks and boundaries of a scheduled request

    def trim(self, allocation: Allocation) -> None:
        """Release the KV blocks that only drafts needed."""
        self._cache.trim(allocation.path, self._num_blocks(allocation.num_computed))

    def _stop(self, start: int, length: int, budget: int) -> int:
        """Where a part of a prefill ends: on a block or chunk if it is cut; where decodes replay it must."""
        if length - start <= budget:
            return length
        for grid in (self._block_size, self._chunk_size):
            if self._replays and grid % self._chunk_size:  # blocks without states may be shorter than chunks
                continue
            stop = (start + budget) // grid * grid
            if stop > start:
                return stop
        return start if self._replays else start + budget

    def _can_hold(self, request: DynamicInferenceRequest, match: PrefixMatch, stop: int) -> bool:
        """Whether the blocks up to `stop` are available; where the request waits, of its whole prompt."""
        path = request.allocation.path if request.allocation is not None else None
        end = len(request.tokens) if path is None else stop
        return self._cache.can_hold(self._num_blocks(end), match, path, self.num_input_blocks(end))

    def _unpin_resumed(self) -> bool:
        """Unpin what running requests resumed from until a waiting one can get live slots; False: too few."""
        for allocation in self.allocations:
            if self.num_available_slots >= self.slots_per_row:
                return True
            self._request_states.move_to_live(allocation)
        return self.num_available_slots >= self.slots_per_row

    def _num_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self._block_size)

    def _shared_tokens(
        self, request: DynamicInferenceRequest, match: PrefixMatch, waiting: Iterable[DynamicInferenceRequest]
    ) -> int:
        """Where a request that is admitted should store a state for those that wait; 0 for nowhere."""
        others = [other for other in waiting if other is not request] if self._caches else []
        if not others:
            return 0
        waiting_hashes = [other.hashes_to(other.max_resume_tokens) for other in others]
        hashes, num_resumed = request.hashes_to(len(request.tokens)), match.resume_tokens // self._block_size
        return best_shared_depth(hashes, waiting_hashes, num_resumed) * self._block_size

    def _branch_tokens(self, match: PrefixMatch, request: DynamicInferenceRequest) -> int:
        """After how many tokens the request departs from an earlier or a waiting one; 0: from none.

        Example with blocks a, b, c, d and x: after an earlier [a b c d], [a b x] departs after a and b.
        """
        depth, shared = match.seen_tokens // self._block_size, request.shared_tokens
        is_inside = 0 < depth < len(request.tokens) // self._block_size
        branches = is_inside and self._cache.tree.was_continued(request.chain.hashes[depth - 1])
        return max(match.seen_tokens if branches else 0, shared if shared > match.resume_tokens else 0)

    def _boundaries(self, allocation: Allocation, start: int, stop: int) -> tuple[Boundary, ...]:
        """The boundaries in (start, stop] whose states the request's plan stores."""
        if not allocation.path.caches or start // self._block_size == stop // self._block_size:
            return ()
        return checked_boundaries(
            allocation.path.plan, start, stop, allocation.prefill_length, self._block_size,
            allocation.branch_tokens,
        )  # fmt: skip
