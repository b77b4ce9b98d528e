"""Where the state of each running request is."""

from collections.abc import Mapping, Sequence

from ...request import DynamicInferenceRequest
from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors
from .mamba_slot_allocator import MambaSlotAllocator
from .request_rows import RequestRows
from .scheduled_chunk import ScheduledChunk
from .state_pool import StatePool


class RequestStates:
    """A request's state is in a live slot of its own, or in a durable slot, pinned until a step has read it.

    Keeps the requests' `state_index` and `pinned_slot`. Here, and nowhere else, is decided what kernels that
    do not separate sources from destinations cost: they get states copied to where they update them
    (`bring`), and boundary states copied away from there (`store`), each in one launch a step.
    """

    def __init__(
        self, pool: StatePool, rows: RequestRows, slots: MambaSlotAllocator | None, separate: bool = True
    ) -> None:
        """`separate`: whether kernels read a state at one index and write it at others."""
        self._pool = pool
        self._rows = rows
        self._slots = slots
        self._separate = separate

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

    def bring(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Before a step: what it starts from is where kernels that update states in place do so."""
        if self._separate:
            return
        sources, places = [], []
        for chunk in chunks:
            request, live = chunk.request, self._rows.live_slot(chunk.request)
            if request.computed and request.state_index != live:
                sources.append(request.state_index)
                places.append(live)
                request.state_index = live
                self.unpin(request)
        self._copy(sources, places)

    def store(self, chunks: Sequence[ScheduledChunk], late: Sequence[ScheduledChunk] = ()) -> None:
        """After a step: boundary states that are in live slots go to the slots reserved for them.

        Those are all, where kernels update states in place; else those of `late`, whose slots were reserved
        after the step.
        """
        sources, places = [], []
        for chunk in late if self._separate else chunks:
            for position, slot in chunk.destinations.items():
                if position >= chunk.stop - len(chunk.drafts):  # those inside a prefill are stored by it
                    sources.append(self._live_slot(chunk, position))
                    places.append(self._pool.durable_index(slot))
        self._copy(sources, places)

    def destination(self, chunk: ScheduledChunk) -> int:
        """The pool index where the chunk's last state goes: the slot reserved for it, or a live one."""
        return self._destination(chunk, chunk.stop)

    def destinations(self, chunk: ScheduledChunk) -> list[int]:
        """Where its last state goes, or of a decode with drafts the state after each token."""
        if not chunk.drafts:
            return [self._destination(chunk, chunk.stop)]
        return [self._destination(chunk, position + 1) for position in range(chunk.start, chunk.stop)]

    def _destination(self, chunk: ScheduledChunk, position: int) -> int:
        slot = chunk.destinations.get(position, -1) if self._separate else -1
        return self._live_slot(chunk, position) if slot < 0 else self._pool.durable_index(slot)

    def _live_slot(self, chunk: ScheduledChunk, position: int) -> int:
        """The live slot for the state there: the end of the chunk, or behind any token of a decode."""
        return self._rows.live_slot(chunk.request, position - chunk.stop + len(chunk.drafts))

    def advance(self, chunk: ScheduledChunk, committed: Mapping[int, int]) -> None:
        """The chunk has been launched: its request's state is where it left it.

        `committed`: boundary -> the slot that holds the state there now, -1 where it was not kept.
        """
        request = chunk.request
        self.unpin(request)
        slot = committed.get(chunk.stop, -1) if self._separate else -1
        if slot >= 0:
            self._pin(request, slot)
            return
        written = self.destination(chunk)
        request.state_index = self._live_slot(chunk, chunk.stop)
        if written != request.state_index:  # not kept; nothing has been launched that could overwrite it
            self._copy([written], [request.state_index])

    def move_to_live(self, request: DynamicInferenceRequest) -> None:
        """Copy a state that the request has only in a durable slot to its live slot, and unpin."""
        if request.pinned_slot >= 0:
            live = self._rows.live_slot(request)
            self._copy([request.state_index], [live])
            request.state_index = live
            self.unpin(request)

    def _copy(self, sources: list[int], destinations: list[int]) -> None:
        if sources:
            states = StateTensors(self._pool.conv_states, self._pool.ssm_states)
            copy_states(states, sources, states, destinations)
