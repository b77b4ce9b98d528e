"""The causal convolution of decode by replay in Triton, with the bits of the kernels in `conv`.

The references are the functions of the same names in `torch_conv`. Rings are contiguous in each row.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .conv import convolved, load_taps
from .dtypes_and_strides import check_slots
from .step_rows import ReplayRows

CHANNELS, NUM_WARPS = 128, 2


def causal_conv1d_replay(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, conv_inputs: Tensor,
    rows: ReplayRows, *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_conv.causal_conv1d_replay`; a ValueError where a slot's ring is not contiguous."""
    num_rows, tokens, conv_dim = x.shape
    check_slots(conv_inputs=conv_inputs)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    conv_replay_kernel[(num_rows * ceil_div(conv_dim, CHANNELS),)](
        x, weight, weight if bias is None else bias, conv_states, conv_inputs, out,
        rows.input_rows, rows.starts, rows.lengths, rows.destinations,
        conv_dim,
        *x.stride(), *weight.stride(), *conv_states.stride(), conv_inputs.stride(0),
        KERNEL=weight.shape[1], HAS_BIAS=bias is not None, ACTIVATION=activation,
        TOKENS=tokens, RING=conv_inputs.shape[1], BLOCK_C=CHANNELS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def keep_conv_inputs(
    x: Tensor, conv_states: Tensor, conv_inputs: Tensor, input_rows: Tensor, starts: Tensor, sources: Tensor,
    query_start_loc: Tensor,
) -> None:  # fmt: skip
    """As `torch_conv.keep_conv_inputs`; a ValueError where the rings are not contiguous in each slot."""
    rows, conv_dim, width = input_rows.shape[0], x.shape[1], conv_states.shape[-1]
    check_slots(conv_inputs=conv_inputs)
    keep_conv_kernel[(rows * ceil_div(conv_dim, CHANNELS),)](
        x, conv_states, conv_inputs, input_rows, starts, sources, query_start_loc,
        conv_dim,
        *x.stride(), *conv_states.stride(), conv_inputs.stride(0),
        WIDTH=width, RING=conv_inputs.shape[1], BLOCK_C=CHANNELS,
        num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def conv_replay_kernel(
    # Pointers
    x, weight, bias, states, rings, out, input_rows, starts, lengths, destinations,
    # Dimensions
    conv_dim,
    # Strides
    x_row_stride, x_token_stride, x_channel_stride,
    weight_channel_stride, weight_tap_stride,
    slot_stride, state_channel_stride, state_tap_stride,
    ring_stride: tl.int64,
    # Meta-parameters
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program has a row and a block of channels. Padding costs one scalar load.

    The positions that it reads and those that it writes are at most RING neighbours, and so lie apart.
    """
    WIDTH: tl.constexpr = KERNEL - 1
    channel_blocks = tl.cdiv(conv_dim, BLOCK_C)
    row = (tl.program_id(0) // channel_blocks).to(tl.int64)
    channel = tl.program_id(0) % channel_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < conv_dim
    x += row * x_row_stride + channel * x_channel_stride
    weight += channel * weight_channel_stride
    bias += channel
    states += channel.to(tl.int64) * state_channel_stride
    out += row * TOKENS * conv_dim + channel

    input_row = tl.load(input_rows + row)
    if input_row >= 0:
        start = tl.load(starts + row)
        length = tl.load(lengths + row)
        destination = tl.load(destinations + row)
        ring = rings + input_row * ring_stride + channel
        taps = load_taps(weight, bias, inside, weight_tap_stride, KERNEL, HAS_BIAS)
        inputs = ()
        for tap in tl.static_range(WIDTH):
            position = start - WIDTH + tap
            place = (position + RING) % RING  # C's remainder of a negative number would be negative
            raw = tl.load(ring + place * conv_dim, mask=inside & (position >= 0), other=0.0)
            inputs = inputs + (raw,)
        for token in tl.static_range(TOKENS):
            raw = tl.load(x + token * x_token_stride, mask=inside & (token < length), other=0.0)
            inputs = inputs + (raw,)
        for token in tl.static_range(TOKENS):
            y = convolved(taps, inputs, token, KERNEL, ACTIVATION)
            tl.store(out + token * conv_dim, y.to(out.dtype.element_ty), mask=inside)
            raw = inputs[WIDTH + token].to(rings.dtype.element_ty)
            tl.store(ring + (start + token) % RING * conv_dim, raw, mask=inside & (token < length))
        if destination >= 0:
            window = states + destination * slot_stride
            for tokens in tl.static_range(TOKENS + 1):
                if length == tokens:
                    for tap in tl.static_range(WIDTH):
                        raw = inputs[tokens + tap].to(states.dtype.element_ty)
                        tl.store(window + tap * state_tap_stride, raw, mask=inside)


@triton.jit
def keep_conv_kernel(
    # Pointers
    x, states, rings, input_rows, starts, sources, query_start_loc,
    # Dimensions
    conv_dim,
    # Strides
    x_token_stride, x_channel_stride,
    slot_stride, state_channel_stride, state_tap_stride,
    ring_stride: tl.int64,
    # Meta-parameters
    WIDTH: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program has a row and a block of channels. Padding costs one scalar load."""
    channel_blocks = tl.cdiv(conv_dim, BLOCK_C)
    row = (tl.program_id(0) // channel_blocks).to(tl.int64)
    channel = tl.program_id(0) % channel_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < conv_dim
    input_row = tl.load(input_rows + row)
    if input_row >= 0:
        source = tl.load(sources + row)
        first = tl.load(query_start_loc + row).to(tl.int64)
        length = tl.load(query_start_loc + row + 1).to(tl.int64) - first
        start = tl.load(starts + row).to(tl.int64)
        tokens = x + first * x_token_stride + channel * x_channel_stride
        window = states + source * slot_stride + channel.to(tl.int64) * state_channel_stride
        ring = rings + input_row * ring_stride + channel
        for tap in tl.static_range(WIDTH):
            token = length - WIDTH + tap  # of the row; below 0 it lies in the carried window
            new = tl.load(tokens + token * x_token_stride, mask=inside & (token >= 0), other=0.0)
            is_carried = inside & (token < 0) & (source >= 0)
            carried = tl.load(window + (token + WIDTH) * state_tap_stride, mask=is_carried, other=0.0)
            raw = tl.where(token >= 0, new.to(rings.dtype.element_ty), carried.to(rings.dtype.element_ty))
            position = start + token
            place = (position + RING) % RING
            tl.store(ring + place * conv_dim, raw, mask=inside & (position >= 0))
