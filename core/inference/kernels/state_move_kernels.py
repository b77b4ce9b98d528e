"""Triton kernels that move or zero whole states, as bytes: any number of states in one launch.

The grid is bounded: up to `PROGRAMS` programs share the tiles of all pairs. Each program first ranks the live
pairs among up to `GROUP` pairs. A pair that holds a -1 or lies past the count has no tile, and a launch that
finds nothing to do costs one small launch, however large the pools are. A grid as large as the work would
start 200,000 programs, each to exit, whenever a captured graph has 32 idle rows of an 8B model.

Up to `LISTED` pairs that the host knows travel as arguments of the launch, live pairs only. They need no
memory, no copy and no ranking.

The kernels know no dtypes. They move words of 8 bytes in accesses of 16 bytes where all addresses and strides
are multiples of 16, and narrower words elsewhere.
"""

import triton
import triton.language as tl

from .state_move import UNSPECIALISED, PartMove

LISTED = 16
"""Pairs that a launch carries as arguments."""
LISTED_ARGUMENTS = [f"pair_{place}" for place in range(LISTED)]


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
    """Copy bytes [tile, tile + 1) * ACCESSES * ALIGN of `size`, or write zeros there without FROM_SOURCE."""
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
    if FROM_SOURCE:
        source_words = tl.multiple_of((source + start).to(tl.pointer_type(word)), ALIGN)
        values = tl.load(source_words + offsets, mask=inside)
    else:
        values = tl.zeros([WORDS], dtype=word)
    tl.store(destination_words + offsets, values, mask=inside)
    if TAIL and tile == num_tiles - 1:
        rest = start + words // WORDS_PER_ACCESS * ALIGN + tl.arange(0, ALIGN)
        destination_bytes = destination.to(tl.pointer_type(tl.int8)) + rest
        if FROM_SOURCE:
            last = tl.load(source.to(tl.pointer_type(tl.int8)) + rest, mask=rest < size)
        else:
            last = tl.zeros([ALIGN], dtype=tl.int8)
        tl.store(destination_bytes, last, mask=rest < size)


@triton.jit
def _part_tiles(part, ACCESSES: tl.constexpr):
    """Tiles of one part of one layer of a state; `part`: a `PartMove`."""
    return tl.cdiv(part.size, ACCESSES * part.ALIGN).to(tl.int32)


@triton.jit
def _move_part(
    part, source, destination, layer, tile, num_tiles, ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr
):
    """Move one tile of one part of one layer from slot `source` to slot `destination`."""
    copy_tile(
        part.source + layer * part.source_layer + source * part.source_slot,
        part.destination + layer * part.destination_layer + destination * part.destination_slot,
        tile,
        num_tiles,
        part.size,
        part.ALIGN,
        part.TAIL,
        FROM_SOURCE,
        ACCESSES,
    )


@triton.jit
def _move_tile(
    # Tile, counted over all pairs, and the slots of the pair that has this tile
    item, source, destination,
    # State: its layers and two `PartMove`s
    layers, conv, ssm,
    # Meta-parameters
    ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr,
):  # fmt: skip
    """Move one tile of a pair; in each layer the tiles of ssm come before the tiles of conv."""
    conv_tiles = _part_tiles(conv, ACCESSES)
    ssm_tiles = _part_tiles(ssm, ACCESSES)
    layer = (item // (conv_tiles + ssm_tiles) % layers).to(tl.int64)
    tile = item % (conv_tiles + ssm_tiles)
    if tile < ssm_tiles:
        _move_part(ssm, source, destination, layer, tile, ssm_tiles, ACCESSES, FROM_SOURCE)
    else:
        _move_part(conv, source, destination, layer, tile - ssm_tiles, conv_tiles, ACCESSES, FROM_SOURCE)


@triton.jit
def move_live_pairs(
    # Pairs: [GROUP]
    live, sources, destinations,
    # State: its layers and two `PartMove`s
    layers, conv, ssm,
    # Meta-parameters
    ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr,
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
            _move_tile(item, source, destination, layers, conv, ssm, ACCESSES, FROM_SOURCE)


@triton.jit(
    do_not_specialize=UNSPECIALISED,
    do_not_specialize_on_alignment=["source_indices", "destination_indices", "count"],
)
def move_states(
    # Pointers
    source_indices, destination_indices, count,
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
    ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs, up to `PROGRAMS` of them, take the tiles of all live pairs in turn."""
    if count is not None:
        pairs = tl.minimum(pairs, tl.load(count).to(tl.int32))
    for first in range(0, pairs, GROUP):
        places = first + tl.arange(0, GROUP)
        inside = places < pairs
        destinations = tl.load(destination_indices + places, mask=inside, other=-1)
        sources = tl.load(source_indices + places, mask=inside, other=-1) if FROM_SOURCE else destinations
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
            ACCESSES, FROM_SOURCE,
        )  # fmt: skip


@triton.jit
def _entry(place, packed):
    """`packed[place]` of a tuple, for a `place` that is known at run time only."""
    entry = packed[0].to(tl.int64)
    for other in tl.static_range(1, len(packed)):
        entry = tl.where(place == other, packed[other], entry)
    return entry


@triton.jit
def _move_packed_pairs(packed, pairs, layers, conv, ssm, ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr):
    """Move this program's share of the first `pairs` of `packed`, a tuple of pairs in 64 bits each."""
    tiles = layers * (_part_tiles(conv, ACCESSES) + _part_tiles(ssm, ACCESSES))
    for item in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
        slots = _entry(item // tiles, packed)
        _move_tile(item, slots >> 32, slots & 0x7FFFFFFF, layers, conv, ssm, ACCESSES, FROM_SOURCE)


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
    ACCESSES: tl.constexpr, FROM_SOURCE: tl.constexpr,
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
        ACCESSES, FROM_SOURCE,
    )  # fmt: skip
