"""Triton kernels that encode states into durable slots and decode them, a launch for each state tensor.

A program has a tile of one layer of one pair. A tile of int8 holds whole groups of entries that share a
scale, so that a program finds the scale and applies it with one read of the states. Rows of a tile are
contiguous in memory; a group is a column of the tile, or a row where the scale's axis is the last.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .reference.torch_state_copy import INVERSE_OF_LARGEST, SMALLEST
from .state_pools import CodedTensor

NUM_WARPS = 8
_TILE_ELEMENTS = 8192
CAST_ELEMENTS = 4096
_ROUNDER = tl.constexpr(1.5 * 2**23)  # what is added to it and taken off is rounded to the nearest integer
_INVERSE = tl.constexpr(INVERSE_OF_LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


class Tiles(NamedTuple):
    """How the groups of one layer of a tensor lie in tiles."""

    outer: int  # entries before the scale's axis
    group: int  # entries along it
    inner: int  # entries after it
    block_x: int  # rows of a tile
    block_y: int  # columns of a tile

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int) -> "Tiles":
        """The tiles of a tensor of this shape, whose scale is shared along `axis`."""
        outer, group, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        width = triton.next_power_of_2(group)
        other = max(1, min(_TILE_ELEMENTS // width, triton.next_power_of_2(outer if inner == 1 else inner)))
        return cls(outer, group, inner, *((other, width) if inner == 1 else (width, other)))

    @property
    def num_tiles(self) -> int:
        """Tiles of a layer."""
        if self.inner == 1:
            return ceil_div(self.outer, self.block_x)
        return self.outer * ceil_div(self.inner, self.block_y)


def code_tensor(tensor: CodedTensor, sources: Tensor, destinations: Tensor, *, encodes: bool) -> None:
    """`torch_state_copy.code_tensor` in one launch; nothing is checked."""
    if tensor.scales is not None:
        _scaled(quantise_kernel if encodes else dequantise_kernel, tensor, sources, destinations)
    elif encodes:
        _cast(tensor.states, tensor.numbers, sources, destinations)
    else:
        _cast(tensor.numbers, tensor.states, sources, destinations)


def _cast(read: Tensor, written: Tensor, sources: Tensor, destinations: Tensor) -> None:
    size = math.prod(read.shape[2:])
    tiles = ceil_div(size, CAST_ELEMENTS)
    cast_kernel[(read.shape[0] * tiles, len(sources))](
        read, written, sources, destinations, size, *read.stride()[:2], *written.stride()[:2],
        TILES=tiles, BLOCK=CAST_ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip


def _scaled(kernel: Any, tensor: CodedTensor, sources: Tensor, destinations: Tensor) -> None:
    states, numbers, scales = tensor.states, tensor.numbers, tensor.scales
    assert scales is not None
    assert tensor.scale_axis is not None
    tiles = Tiles.of(tuple(states.shape[2:]), tensor.scale_axis)
    kernel[(states.shape[0] * tiles.num_tiles, len(sources))](
        states, numbers, scales, sources, destinations,
        *states.stride()[:2], *numbers.stride()[:2], *scales.stride()[:2],
        TILES=tiles.num_tiles, OUTER=tiles.outer, GROUP=tiles.group, INNER=tiles.inner,
        BLOCK_X=tiles.block_x, BLOCK_Y=tiles.block_y, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def cast_kernel(
    # Pointers
    read, written, sources, destinations,
    # Dimensions
    size,
    # Strides
    read_layer, read_slot, written_layer, written_slot,
    # Meta-parameters
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK numbers of one layer of one pair, as numbers of the dtype of `written`."""
    source = tl.load(sources + tl.program_id(1)).to(tl.int64)
    destination = tl.load(destinations + tl.program_id(1)).to(tl.int64)
    if source >= 0 and destination >= 0:
        layer = (tl.program_id(0) // TILES).to(tl.int64)
        at = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
        read += layer * read_layer + source * read_slot
        written += layer * written_layer + destination * written_slot
        values = tl.load(read + at, mask=at < size)
        tl.store(written + at, values.to(written.dtype.element_ty), mask=at < size)


@triton.jit
def _tile(
    TILES: tl.constexpr, OUTER: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Where this program's entries and scales lie in a slot of a layer, and which of them exist."""
    tile = tl.program_id(0) % TILES
    x, y = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_Y)
    if INNER == 1:
        rows = tile * BLOCK_X + x
        entries = rows[:, None] * GROUP + y[None, :]
        inside = (rows < OUTER)[:, None] & (y < GROUP)[None, :]
        scales, has_scale = rows, rows < OUTER
    else:
        ACROSS: tl.constexpr = (INNER + BLOCK_Y - 1) // BLOCK_Y
        outer, columns = tile // ACROSS, tile % ACROSS * BLOCK_Y + y
        entries = outer * (GROUP * INNER) + x[:, None] * INNER + columns[None, :]
        inside = (x < GROUP)[:, None] & (columns < INNER)[None, :]
        scales, has_scale = outer * INNER + columns, columns < INNER
    return entries, inside, scales, has_scale


@triton.jit
def quantise_kernel(
    # Pointers
    states, numbers, scales, sources, destinations,
    # Strides
    state_layer, state_slot, number_layer, number_slot, scale_layer, scale_slot,
    # Meta-parameters
    TILES: tl.constexpr, OUTER: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Store one tile of one layer of one pair as int8 with a scale for each group."""
    source = tl.load(sources + tl.program_id(1)).to(tl.int64)
    destination = tl.load(destinations + tl.program_id(1)).to(tl.int64)
    if source >= 0 and destination >= 0:
        AXIS: tl.constexpr = 1 if INNER == 1 else 0
        layer = (tl.program_id(0) // TILES).to(tl.int64)
        entries, inside, groups, has_scale = _tile(TILES, OUTER, GROUP, INNER, BLOCK_X, BLOCK_Y)
        states += layer * state_layer + source * state_slot
        numbers += layer * number_layer + destination * number_slot
        scales += layer * scale_layer + destination * scale_slot
        values = tl.load(states + entries, mask=inside, other=0.0).to(tl.float32)
        infinite: tl.constexpr = float("inf")
        sizes = tl.where(values == values, tl.abs(values), infinite)  # a maximum may pass over NaN
        largest = tl.max(sizes, axis=AXIS)
        bits = (largest * _INVERSE).to(tl.int32, bitcast=True)
        scale = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)  # rounded up to bfloat16
        scale = tl.where(largest >= _SMALLEST, scale, 0.0)
        finite = largest < infinite
        usable = finite & (scale > 0)
        inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)
        scale = tl.where(finite, scale, float("nan"))
        scaled = values * (inverse[:, None] if INNER == 1 else inverse[None, :])
        rounded = (scaled + _ROUNDER) - _ROUNDER
        rounded = tl.where(finite[:, None] if INNER == 1 else finite[None, :], rounded, 0.0)
        tl.store(numbers + entries, rounded.to(tl.int8), mask=inside)
        tl.store(scales + groups, scale.to(tl.bfloat16), mask=has_scale)


@triton.jit
def dequantise_kernel(
    # Pointers
    states, numbers, scales, sources, destinations,
    # Strides
    state_layer, state_slot, number_layer, number_slot, scale_layer, scale_slot,
    # Meta-parameters
    TILES: tl.constexpr, OUTER: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Restore one tile of one layer of one pair: each int8 number times the scale of its group."""
    source = tl.load(sources + tl.program_id(1)).to(tl.int64)
    destination = tl.load(destinations + tl.program_id(1)).to(tl.int64)
    if source >= 0 and destination >= 0:
        layer = (tl.program_id(0) // TILES).to(tl.int64)
        entries, inside, groups, has_scale = _tile(TILES, OUTER, GROUP, INNER, BLOCK_X, BLOCK_Y)
        states += layer * state_layer + destination * state_slot
        numbers += layer * number_layer + source * number_slot
        scales += layer * scale_layer + source * scale_slot
        rounded = tl.load(numbers + entries, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scales + groups, mask=has_scale, other=0.0).to(tl.float32)
        values = rounded * (scale[:, None] if INNER == 1 else scale[None, :])
        tl.store(states + entries, values.to(states.dtype.element_ty), mask=inside)
