"""Where the state of each running request is."""

from collections.abc import Mapping

from ...request import DynamicInferenceRequest
from ..kernels.state_copy import StateTensors, copy_states
from .mamba_slot_allocator import MambaSlotAllocator
from .request_rows import RequestRows
from .scheduled_chunk import ScheduledChunk
from .state_pool import StatePool


class RequestStates:
    """A request's state is in its live slot, or in a durable slot, pinned until a step has read it.

    Keeps the requests' `state_index` and `pinned_slot`.
    """

    def __init__(self, pool: StatePool, rows: RequestRows, slots: MambaSlotAllocator | None) -> None:
        self._pool = pool
        self._rows = rows
        self._slots = slots

    def resume(self, request: DynamicInferenceRequest, slot: int) -> None:
        """The request goes on from the state in a durable slot; a use of that state."""
        self._pin(request, slot)
        if self._slots is not None:
            self._slots.note_use(slot)

    def _pin(self, request: DynamicInferenceRequest, slot: int) -> None:
        self.unpin(request)
        if self._slots is not None:
            self._slots.pin(slot)
        request.pinned_slot = slot
        request.state_index = self._pool.durable_index(slot)

    def unpin(self, request: DynamicInferenceRequest) -> None:
        """The request needs its durable slot no longer."""
        if request.pinned_slot >= 0 and self._slots is not None:
            self._slots.unpin(request.pinned_slot)
        request.pinned_slot = -1

    def destination(self, chunk: ScheduledChunk) -> int:
        """The pool index where the chunk's last state goes: the slot reserved for it, or the live one."""
        slot = chunk.destinations.get(chunk.stop, -1)
        return self._rows.live_slot(chunk.request) if slot < 0 else self._pool.durable_index(slot)

    def advance(self, chunk: ScheduledChunk, committed: Mapping[int, int]) -> None:
        """The chunk has been launched: its request's state is where it left it.

        `committed`: boundary -> the slot that holds the state there now, -1 where it was not kept.
        """
        request = chunk.request
        self.unpin(request)
        slot = committed.get(chunk.stop, -1)
        if slot >= 0:
            self._pin(request, slot)
            return
        written = self.destination(chunk)
        request.state_index = self._rows.live_slot(request)
        if written != request.state_index:  # not kept; nothing has been launched that could overwrite it
            self._copy(written, request.state_index)

    def move_to_live(self, request: DynamicInferenceRequest) -> None:
        """Copy a state that the request has only in a durable slot to its live slot, and unpin."""
        if request.pinned_slot >= 0:
            live = self._rows.live_slot(request)
            self._copy(request.state_index, live)
            request.state_index = live
            self.unpin(request)

    def _copy(self, source: int, destination: int) -> None:
        states = StateTensors(self._pool.conv_states, self._pool.ssm_states)
        copy_states(states, [source], states, [destination])
