"""How states lie in two pools, counted in bytes, and the launch of a kernel that moves states between them.

A launch goes to the compiled kernel itself, which the `StateMove` stores. Triton's own look-up, by the type
of every argument, takes the host longer than the launch.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...validation import INT32_MAX
from .state_tensors import StateTensors

PROGRAMS = 4224
"""Most programs of a launch: 32 for each of the 132 multiprocessors of an H200, of which 8 fit at once. Short
programs leave a short tail: copies of few states were up to 4 % faster than with 8 (benchmarks/results/)."""
ACCESSES = 1024
"""Accesses of a tile: 8 independent ones for each thread of 4 warps; 16 KiB where an access has 16 bytes."""
GROUP = 128
"""Pairs that a program ranks at once."""
NUM_WARPS = 4
WIDEST = 16
"""Bytes that one thread can load or store at once."""


class PartMove(NamedTuple):
    """One part of a state, conv or ssm, in two pools; every number is in bytes.

    The host fills the fields with ints. In a kernel the first seven are int64 scalars, and the last two are
    constants. Triton 3.6 and 3.7 lose the constants of a tuple that is assigned to a name, and 3.6 those of
    a tuple inside another tuple: kernels pass a `PartMove` straight on as an argument of its own.
    """

    source: int
    """Address of layer 0, slot 0 in the pool that is read."""
    destination: int
    """Address of layer 0, slot 0 in the pool that is written."""
    size: int
    """Of one slot of one layer."""
    source_layer: int
    """Stride between layers; the next three fields are strides too."""
    source_slot: int
    destination_layer: int
    destination_slot: int
    ALIGN: int
    """Width of an access: the largest power of two up to 16 that divides both addresses and all strides."""
    TAIL: bool
    """Whether `size` is no multiple of `ALIGN`."""


MOVE_ARGUMENTS = (
    *("layers", "conv_source", "conv_destination", "conv_size"),
    *("conv_source_layer", "conv_source_slot", "conv_destination_layer", "conv_destination_slot"),
    *("ssm_source", "ssm_destination", "ssm_size"),
    *("ssm_source_layer", "ssm_source_slot", "ssm_destination_layer", "ssm_destination_slot"),
    *("CONV_ALIGN", "CONV_TAIL", "SSM_ALIGN", "SSM_TAIL", "ACCESSES"),
)
"""The kernels' names of what `StateMove.arguments` holds, in the kernels' order; constants are upper case."""
UNSPECIALISED = ["pairs", *(name for name in MOVE_ARGUMENTS if not name.isupper())]
"""Arguments by whose values Triton compiles nothing anew: ALIGN says what the kernels know of them."""


class Layout(NamedTuple):
    """What a launch depends on in one pool tensor [layers, slots, ...]."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def slot_bytes(self) -> int | None:
        """Bytes of one slot of one layer; None when the slot's elements are not contiguous."""
        size = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape[2:]), reversed(self.strides[2:]), strict=True):
            if length != 1 and stride * self.dtype.itemsize != size:
                return None if math.prod(self.shape[2:]) else 0
            size *= length
        return size


@dataclass(frozen=True)
class StateMove:
    """How states lie in two pools: everything that a launch needs, except which states move."""

    arguments: dict[str, int | bool]
    """Addresses, dimensions, strides and meta-parameters, named and ordered as `MOVE_ARGUMENTS`."""
    tiles: int
    """Tiles of one state, all layers."""
    _compiled: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def between(cls, source: StateTensors, destination: StateTensors) -> "StateMove":
        """The move between two pools; does not read the states.

        A move is computed once for pools that stay where they are.

        Raises:
            ValueError: the pools differ in more than their slots, or a slot has gaps.
        """
        conv, ssm = source
        to_conv, to_ssm = destination
        return _state_move(
            conv.data_ptr(), conv.shape, conv.stride(), conv.dtype, conv.device,
            ssm.data_ptr(), ssm.shape, ssm.stride(), ssm.dtype, ssm.device,
            to_conv.data_ptr(), to_conv.shape, to_conv.stride(), to_conv.dtype, to_conv.device,
            to_ssm.data_ptr(), to_ssm.shape, to_ssm.stride(), to_ssm.dtype, to_ssm.device,
        )  # fmt: skip

    def programs(self, pairs: int) -> int:
        """The size of the grid for at most `pairs` pairs."""
        return max(1, min(PROGRAMS, pairs * self.tiles))

    def launch(
        self,
        kernel: Any,
        pairs: int,
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        types: tuple[torch.dtype | None, ...] = (),
        max_programs: int | None = None,
    ) -> None:
        """Start `kernel` on the current stream; the current device must be the pools' device.

        Args:
            kernel: a `@triton.jit` function that takes `arguments`, then `MOVE_ARGUMENTS`, then `constants`.
            pairs: an upper bound of the pairs that move.
            arguments, constants: the kernel's own arguments.
            types: the dtypes of those arguments that do not always have the same dtype; None for an argument
                that is None.
            max_programs: replaces `PROGRAMS`.
        """
        if not self.tiles:
            return
        grid = (min(self.programs(pairs), max_programs or PROGRAMS), 1, 1)
        listed = (*arguments, *self.arguments.values(), *constants)
        key = (kernel, constants, types)
        compiled = self._compiled.get(key)
        if compiled is None:
            # The interpreter compiles nothing: there the kernel itself is launched.
            compiled = kernel.warmup(*listed, grid=grid, num_warps=NUM_WARPS, num_stages=1) or kernel
            self._compiled[key] = compiled
        compiled[grid](*listed)


@lru_cache(maxsize=256)
def _state_move(*fields: Any) -> StateMove:
    """`fields`: those of four `Layout`s one after another. The flat list makes the cache's look-up cheap."""
    conv_source, ssm_source, conv, ssm = (Layout(*fields[first : first + 5]) for first in range(0, 20, 5))
    layers = ssm.shape[0]
    arguments: dict[str, int | bool] = {"layers": layers, "ACCESSES": ACCESSES}
    tiles = 0
    for name, source, destination in (("conv", conv_source, conv), ("ssm", ssm_source, ssm)):
        part = _part_move(name, source, destination, layers, ssm.device)
        for entry, value in part._asdict().items():
            argument = f"{name}_{entry}"
            arguments[argument.upper() if entry.isupper() else argument] = value
        tiles += layers * -(-part.size // (ACCESSES * part.ALIGN))
    if GROUP * tiles > INT32_MAX:
        raise ValueError(f"a state has {tiles} tiles; accepted: at most {INT32_MAX // GROUP}")
    return StateMove({name: arguments[name] for name in MOVE_ARGUMENTS}, tiles)


def _part_move(name: str, source: Layout, destination: Layout, layers: int, device: torch.device) -> PartMove:
    slots = [(pool.dtype, pool.device, pool.shape[0], pool.shape[2:]) for pool in (source, destination)]
    if slots[0] != slots[1] or destination.shape[0] != layers or destination.device != device:
        raise ValueError(
            f"{name} states are {source} and {destination}; accepted: pools of {layers} layers on one device "
            "that differ in their slots only"
        )
    size = destination.slot_bytes()
    if size is None or source.slot_bytes() is None:
        raise ValueError(
            f"{name} states have the strides {source.strides} and {destination.strides}; accepted: slots "
            "without gaps"
        )
    strides = [stride * pool.dtype.itemsize for pool in (source, destination) for stride in pool.strides[:2]]
    align = math.gcd(WIDEST, source.address, destination.address, *strides)
    return PartMove(
        source.address, destination.address, size, strides[0], strides[1], strides[2], strides[3],
        align, size % align > 0,
    )  # fmt: skip
