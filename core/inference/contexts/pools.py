"""The memory of recurrent states, and of the inputs that decodes replay."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...state_tensor import SlotLayout, StateTensor
from ...validation import INT32_MAX, addressable, instance, integer
from ...validation import device as checked_device
from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors


class StatePool:
    """Live and durable states in one index space.

    A live slot is updated in place by the request that owns it. A durable slot is immutable once committed.
    In a shared pool a slot is live or durable at different times, and a pool index is a slot's number. Else:

        pool index   0 ........ num_live-1 | num_live ........ num_live+num_durable-1
        holds        live slot 0 ..        | durable slot 0 ..

    So a resumed request reads a durable slot and writes its live slot without a copy in between. A slot is
    contiguous: all tensors of a state, each with all its layers. `pool[name]` is [layers, slots, *shape].

    Attributes:
        states: what a slot holds.
        num_live, num_durable: the slots of both parts; of a shared pool, what each part has for certain.
        is_shared: whether any slot may hold a live or a durable state.
        allocated: whether the slots have memory.
        memory: [slots, bytes of a slot] uint8. All slots start as zeros.
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
        for index, tensor in enumerate(self.states):
            instance(f"states[{index}]", tensor, StateTensor)
        self.num_live = integer("num_live", num_live, 0, INT32_MAX)
        self.num_durable = integer("num_durable", num_durable, 0, INT32_MAX)
        self._layout = SlotLayout.of(self.states)
        self._device = checked_device("device", device)
        size = self.num_slots, self._layout.slot_bytes
        addressable("states", list(self.states), size, torch.uint8)
        self.put(self.new_memory() if memory is None else memory)

    @property
    def num_slots(self) -> int:
        return self.num_live + self.num_durable

    @property
    def slot_bytes(self) -> int:
        return self._layout.slot_bytes

    def allocate(self) -> None:
        """Make the memory, as zeros; its address is new. A call that raises changes nothing."""
        self.put(self.new_memory())

    def new_memory(self) -> Tensor:
        """Memory for the pool, as zeros, for `put`."""
        return self._zeros(self.num_slots)

    def put(self, memory: Tensor) -> None:
        """Use this memory from now on, as that of the constructor."""
        views = {
            tensor.name: self._view(memory, tensor, offset)
            for tensor, offset in zip(self.states, self._layout.offsets, strict=True)
        }
        self.memory, self._views = memory, views
        self.allocated = len(memory) == self.num_slots

    def free(self) -> None:
        """Free the memory; tensors without slots remain."""
        self.put(self._zeros(0))
        self.allocated = False

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def _zeros(self, num_slots: int) -> Tensor:
        return torch.zeros(num_slots, self._layout.slot_bytes, dtype=torch.uint8, device=self._device)

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

    def live(self, name: str) -> Tensor:
        """[layers, num_live, *shape], a view; all slots of a shared pool."""
        return self[name] if self.is_shared else self[name][:, : self.num_live]

    def durable(self, name: str) -> Tensor:
        """[layers, num_durable, *shape], a view; all slots of a shared pool."""
        return self[name] if self.is_shared else self[name][:, self.num_live :]

    def durable_index(self, slot: int) -> int:
        first = 0 if self.is_shared else self.num_live
        if type(slot) is not int or not 0 <= slot < self.num_slots - first:
            slot = integer("slot", slot, 0, self.num_slots - first - 1)
        return first + slot

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole slots, pair by pair, in one launch; no destination is a source or named twice."""
        slots = self.memory[None]
        states = StateTensors(slots[..., :0], slots)  # one tensor for all: slots are contiguous
        copy_states(states, sources, states, destinations)


class InputPool:
    """What decodes by replay read with a state: the inputs of the tokens after it, a slot for each row.

    `pool[name]` is [layers, slots, *shape of one request]; `InputTensor.layout` says where a token lies.
    """

    def __init__(
        self,
        states: Sequence[StateTensor],
        num_slots: int,
        chunk_size: int,
        num_drafts: int,
        device: torch.device,
    ) -> None:
        """`num_drafts`: drafts of a step, at most."""
        self.slots = num_slots
        self._device = device
        self._shapes = {
            entry.name: (
                (tensor.num_layers, num_slots, *entry.of_request(chunk_size, num_drafts)),
                entry.dtype,
            )
            for tensor in states
            for entry in tensor.inputs
        }
        for name, (shape, dtype) in self._shapes.items():
            addressable(name, num_slots, shape, dtype)
        self.allocate()

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def allocate(self) -> None:
        """Make the tensors, as zeros."""
        self._tensors = {
            name: torch.zeros(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in self._shapes.items()
        }

    def free(self) -> None:
        """Free the memory; tensors without slots remain."""
        self._tensors = {name: tensor.new_empty(0) for name, tensor in self._tensors.items()}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        """[layers, slots, *shape of one request]."""
        return self._tensors[name]
