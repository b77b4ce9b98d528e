"""Copy whole states: the function that callers use, and its reference in plain torch.

On CUDA one Triton launch does the work (`state_move`, imported by the first call that needs it). Elsewhere
fancy indexing does the work. The reference runs on any device.
"""

from collections.abc import Sequence

from torch import Tensor

from ...parallel_groups import on_device_of
from .state_tensors import StateTensors, slot_pairs


def copy_states(
    source: StateTensors, sources: Sequence[int], destination: StateTensors, destinations: Sequence[int]
) -> None:
    """Copy states `source[:, i]` to `destination[:, j]`, pair by pair: both tensors, all layers, same bits.

    Runs on the current stream and does not synchronise. On CUDA one launch reads and writes each byte once.

    Args:
        source, destination: two pools, or one pool twice. The pools differ in their number of slots only, and
            the elements of a slot of a layer are contiguous. `destination` is written.
        sources, destinations: [n] the pairs. A pair with a -1 is skipped. A destination is named once and is
            no other pair's source.

    Raises:
        ValueError: the lengths differ, or an index lies outside its pool. On CUDA also: the pools differ in
            more than their slots, a slot has gaps, or a CUDA graph is captured, whose every replay would use
            the slots of the capture.
    """
    read, write = slot_pairs(sources, source.ssm, destinations, destination.ssm)
    if not len(read):
        return
    if not destination.ssm.is_cuda:
        copy_states_reference(source, read, destination, write)
        return
    from . import state_move

    with on_device_of(destination.ssm.device):
        state_move.copy_states(source, read, destination, write)


def copy_states_reference(
    source: StateTensors, read: Tensor, destination: StateTensors, write: Tensor
) -> None:
    """`copy_states` by fancy indexing."""
    for source_pool, destination_pool in zip(source, destination, strict=True):
        destination_pool[:, write] = source_pool[:, read]
