"""The live slots and rows of running requests, and how a request gets what its next step needs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...config import InferenceConfig
from ...errors import RequestOverflowError
from ...validation import INT32_MAX, integer, integers
from .cache.checkpoint_plan import Boundary, checked_boundaries
from .cache.memory import DirtyEntries
from .cache.prefix_cache import PrefixCache
from .cache.prefix_match import PrefixMatch
from .cache.state_slots import StateSlots
from .request import DynamicInferenceRequest, Holding, RequestStep
from .states import RequestStates


class MambaMetadata:
    """Which live slots each running request owns.

    Live slots have a pool of their own, or are slots of the cache's pool (`slots`), so that those of idle
    rows hold cached states. That pool has `num_live_slots` slots more than pins may keep, and no pin of a
    running request lasts (`RequestStates.move_to_live` ends it): a free row always finds its live slots.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32 on the CPU, -1 = none. The context writes it as
            requests move between rows; `free_slots` reads it.
        intermediate_count, per_request_intermediate_counts: how many checkpoints this step's kernels
            extract, in all and for each prefill request. The context writes them; the slot allocator
            reads them when it commits.
    """

    def __init__(
        self,
        max_requests: int,
        num_live_slots: int | None = None,
        dirty: DirtyEntries | None = None,
        slots: StateSlots | None = None,
    ) -> None:
        """
        Args:
            max_requests: rows.
            num_live_slots: of all rows together; one a row by default, more with speculative decoding.
            dirty: notes the slots that become free, in a pool of their own.
            slots: the pool of cached states, to allocate from; None for a pool of their own.
        """
        self._dirty = dirty or DirtyEntries()
        self._slots = slots
        self.max_requests = integer("max_requests", max_requests, 1, INT32_MAX)
        self.num_live_slots = integer(
            "num_live_slots", max_requests if num_live_slots is None else num_live_slots, 1, INT32_MAX
        )
        with torch.inference_mode(False):  # `reset` writes it anywhere
            self.request_to_mamba_state_idx = torch.empty(self.max_requests, dtype=torch.int32, device="cpu")
        self.reset()

    @property
    def free_count(self) -> int:
        """Live slots that rows may still allocate."""
        return len(self._free) if self._slots is None else self.num_live_slots - len(self._slots.live)

    def idle_slots(self) -> list[int]:
        """The free slots of a pool of live slots' own."""
        return list(self._free)

    def has_room(self, num_slots: int) -> bool:
        """Whether a request could get `num_slots` live slots, and resume from any cached state."""
        return (len(self._free) if self._slots is None else self._slots.num_available) >= num_slots

    def allocate_slot(self) -> int:
        """A free live slot, as a plain int; its state is stale. Enters no row.

        Raises:
            RequestOverflowError: none is free.
        """
        return self.allocate_slots(1)[0]

    def allocate_slots(self, num_slots: int, resume_slot: int = -1) -> tuple[int, ...]:
        """The live slots of one request; their states are stale. They enter no row. May evict states.

        `resume_slot`: the slot of the state that the request resumes from; -1 for none. Where a shared
        pool has no other slot, the request takes this one over: it is the first of the result, holds the
        request's state, and the state is not cached any more.

        Raises:
            RequestOverflowError, MambaSlotCapacityError: too few are free; nothing is changed.
        """
        slots = self._slots
        if slots is not None:
            return tuple(slots.take_live(num_slots, resume_slot))
        if len(self._free) < num_slots:
            raise RequestOverflowError(required=num_slots, available=len(self._free))
        taken = tuple(self._free.popitem()[0] for _ in range(num_slots))
        self._dirty.clean(taken)
        return taken

    def free_slot(self, slot: int) -> None:
        """Free `slot`. The caller clears the row that names the slot.

        Raises:
            ValueError: `slot` is out of range or free already; nothing is changed.
        """
        last = (self.num_live_slots if self._slots is None else self._slots.num_slots) - 1
        self._release("slot", [integer("slot", slot, 0, last)])

    def free_slots(self, request_indices: Iterable[int] | Tensor) -> None:
        """Free the slots of these rows and clear the rows; rows without a slot are skipped.

        Raises:
            ValueError: a row is out of range, or its slot is named twice or free already; nothing is
                changed.
        """
        rows = integers("request_indices", request_indices, 0, self.max_requests - 1)
        slots = self.request_to_mamba_state_idx[rows].tolist()
        self._release("request_indices", [slot for slot in slots if slot != -1])
        self.request_to_mamba_state_idx[rows] = -1

    def _release(self, named_by: str, slots: list[int]) -> None:
        released = dict.fromkeys(slots)
        in_use = (
            released.keys().isdisjoint(self._free)
            if self._slots is None
            else self._slots.live.issuperset(released)
        )
        if len(released) < len(slots) or not in_use:
            raise ValueError(f"{named_by} names slots {slots}; accepted: live slots in use, once each")
        if self._slots is not None:
            self._slots.free_live(slots)
            return
        self._dirty.note(released)
        self._free.update(released)

    def reset(self) -> None:
        """All slots free, all rows empty, no checkpoints. Rows keep their storage."""
        num_own = self.num_live_slots if self._slots is None else 0
        self._free = dict.fromkeys(reversed(range(num_own)))  # a stack with fast membership tests
        self._dirty.note(self._free)
        self.request_to_mamba_state_idx.fill_(-1)
        self.intermediate_count = 0
        self.per_request_intermediate_counts: list[int] = []

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned, and that no two rows name one."""
        named = [slot for slot in self.request_to_mamba_state_idx.tolist() if slot != -1]
        assert len(set(named)) == len(named), "two rows name one slot"
        if self._slots is not None:
            assert self._slots.live.issuperset(named), "a row names a slot that is not live"
            assert self.free_count >= 0, "more slots are live than rows may have"
            return
        assert all(0 <= slot < self.num_live_slots for slot in self._free), "a free slot is out of range"
        assert all(0 <= slot < self.num_live_slots for slot in named), "a row names a slot out of range"
        assert self._free.keys().isdisjoint(named), "a row names a free slot"


class Admission:
    """Rows, and what requests need for their next step: all of it is allocated, or nothing.

    A request keeps its row, and its live slots, until it is released. This class alone writes
    `Holding.branch_tokens` and `Holding.spans`.

    Attributes:
        block_table: [rows, blocks of the longest sequence] int32 on the CPU: each row's KV blocks in order,
            then -1.
    """

    def __init__(
        self,
        config: InferenceConfig,
        chunk_size: int,
        cache: PrefixCache,
        metadata: MambaMetadata,
        states: RequestStates,
        dirty: DirtyEntries,
    ) -> None:
        """`dirty`: notes the rows that become free."""
        self._shares = config.enable_prefix_caching
        self._replays = config.replays
        self._block_size = config.block_size_tokens
        self._chunk_size = chunk_size
        self._cache = cache
        self._metadata = metadata
        self._states = states
        self._dirty = dirty
        shape = (
            config.max_requests,
            min(cache.kv_blocks.total_count, self._num_blocks(config.max_sequence_length)),
        )
        self.block_table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        self._table: npt.NDArray[np.integer[Any]] = self.block_table.numpy()
        self._first_slots = metadata.request_to_mamba_state_idx.numpy()  # the same memory
        self._slots_per_row = metadata.num_live_slots // config.max_requests
        self._requests: dict[int, DynamicInferenceRequest] = {}
        self._free = list(range(config.max_requests - 1, -1, -1))
        self._dirty.note(self._free)

    # ---- rows

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        return list(self._requests.values())

    @property
    def holdings(self) -> list[Holding]:
        return [request.holding for request in self._requests.values() if request.holding is not None]

    def has(self, request: DynamicInferenceRequest) -> bool:
        """Whether the request holds one of these rows."""
        return request.holding is not None and self._requests.get(request.holding.row) is request

    def admit(self, request: DynamicInferenceRequest, resume_slot: int = -1) -> Holding:
        """Give a waiting request a row, live slots and an open path. A row must be free.

        `resume_slot`: see `MambaMetadata.allocate_slots`.
        """
        live = self._metadata.allocate_slots(self._slots_per_row, resume_slot)
        row = self._free.pop()
        self._dirty.clean([row])
        self._first_slots[row] = live[0]
        path = self._cache.open(
            request.hashes, request.plan, self._table[row], max_resume_tokens=request.most_resumed,
            again=request.num_counted > 0,
        )  # fmt: skip
        request.holding = Holding(row, live, path, prefill_length=len(request.tokens))
        self._requests[row] = request
        return request.holding

    def release(self, request: DynamicInferenceRequest) -> Holding:
        """Free the request's row and live slots; the caller releases the path of the returned Holding."""
        holding, request.holding = request.holding, None
        assert holding is not None, "a request without a row is released"
        for slot in holding.live_slots:
            self._metadata.free_slot(slot)
        self._first_slots[holding.row] = -1
        del self._requests[holding.row]
        self._dirty.note([holding.row])
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

    # ---- steps

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What is cached of a request's tokens; changes only the request's hash chain and its last match."""
        path = request.holding.path if request.holding is not None else None
        if self._shares and (path is None or path.shares):
            request.hashes.extend_to(request.tokens)
        num_tokens, limit = len(request.tokens), request.max_resume_tokens
        request.match = self._cache.match(request.hashes, num_tokens, path, limit, request.match)
        return request.match

    def schedule(self, request: DynamicInferenceRequest, token_budget: int) -> RequestStep | None:
        """The request's next step of at most `token_budget` tokens; None where blocks or tokens are short."""
        holding = request.holding
        if holding is not None and holding.decoding:
            return self._schedule_decode(request, holding)
        if holding is None and not self._free:
            raise RequestOverflowError(len(self._table) + 1, len(self._table))
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
            if not self._has_slots():
                return None
            holding = self.admit(request, match.resume_slot)
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
        if holding is None and not self._has_slots():
            return False
        num_reachable = min(len(match.blocks), request.most_resumed // size)
        return tier.bring_back(
            self._cache.slots, match.blocks[:num_reachable], request.hashes.keys, start, size
        )

    def _schedule_decode(self, request: DynamicInferenceRequest, holding: Holding) -> RequestStep | None:
        """A decode; one of a token that only the device knows neither needs nor completes a KV block."""
        start, path, size = holding.num_computed, holding.path, self._block_size
        follows, needs_block = start == len(request.tokens), start == len(path.blocks) * size
        if follows and (needs_block or (start + 1) % size == 0):
            return None
        if needs_block:
            if not self._cache.kv_blocks.is_memory_available(1):
                return None
            self._cache.grow(path, len(path.blocks) + 1)
        return RequestStep.of(
            request, holding, start, start + 1, decoding=True, follows=follows,
            boundaries=self._boundaries(holding, start, start + 1),
        )  # fmt: skip

    def draft(self, step: RequestStep, tokens: Sequence[int]) -> RequestStep:
        """The step with as many of the drafts `tokens` as there are free KV blocks for; evicts nothing."""
        path = step.holding.path
        if self._replays:  # a draft may be wrong, and so may not complete a chunk
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
        for grid in (self._block_size, self._chunk_size):
            if self._replays and grid % self._chunk_size:  # blocks without states may be shorter than chunks
                continue
            stop = (start + budget) // grid * grid
            if stop > start:
                return stop
        return start if self._replays else start + budget

    def _affords(self, request: DynamicInferenceRequest, match: PrefixMatch, stop: int) -> bool:
        """Whether the step's blocks are available; a waiting request needs the blocks of its whole prompt."""
        holding = request.holding
        if holding is None:
            return self._cache.affords(self._num_blocks(len(request.tokens)), match, None)
        return self._cache.affords(self._num_blocks(stop), match, holding.path)

    def _has_slots(self) -> bool:
        """Whether a waiting request can get live slots, once running ones unpin what they resumed from."""
        for holding in self.holdings:
            if self._metadata.has_room(self._slots_per_row):
                return True
            self._states.move_to_live(holding)
        return self._metadata.has_room(self._slots_per_row)

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
