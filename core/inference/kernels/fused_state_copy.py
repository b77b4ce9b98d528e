"""One launch moves or zeroes any number of whole states: both tensors, all layers, as bits.

The grid is bounded: up to `PROGRAMS` programs share the tiles of all pairs. Each first ranks the live pairs
of up to `GROUP`, so that a pair that is -1 or past the count costs no tile and a launch with nothing to do
costs one small launch, however large the pools. (A grid as large as the work, its programs exiting one by
one, would pay for 200,000 programs whenever a captured graph has 32 idle rows of an 8B model.)

Up to `LISTED` pairs that the host knows cross as arguments of the launch, live ones only: no memory, no copy
and no ranking. Launches go to the compiled kernel itself, which a `StateMove` keeps: triton's own look-up, by
the type of every argument, costs the host more than the launch.

States are bytes here: every dtype moves through 8-byte words in 16-byte accesses where all addresses, strides
and the pointers allow it, and through narrower words where they do not.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import INT32_MAX
from .specialisation import Specialisation
from .state_copy import Indices, StateTensors, on_device

PROGRAMS = 4224
"""32 for each of the 132 multiprocessors of an H200, of which 8 fit at once: short programs leave a short
tail, and copies of few states were up to 4 % faster than with 8 (benchmarks/results/)."""
ACCESSES = 1024
"""Accesses of a tile: 8 independent ones for each thread of 4 warps; 16 KiB where they are 16 bytes wide."""
GROUP = 128
"""Pairs that a program ranks at once."""
LISTED = 16
"""Pairs that a launch carries as arguments."""
NUM_WARPS = 4
WIDEST = 16
"""Bytes that one thread can load or store at once."""
MOVE_ARGUMENTS = (
    *("conv_source", "conv_destination", "ssm_source", "ssm_destination"),
    *("layers", "conv_size", "ssm_size"),
    *("conv_source_layer", "conv_source_slot", "conv_destination_layer", "conv_destination_slot"),
    *("ssm_source_layer", "ssm_source_slot", "ssm_destination_layer", "ssm_destination_slot"),
    *("CONV_ALIGN", "CONV_TAIL", "SSM_ALIGN", "SSM_TAIL", "ACCESSES"),
)
"""What a `StateMove` is to a kernel, in the kernels' order."""
UNSPECIALISED = ["pairs", *(name for name in MOVE_ARGUMENTS if not name.isupper())]
"""Arguments of which the kernels know no more than their type: what alignment there is, ALIGN says."""
PACKED = [f"pair_{place}" for place in range(LISTED)]
NO_PAIRS = (0,) * LISTED


@triton.jit
def copy_tile(
    # Pointers, as addresses
    source,
    destination,
    # Dimensions
    tile,
    num_tiles,
    size,
    # Meta-parameters
    ALIGN: tl.constexpr,
    TAIL: tl.constexpr,
    FROM_SOURCE: tl.constexpr,
    ACCESSES: tl.constexpr,
):
    """Bytes [tile, tile + 1) * ACCESSES * ALIGN of `size` from `source` to `destination`, or zeros to it."""
    EACH: tl.constexpr = 2 if ALIGN == 16 else 1  # words of an access; the widest word has 8 bytes
    WORDS: tl.constexpr = ACCESSES * EACH
    word: tl.constexpr = (
        tl.int64 if ALIGN >= 8 else tl.int32 if ALIGN == 4 else tl.int16 if ALIGN == 2 else tl.int8
    )
    start = tile.to(tl.int64) * (ACCESSES * ALIGN)
    words = ((size - start) // ALIGN * EACH).to(tl.int32)
    offsets = tl.arange(0, WORDS)
    inside = offsets < words
    to = tl.multiple_of((destination + start).to(tl.pointer_type(word)), ALIGN)
    if FROM_SOURCE:
        of = tl.multiple_of((source + start).to(tl.pointer_type(word)), ALIGN)
        moved = tl.load(of + offsets, mask=inside)
    else:
        moved = tl.zeros([WORDS], dtype=word)
    tl.store(to + offsets, moved, mask=inside)
    if TAIL and tile == num_tiles - 1:
        rest = start + words // EACH * ALIGN + tl.arange(0, ALIGN)
        to_byte = destination.to(tl.pointer_type(tl.int8)) + rest
        if FROM_SOURCE:
            last = tl.load(source.to(tl.pointer_type(tl.int8)) + rest, mask=rest < size)
        else:
            last = tl.zeros([ALIGN], dtype=tl.int8)
        tl.store(to_byte, last, mask=rest < size)


@triton.jit
def _move_tile(
    # Tile, of all pairs'
    item,
    # Pair
    source,
    destination,
    # Pointers, as addresses
    conv_source,
    conv_destination,
    ssm_source,
    ssm_destination,
    # Dimensions
    conv_tiles,
    ssm_tiles,
    layers,
    conv_size,
    ssm_size,
    # Strides in bytes
    conv_source_layer,
    conv_source_slot,
    conv_destination_layer,
    conv_destination_slot,
    ssm_source_layer,
    ssm_source_slot,
    ssm_destination_layer,
    ssm_destination_slot,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr,
    CONV_TAIL: tl.constexpr,
    SSM_ALIGN: tl.constexpr,
    SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
    FROM_SOURCE: tl.constexpr,
):
    """Move tile `item` of all pairs' all layers', which is this pair's; of a layer, ssm comes before conv."""
    layer = (item // (conv_tiles + ssm_tiles) % layers).to(tl.int64)
    tile = item % (conv_tiles + ssm_tiles)
    if tile < ssm_tiles:
        copy_tile(
            ssm_source + layer * ssm_source_layer + source * ssm_source_slot,
            ssm_destination + layer * ssm_destination_layer + destination * ssm_destination_slot,
            tile,
            ssm_tiles,
            ssm_size,
            SSM_ALIGN,
            SSM_TAIL,
            FROM_SOURCE,
            ACCESSES,
        )
    else:
        copy_tile(
            conv_source + layer * conv_source_layer + source * conv_source_slot,
            conv_destination + layer * conv_destination_layer + destination * conv_destination_slot,
            tile - ssm_tiles,
            conv_tiles,
            conv_size,
            CONV_ALIGN,
            CONV_TAIL,
            FROM_SOURCE,
            ACCESSES,
        )


@triton.jit
def move_live_pairs(
    # Pairs: [GROUP]
    live,
    sources,
    destinations,
    # Pointers, as addresses
    conv_source,
    conv_destination,
    ssm_source,
    ssm_destination,
    # Dimensions
    layers,
    conv_size,
    ssm_size,
    # Strides in bytes
    conv_source_layer,
    conv_source_slot,
    conv_destination_layer,
    conv_destination_slot,
    ssm_source_layer,
    ssm_source_slot,
    ssm_destination_layer,
    ssm_destination_slot,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr,
    CONV_TAIL: tl.constexpr,
    SSM_ALIGN: tl.constexpr,
    SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
    FROM_SOURCE: tl.constexpr,
):
    """This program's share of moving the `live` ones of up to GROUP pairs of slots, all layers."""
    live_pairs = tl.sum(live.to(tl.int32), 0)
    if live_pairs > 0:
        rank = tl.where(live, tl.cumsum(live.to(tl.int32), 0) - 1, -1)
        conv_tiles = tl.cdiv(conv_size, ACCESSES * CONV_ALIGN).to(tl.int32)
        ssm_tiles = tl.cdiv(ssm_size, ACCESSES * SSM_ALIGN).to(tl.int32)
        tiles = layers * (conv_tiles + ssm_tiles)
        for item in range(tl.program_id(0), live_pairs * tiles, tl.num_programs(0)):
            pair = item // tiles
            _move_tile(
                item,
                tl.sum(tl.where(rank == pair, sources, 0), 0).to(tl.int64),
                tl.sum(tl.where(rank == pair, destinations, 0), 0).to(tl.int64),
                conv_source,
                conv_destination,
                ssm_source,
                ssm_destination,
                conv_tiles,
                ssm_tiles,
                layers,
                conv_size,
                ssm_size,
                conv_source_layer,
                conv_source_slot,
                conv_destination_layer,
                conv_destination_slot,
                ssm_source_layer,
                ssm_source_slot,
                ssm_destination_layer,
                ssm_destination_slot,
                CONV_ALIGN,
                CONV_TAIL,
                SSM_ALIGN,
                SSM_TAIL,
                ACCESSES,
                FROM_SOURCE,
            )


@triton.jit(
    do_not_specialize=UNSPECIALISED,
    do_not_specialize_on_alignment=["source_indices", "destination_indices", "count"],
)
def _move_states(
    # Pointers
    source_indices,
    destination_indices,
    count,
    # Dimensions
    pairs: tl.int32,
    # Pointers, as addresses
    conv_source: tl.int64,
    conv_destination: tl.int64,
    ssm_source: tl.int64,
    ssm_destination: tl.int64,
    # Dimensions
    layers: tl.int32,
    conv_size: tl.int64,
    ssm_size: tl.int64,
    # Strides in bytes
    conv_source_layer: tl.int64,
    conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64,
    conv_destination_slot: tl.int64,
    ssm_source_layer: tl.int64,
    ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64,
    ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr,
    CONV_TAIL: tl.constexpr,
    SSM_ALIGN: tl.constexpr,
    SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
    FROM_SOURCE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Programs, up to `PROGRAMS` of them, take the tiles of all live pairs in turn."""
    if count is not None:
        pairs = tl.minimum(pairs, tl.load(count).to(tl.int32))
    for first in range(0, pairs, GROUP):
        places = first + tl.arange(0, GROUP)
        inside = places < pairs
        destinations = tl.load(destination_indices + places, mask=inside, other=-1)
        sources = tl.load(source_indices + places, mask=inside, other=-1) if FROM_SOURCE else destinations
        move_live_pairs(
            (sources >= 0) & (destinations >= 0),
            sources,
            destinations,
            conv_source,
            conv_destination,
            ssm_source,
            ssm_destination,
            layers,
            conv_size,
            ssm_size,
            conv_source_layer,
            conv_source_slot,
            conv_destination_layer,
            conv_destination_slot,
            ssm_source_layer,
            ssm_source_slot,
            ssm_destination_layer,
            ssm_destination_slot,
            CONV_ALIGN,
            CONV_TAIL,
            SSM_ALIGN,
            SSM_TAIL,
            ACCESSES,
            FROM_SOURCE,
        )


@triton.jit
def _chosen(place, packed):
    """`packed[place]` of a tuple."""
    chosen = packed[0].to(tl.int64)
    for other in tl.static_range(1, len(packed)):
        chosen = tl.where(place == other, packed[other], chosen)
    return chosen


@triton.jit(do_not_specialize=[*PACKED, *UNSPECIALISED])
def _move_listed_states(
    # Pairs of slots, the source in the upper 32 bits
    pair_0: tl.int64,
    pair_1: tl.int64,
    pair_2: tl.int64,
    pair_3: tl.int64,
    pair_4: tl.int64,
    pair_5: tl.int64,
    pair_6: tl.int64,
    pair_7: tl.int64,
    pair_8: tl.int64,
    pair_9: tl.int64,
    pair_10: tl.int64,
    pair_11: tl.int64,
    pair_12: tl.int64,
    pair_13: tl.int64,
    pair_14: tl.int64,
    pair_15: tl.int64,
    # Dimensions
    pairs: tl.int32,
    # Pointers, as addresses
    conv_source: tl.int64,
    conv_destination: tl.int64,
    ssm_source: tl.int64,
    ssm_destination: tl.int64,
    # Dimensions
    layers: tl.int32,
    conv_size: tl.int64,
    ssm_size: tl.int64,
    # Strides in bytes
    conv_source_layer: tl.int64,
    conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64,
    conv_destination_slot: tl.int64,
    ssm_source_layer: tl.int64,
    ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64,
    ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr,
    CONV_TAIL: tl.constexpr,
    SSM_ALIGN: tl.constexpr,
    SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
    FROM_SOURCE: tl.constexpr,
):
    """`_move_states` of the first `pairs` arguments, all of them live."""
    packed = (
        pair_0, pair_1, pair_2, pair_3, pair_4, pair_5, pair_6, pair_7,
        pair_8, pair_9, pair_10, pair_11, pair_12, pair_13, pair_14, pair_15,
    )  # fmt: skip
    conv_tiles = tl.cdiv(conv_size, ACCESSES * CONV_ALIGN).to(tl.int32)
    ssm_tiles = tl.cdiv(ssm_size, ACCESSES * SSM_ALIGN).to(tl.int32)
    tiles = layers * (conv_tiles + ssm_tiles)
    for item in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
        slots = _chosen(item // tiles, packed)
        _move_tile(
            item,
            slots >> 32,
            slots & 0x7FFFFFFF,
            conv_source,
            conv_destination,
            ssm_source,
            ssm_destination,
            conv_tiles,
            ssm_tiles,
            layers,
            conv_size,
            ssm_size,
            conv_source_layer,
            conv_source_slot,
            conv_destination_layer,
            conv_destination_slot,
            ssm_source_layer,
            ssm_source_slot,
            ssm_destination_layer,
            ssm_destination_slot,
            CONV_ALIGN,
            CONV_TAIL,
            SSM_ALIGN,
            SSM_TAIL,
            ACCESSES,
            FROM_SOURCE,
        )


class Layout(NamedTuple):
    """What a launch depends on of one pool tensor [layers, slots, ...]."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def slot_bytes(self) -> int | None:
        """Bytes of one slot of one layer; None when its elements do not follow one another."""
        size = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape[2:]), reversed(self.strides[2:]), strict=True):
            if length != 1 and stride * self.dtype.itemsize != size:
                return None if math.prod(self.shape[2:]) else 0
            size *= length
        return size


@dataclass(frozen=True)
class StateMove:
    """How states lie in two pools, in bytes: everything of a launch but which of them move."""

    arguments: dict[str, int | bool]
    """Addresses, dimensions, strides and meta-parameters: `MOVE_ARGUMENTS`, in their order."""
    tiles: int
    """Tiles of one state, all layers."""
    _compiled: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def between(cls, source: StateTensors, destination: StateTensors) -> "StateMove":
        """ValueError where the pools differ in more than their slots, or a slot has gaps.

        Reads no states. Worked out once for pools that stay where they are.
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
        """The grid for at most `pairs` pairs."""
        return max(1, min(PROGRAMS, pairs * self.tiles))

    def launch(
        self,
        kernel: Any,
        pairs: int,
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        types: tuple[torch.dtype | None, ...] = (),
        most_programs: int | None = None,
    ) -> None:
        """Start `kernel` for at most `pairs` pairs on the current stream of the current device, the pools'.

        Args:
            arguments, constants: what the kernel takes before and behind the move's arguments.
            types: of those arguments whose type is not always the same; None for one that is not there.
            most_programs: in place of `PROGRAMS`.
        """
        if not self.tiles:
            return
        grid = (min(self.programs(pairs), most_programs or PROGRAMS), 1, 1)
        listed = (*arguments, *self.arguments.values(), *constants)
        key = (kernel, constants, types)
        compiled = self._compiled.get(key)
        if compiled is None:
            # The interpreter compiles nothing: there the kernel itself is launched.
            compiled = kernel.warmup(*listed, grid=grid, num_warps=NUM_WARPS, num_stages=1) or kernel
            self._compiled[key] = compiled
        compiled[grid](*listed)


@lru_cache(maxsize=256)
def _state_move(*places: Any) -> StateMove:
    """Of four tensors, the fields of a `Layout` each: flat, because every call looks them up."""
    conv_source, ssm_source, conv, ssm = (Layout(*places[first : first + 5]) for first in range(0, 20, 5))
    layers = ssm.shape[0]
    arguments: dict[str, int | bool] = {"layers": layers, "ACCESSES": ACCESSES}
    tiles = 0
    for name, of, to in (("conv", conv_source, conv), ("ssm", ssm_source, ssm)):
        if (of.dtype, of.device, of.shape[2:]) != (to.dtype, to.device, to.shape[2:]) or not (
            of.shape[0] == to.shape[0] == layers and to.device == ssm.device
        ):
            raise ValueError(
                f"{name} states are {of} and {to}; accepted: pools of {layers} layers on one device that "
                "differ in their slots only"
            )
        size = to.slot_bytes()
        if size is None or of.slot_bytes() is None:
            raise ValueError(
                f"{name} states have the strides {of.strides} and {to.strides}; accepted: slots without gaps"
            )
        strides = [stride * pool.dtype.itemsize for pool in (of, to) for stride in pool.strides[:2]]
        align = math.gcd(WIDEST, of.address, to.address, *strides)
        names = ("source_layer", "source_slot", "destination_layer", "destination_slot")
        arguments |= {f"{name}_{stride}": value for stride, value in zip(names, strides, strict=True)}
        arguments |= {f"{name}_source": of.address, f"{name}_destination": to.address, f"{name}_size": size}
        arguments |= {f"{name.upper()}_ALIGN": align, f"{name.upper()}_TAIL": size % align > 0}
        tiles += layers * -(-size // (ACCESSES * align))
    if GROUP * tiles > INT32_MAX:
        raise ValueError(f"a state has {tiles} tiles; accepted: at most {INT32_MAX // GROUP}")
    return StateMove({name: arguments[name] for name in MOVE_ARGUMENTS}, tiles)


def copy_states(
    source: StateTensors,
    source_indices: Indices,
    destination: StateTensors,
    destination_indices: Indices,
    count: Tensor | None = None,
) -> None:
    """`state_copy.copy_states` of indices that are as they must be: one launch, or none for no pairs.

    Reads and writes each byte once. ValueError for pools between which states cannot move as bytes.
    """
    move = StateMove.between(source, destination)
    lists = not isinstance(source_indices, Tensor) and not isinstance(destination_indices, Tensor)
    if lists and count is None:
        pairs = zip(source_indices, destination_indices, strict=True)
        live = [(read, write) for read, write in pairs if read >= 0 <= write]
        _move_listed(move, destination.ssm.device, live, True)
        return
    read, write = on_device(destination.ssm.device, source_indices, destination_indices)
    _move(move, read, write, count)


def zero_states(states: StateTensors, indices: Indices, count: Tensor | None = None) -> None:
    """`state_copy.zero_states` of indices that are as they must be: one launch, or none for no slots."""
    move = StateMove.between(states, states)
    if not isinstance(indices, Tensor) and count is None:
        _move_listed(move, states.ssm.device, [(slot, slot) for slot in indices if slot >= 0], False)
        return
    (write,) = on_device(states.ssm.device, indices)
    _move(move, None, write, count)


def _move_listed(
    move: StateMove, device: torch.device, pairs: list[tuple[int, int]], from_source: bool
) -> None:
    """Move live pairs; those of more than a launch can carry cross in memory."""
    if len(pairs) > LISTED:
        read, write = on_device(device, *zip(*pairs, strict=True))
        _move(move, read if from_source else None, write, None)
    elif pairs:
        packed = [index(source) << 32 | index(destination) for source, destination in pairs]
        arguments = (*packed, *NO_PAIRS[len(packed) :], len(packed))
        move.launch(_move_listed_states, len(packed), arguments, (from_source,))


def _move(move: StateMove, sources: Tensor | None, destinations: Tensor, count: Tensor | None) -> None:
    pairs = destinations.shape[0]
    if pairs:
        types = (None if sources is None else sources.dtype, None if count is None else count.dtype)
        arguments = (sources, destinations, count, pairs)
        move.launch(_move_states, pairs, arguments, (sources is not None, GROUP), types)


def nemotron_h_8b(ssm_dtype: torch.dtype = torch.float32) -> StateTensors:
    """A pool of 64 of Nemotron-H-8B's states, without memory."""
    return StateTensors(
        torch.empty(24, 64, 10240, 3, dtype=torch.bfloat16, device="meta"),
        torch.empty(24, 64, 128, 64, 128, dtype=ssm_dtype, device="meta"),
    )


def specialisation_of(
    name: str,
    kernel: Any,
    move: StateMove,
    other_types: dict[str, str],
    constexprs: dict[str, Any],
    wide: tuple[Literal["load", "store"], ...],
) -> Specialisation:
    """A launch of `kernel` for a move; `other_types` and `constexprs` hold the arguments that it has not."""
    fixed = {argument: value for argument, value in move.arguments.items() if argument.isupper()}
    types = {argument: "i64" for argument in move.arguments if not argument.isupper()}
    return Specialisation(
        name,
        kernel,
        types | {"layers": "i32", "pairs": "i32"} | other_types,
        fixed | constexprs,
        num_warps=NUM_WARPS,
        num_stages=1,
        wide=wide,
    )


def hopper_specialisations() -> list[Specialisation]:
    """Copies and zero-fill at Nemotron-H-8B's shapes, and the narrow accesses of slots of odd sizes."""
    to: dict[str, str] = {"destination_indices": "*i64"}
    pairs = to | {"source_indices": "*i64"}
    copy: dict[str, Any] = {"FROM_SOURCE": True, "GROUP": GROUP, "count": None}
    zero: dict[str, Any] = {"FROM_SOURCE": False, "GROUP": GROUP, "count": None, "source_indices": None}
    listed = dict.fromkeys(PACKED, "i64")
    copy_listed, zero_listed = {"FROM_SOURCE": True}, {"FROM_SOURCE": False}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pool = nemotron_h_8b(dtype)
        move = StateMove.between(pool, pool)
        kind = str(dtype).removeprefix("torch.")
        found += [
            specialisation_of(f"copy_states {kind}", _move_states, move, pairs, copy, ("load", "store")),
            specialisation_of(f"zero_states {kind}", _move_states, move, to, zero, ("store",)),
            specialisation_of(
                f"copy_states {kind}, listed",
                _move_listed_states,
                move,
                listed,
                copy_listed,
                ("load", "store"),
            ),
            specialisation_of(
                f"zero_states {kind}, listed", _move_listed_states, move, listed, zero_listed, ("store",)
            ),
        ]
    counted = {"FROM_SOURCE": True, "GROUP": GROUP}
    of_count = pairs | {"count": "*i32"}
    found.append(
        specialisation_of("copy_states, counted", _move_states, move, of_count, counted, ("load", "store"))
    )
    for align in (16, 8, 4, 2, 1):
        tail = align > 1
        odd = {"CONV_ALIGN": align, "CONV_TAIL": tail, "SSM_ALIGN": align, "SSM_TAIL": tail}
        name = f"copy_states, aligned to {align}" + ", odd size" * tail
        found.append(specialisation_of(name, _move_states, move, pairs, copy | odd, ()))
    return found
