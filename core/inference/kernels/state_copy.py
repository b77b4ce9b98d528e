"""Copy whole states, encode live states into durable slots, and decode them.

Where Triton runs, one launch does the work, of `state_move` for all of a copy, of `state_codec` for each
tensor. Elsewhere torch does (`torch_state_copy`). The first call that needs a module imports it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...devices import on_device_of, tensor_on
from .kernel_set import runs_triton
from .state_pools import CodedTensor, ConvAndSsm

Slots = Sequence[int]  # of states; -1 in a pair of lists skips the pair


def copy_states(source: ConvAndSsm, sources: Slots, destination: ConvAndSsm, destinations: Slots) -> None:
    """Copy states `source[:, i]` to `destination[:, j]`, pair by pair: both tensors, all layers, same bits.

    A destination is named once, and is no other pair's source. Pools may differ
    in their number of slots only. Raises a ValueError where the lengths differ, an index lies outside its
    pool, or a CUDA graph is captured, whose every replay would use the slots of the capture.
    """
    read, write = _slot_pairs(sources, source.ssm, destinations, destination.ssm)
    if not len(read):
        return
    if runs_triton(destination.ssm.device):
        from .state_move import copy_states as copy
    else:
        from .reference.torch_state_copy import copy_states as copy
    with on_device_of(destination.ssm.device):
        copy(source, read, destination, write)


def encode_states(tensors: Sequence[CodedTensor], sources: Slots, destinations: Slots) -> None:
    """Store states `sources` in durable slots `destinations`, as `copy_states` does, one launch a tensor."""
    _run(tensors, sources, destinations, encodes=True)


def decode_states(tensors: Sequence[CodedTensor], sources: Slots, destinations: Slots) -> None:
    """Restore the states of durable slots `sources` to slots `destinations`: `encode_states` backwards."""
    _run(tensors, sources, destinations, encodes=False)


def _run(tensors: Sequence[CodedTensor], sources: Slots, destinations: Slots, *, encodes: bool) -> None:
    tensors = [tensor for tensor in tensors if tensor.states.numel()]
    if not tensors:
        return
    pools = tensors[0].states, tensors[0].numbers
    read, written = pools if encodes else pools[::-1]
    reads, writes = _slot_pairs(sources, read, destinations, written)
    if not len(reads):
        return
    if runs_triton(read.device):
        from .state_codec import code_tensor
    else:
        from .reference.torch_state_copy import code_tensor
    with on_device_of(read.device):
        for tensor in tensors:
            code_tensor(tensor, reads, writes, encodes=encodes)


def _slot_pairs(sources: Slots, read: Tensor, destinations: Slots, written: Tensor) -> tuple[Tensor, ...]:
    """The pairs without a -1: sources and destinations, int64 tensors on the device of `written`."""
    if len(destinations) != len(sources):
        raise ValueError(
            f"destinations has {len(destinations)} entries; accepted: {len(sources)}, one a source"
        )
    for name, indices, pool in (("sources", sources, read), ("destinations", destinations, written)):
        if indices and not -1 <= min(indices) <= max(indices) < pool.shape[1]:
            raise ValueError(f"{name} is {list(indices)}; accepted: -1 to {pool.shape[1] - 1}")
    if written.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("slots are lists while a CUDA graph is captured; accepted: a call outside of graphs")
    pairs = [(source, to) for source, to in zip(sources, destinations, strict=True) if source >= 0 <= to]
    return tensor_on(written.device, [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]).unbind()
