"""The causal convolution of decode by replay in plain torch; `reference` re-exports both functions.

A request keeps its last raw inputs in a ring of R places: position p of its sequence lies at p % R.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference_chunks import compute_dtype, read_states, rounded, write_states


def causal_conv1d_replay(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    conv_inputs: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    destinations: Tensor,
    *,
    activation: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_prefill` for rows of up to T tokens, whose raw inputs before them lie in a ring.

    An output is the sum of `causal_conv1d_prefill`, in the same order, and so has the same bits.

    Args:
        x: [rows, T, conv_dim] raw inputs. Tokens of a row behind its length are padding.
        weight, bias, activation, out: as for `causal_conv1d_prefill`.
        conv_states: [slots, conv_dim, >= kernel - 1]. Written at `destinations`.
        conv_inputs: [slots, R, conv_dim] rings; R is at least kernel - 1 + T. Written at the positions of the
            rows' tokens. Only the kernel - 1 positions before `starts` are read; positions before 0 are
            zeros.
        slots: [rows] where each row's ring is, -1: padding.
        starts, lengths: [rows] the position of each row's first token, and its number of tokens.
        destinations: [rows] the index in `conv_states` for the window after the row's last token, -1:
            nowhere.

    Returns: [rows, T, conv_dim] in the dtype of x; unspecified for padding.
    """
    rows, tokens, _ = x.shape
    width, ring = weight.shape[1] - 1, conv_inputs.shape[1]
    place = torch.arange(width + tokens, device=x.device)  # of a token behind the oldest input that is read
    positions = starts.long()[:, None] + place - width
    own_ring = slots.clamp(min=0)[:, None]
    real = (slots[:, None] >= 0) & (place - width < lengths[:, None])

    carried = conv_inputs[own_ring, positions[:, :width] % ring].to(x.dtype)
    carried = carried.masked_fill(~(real & (positions >= 0))[:, :width, None], 0)
    packed = torch.cat([carried, x.masked_fill(~real[:, width:, None], 0)], dim=1)
    dtype = compute_dtype(x.dtype)
    y = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for tap in range(width + 1):
        y = y + packed[:, tap : tap + tokens].to(dtype) * weight[:, tap].to(dtype)

    row, token = real[:, width:].nonzero(as_tuple=True)
    stored = positions[row, width + token] % ring
    conv_inputs[slots[row], stored] = x[row, token].to(conv_inputs.dtype)
    of_window = lengths.long()[:, None] + place[:width]
    windows = packed[torch.arange(rows, device=x.device)[:, None], of_window].transpose(1, 2)
    write_states(conv_states[..., :width], destinations, windows)
    return rounded(F.silu(y) if activation else y, x.dtype, out)


def keep_conv_inputs(
    x: Tensor,
    conv_states: Tensor,
    conv_inputs: Tensor,
    slots: Tensor,
    starts: Tensor,
    sources: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Store the last raw inputs of each prefill row in the row's ring.

    Where a row is shorter than kernel - 1 tokens, the inputs before it come from its carried window. The call
    must therefore come before the prefill's own call, which may write a row's window in place.

    Args:
        x: [tokens, conv_dim] raw inputs, row after row.
        conv_states: [slots, conv_dim, kernel - 1] the windows before the rows.
        conv_inputs: as for `causal_conv1d_replay`. Written at the kernel - 1 positions before each row's end,
            except positions before 0.
        slots: [rows] where each row's ring is, -1: nowhere.
        starts: [rows] the position of each row's first token.
        sources: [rows] the index in `conv_states` of each row's carried window, -1: zeros.
        query_start_loc: [rows + 1] where each row's tokens start in `x`.
    """
    width = conv_states.shape[-1]
    carried = read_states(conv_states, sources).transpose(1, 2).to(conv_inputs.dtype)
    bounds, row_starts = query_start_loc.tolist(), starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            tokens = x[bounds[row] : bounds[row + 1]].to(conv_inputs.dtype)
            last = torch.cat([carried[row], tokens])[tokens.shape[0] :]
            end = row_starts[row] + tokens.shape[0]
            positions = torch.arange(max(0, end - width), end, device=x.device)
            conv_inputs[slot, positions % conv_inputs.shape[1]] = last[width - positions.shape[0] :]
