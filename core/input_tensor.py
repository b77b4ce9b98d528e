"""What a running request keeps of its last tokens where decodes replay them, as a model declares it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .tensor_validation import float_dtype
from .validation import INT32_MAX, integer, integers, one_of, set_field, shown

InputLayout = Literal["ring", "chunk", "by_head"]
_LAYOUTS = ("ring", "chunk", "by_head")


@dataclass(frozen=True)
class InputTensor:
    """One tensor of inputs since the last grid point, in all layers that have the state tensor it belongs to.

    Attributes:
        name: unique in the model.
        shape: of one token in one layer.
        dtype: as stored.
        layout: where tokens lie. With C tokens of a chunk and K drafts of a step at most:
            "ring": [taps + K, *shape], the token at position p lies at p % (taps + K).
            "chunk": [C, *shape], at p % C.
            "by_head": [*shape, C], at p % C of the last dimension.
        taps: of the convolution whose inputs lie in a ring; 0 for other layouts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: InputLayout = "chunk"
    taps: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"name is {shown(self.name)}; accepted: a name such as 'conv_in' or 'ssm_x'")
        set_field(self, "shape", tuple(integers("shape", self.shape, 1, INT32_MAX)))
        float_dtype("dtype", self.dtype)
        one_of("layout", self.layout, _LAYOUTS)
        fewest, most = (1, INT32_MAX) if self.layout == "ring" else (0, 0)
        set_field(self, "taps", integer("taps", self.taps, fewest, most))

    def of_request(self, chunk_size: int, num_drafts: int) -> tuple[int, ...]:
        """The shape of one request in one layer.

        Args:
            chunk_size: tokens of a chunk.
            num_drafts: drafts of a step, at most.
        """
        if self.layout == "ring":
            return (self.taps + num_drafts, *self.shape)
        return (chunk_size, *self.shape) if self.layout == "chunk" else (*self.shape, chunk_size)


def checked_inputs(inputs: Sequence[InputTensor]) -> tuple[InputTensor, ...]:
    """`inputs` as a tuple; a ValueError where one is no InputTensor."""
    if not isinstance(inputs, Sequence) or not all(isinstance(entry, InputTensor) for entry in inputs):
        raise ValueError(f"inputs is {shown(inputs)}; accepted: InputTensors")
    return tuple(inputs)
