"""The pool of states, live and durable, and where the state of each running request is."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...state_spec import SCALES, SlotLayout, StateTensor
from ...validation import addressable
from ..kernels.state_copy import copy_states, decode_states, encode_states
from ..kernels.state_pools import CodedTensor, ConvAndSsm
from .cache.free_entries import DirtyEntries
from .cache.prefix_cache import PrefixCache
from .dynamic_request import Allocation, Batch, ScheduledRequest

IdleSlots = Callable[[], Sequence[int]]
"""Returns the live slots that no request owns now, in a pool without durable states."""


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of zeros; on a CPU its pages are allocated when they are first written."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class StatePool:
    """Live and durable states in one index space.

    A live slot is updated in place by its request; a durable slot is immutable once committed. In a shared
    pool a slot is either at different times, and a pool index is a slot's id. Else:

        pool index   0 ........ num_live-1 | num_live ........ num_live+num_durable-1
        holds        live slot 0 ..        | durable slot 0 ..

    A slot is contiguous: all tensors of a state, each with all its layers.
    """

    def __init__(
        self, states: Sequence[StateTensor], num_live: int, num_durable: int,
        device: torch.device | str = "cpu", is_shared: bool = False, memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`memory`: [slots, bytes of a slot] uint8, zeros, perhaps with gaps between slots; None: new."""
        self.is_shared = is_shared
        self.states = tuple(states)
        self.num_live = num_live
        self.num_durable = num_durable
        self.num_slots = num_live + num_durable  # of a shared pool, each part has these for certain
        self._first_durable = 0 if is_shared else self.num_live
        self._offsets, self.slot_bytes = SlotLayout.of(self.states)
        self._device = torch.device(device)
        addressable("states", list(self.states), (self.num_slots, self.slot_bytes), torch.uint8)
        self.allocate(memory)

    def allocate(self, memory: Tensor | None = None) -> None:
        """Use `memory`, as the constructor does. A call that raises changes nothing."""
        self._put(self._zeros(self.num_slots) if memory is None else memory)

    def _put(self, memory: Tensor) -> None:
        views = {
            tensor.name: self._view(memory, tensor, offset)
            for tensor, offset in zip(self.states, self._offsets, strict=True)
        }
        self.memory = memory
        self._views = views

    def deallocate(self) -> None:
        """Free the memory; tensors without slots remain."""
        self._put(self._zeros(0))

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def _zeros(self, num_slots: int) -> Tensor:
        return zeroed((num_slots, self.slot_bytes), torch.uint8, self._device)

    @staticmethod
    @torch.inference_mode(False)
    def _view(memory: Tensor, tensor: StateTensor, offset: int) -> Tensor:
        """[layers, slots, *shape] of one tensor."""
        if not tensor.num_layers or not len(memory):
            shape = tensor.num_layers, len(memory), *tensor.shape
            return torch.zeros(shape, dtype=tensor.dtype, device=memory.device)
        entries = memory[:, offset : offset + tensor.state_bytes].view(tensor.dtype)
        return entries.view(len(memory), tensor.num_layers, *tensor.shape).movedim(0, 1)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor `name` of all slots, [layers, slots, *shape], a view."""
        return self._views[name]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._views.values())

    def durable(self, name: str) -> Tensor:
        """[layers, num_durable, *shape], a view; all slots of a shared pool."""
        return self[name][:, self._first_durable :]

    def durable_index(self, slot: int) -> int:
        return self._first_durable + slot

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole slots, pair by pair, in one launch; no destination is a source or named twice."""
        slots = self.memory[None]
        states = ConvAndSsm(slots[..., :0], slots)  # one tensor for all: slots are contiguous
        copy_states(states, sources, states, destinations)


def coded_tensors(live: StatePool, durable: StatePool) -> list[CodedTensor]:
    """The tensors of live slots, and of durable slots that store them in fewer bytes, where they are now."""
    pairs = [(state, durable[state.name]) for state in live.states]
    return [
        CodedTensor(live[state.name], codes, durable[state.name + SCALES], state.scale_axis)
        if codes.dtype == torch.int8
        else CodedTensor(live[state.name], codes)
        for state, codes in pairs
    ]


class RequestStates:
    """Where each request's state is: in its live slot, or in a durable slot, pinned until a step reads it.

    Kernels that write elsewhere than they read store boundary states in durable slots themselves. For kernels
    that update states in place, `gather` copies states to live slots before a step, and `scatter` copies
    boundary states from there afterwards.
    """

    _grid = 1  # a state that is no multiple of it is not stored

    def __init__(self, pool: StatePool, cache: PrefixCache, in_place: bool = False) -> None:
        self._pool = pool
        self._cache = cache
        self._in_place = in_place
        self._writes_durable = not in_place  # whether kernels do

    def start_from(self, allocation: Allocation, slot: int, num_tokens: int) -> None:
        """Continue from the state after `num_tokens` tokens in a durable slot, perhaps a live slot now."""
        if not (self._pool.is_shared and slot in allocation.live_slots):
            self._cache.pin_state(allocation.path, slot, resumes=True)
        allocation.state_index = self._pinned_index(slot)
        allocation.num_computed = num_tokens

    def _pinned_index(self, slot: int) -> int:
        """`Allocation.state_index` while the request's state is in a pinned durable slot."""
        return self._pool.durable_index(slot)

    def _last_grid_point(self, position: int) -> int:
        return position // self._grid * self._grid

    def max_inner_states(self, batch: Batch, idle_slots: IdleSlots) -> int | None:
        """How many states inside its prefills the batch can store; None: any number."""
        return None

    def gather(self, batch: Batch, idle_slots: IdleSlots) -> None:
        """Before a step: copy states to live slots where the kernels need them there."""
        if self._in_place:
            resuming = (scheduled.allocation for scheduled in batch if scheduled.allocation.num_computed)
            self._to_live([a for a in resuming if a.state_index != a.live_slots[0]])

    def scatter(self, batch: Batch, late: Batch = ()) -> None:
        """After a step: bring boundary states to their slots where kernels do not; `late` slots are new."""
        pairs = [
            (self._live_slot(scheduled, position), self._pool.durable_index(slot))
            for scheduled in (late if self._writes_durable else batch)
            for position, slot in scheduled.destinations.items()
            if position >= scheduled.stop - len(scheduled.drafts)  # else a prefill stores it
        ]
        if pairs:
            self._pool.copy(*zip(*pairs, strict=True))

    def inner_destinations(self, scheduled: ScheduledRequest) -> list[tuple[int, int]]:
        """Positions inside a prefill, and the pool indices where the prefill stores the states there."""
        inner = [place for place in scheduled.destinations.items() if place[0] != scheduled.stop]
        return [(position, self._pool.durable_index(slot)) for position, slot in inner]

    def completed_destination(self, scheduled: ScheduledRequest) -> int:
        """The pool index for the state of a chunk that a decode by replay completes; -1: none."""
        return -1

    def destinations(self, scheduled: ScheduledRequest) -> list[int]:
        """The pool index for the request's state after the step; with drafts, one for each token's state."""
        if not scheduled.drafts:
            return [self._destination(scheduled, scheduled.stop)]
        return [self._destination(scheduled, end) for end in range(scheduled.start + 1, scheduled.stop + 1)]

    def _destination(self, scheduled: ScheduledRequest, position: int) -> int:
        """The slot reserved for the state at `position`, or a live slot."""
        slot = scheduled.destinations.get(position, -1) if self._writes_durable else -1
        return self._live_slot(scheduled, position) if slot < 0 else self._pool.durable_index(slot)

    def _live_slot(self, scheduled: ScheduledRequest, position: int) -> int:
        """The live slot for the state at `position`: `stop`, or the end of any token of a decode."""
        return scheduled.allocation.live_slots[position - scheduled.stop + len(scheduled.drafts)]

    def release_source(self, scheduled: ScheduledRequest) -> None:
        """After a launched step: unpin the durable slot that its row read, unless a later step reads it."""
        if self._last_grid_point(scheduled.stop) > scheduled.start:
            self._cache.unpin_state(scheduled.allocation.path)

    def advance(self, scheduled: ScheduledRequest, committed: Mapping[int, int]) -> None:
        """Set where a launched step wrote its request's state; `committed`: boundary -> its slot, or -1."""
        allocation, position = scheduled.allocation, self._last_grid_point(scheduled.stop)
        allocation.num_computed = scheduled.stop
        if position <= scheduled.start:
            return
        slot = committed.get(position, -1) if self._writes_durable else -1
        if slot >= 0:
            self._cache.pin_state(allocation.path, slot, resumes=False)
            allocation.state_index = self._pool.durable_index(slot)
        else:
            allocation.state_index = self._live_slot(scheduled, position)
            if self._writes_durable and position in scheduled.destinations:
                # Refused, or not findable yet; no launched kernel overwrites it.
                self._pool.copy([self._destination(scheduled, position)], [allocation.state_index])

    def skip_decodes(self, allocation: Allocation, num_tokens: int) -> None:
        """Count decodes as made, without steps: the state is in the request's live slot and stays there."""
        allocation.num_computed += num_tokens

    def move_to_live(self, allocation: Allocation) -> None:
        """Copy a state that is only in a durable slot to the request's live slot, and unpin the former."""
        if allocation.path.state_slot >= 0:
            self._to_live([allocation])

    def _to_live(self, allocations: Sequence[Allocation]) -> None:
        """Copy the requests' states to their first live slots, and unpin durable ones."""
        live = [allocation.live_slots[0] for allocation in allocations]
        if live:
            self._copy_to_live(allocations, live)
        for allocation, slot in zip(allocations, live, strict=True):
            allocation.state_index = slot
            self._cache.unpin_state(allocation.path)

    def _copy_to_live(self, allocations: Sequence[Allocation], live: Sequence[int]) -> None:
        self._pool.copy([allocation.state_index for allocation in allocations], live)

    def check_integrity(self, allocations: Sequence[Allocation], during_step: bool) -> None:
        """Raise AssertionError where a request's state is neither in its pinned slot nor in a live slot."""
        for allocation in allocations:
            if allocation.path.state_slot >= 0:
                assert allocation.state_index == self._pinned_index(allocation.path.state_slot)
            elif allocation.num_computed >= self._grid and not during_step:
                assert allocation.state_index in allocation.live_slots, "a request's state is somewhere else"


class EncodedStates(RequestStates):
    """Durable slots are a pool of their own, in fewer bytes.

    `gather` decodes the states that requests resume from, and `scatter` encodes boundary states; a request
    continues from its live slot, never from its own rounded copy. States inside a prefill are written to
    *staging* slots, which belong to one step: those after the live ones, and idle live ones. Without one, a
    state is not stored.
    """

    def __init__(
        self, pool: StatePool, durable: StatePool, cache: PrefixCache, scratch: DirtyEntries, in_place: bool
    ) -> None:
        super().__init__(pool, cache, in_place)
        self._durable = durable
        self._scratch = scratch
        self._writes_durable = False
        self._staged: dict[tuple[int, int], int] = {}  # row and position -> staging slot, in this step

    def _pinned_index(self, slot: int) -> int:
        return -1  # until `gather`

    def max_inner_states(self, batch: Batch, idle_slots: IdleSlots) -> int:
        return len(self._staging_slots(batch, idle_slots))

    def _staging_slots(self, batch: Batch, idle_slots: IdleSlots) -> list[int]:
        """The slots that are free in a step: those for staging, then idle live ones."""
        staging = range(self._pool.num_live, self._pool.num_slots)
        prefills = (scheduled.allocation for scheduled in batch if not scheduled.decoding)
        drafts = [slot for prefill in prefills for slot in prefill.live_slots[1:]]
        return [*staging, *drafts, *idle_slots()]

    def gather(self, batch: Batch, idle_slots: IdleSlots) -> None:
        places = iter(self._staging_slots(batch, idle_slots))
        self._staged = {
            (scheduled.allocation.row, position): next(places)
            for scheduled in batch
            for position in scheduled.destinations
            if position < scheduled.stop - len(scheduled.drafts)
        }
        self._scratch.add(self._staged.values())
        allocations = [scheduled.allocation for scheduled in batch]
        self._to_live([resumed for resumed in allocations if resumed.path.state_slot >= 0])
        super().gather(batch, idle_slots)

    def _copy_to_live(self, allocations: Sequence[Allocation], live: Sequence[int]) -> None:
        pinned = [allocation.path.state_slot for allocation in allocations]
        if pinned[0] >= 0:
            decode_states(coded_tensors(self._pool, self._durable), pinned, live)
        else:
            super()._copy_to_live(allocations, live)

    def scatter(self, batch: Batch, late: Batch = ()) -> None:
        pairs = [
            (self._place(scheduled, position), slot)
            for scheduled in batch
            for position, slot in scheduled.destinations.items()
        ]
        if pairs:
            encode_states(coded_tensors(self._pool, self._durable), *zip(*pairs, strict=True))
        self._scratch.scrub_all()

    def inner_destinations(self, scheduled: ScheduledRequest) -> list[tuple[int, int]]:
        inner = (position for position in scheduled.destinations if position != scheduled.stop)
        return [(position, self._place(scheduled, position)) for position in inner]

    def _place(self, scheduled: ScheduledRequest, position: int) -> int:
        """The live or staging slot where the step writes the request's state at a boundary."""
        staged = self._staged.get((scheduled.allocation.row, position))
        return self._live_slot(scheduled, position) if staged is None else staged


class ReplayedStates(RequestStates):
    """Decodes compute by replay from the state at the last grid point, which is in the one live slot."""

    def __init__(self, pool: StatePool, cache: PrefixCache, chunk_size: int) -> None:
        super().__init__(pool, cache)
        self._grid = chunk_size

    def inner_destinations(self, scheduled: ScheduledRequest) -> list[tuple[int, int]]:
        inner, last = super().inner_destinations(scheduled), self._last_grid_point(scheduled.stop)
        if scheduled.start < last < scheduled.stop and last not in scheduled.destinations:
            inner.append((last, self._live_slot(scheduled, last)))
        return inner

    def completed_destination(self, scheduled: ScheduledRequest) -> int:
        completes = scheduled.decoding and scheduled.stop % self._grid == 0
        return self._destination(scheduled, scheduled.stop) if completes else -1

    def destinations(self, scheduled: ScheduledRequest) -> list[int]:
        if scheduled.decoding or scheduled.stop % self._grid:
            return [-1] * (scheduled.length if scheduled.decoding else 1)
        return super().destinations(scheduled)

    def _live_slot(self, scheduled: ScheduledRequest, position: int) -> int:
        return scheduled.allocation.live_slots[0]

    def advance(self, scheduled: ScheduledRequest, committed: Mapping[int, int]) -> None:
        super().advance(scheduled, committed)
        if scheduled.allocation.decoding:
            self.move_to_live(scheduled.allocation)
