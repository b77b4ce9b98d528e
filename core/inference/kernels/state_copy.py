"""Copy whole states: the function that callers use, and its reference in plain torch.

On CUDA one Triton launch does the work (`state_move`, imported by the first call that needs it). Elsewhere
fancy indexing does the work. The reference runs on any device.
"""

import torch
from torch import Tensor

from ...parallel_groups import on_device_of
from .state_tensors import Indices, StateTensors, check_indices, device_indices


def copy_states(
    source: StateTensors, source_indices: Indices, destination: StateTensors, destination_indices: Indices
) -> None:
    """Copy states `source[:, i]` to `destination[:, j]`, pair by pair: both tensors, all layers, same bits.

    Runs on the current stream and does not synchronise. On CUDA one launch reads and writes each byte once.
    Two lists of up to 16 pairs travel as arguments of the launch. Other lists are copied to the device first,
    and a call with a list cannot be captured in a CUDA graph. A pair with a -1 costs nothing on CUDA.

    Args:
        source, destination: two pools, or one pool twice. The pools differ in their number of slots only, and
            the elements of a slot of a layer are contiguous. `destination` is written.
        source_indices, destination_indices: [n] the pairs. A pair with a -1 is skipped. A destination is
            named once and is no other pair's source.

    Raises:
        ValueError: the lengths differ, or a listed index lies outside its pool (values of tensors are not
            checked). On CUDA also: the pools differ in more than their slots, a slot has gaps, or a list is
            passed while a graph is captured.
    """
    num_pairs = len(source_indices)
    if len(destination_indices) != num_pairs:
        raise ValueError(
            f"destination_indices has {len(destination_indices)} entries; accepted: {num_pairs}, one a source"
        )
    if not num_pairs:
        return
    check_indices("source_indices", source_indices, source.ssm)
    check_indices("destination_indices", destination_indices, destination.ssm)
    device = destination.ssm.device
    if device.type == "cuda":
        from . import state_move

        with on_device_of(device):
            _check_capture(source_indices, destination_indices)
            state_move.copy_states(source, source_indices, destination, destination_indices)
    else:
        read, write = device_indices(device, source_indices, destination_indices)
        copy_states_reference(source, read, destination, write)


def copy_states_reference(
    source: StateTensors, source_indices: Tensor, destination: StateTensors, destination_indices: Tensor
) -> None:
    """`copy_states` by fancy indexing; synchronises on a GPU."""
    selected = (destination_indices >= 0) & (source_indices >= 0)
    read, write = source_indices[selected], destination_indices[selected]
    for source_pool, destination_pool in zip(source, destination, strict=True):
        destination_pool[:, write] = source_pool[:, read]


def _check_capture(*indices: Indices) -> None:
    """Refuse lists in a graph: every replay would use the slots of the capture."""
    has_list = not all(isinstance(entry, Tensor) for entry in indices)
    if has_list and torch.cuda.is_current_stream_capturing():
        raise ValueError("indices are lists while a CUDA graph is captured; accepted: tensors on the device")
