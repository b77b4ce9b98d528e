"""Copy or zero whole states: the functions that callers use, and their references in plain torch.

On CUDA one Triton launch does the work (`state_move`, imported by the first call that needs it). Elsewhere
fancy indexing does the work. The functions whose names end in `_reference` run on any device.
"""

import torch
from torch import Tensor

from ...parallel_groups import on_device_of
from .state_tensors import Indices, StateTensors, check_indices, device_indices


def copy_states(
    source: StateTensors,
    source_indices: Indices,
    destination: StateTensors,
    destination_indices: Indices,
    count: Tensor | None = None,
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
        count: one int32 or int64 on the device; pairs from `count` on are skipped. None: no pair is skipped.

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
    check_indices("source_indices", source_indices, source)
    check_indices("destination_indices", destination_indices, destination)
    device = destination.ssm.device
    if device.type == "cuda":
        from . import state_move

        with on_device_of(device):
            _check_capture(source_indices, destination_indices)
            state_move.copy_states(source, source_indices, destination, destination_indices, count)
    else:
        read, write = device_indices(device, source_indices, destination_indices)
        copy_states_reference(source, read, destination, write, count)


def zero_states(states: StateTensors, indices: Indices, count: Tensor | None = None) -> None:
    """Write zeros over `states[:, i]`: both tensors, all layers.

    Our own kernels start a row without a source from zeros, so that our engine never calls this function. It
    serves a host whose kernels read a live slot before they write the slot.

    Args:
        states: one pool, as in `copy_states`. Written.
        indices, count: as in `copy_states`.

    Raises:
        ValueError: as `copy_states`.
    """
    if not len(indices):
        return
    check_indices("indices", indices, states)
    device = states.ssm.device
    if device.type == "cuda":
        from . import state_move

        with on_device_of(device):
            _check_capture(indices)
            state_move.zero_states(states, indices, count)
    else:
        (write,) = device_indices(device, indices)
        zero_states_reference(states, write, count)


def capture_boundaries(
    live: StateTensors,
    live_slots: Tensor,
    sequence_lengths: Tensor,
    block_size_tokens: int,
    durable: StateTensors,
    durable_slots: Tensor,
) -> None:
    """Copy the states of rows that reached a block boundary in this step to their reserved durable slots.

    Our own kernels write such a state to its durable slot themselves, so that our engine never calls this
    function. It serves a host whose kernels update live slots in place: the host calls it inside its captured
    step. All tensors lie on the device; nothing synchronises. A step with nothing to do costs one small
    launch.

    Args:
        live, durable: two pools, or two views of one pool, as in `copy_states`. `durable` is written.
        live_slots: [rows] int64, where each row's state lies after this step; -1 for padding.
        sequence_lengths: [rows] int32 or int64, the tokens of each sequence after this step. A row is on a
            boundary when its length is a positive multiple of `block_size_tokens`. A row whose several tokens
            passed a boundary has lost the state there.
        durable_slots: [rows] int64, the slot that is reserved for the row in this step, -1 for none. A row
            without tokens in this step must have -1.

    Raises:
        ValueError: the pools differ as in `copy_states`, or an index tensor has another dtype or length.
    """
    check_indices("live_slots", live_slots, live)
    check_indices("durable_slots", durable_slots, durable)
    if not live_slots.shape == sequence_lengths.shape == durable_slots.shape:
        shapes = [list(tensor.shape) for tensor in (live_slots, sequence_lengths, durable_slots)]
        raise ValueError(
            f"live_slots, sequence_lengths and durable_slots have the shapes {shapes}; accepted: one length"
        )
    device = durable.ssm.device
    if device.type == "cuda":
        from . import state_move

        with on_device_of(device):
            state_move.capture_boundaries(
                live, live_slots, sequence_lengths, block_size_tokens, durable, durable_slots
            )
    else:
        capture_boundaries_reference(
            live, live_slots, sequence_lengths, block_size_tokens, durable, durable_slots
        )


def copy_states_reference(
    source: StateTensors,
    source_indices: Tensor,
    destination: StateTensors,
    destination_indices: Tensor,
    count: Tensor | None = None,
) -> None:
    """`copy_states` by fancy indexing: two launches and a temporary of n states for each tensor.

    Synchronises on a GPU, because the number of pairs that are not skipped becomes a shape.
    """
    selected = _selected(destination_indices, count) & (source_indices >= 0)
    read, write = source_indices[selected], destination_indices[selected]
    for source_pool, destination_pool in zip(source, destination, strict=True):
        destination_pool[:, write] = source_pool[:, read]


def zero_states_reference(states: StateTensors, indices: Tensor, count: Tensor | None = None) -> None:
    """`zero_states` by fancy indexing; synchronises on a GPU."""
    write = indices[_selected(indices, count)]
    for pool in states:
        pool[:, write] = torch.zeros((), dtype=pool.dtype, device=pool.device)


def capture_boundaries_reference(
    live: StateTensors,
    live_slots: Tensor,
    sequence_lengths: Tensor,
    block_size_tokens: int,
    durable: StateTensors,
    durable_slots: Tensor,
) -> None:
    """`capture_boundaries` by fancy indexing; synchronises on a GPU."""
    reached = (sequence_lengths > 0) & (sequence_lengths % block_size_tokens == 0)
    copy_states_reference(live, live_slots, durable, torch.where(reached, durable_slots, -1))


def _selected(indices: Tensor, count: Tensor | None) -> Tensor:
    """Which entries name a slot and come before `count`, [n] bool."""
    named = indices >= 0
    if count is None:
        return named
    return named & (torch.arange(indices.shape[0], device=indices.device) < count)


def _check_capture(*indices: Indices) -> None:
    """Refuse lists in a graph: every replay would use the slots of the capture."""
    has_list = not all(isinstance(entry, Tensor) for entry in indices)
    if has_list and torch.cuda.is_current_stream_capturing():
        raise ValueError("indices are lists while a CUDA graph is captured; accepted: tensors on the device")
