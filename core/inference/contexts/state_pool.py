"""The pool of live and durable states: one index space, and the tensors in it."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...state_spec import SCALES, SlotLayout, StateTensor
from ...validation import addressable
from ..kernels.operands import CodedTensor, ConvAndSsm
from ..kernels.state_copy import copy_states


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of zeros; on a CPU its pages are allocated when they are first written."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class StatePool:
    """Live and durable states in one index space.

    A live slot is updated in place by its request; a durable slot is immutable once committed. In a shared
    pool a slot is either at different times, and a pool index is a slot's number. Else:

        pool index   0 ........ num_live-1 | num_live ........ num_live+num_durable-1
        holds        live slot 0 ..        | durable slot 0 ..

    A slot is contiguous: all tensors of a state, each with all its layers.
    """

    def __init__(
        self,
        states: Sequence[StateTensor],
        num_live: int,
        num_durable: int,
        device: torch.device | str = "cpu",
        is_shared: bool = False,
        memory: Tensor | None = None,
    ) -> None:
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
        CodedTensor(live[state.name], numbers, durable[state.name + SCALES], state.scale_axis)
        if numbers.dtype == torch.int8
        else CodedTensor(live[state.name], numbers)
        for state, numbers in pairs
    ]
