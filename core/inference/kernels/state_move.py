"""A Triton kernel that moves whole states between two pools, as bytes: any number of states in one launch.

Up to `PROGRAMS` programs share the tiles of all pairs. The kernel knows no dtypes. It moves words of 8 bytes
in accesses of 16 bytes where all addresses and strides are multiples of 16, and narrower words elsewhere.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .state_pools import ConvAndSsm

PROGRAMS = 4224
"""Most programs of a launch: 32 for each of the 132 multiprocessors of an H200, of which 8 fit at once."""
ACCESSES = 1024
"""Accesses of a tile: 8 independent ones for each thread of 4 warps; 16 KiB where an access has 16 bytes."""
NUM_WARPS = 4
WIDEST = 16  # bytes that one thread can load or store at once


class PartMove(NamedTuple):
    """One part of a state, conv or ssm, in two pools; every number is in bytes."""

    source: int  # the address of layer 0, slot 0 in the pool that is read
    destination: int  # and in the pool that is written
    size: int  # of one slot of one layer
    source_layer: int  # strides, between layers and between slots
    source_slot: int
    destination_layer: int
    destination_slot: int
    align: int  # the largest power of two up to 16 that divides both addresses and all strides

    @classmethod
    def between(cls, source: Tensor, destination: Tensor) -> "PartMove":
        """The move between pools [layers, slots, ...]; a ValueError where they differ in more than slots."""
        kinds = [(pool.dtype, pool.device, pool.shape[0], pool.shape[2:]) for pool in (source, destination)]
        gapless = source[:1, :1].is_contiguous() and destination[:1, :1].is_contiguous()
        if kinds[0] != kinds[1] or not gapless:
            raise ValueError(
                f"pools have (dtype, device, layers, shape) {kinds} and the strides {source.stride()} and "
                f"{destination.stride()}; accepted: pools that differ in their slots only, slots without gaps"
            )
        strides = [stride * pool.itemsize for pool in (source, destination) for stride in pool.stride()[:2]]
        addresses = source.data_ptr(), destination.data_ptr()
        size = math.prod(destination.shape[2:]) * destination.itemsize
        align = math.gcd(WIDEST, *addresses, *strides)
        return cls(*addresses, size, strides[0], strides[1], strides[2], strides[3], align)

    @property
    def tiles(self) -> int:
        """Tiles of one layer of a state."""
        return ceil_div(self.size, ACCESSES * self.align)


def copy_states(source: ConvAndSsm, read: Tensor, destination: ConvAndSsm, write: Tensor) -> None:
    """Copy `source[:, read]` to `destination[:, write]` in one launch; ValueError where bytes cannot move."""
    conv, ssm = (PartMove.between(*pools) for pools in zip(source, destination, strict=True))
    layers, pairs = destination.ssm.shape[0], len(write)
    if tiles := layers * pairs * (conv.tiles + ssm.tiles):
        move_states[(min(PROGRAMS, tiles),)](
            read, write, pairs, layers, *conv[:-1], *ssm[:-1], *constants_of(conv, ssm).values(),
            num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip


def constants_of(conv: PartMove, ssm: PartMove) -> dict[str, int | bool]:
    """The meta-parameters of `move_states`, in order; TAIL: whether a size is no multiple of ALIGN."""
    return {
        "CONV_ALIGN": conv.align, "CONV_TAIL": conv.size % conv.align > 0,
        "SSM_ALIGN": ssm.align, "SSM_TAIL": ssm.size % ssm.align > 0, "ACCESSES": ACCESSES,
    }  # fmt: skip


PART_ARGUMENTS = [f"{part}_{name}" for part in ("conv", "ssm") for name in PartMove._fields[:-1]]


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
        tail = start + words // WORDS_PER_ACCESS * ALIGN + tl.arange(0, ALIGN)
        destination_bytes = destination.to(tl.pointer_type(tl.int8)) + tail
        last = tl.load(source.to(tl.pointer_type(tl.int8)) + tail, mask=tail < size)
        tl.store(destination_bytes, last, mask=tail < size)


@triton.jit(
    do_not_specialize=["pairs", "layers", *PART_ARGUMENTS], do_not_specialize_on_alignment=["read", "write"]
)
def move_states(
    # Pointers
    read, write,
    # Dimensions
    pairs: tl.int32, layers: tl.int32,
    # Addresses, sizes and strides in bytes, as in `PartMove`
    conv_source: tl.int64, conv_destination: tl.int64, conv_size: tl.int64,
    conv_source_layer: tl.int64, conv_source_slot: tl.int64,
    conv_destination_layer: tl.int64, conv_destination_slot: tl.int64,
    ssm_source: tl.int64, ssm_destination: tl.int64, ssm_size: tl.int64,
    ssm_source_layer: tl.int64, ssm_source_slot: tl.int64,
    ssm_destination_layer: tl.int64, ssm_destination_slot: tl.int64,
    # Meta-parameters
    CONV_ALIGN: tl.constexpr, CONV_TAIL: tl.constexpr, SSM_ALIGN: tl.constexpr, SSM_TAIL: tl.constexpr,
    ACCESSES: tl.constexpr,
):  # fmt: skip
    """Programs take the tiles of all pairs in turn; in each layer those of ssm are before those of conv."""
    conv_tiles = tl.cdiv(conv_size, ACCESSES * CONV_ALIGN).to(tl.int32)
    ssm_tiles = tl.cdiv(ssm_size, ACCESSES * SSM_ALIGN).to(tl.int32)
    tiles = conv_tiles + ssm_tiles
    for item in range(tl.program_id(0), pairs * layers * tiles, tl.num_programs(0)):
        source = tl.load(read + item // (layers * tiles))
        destination = tl.load(write + item // (layers * tiles))
        layer = (item // tiles % layers).to(tl.int64)
        tile = item % tiles
        if tile < ssm_tiles:
            copy_tile(
                ssm_source + layer * ssm_source_layer + source * ssm_source_slot,
                ssm_destination + layer * ssm_destination_layer + destination * ssm_destination_slot,
                tile, ssm_tiles, ssm_size, SSM_ALIGN, SSM_TAIL, ACCESSES,
            )  # fmt: skip
        else:
            copy_tile(
                conv_source + layer * conv_source_layer + source * conv_source_slot,
                conv_destination + layer * conv_destination_layer + destination * conv_destination_slot,
                tile - ssm_tiles, conv_tiles, conv_size, CONV_ALIGN, CONV_TAIL, ACCESSES,
            )  # fmt: skip
