"""CPU tensors that show what is kept in faster structures."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Fill = Callable[[npt.NDArray[np.generic]], None]


class MirroredTensor:
    """One CPU tensor for hosts to index, brought up to date when it is read.

    It stays the same tensor for ever. What a host keeps shows the last `read`.
    """

    def __init__(self, tensor: torch.Tensor, fill: Fill) -> None:
        """
        Args:
            tensor: on the CPU; this class alone writes it.
            fill: writes the present values into the tensor's numpy view.
        """
        self._tensor = tensor
        self._array = tensor.numpy()
        self._fill = fill
        self._shown_version = -1

    def read(self, version: int) -> torch.Tensor:
        """The tensor as of `version`, a number >= 0 that grows with every change of what the tensor shows.

        O(1) where nothing changed since the last read, else as long as `fill` takes.
        """
        if version != self._shown_version:
            self._fill(self._array)
            self._shown_version = version
        return self._tensor

    def shows(self, version: int) -> bool:
        """Whether the tensor is up to date."""
        return version == self._shown_version
