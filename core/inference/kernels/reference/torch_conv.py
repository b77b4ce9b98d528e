"""The causal convolution of mixers in plain torch: packed prefill, decode, and decode by replay.

For decode by replay a request keeps its last raw inputs in a ring: position p of its sequence lies at p % R.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes_and_strides import compute_dtype
from ..step_rows import ConvRows, ReplayRows
from .torch_chunks import read_states, rounded, write_states


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, rows: ConvRows,
    *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Depthwise causal convolution, then SiLU, over packed sequences of any lengths, 0 and 1 included."""
    tokens, conv_dim = x.shape
    width = weight.shape[1] - 1
    row = torch.arange(rows.sources.shape[0], device=x.device)
    taps = torch.arange(width, device=x.device)

    # Each row's carried window goes in front of the row's tokens, and one gather serves rows of any length.
    # Padding tokens belong to a row after the last, whose window is zeros.
    packed = x.new_zeros(tokens + (row.shape[0] + 1) * width, conv_dim)
    window_starts = rows.query_start_loc[:-1] + row * width
    carried = read_states(conv_states[..., :width], rows.sources)
    packed[window_starts[:, None] + taps] = carried.transpose(1, 2).to(x.dtype)
    windows_before = torch.where(rows.token_rows < 0, row.shape[0], rows.token_rows)
    token_windows = torch.arange(tokens, device=x.device) + windows_before * width
    packed[token_windows + width] = x

    inputs = (packed[token_windows + tap] for tap in range(width + 1))
    y = _convolved(x.dtype, inputs, weight, bias, activation)
    ends = torch.cat([rows.query_start_loc[1:], rows.checkpoint_ends])
    end_rows = torch.cat([row, rows.checkpoint_rows])
    windows = packed[(ends + end_rows * width)[:, None] + taps].transpose(1, 2)
    destinations = torch.cat([rows.destinations, rows.checkpoint_destinations])
    write_states(conv_states[..., :width], destinations, windows)
    return rounded(y, x.dtype, out)


def _convolved(
    of: torch.dtype, inputs: Iterable[Tensor], weight: Tensor, bias: Tensor | None, activation: bool
) -> Tensor:
    """The sum over the taps of one tensor of inputs each, in the compute dtype of inputs `of` a dtype."""
    dtype = compute_dtype(of)
    y = weight.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for shifted, tap in zip(inputs, weight.to(dtype).unbind(1), strict=True):
        y = y + shifted.to(dtype) * tap
    return F.silu(y) if activation else y


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, sources: Tensor,
    destinations: Tensor, *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_prefill` for rows of T tokens each, with the window stored after each token."""
    tokens, width = x.shape[1], weight.shape[1] - 1
    carried = read_states(conv_states[..., :width], sources).transpose(1, 2)
    packed = torch.cat([carried.to(x.dtype), x], dim=1)
    inputs = (packed[:, tap : tap + tokens] for tap in range(width + 1))
    windows = packed.unfold(1, width, 1)[:, 1:]  # [rows, T, conv_dim, width]
    write_states(conv_states[..., :width], destinations.flatten(), windows.flatten(0, 1))
    return rounded(_convolved(x.dtype, inputs, weight, bias, activation), x.dtype, out)


def causal_conv1d_replay(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, conv_inputs: Tensor,
    rows: ReplayRows, *, activation: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_prefill` of T tokens whose inputs before them lie in a ring; the same sums and bits."""
    num_rows, tokens, _ = x.shape
    input_rows, starts, lengths = rows[:3]
    width, ring = weight.shape[1] - 1, conv_inputs.shape[1]
    place = torch.arange(width + tokens, device=x.device)  # of a token after the oldest input that is read
    positions = starts.long()[:, None] + place - width
    own_ring = input_rows.clamp(min=0)[:, None]
    real = (input_rows[:, None] >= 0) & (place - width < lengths[:, None])

    carried = conv_inputs[own_ring, positions[:, :width] % ring].to(x.dtype)
    carried = carried.masked_fill(~(real & (positions >= 0))[:, :width, None], 0)
    packed = torch.cat([carried, x.masked_fill(~real[:, width:, None], 0)], dim=1)
    inputs = (packed[:, tap : tap + tokens] for tap in range(width + 1))
    row, token = real[:, width:].nonzero(as_tuple=True)
    stored = positions[row, width + token] % ring
    conv_inputs[input_rows[row], stored] = x[row, token].to(conv_inputs.dtype)
    window_places = lengths.long()[:, None] + place[:width]
    windows = packed[torch.arange(num_rows, device=x.device)[:, None], window_places].transpose(1, 2)
    assert rows.destinations is not None
    write_states(conv_states[..., :width], rows.destinations, windows)
    return rounded(_convolved(x.dtype, inputs, weight, bias, activation), x.dtype, out)


def keep_conv_inputs(
    x: Tensor, conv_states: Tensor, conv_inputs: Tensor, input_rows: Tensor, starts: Tensor, sources: Tensor,
    query_start_loc: Tensor,
) -> None:  # fmt: skip
    """Store prefill rows' last inputs in their rings; before the prefill, which may overwrite its windows."""
    width = conv_states.shape[-1]
    carried = read_states(conv_states, sources).transpose(1, 2).to(conv_inputs.dtype)
    bounds, row_starts = query_start_loc.tolist(), starts.tolist()
    for row, input_row in enumerate(input_rows.tolist()):
        if input_row >= 0:
            tokens = x[bounds[row] : bounds[row + 1]].to(conv_inputs.dtype)
            last = torch.cat([carried[row], tokens])[tokens.shape[0] :]
            end = row_starts[row] + tokens.shape[0]
            positions = torch.arange(max(0, end - width), end, device=x.device)
            conv_inputs[input_row, positions % conv_inputs.shape[1]] = last[width - positions.shape[0] :]
