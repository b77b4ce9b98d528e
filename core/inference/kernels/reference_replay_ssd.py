"""Mamba-2's decode by replay in plain torch: outputs from a chunk's first state and the inputs since.

Runs in any float dtype, row by row, and synchronises.
"""

import torch
from torch import Tensor

from .reference_chunks import compute_dtype, rounded


def ssd_replay(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    x_inputs: Tensor,
    B_inputs: Tensor,
    gates: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """y of the next tokens of each row, as `ssd_chunk_scan` defines it.

    A chunk begins at the last multiple g of `chunk_size` at or before a row's start. Reads the row's state at
    g and the inputs of [g, start), and stores the inputs of the row's tokens. Where a row has a destination,
    the state behind the row's tokens goes there. With l the sums of dt * A from g on, and for token m
    (Dao & Gu 2024, arXiv 2405.21060, section 6):

        y[m] = exp(l[m]) C[m] h(g) + sum over k <= m of exp(l[m] - l[k]) C[m] B[k] dt[k] x[k] + D x[m]

    Args:
        x: [rows, T, H, P]. dt: [rows, T, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [rows, T, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations`.
        x_inputs, B_inputs: [slots, chunk size, H, P] and [slots, chunk size, G, N]: a token's inputs lie at
            its position modulo `chunk_size`. Written.
        gates: [slots, 2, H, chunk size] in the compute dtype: dt, and l. Written. Numbers at positions from
            start + length on have no effect, NaN included.
        slots: [rows], where a row's inputs lie; -1: padding, which reads and writes nothing.
        starts, lengths: [rows], the position of a row's first token, and its number of tokens, at most T. No
            row goes beyond its chunk's end. Outputs of tokens from `length` on are unspecified.
        sources: [rows], where in `ssm_states` the state at g lies; -1: zeros.
        destinations: [rows], where the state behind the tokens goes, -1: nowhere. A destination may be the
            row's own source, no other row's.
        chunk_size: the tokens of a chunk.
        out: where y goes; None allocates it.

    Returns: y, [rows, T, H, P] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    heads_a_group = x.shape[2] // B.shape[2]
    y = torch.zeros_like(x, dtype=dtype)
    indices = (index.tolist() for index in (slots, starts, lengths, sources, destinations))
    for row, (slot, start, length, source, destination) in enumerate(zip(*indices, strict=True)):
        if slot < 0:
            continue
        offset = start % chunk_size
        end, new = offset + length, slice(offset, offset + length)
        x_inputs[slot, new] = x[row, :length]
        B_inputs[slot, new] = B[row, :length]
        before = gates[slot, 1, :, offset - 1 : offset].to(dtype)
        steps = dt[row, :length].to(dtype).T
        sums = torch.cat([before, steps * A.to(dtype)[:, None]], dim=1).cumsum(1)[:, before.shape[1] :]
        gates[slot, :, :, new] = torch.stack([steps, sums])

        steps, sums = gates[slot, :, :, :end].to(dtype)
        scaled = x_inputs[slot, :end].to(dtype).movedim(1, 0) * steps[..., None]  # [H, tokens, P]
        keys = B_inputs[slot, :end].to(dtype).repeat_interleave(heads_a_group, dim=1).movedim(1, 0)
        queries = C[row, :length].to(dtype).repeat_interleave(heads_a_group, dim=1).movedim(1, 0)
        state = torch.zeros_like(ssm_states[0], dtype=dtype) if source < 0 else ssm_states[source].to(dtype)

        later = torch.arange(end) > torch.arange(offset, end)[:, None]
        decays = (sums[:, new, None] - sums[:, None]).masked_fill(later.to(x.device), float("-inf")).exp()
        found = (queries @ state.mT) * sums[:, new, None].exp() + (queries @ keys.mT * decays) @ scaled
        y[row, :length] = found.movedim(0, 1) + x[row, :length].to(dtype) * D.to(dtype)[:, None]
        if destination >= 0:
            to_end = (sums[:, -1:] - sums).exp()[..., None]
            leaving = sums[:, -1].exp()[:, None, None] * state + (scaled * to_end).mT @ keys
            ssm_states[destination] = leaving.to(ssm_states.dtype)
    return rounded(y, x.dtype, out)


def keep_ssd_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    x_inputs: Tensor,
    B_inputs: Tensor,
    gates: Tensor,
    slots: Tensor,
    tail_starts: Tensor,
    query_start_loc: Tensor,
    chunk_size: int,
) -> None:
    """Store the inputs of each row's tail, the tokens behind the row's last grid point, for `ssd_replay`.

    Args:
        x: [tokens, H, P], B: [tokens, G, N] and dt: [tokens, H], of packed rows. A: [H].
        x_inputs, B_inputs, gates: as for `ssd_replay`. Written at `slots`.
        slots: [rows], where a row's inputs go; -1: nowhere.
        tail_starts: [rows], the packed token with which a row's tail begins, at a grid point. The tail has at
            most `chunk_size` tokens, and no token where it begins at the row's end.
        query_start_loc: [rows + 1], where each row's tokens start.
        chunk_size: the tokens of a chunk.
    """
    dtype = compute_dtype(x.dtype)
    ends = query_start_loc[1:].tolist()
    for slot, start, end in zip(slots.tolist(), tail_starts.tolist(), ends, strict=True):
        if slot < 0 or start >= end:
            continue
        count = end - start
        x_inputs[slot, :count] = x[start:end]
        B_inputs[slot, :count] = B[start:end]
        steps = dt[start:end].to(dtype).T
        gates[slot, :, :, :count] = torch.stack([steps, (steps * A.to(dtype)[:, None]).cumsum(1)])
