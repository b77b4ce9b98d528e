"""What caches have in common whose KV blocks and states lie in pools of their own."""

from .blocks import BlockIndex
from .kv_pool import KVPool
from .loop import RunningRequest
from .states import StateSlots


class TwoPools:
    """KV in a tree of blocks, and states in slots beside it. Who takes what is for the class below to say.

    Attributes:
        kv: the KV blocks.
        states: the slots.
    """

    def __init__(self, index: BlockIndex, kv: KVPool, states: StateSlots) -> None:
        """Let states leave with their KV; `index`: the blocks of the trace."""
        self._block = index.block_size
        self._num_slots = states.capacity
        self.kv = kv
        self.states = states
        states.bind(kv)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books of KV or states are wrong."""
        self.kv.check_integrity()
        self.states.check_integrity()

    @property
    def num_states_taken(self) -> int:
        return self.states.num_taken

    @property
    def state_capacity(self) -> int:
        return self._num_slots

    def stop(self, request: RunningRequest, budget: int) -> int:
        end = min(request.computed + budget, request.target)
        if end < request.target:
            aligned = end // self._block * self._block
            if aligned > request.computed:
                return aligned
        return end

    def reserve(self, request: RunningRequest, end: int) -> bool:
        missing = (end + self._block - 1) // self._block - request.held - request.private
        if missing <= 0:
            return True
        if not self.kv.take(missing):
            return False
        request.private += missing
        return True

    def boundary(self, request: RunningRequest) -> int:
        return (request.computed // self._block + 1) * self._block
