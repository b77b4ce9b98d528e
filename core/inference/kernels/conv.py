"""The causal convolution of mixers in Triton: packed prefill and decode; `conv_replay` has decode by replay.

The references are the functions of the same names in `torch_conv`. Every output is the same chain of
fused multiply-adds over the same taps in float32 in every kernel, wherever its row was cut: a cached, an
uncached and a replaying run get equal bits. Tensors have any strides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .step_rows import ConvRows
from .tiles import any_index

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples


PREFILL_TOKENS, PREFILL_CHANNELS, PREFILL_WARPS = 16, 256, 8
UPDATE_CHANNELS, UPDATE_WARPS = 128, 2


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, rows: ConvRows,
    *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_conv.causal_conv1d_prefill`. The slot of a checkpoint is no row's source."""
    tokens, conv_dim = x.shape
    num_rows, checkpoints = rows.sources.shape[0], rows.checkpoint_rows.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    works = num_rows + checkpoints + ceil_div(tokens, PREFILL_TOKENS)
    conv_prefill_kernel[(works * ceil_div(conv_dim, PREFILL_CHANNELS),)](
        x, weight, weight if bias is None else bias, conv_states, out, *rows,
        num_rows, checkpoints, conv_dim,
        *x.stride(), *weight.stride(), *conv_states.stride(),
        KERNEL=weight.shape[1], HAS_BIAS=bias is not None, ACTIVATION=activation,
        BLOCK_T=PREFILL_TOKENS, BLOCK_C=PREFILL_CHANNELS,
        num_warps=PREFILL_WARPS,
    )  # fmt: skip
    return out


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, sources: Tensor,
    destinations: Tensor, *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_conv.causal_conv1d_update`."""
    rows, tokens, conv_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    conv_update_kernel[(rows * ceil_div(conv_dim, UPDATE_CHANNELS),)](
        x, weight, weight if bias is None else bias, conv_states, out, sources, destinations,
        conv_dim,
        *x.stride(), *weight.stride(), *conv_states.stride(), *destinations.stride(),
        KERNEL=weight.shape[1], HAS_BIAS=bias is not None, ACTIVATION=activation,
        TOKENS=tokens, BLOCK_C=UPDATE_CHANNELS,
        num_warps=UPDATE_WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "checkpoints"])
def conv_prefill_kernel(
    # Pointers
    x, weight, bias, states, out,
    sources, destinations, query_start_loc, token_rows,
    checkpoint_rows, checkpoint_ends, checkpoint_destinations,
    # Dimensions
    rows, checkpoints, conv_dim,
    # Strides
    x_token_stride, x_channel_stride,
    weight_channel_stride, weight_tap_stride,
    slot_stride, state_channel_stride, state_tap_stride,
    # Meta-parameters
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program has a block of channels and a row, a checkpoint, or BLOCK_T tokens of the packed stream.

    A row's own program alone reads the row's carried window and writes the final one, which may lie in the
    same slot; it also has the row's first KERNEL - 1 outputs and the checkpoints among these tokens. Others
    read only `x`.
    """
    channel_blocks = tl.cdiv(conv_dim, BLOCK_C)
    work = tl.program_id(0) // channel_blocks
    channel = tl.program_id(0) % channel_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < conv_dim
    x += channel * x_channel_stride
    weight += channel * weight_channel_stride
    bias += channel
    states += channel.to(tl.int64) * state_channel_stride
    out += channel

    if work < rows:
        _row(
            x, weight, bias, states, out, sources, destinations, query_start_loc,
            checkpoint_rows, checkpoint_ends, checkpoint_destinations,
            work, checkpoints, conv_dim, inside,
            x_token_stride, weight_tap_stride, slot_stride, state_tap_stride, KERNEL, HAS_BIAS, ACTIVATION,
        )  # fmt: skip
    elif work < rows + checkpoints:
        _checkpoint(
            x, states, query_start_loc, checkpoint_rows, checkpoint_ends, checkpoint_destinations,
            work - rows, inside, x_token_stride, slot_stride, state_tap_stride, KERNEL,
        )  # fmt: skip
    else:
        _tokens(
            x, weight, bias, out, query_start_loc, token_rows,
            work - rows - checkpoints, rows, conv_dim, inside,
            x_token_stride, weight_tap_stride, KERNEL, HAS_BIAS, ACTIVATION, BLOCK_T,
        )  # fmt: skip


@triton.jit
def _row(
    x, weight, bias, states, out, sources, destinations, query_start_loc,
    checkpoint_rows, checkpoint_ends, checkpoint_destinations,
    row, checkpoints, conv_dim, inside,
    x_token_stride, weight_tap_stride, slot_stride, state_tap_stride,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A row's outputs and checkpoints within its first KERNEL - 1 tokens, and its final window."""
    WIDTH: tl.constexpr = KERNEL - 1
    start = tl.load(query_start_loc + row)
    tokens = tl.load(query_start_loc + row + 1) - start
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    x += start * x_token_stride
    carried = _load_window(states, source, slot_stride, state_tap_stride, inside, WIDTH)
    tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
    if tokens > 0:
        taps = load_taps(weight, bias, inside, weight_tap_stride, KERNEL, HAS_BIAS)
        inputs = carried
        for token in tl.static_range(WIDTH):
            raw = tl.load(x + token * x_token_stride, mask=inside & (token < tokens), other=0.0)
            inputs = inputs + (raw,)
        for token in tl.static_range(WIDTH):
            y = convolved(taps, inputs, token, KERNEL, ACTIVATION)
            is_token = inside & (token < tokens)
            tl.store(out + (start + token) * conv_dim, y.to(out.dtype.element_ty), mask=is_token)
    _store_window(
        states, destination, slot_stride, state_tap_stride,
        inside, carried, x, x_token_stride, tokens, WIDTH,
    )  # fmt: skip
    for first in range(0, checkpoints, 128):
        several = first + tl.arange(0, 128)
        owners = tl.load(checkpoint_rows + several, mask=several < checkpoints, other=-1)
        ends = tl.load(checkpoint_ends + several, mask=several < checkpoints, other=0)
        if tl.sum(((owners == row) & (ends - start < WIDTH)).to(tl.int32)) > 0:
            for checkpoint in range(first, tl.minimum(first + 128, checkpoints)):
                before = tl.load(checkpoint_ends + checkpoint) - start
                if (tl.load(checkpoint_rows + checkpoint) == row) & (before < WIDTH):
                    _store_window(
                        states, tl.load(checkpoint_destinations + checkpoint), slot_stride, state_tap_stride,
                        inside, carried, x, x_token_stride, before, WIDTH,
                    )  # fmt: skip


@triton.jit
def _checkpoint(
    x, states, query_start_loc, checkpoint_rows, checkpoint_ends, checkpoint_destinations,
    checkpoint, inside, x_token_stride, slot_stride, state_tap_stride, KERNEL: tl.constexpr,
):  # fmt: skip
    """Store a checkpoint's window, unless `_row` stores it because it needs the carried window."""
    WIDTH: tl.constexpr = KERNEL - 1
    row = tl.load(checkpoint_rows + checkpoint)
    end = tl.load(checkpoint_ends + checkpoint)
    destination = tl.load(checkpoint_destinations + checkpoint)
    real = (row >= 0) & (destination >= 0)
    start = tl.load(query_start_loc + row, mask=real, other=0)
    if real & (end - start >= WIDTH):
        window = states + destination * slot_stride
        for tap in tl.static_range(WIDTH):
            raw = tl.load(x + (end - WIDTH + tap) * x_token_stride, mask=inside)
            tl.store(window + tap * state_tap_stride, raw.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _tokens(
    x, weight, bias, out, query_start_loc, token_rows,
    block, rows, conv_dim, inside,
    x_token_stride, weight_tap_stride,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The outputs of BLOCK_T packed tokens of any rows, except the outputs that `_row` computes."""
    WIDTH: tl.constexpr = KERNEL - 1
    first = block.to(tl.int64) * BLOCK_T
    total = tl.load(query_start_loc + rows)
    if first < total:
        token = tl.arange(0, BLOCK_T)
        real = first + token < total
        row = tl.load(token_rows + first + token, mask=real, other=0)
        start = tl.load(query_start_loc + row, mask=real, other=0)
        # The loads do not wait for the row indices: an output that would mix two rows is not stored.
        x += first * x_token_stride
        inputs = ()
        for tap in tl.static_range(KERNEL):
            place = token + (tap - WIDTH)
            mask = (real & (first + place >= 0))[:, None] & inside[None, :]
            inputs = inputs + (tl.load(x[None, :] + place[:, None] * x_token_stride, mask=mask, other=0.0),)
        taps = load_taps(weight[None, :], bias[None, :], inside[None, :], weight_tap_stride, KERNEL, HAS_BIAS)
        y = convolved(taps, inputs, 0, KERNEL, ACTIVATION)
        is_stored = (real & (first + token - start >= WIDTH))[:, None] & inside[None, :]
        place = out[None, :] + (first + token[:, None]) * conv_dim
        tl.store(place, y.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def conv_update_kernel(
    # Pointers
    x, weight, bias, states, out, sources, destinations,
    # Dimensions
    conv_dim,
    # Strides
    x_row_stride, x_token_stride, x_channel_stride,
    weight_channel_stride, weight_tap_stride,
    slot_stride, state_channel_stride, state_tap_stride,
    destination_row_stride, destination_token_stride,
    # Meta-parameters
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program has a row and a block of channels. Padding costs 1 + TOKENS scalar loads."""
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
    destinations += row * destination_row_stride

    source = tl.load(sources + row)
    if any_index(source, destinations, destination_token_stride, TOKENS) >= 0:
        taps = load_taps(weight, bias, inside, weight_tap_stride, KERNEL, HAS_BIAS)
        inputs = _load_window(states, source, slot_stride, state_tap_stride, inside, WIDTH)
        for token in tl.static_range(TOKENS):
            inputs = inputs + (tl.load(x + token * x_token_stride, mask=inside, other=0.0),)
        tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
        for token in tl.static_range(TOKENS):
            y = convolved(taps, inputs, token, KERNEL, ACTIVATION)
            tl.store(out + token * conv_dim, y.to(out.dtype.element_ty), mask=inside)
            destination = tl.load(destinations + token * destination_token_stride)
            if destination >= 0:
                window = states + destination * slot_stride
                for tap in tl.static_range(WIDTH):
                    raw = inputs[token + 1 + tap].to(states.dtype.element_ty)
                    tl.store(window + tap * state_tap_stride, raw, mask=inside)


@triton.jit
def _load_window(states, source, slot_stride, tap_stride, inside, WIDTH: tl.constexpr):
    """The raw inputs in slot `source`, oldest first, as a tuple of WIDTH; zeros for -1."""
    window = ()
    for tap in tl.static_range(WIDTH):
        place = states + source * slot_stride + tap * tap_stride
        window = window + (tl.load(place, mask=inside & (source >= 0), other=0.0),)
    return window


@triton.jit
def _store_window(
    states, destination, slot_stride, tap_stride,
    inside, carried, x, x_token_stride, tokens, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a row's window after its first `tokens` tokens, which start at `x`; destination -1: nowhere."""
    if destination >= 0:
        window = states + destination * slot_stride
        for tap in tl.static_range(WIDTH):
            position = tokens - WIDTH + tap
            raw = tl.load(x + position * x_token_stride, mask=inside & (position >= 0), other=0.0)
            raw = raw.to(states.dtype.element_ty)
            for place in tl.static_range(tap, WIDTH):
                raw = tl.where(tokens + tap == place, carried[place], raw)
            tl.store(window + tap * tap_stride, raw, mask=inside)


@triton.jit
def load_taps(weight, bias, inside, tap_stride, KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The bias or zeros, then the KERNEL weights, as a tuple in float32."""
    taps = (tl.load(bias, mask=inside & HAS_BIAS, other=0.0).to(tl.float32),)
    for tap in tl.static_range(KERNEL):
        taps = taps + (tl.load(weight + tap * tap_stride, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def convolved(taps, inputs, first: tl.constexpr, KERNEL: tl.constexpr, ACTIVATION: tl.constexpr):
    """The convolution of KERNEL `inputs` from `first`; every caller gets one order of operations."""
    acc = taps[0]
    for tap in tl.static_range(KERNEL):
        acc = tl.fma(inputs[first + tap].to(tl.float32), taps[1 + tap], acc)
    if ACTIVATION:
        acc = acc / (1.0 + tl.exp(-acc))
    return acc
