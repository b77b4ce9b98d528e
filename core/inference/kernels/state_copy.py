"""Moving whole states between pools: what every device shares, and the reference in plain torch.

On CUDA one Triton launch does the work (`fused_state_copy`, `boundary_capture`, imported there and then);
elsewhere fancy indexing does. The functions that end in `_reference` run on any device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Indices = Sequence[int] | Tensor
"""Slots, -1 for none: ints of the host, or an int64 tensor on the states' device."""


class StateTensors(NamedTuple):
    """The states of all Mamba layers: conv [layers, slots, ...] and ssm [layers, slots, ...]."""

    conv: Tensor
    ssm: Tensor


def copy_states(
    source: StateTensors,
    source_indices: Indices,
    destination: StateTensors,
    destination_indices: Indices,
    count: Tensor | None = None,
) -> None:
    """Copy states `source[:, i]` to `destination[:, j]`, pair by pair, both tensors, all layers, to the bit.

    Args:
        source, destination: two pools, or the same one; equal but for their slots, in which every layer's
            elements follow one another. Only `destination` is written.
        source_indices, destination_indices: [n] the pairs. A pair with a -1 in it is none. No destination may
            be named twice, or be another pair's source.
        count: one int32 or int64 on the device; only pairs before it are meant. None: all.

    On the current stream, without synchronising. On CUDA one launch, which reads and writes each byte once.
    Two lists of up to 16 pairs cross as its arguments, other lists in one copy before it; only calls without
    lists can be captured in a graph. A pair that is none costs nothing there. ValueError for indices outside
    the pools, which only lists are checked for, and on CUDA for pools that differ in more than their slots or
    whose slots have gaps.
    """
    pairs = len(source_indices)
    if len(destination_indices) != pairs:
        raise ValueError(
            f"destination_indices has {len(destination_indices)} entries; accepted: {pairs}, one a source"
        )
    if not pairs:
        return
    _check("source_indices", source_indices, source)
    _check("destination_indices", destination_indices, destination)
    device = destination.ssm.device
    if device.type == "cuda":
        from . import fused_state_copy

        with torch.cuda.device(device.index):
            _check_capture(source_indices, destination_indices)
            fused_state_copy.copy_states(source, source_indices, destination, destination_indices, count)
    else:
        read, write = on_device(device, source_indices, destination_indices)
        copy_states_reference(source, read, destination, write, count)


def zero_states(states: StateTensors, indices: Indices, count: Tensor | None = None) -> None:
    """Write zeros over `states[:, i]`, both tensors, all layers. As `copy_states` in all else."""
    if not len(indices):
        return
    _check("indices", indices, states)
    device = states.ssm.device
    if device.type == "cuda":
        from . import fused_state_copy

        with torch.cuda.device(device.index):
            _check_capture(indices)
            fused_state_copy.zero_states(states, indices, count)
    else:
        (write,) = on_device(device, indices)
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

    For kernel sets that only update live slots in place; part of the step, inside its captured graph.

    Args:
        live, durable: two pools, or two parts of one, as for `copy_states`. Only `durable` is written.
        live_slots: [rows] int64, where each row's state is after this step; -1 for padding.
        sequence_lengths: [rows] int32 or int64, the tokens of each sequence after this step. A state is on a
            boundary when they are a multiple of `block_size_tokens`, and more than 0: a row of several tokens
            that went past one has lost it.
        durable_slots: [rows] int64, the slot reserved for the row in this step, -1 for none. A row without
            tokens in this step has none.

    All tensors lie on the device; nothing synchronises. A step with nothing to do costs one small launch.
    ValueError for pools as `copy_states` refuses them, and for index tensors of other types or lengths.
    """
    _check("live_slots", live_slots, live)
    _check("durable_slots", durable_slots, durable)
    if not live_slots.shape == sequence_lengths.shape == durable_slots.shape:
        shapes = [list(of.shape) for of in (live_slots, sequence_lengths, durable_slots)]
        raise ValueError(f"slots, lengths and slots have shapes {shapes}; accepted: one length a row")
    device = durable.ssm.device
    if device.type == "cuda":
        from . import boundary_capture

        with torch.cuda.device(device.index):
            boundary_capture.capture_boundaries(
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

    Synchronises on a GPU: the number of pairs that are meant becomes a shape.
    """
    meant = _meant(destination_indices, count) & (source_indices >= 0)
    read, write = source_indices[meant], destination_indices[meant]
    for of, to in zip(source, destination, strict=True):
        to[:, write] = of[:, read]


def zero_states_reference(states: StateTensors, indices: Tensor, count: Tensor | None = None) -> None:
    """`zero_states` by fancy indexing; synchronises on a GPU."""
    write = indices[_meant(indices, count)]
    for to in states:
        to[:, write] = torch.zeros((), dtype=to.dtype, device=to.device)


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


def _meant(indices: Tensor, count: Tensor | None) -> Tensor:
    meant = indices >= 0
    if count is None:
        return meant
    return meant & (torch.arange(indices.shape[0], device=indices.device) < count)


def _check(name: str, indices: Indices, states: StateTensors) -> None:
    """Lists are checked against the slots, tensors for what a kernel takes for granted."""
    if isinstance(indices, Tensor):
        of_kernels = indices.dtype == torch.int64 and indices.dim() == 1 and indices.is_contiguous()
        if not of_kernels or indices.device != states.ssm.device:
            raise ValueError(
                f"{name} is {indices.dtype} {list(indices.shape)} on {indices.device}; accepted: a "
                f"contiguous 1-D int64 tensor on {states.ssm.device}"
            )
    elif not -1 <= min(indices) <= max(indices) < states.ssm.shape[1]:
        raise ValueError(f"{name} is {list(indices)}; accepted: -1 to {states.ssm.shape[1] - 1}")


def _check_capture(*indices: Indices) -> None:
    """A graph would replay the slots that lists name at its capture."""
    listed = not all(isinstance(entry, Tensor) for entry in indices)
    if listed and torch.cuda.is_current_stream_capturing():
        raise ValueError("indices are lists while a CUDA graph is captured; accepted: tensors on the device")


def on_device(device: torch.device, *indices: Indices) -> list[Tensor]:
    """Indices as tensors; all lists among them cross together, from pinned memory, without synchronising."""
    listed = [list(entry) for entry in indices if not isinstance(entry, Tensor)]
    if not listed:
        return [entry for entry in indices if isinstance(entry, Tensor)]
    pinned = torch.tensor(listed, dtype=torch.int64, pin_memory=device.type == "cuda")
    crossed = iter(pinned.to(device, non_blocking=True).unbind())
    return [entry if isinstance(entry, Tensor) else next(crossed) for entry in indices]
