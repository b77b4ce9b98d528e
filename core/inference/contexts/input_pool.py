"""The memory that holds the inputs of running requests since their last grid points."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...state_tensor import StateTensor
from ...validation import addressable


class InputPool:
    """What decodes by replay read beside a state: the inputs of the tokens behind it.

    A slot belongs to one row, and so to one running request. `pool[name]` is [layers, slots, *shape of one
    request]; slots of a layer are contiguous. `InputTensor.layout` says where a token lies.

    Attributes:
        slots: how many.
    """

    def __init__(
        self,
        states: Sequence[StateTensor],
        num_slots: int,
        chunk_size: int,
        num_drafts: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            states: the state tensors; `StateTensor.inputs` says what is kept.
            num_slots: slots. 0 keeps nothing.
            chunk_size: tokens of a chunk.
            num_drafts: drafts of a step, at most.
            device: where the tensors live.
        """
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
        self._tensors = self.new_tensors()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def new_tensors(self) -> dict[str, Tensor]:
        """Memory for the pool, as zeros, for `put`."""
        return {
            name: torch.zeros(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in self._shapes.items()
        }

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Use these tensors, a result of `new_tensors`, from now on."""
        self._tensors = tensors

    def free(self) -> None:
        """Free the memory; tensors without slots remain."""
        self._tensors = {name: tensor.new_empty(0) for name, tensor in self._tensors.items()}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """`self[name]` of all names."""
        return tuple(self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        """[layers, slots, *shape of one request]."""
        return self._tensors[name]
