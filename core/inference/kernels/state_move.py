"""Triton kernels that move whole states between two pools, as bytes: any number of states in one launch.

Up to `PROGRAMS` programs share the tiles of all pairs. Each program first ranks the live pairs among up to
`GROUP` pairs; a pair that holds a -1 has no tile. Up to `LISTED` pairs that the host knows travel as
arguments of the launch, live pairs only: no memory, no copy and no ranking.

The kernels know no dtypes. They move words of 8 bytes in accesses of 16 bytes where all addresses and strides
are multiples of 16, and narrower words elsewhere. A launch goes to the compiled kernel itself, which the
`StateMove` stores: Triton's own look-up takes the host longer than the launch. The functions expect what
`state_copy` has checked, on the device of the pools. Nothing synchronises.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import INT32_MAX
from .state_tensors import Indices, StateTensors, device_indices

PROGRAMS = 4224
"""Most programs of a launch: 32 for each of the 132 multiprocessors of an H200, of which 8 fit at once."""
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

    source: int  # the address of layer 0, slot 0 in the pool that is read
    destination: int  # and in the pool that is written
    size: int  # of one slot of one layer
    source_layer: int  # strides, between layers and between slots
    source_slot: int
    destination_layer: int
    destination_slot: int
    ALIGN: int  # the largest power of two up to 16 that divides both addresses and all strides
    TAIL: bool  # whether `size` is no multiple of `ALIGN`


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
        """The move between two pools, computed once for pools that stay where they are.

        Raises:
            ValueError: the pools differ in more than their slots, or a slot has gaps.
        """
        conv, ssm = source
        to_conv, to_ssm = destination
        memory = (
            conv.data_ptr(), conv.shape, conv.stride(), conv.dtype, conv.device,
            ssm.data_ptr(), ssm.shape, ssm.stride(), ssm.dtype, ssm.device,
            to_conv.data_ptr(), to_conv.shape, to_conv.stride(), to_conv.dtype, to_conv.device,
            to_ssm.data_ptr(), to_ssm.shape, to_ssm.stride(), to_ssm.dtype, to_ssm.device,
        )  # fmt: skip
        move = _MOVES.get(memory)
        if move is None:
            if len(_MOVES) == MAX_MOVES:
                _MOVES.clear()
            move = _MOVES[memory] = _state_move(source, destination)
        return move

    def programs(self, pairs: int) -> int:
        """The size of the grid for at most `pairs` pairs."""
        return max(1, min(PROGRAMS, pairs * self.tiles))

    def launch(self, kernel: Any, pairs: int, arguments: Sequence[Any], constants: tuple[Any, ...]) -> None:
        """Start `kernel` on the current stream of the pools' device, for at most `pairs` pairs.

        `kernel` is a `@triton.jit` function that takes `arguments`, then `MOVE_ARGUMENTS`, then `constants`.
        """
        if not self.tiles:
            return
        grid = (self.programs(pairs), 1, 1)
        listed = (*arguments, *self.arguments.values(), *constants)
        key = (kernel, constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            # The interpreter compiles nothing: there the kernel itself is launched.
            compiled = kernel.warmup(*listed, grid=grid, num_warps=NUM_WARPS, num_stages=1) or kernel
            self._compiled[key] = compiled
        compiled[grid](*listed)


MAX_MOVES = 256
_MOVES: dict[tuple[object, ...], StateMove] = {}
"""By the memory of the pools."""


def _state_move(source: StateTensors, destination: StateTensors) -> StateMove:
    layers, device = destination.ssm.shape[0], destination.ssm.device
    arguments: dict[str, int | bool] = {"layers": layers, "ACCESSES": ACCESSES}
    tiles = 0
    for name, of, to in zip(StateTensors._fields, source, destination, strict=True):
        part = _part_move(name, of, to, layers, device)
        for entry, value in part._asdict().items():
            argument = f"{name}_{entry}"
            arguments[argument.upper() if entry.isupper() else argument] = value
        tiles += layers * -(-part.size // (ACCESSES * part.ALIGN))
    if GROUP * tiles > INT32_MAX:
        raise ValueError(f"a state has {tiles} tiles; accepted: at most {INT32_MAX // GROUP}")
    return StateMove({name: arguments[name] for name in MOVE_ARGUMENTS}, tiles)


def _part_move(name: str, source: Tensor, destination: Tensor, layers: int, device: torch.device) -> PartMove:
    pools = source, destination
    slots = [(pool.dtype, pool.device, pool.shape[0], pool.shape[2:]) for pool in pools]
    if slots != [(destination.dtype, device, layers, destination.shape[2:])] * 2:
        raise ValueError(
            f"{name} states have (dtype, device, layers, shape) {slots}; accepted: pools of {layers} layers "
            "on one device that differ in their slots only"
        )
    if not all(pool[:1, :1].is_contiguous() for pool in pools):
        raise ValueError(
            f"{name} states have the strides {source.stride()} and {destination.stride()}; accepted: slots "
            "without gaps"
        )
    size = math.prod(destination.shape[2:]) * destination.itemsize
    strides = [stride * pool.itemsize for pool in pools for stride in pool.stride()[:2]]
    align = math.gcd(WIDEST, source.data_ptr(), destination.data_ptr(), *strides)
    return PartMove(
        source.data_ptr(), destination.data_ptr(), size, strides[0], strides[1], strides[2], strides[3],
        align, size % align > 0,
    )  # fmt: skip


LISTED = 16
"""Pairs that a launch carries as arguments."""
LISTED_ARGUMENTS = [f"pair_{place}" for place in range(LISTED)]


@triton.jit
def copy_tile(
    # Pointers, as addresses
    source, destination,
    # Dimensions
    tile, num_tiles, size,
    # Meta-parameters
    ALIGN: tl.constexpr, TAIL: tl.constexpr, ACCESSES: tl.constexpr,
):  # fmt: skip
    """Copy bytes [tile, tile + 1) * ACCESSES * ALIGN of `size`."""
    WORDS_PER_ACCESS: tl.constexpr = 2 if ALIGN == 16 else 1  # the widest word has 8 bytes
    WORDS: tl.constexpr = ACCESSES * WORDS_PER_ACCESS
    word: tl.constexpr = (
        tl.int64 if ALIGN >= 8 else tl.int32 if ALIGN == 4 else tl.int16 if ALIGN == 2 else tl.int8
    )
    start = tile.to(tl.int64) * (ACCESSES * ALIGN)
    words = ((size - start) // ALIGN * WORDS_PER_ACCESS).to(tl.int32)
    offsets = tl.arange(0, WORDS)
    inside = offsets < words
    destination_words = tl.multiple_of((destination + start).to(tl.pointer_type(word)), ALIGN)
    source_words = tl.multiple_of((source + start).to(tl.pointer_type(word)), ALIGN)
    values = tl.load(source_words + offsets, mask=inside)
    tl.store(destination_words + offsets, values, mask=inside)
    if TAIL and tile == num_tiles - 1:
        rest = start + words // WORDS_PER_ACCESS * ALIGN + tl.arange(0, ALIGN)
        destination_bytes = destination.to(tl.pointer_type(tl.int8)) + rest
        last = tl.load(source.to(tl.pointer_type(tl.int8)) + rest, mask=rest < size)
        tl.store(destination_bytes, last, mask=rest < size)


@triton.jit
def _part_tiles(part, ACCESSES: tl.constexpr):
    """Tiles of one part of one layer of a state; `part`: a `PartMove`."""
    return tl.cdiv(part.size, ACCESSES * part.ALIGN).to(tl.int32)


@triton.jit
def _move_part(part, source, destination, layer, tile, num_tiles, ACCESSES: tl.constexpr):
    """Move one tile of one part of one layer from slot `source` to slot `destination`."""
    copy_tile(
        part.source + layer * part.source_layer + source * part.source_slot,
        part.destination + layer * part.destination_layer + destination * part.destination_slot,
        tile, num_tiles, part.size, part.ALIGN, part.TAIL, ACCESSES,
    )  # fmt: skip


@triton.jit
def _move_tile(
    # Tile, counted over all pairs, and the slots of the pair that has this tile
    item, source, destination,
    # State: its layers and two `PartMove`s
    layers, conv, ssm,
    # Meta-parameters
    ACCESSES: tl.constexpr,
):  # fmt: skip
    """Move one tile of a pair; in each layer the tiles of ssm come before the tiles of conv."""
    conv_tiles = _part_tiles(conv, ACCESSES)
    ssm_tiles = _part_tiles(ssm, ACCESSES)
    layer = (item // (conv_tiles + ssm_tiles) % layers).to(tl.int64)
    tile = item % (conv_tiles + ssm_tiles)
    if tile < ssm_tiles:
        _move_part(ssm, source, destination, layer, tile, ssm_tiles, ACCESSES)
    else:
        _move_part(conv, source, destination, layer, tile - ssm_tiles, conv_tiles, ACCESSES)


@triton.jit
def move_live_pairs(
    # Pairs: [GROUP]
    live, sources, destinations,
    # State: its layers and two `PartMove`s
    layers, conv, ssm,
    # Meta-parameters
    ACCESSES: tl.constexpr,
):  # fmt: skip
    """Move this program's share of the `live` pairs among up to GROUP pairs of slots."""
    live_pairs = tl.sum(live.to(tl.int32), 0)
    if live_pairs > 0:
        rank = tl.where(live, tl.cumsum(live.to(tl.int32), 0) - 1, -1)
        tiles = layers * (_part_tiles(conv, ACCESSES) + _part_tiles(ssm, ACCESSES))
        for item in range(tl.program_id(0), live_pairs * tiles, tl.num_programs(0)):
            pair = item // tiles
            source = tl.sum(tl.where(rank == pair, sources, 0), 0).to(tl.int64)
            destination = tl.sum(tl.where(rank == pair, destinations, 0), 0).to(tl.int64)
            _move_tile(item, source, destination, layers, conv, ssm, ACCESSES)


@triton.jit(
    do_not_specialize=UNSPECIALISED,
    do_not_specialize_on_alignment=["source_indices", "destination_indices"],
)
def move_states(
    # Pointers
    source_indices, destination_indices,
    # Dimensions
    pairs: tl.int32,
    # The move: layers, then addresses, sizes and strides in bytes
    layers: tl.int32, conv_source: tl.int64, conv_destination: tl.int64, conv_size: tl.int64,
    conv_source_layer: tl.int64, conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64, conv_destination_slot: tl.int64,
    ssm_source: tl.int64, ssm_destination: tl.int64, ssm_size: tl.int64,
    ssm_source_layer: tl.int64, ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64, ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr, CONV_TAIL: tl.constexpr, SSM_ALIGN: tl.constexpr, SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs, up to `PROGRAMS` of them, take the tiles of all live pairs in turn."""
    for first in range(0, pairs, GROUP):
        places = first + tl.arange(0, GROUP)
        inside = places < pairs
        destinations = tl.load(destination_indices + places, mask=inside, other=-1)
        sources = tl.load(source_indices + places, mask=inside, other=-1)
        move_live_pairs(
            (sources >= 0) & (destinations >= 0), sources, destinations,
            layers,
            PartMove(
                conv_source, conv_destination, conv_size, conv_source_layer, conv_source_slot,
                conv_destination_layer, conv_destination_slot, CONV_ALIGN, CONV_TAIL,
            ),
            PartMove(
                ssm_source, ssm_destination, ssm_size, ssm_source_layer, ssm_source_slot,
                ssm_destination_layer, ssm_destination_slot, SSM_ALIGN, SSM_TAIL,
            ),
            ACCESSES,
        )  # fmt: skip


@triton.jit
def _entry(place, packed):
    """`packed[place]` of a tuple, for a `place` that is known at run time only."""
    entry = packed[0].to(tl.int64)
    for other in tl.static_range(1, len(packed)):
        entry = tl.where(place == other, packed[other], entry)
    return entry


@triton.jit
def _move_packed_pairs(packed, pairs, layers, conv, ssm, ACCESSES: tl.constexpr):
    """Move this program's share of the first `pairs` of `packed`, a tuple of pairs in 64 bits each."""
    tiles = layers * (_part_tiles(conv, ACCESSES) + _part_tiles(ssm, ACCESSES))
    for item in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
        slots = _entry(item // tiles, packed)
        _move_tile(item, slots >> 32, slots & 0x7FFFFFFF, layers, conv, ssm, ACCESSES)


@triton.jit(do_not_specialize=[*LISTED_ARGUMENTS, *UNSPECIALISED])
def move_listed_states(
    # Pairs of slots, the source in the upper 32 bits
    pair_0: tl.int64, pair_1: tl.int64, pair_2: tl.int64, pair_3: tl.int64,
    pair_4: tl.int64, pair_5: tl.int64, pair_6: tl.int64, pair_7: tl.int64,
    pair_8: tl.int64, pair_9: tl.int64, pair_10: tl.int64, pair_11: tl.int64,
    pair_12: tl.int64, pair_13: tl.int64, pair_14: tl.int64, pair_15: tl.int64,
    # Dimensions
    pairs: tl.int32,
    # The move: layers, then addresses, sizes and strides in bytes
    layers: tl.int32, conv_source: tl.int64, conv_destination: tl.int64, conv_size: tl.int64,
    conv_source_layer: tl.int64, conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64, conv_destination_slot: tl.int64,
    ssm_source: tl.int64, ssm_destination: tl.int64, ssm_size: tl.int64,
    ssm_source_layer: tl.int64, ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64, ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr, CONV_TAIL: tl.constexpr, SSM_ALIGN: tl.constexpr, SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
):  # fmt: skip
    """Move the first `pairs` pairs; every one of them is live."""
    _move_packed_pairs(
        (
            pair_0, pair_1, pair_2, pair_3, pair_4, pair_5, pair_6, pair_7,
            pair_8, pair_9, pair_10, pair_11, pair_12, pair_13, pair_14, pair_15,
        ),
        pairs, layers,
        PartMove(
            conv_source, conv_destination, conv_size, conv_source_layer, conv_source_slot,
            conv_destination_layer, conv_destination_slot, CONV_ALIGN, CONV_TAIL,
        ),
        PartMove(
            ssm_source, ssm_destination, ssm_size, ssm_source_layer, ssm_source_slot,
            ssm_destination_layer, ssm_destination_slot, SSM_ALIGN, SSM_TAIL,
        ),
        ACCESSES,
    )  # fmt: skip


_NO_PAIRS = (0,) * LISTED


def copy_states(
    source: StateTensors, source_indices: Indices, destination: StateTensors, destination_indices: Indices
) -> None:
    """`state_copy.copy_states` in one launch, or in none for no pairs. Indices are not checked here.

    Raises:
        ValueError: states cannot move between the pools as bytes.
    """
    move = StateMove.between(source, destination)
    device = destination.ssm.device
    if not isinstance(source_indices, Tensor) and not isinstance(destination_indices, Tensor):
        both = zip(source_indices, destination_indices, strict=True)
        live = [(read, write) for read, write in both if read >= 0 <= write]
        if len(live) <= LISTED:
            packed = [index(read) << 32 | index(write) for read, write in live]
            arguments = (*packed, *_NO_PAIRS[len(packed) :], len(packed))
            if live:
                move.launch(move_listed_states, len(packed), arguments, ())
            return
        source_indices, destination_indices = ([*side] for side in zip(*live, strict=True))
    sources, destinations = device_indices(device, source_indices, destination_indices)
    if pairs := len(destinations):
        move.launch(move_states, pairs, (sources, destinations, pairs), (GROUP,))
