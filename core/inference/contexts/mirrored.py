"""CPU tensors that mirror faster data structures."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Fill = Callable[[npt.NDArray[np.generic]], None]


class MirroredTensor:
    """One CPU tensor for hosts to index, brought up to date when it is read.

    The tensor object never changes. A reference that a host keeps shows the values of the last `read`.
    """

    def __init__(self, tensor: torch.Tensor, fill: Fill) -> None:
        """
        Args:
            tensor: a CPU tensor; this class alone writes it.
            fill: writes the current values into the tensor's numpy view.
        """
        self._tensor = tensor
        self._array = tensor.numpy()
        self._fill = fill
        self._shown_version = -1

    def read(self, version: int) -> torch.Tensor:
        """The tensor with the values of `version`.

        O(1) where the version is that of the last read, else as long as `fill` takes.

        `version`: a number >= 0 that grows with every change of the mirrored values.
        """
        if version != self._shown_version:
            self._fill(self._array)
            self._shown_version = version
        return self._tensor

    def shows(self, version: int) -> bool:
        """Whether the tensor shows the values of `version`."""
        return version == self._shown_version
