"""Moving whole states between pools."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateTensors(NamedTuple):
    """The states of all Mamba layers: conv [layers, slots, ...] and ssm [layers, slots, ...]."""

    conv: Tensor
    ssm: Tensor


def copy_states(
    source: StateTensors,
    source_indices: Sequence[int],
    destination: StateTensors,
    destination_indices: Sequence[int],
) -> None:
    """Copy states `source[:, i]` to `destination[:, j]`, pair by pair, both tensors, all layers.

    One batched copy a tensor, on the current stream, without synchronising. All sources are read before
    any destination is written; a destination may not be named twice. Fancy indexing gathers into a
    temporary of n states.
    """
    if not source_indices:
        return
    device = source.conv.device
    read = torch.tensor(source_indices, dtype=torch.int64, device=device)
    write = torch.tensor(destination_indices, dtype=torch.int64, device=device)
    for of, to in zip(source, destination, strict=True):
        to[:, write] = of[:, read]
