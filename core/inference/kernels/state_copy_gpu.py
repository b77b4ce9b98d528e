"""The launches of `state_copy.copy_states` and `state_copy.zero_states` on a GPU.

The functions take what `state_copy` has checked, on the device of the pools. Nothing here synchronises.
"""

from operator import index

import torch
from torch import Tensor

from .state_move import GROUP, StateMove
from .state_move_kernels import LISTED, move_listed_states, move_states
from .state_tensors import Indices, StateTensors, device_indices

_NO_PAIRS = (0,) * LISTED


def copy_states(
    source: StateTensors,
    source_indices: Indices,
    destination: StateTensors,
    destination_indices: Indices,
    count: Tensor | None = None,
) -> None:
    """`state_copy.copy_states` in one launch, or in none for no pairs. Indices are not checked here.

    Raises:
        ValueError: states cannot move between the pools as bytes.
    """
    move = StateMove.between(source, destination)
    lists = not isinstance(source_indices, Tensor) and not isinstance(destination_indices, Tensor)
    if lists and count is None:
        pairs = zip(source_indices, destination_indices, strict=True)
        live = [(read, write) for read, write in pairs if read >= 0 <= write]
        _move_listed(move, destination.ssm.device, live, True)
        return
    read, write = device_indices(destination.ssm.device, source_indices, destination_indices)
    _move(move, read, write, count)


def zero_states(states: StateTensors, indices: Indices, count: Tensor | None = None) -> None:
    """`state_copy.zero_states` in one launch, or in none for no slots. Indices are not checked here."""
    move = StateMove.between(states, states)
    if not isinstance(indices, Tensor) and count is None:
        _move_listed(move, states.ssm.device, [(slot, slot) for slot in indices if slot >= 0], False)
        return
    (write,) = device_indices(states.ssm.device, indices)
    _move(move, None, write, count)


def _move_listed(
    move: StateMove, device: torch.device, pairs: list[tuple[int, int]], from_source: bool
) -> None:
    """Move live pairs: as arguments of the launch, or through memory where a launch cannot carry them."""
    if len(pairs) > LISTED:
        read, write = device_indices(device, *zip(*pairs, strict=True))
        _move(move, read if from_source else None, write, None)
    elif pairs:
        packed = [index(source) << 32 | index(destination) for source, destination in pairs]
        arguments = (*packed, *_NO_PAIRS[len(packed) :], len(packed))
        move.launch(move_listed_states, len(packed), arguments, (from_source,))


def _move(move: StateMove, sources: Tensor | None, destinations: Tensor, count: Tensor | None) -> None:
    """`sources`: None writes zeros."""
    pairs = destinations.shape[0]
    if pairs:
        types = (None if sources is None else sources.dtype, None if count is None else count.dtype)
        arguments = (sources, destinations, count, pairs)
        move.launch(move_states, pairs, arguments, (sources is not None, GROUP), types)
