"""Mamba-2's scan and recurrence in plain torch, and decode by replay from a chunk's first state.

For packed rows or single tokens, h[t] = exp(dt A) h[t-1] + dt B x and y = C h + D x. Every chunk is padded to
`chunk_size`, so that its products have the same shape, and its states the same bits, in every batch.
"""

import torch
from torch import Tensor

from ..dtypes_and_strides import compute_dtype
from ..mixer_inputs import SsdInputs
from ..step_rows import ReplayRows, ScanRows, TailRows, input_table
from .torch_chunks import PaddedChunks, pass_states, places, read_states, rounded, write_states


def ssd_chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor, rows: ScanRows,
    *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The state space dual form of the recurrence, in chunks (Dao & Gu 2024, arXiv 2405.21060, section 6)."""
    dtype = compute_dtype(x.dtype)
    heads, groups = x.shape[1], B.shape[1]
    chunks, chunk_size = PaddedChunks(x.shape[0], rows), rows.chunk_size

    # From here [chunks, G, heads of a group, chunk_size (, chunk_size, P or N)]. Padding has dt = 0.
    grouped = (groups, heads // groups)
    steps = chunks.padded(dt, dtype).movedim(1, 2)
    log_decay = torch.unflatten((steps * A.to(dtype)[:, None]).cumsum(-1), 1, grouped)
    scaled = torch.unflatten((chunks.padded(x, dtype) * steps.mT[..., None]).movedim(1, 2), 1, grouped)
    keys = chunks.padded(B, dtype).movedim(1, 2)
    queries = chunks.padded(C, dtype).movedim(1, 2)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    pairwise = log_decay[..., :, None] - log_decay[..., None, :]
    decay = pairwise.masked_fill(~causal, float("-inf")).exp()
    y = ((queries @ keys.mT)[:, :, None] * decay) @ scaled

    to_end = (log_decay[..., -1:] - log_decay).exp()
    updates = (scaled * to_end[..., None]).mT @ keys[:, :, None]
    entering, leaving, final = pass_states(
        lambda state, update, decay: decay[:, :, None, None] * state + update,
        (updates.flatten(1, 2), log_decay[..., -1].exp().flatten(1, 2)),
        read_states(ssm_states, rows.sources).to(dtype),
        rows.seq_idx[: chunks.num_chunks],
    )
    carried = queries[:, :, None] @ torch.unflatten(entering, 1, grouped).mT
    y = y + carried * log_decay.exp()[..., None]

    write_states(ssm_states, rows.chunk_destinations[: chunks.num_chunks], leaving)
    write_states(ssm_states, rows.destinations, final)
    outputs = x.to(dtype) * D.to(dtype)[:, None]
    packed = chunks.packed(y.flatten(1, 2).movedim(1, 2))
    outputs[: packed.shape[0]] += packed
    return rounded(outputs, x.dtype, out)


def selective_state_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor,
    sources: Tensor, destinations: Tensor, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`ssd_chunk_scan` for rows of T tokens each: the recurrence (Gu & Dao 2023, arXiv 2312.00752)."""
    dtype = compute_dtype(x.dtype)
    narrow, x, dt = x.dtype, x.to(dtype), dt.to(dtype)
    heads_a_group = x.shape[2] // B.shape[2]
    key = B.to(dtype).repeat_interleave(heads_a_group, dim=2)
    query = C.to(dtype).repeat_interleave(heads_a_group, dim=2)
    decay = (dt * A.to(dtype)).exp()[..., None, None]
    scaled = (dt[..., None] * x)[..., None]
    state = read_states(ssm_states, sources).to(dtype)
    states = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + scaled[:, t] * key[:, t, :, None]
        states.append(state)
    after = torch.stack(states, dim=1)
    write_states(ssm_states, destinations.flatten(), after.flatten(0, 1))
    y = (after @ query[..., None])[..., 0] + x * D.to(dtype)[:, None]
    return rounded(y, narrow, out)


def ssd_replay(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor, inputs: SsdInputs,
    rows: ReplayRows, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`ssd_chunk_scan` of each row's next tokens, from the state and the inputs since its last grid point.

    With l the sums of dt * A from the grid point g on, and for token m (arXiv 2405.21060, section 6):

        y[m] = exp(l[m]) C[m] h(g) + sum over k <= m of exp(l[m] - l[k]) C[m] B[k] dt[k] x[k] + D x[m]
    """
    dtype = compute_dtype(x.dtype)
    heads_a_group = x.shape[2] // B.shape[2]
    y = torch.zeros_like(x, dtype=dtype)
    input_blocks = input_table(rows)
    assert rows.destinations is not None
    indices = (index.tolist() for index in (*rows[:4], rows.destinations))
    for row, (input_row, start, length, source, destination) in enumerate(zip(*indices, strict=True)):
        if input_row < 0:
            continue
        offset = start % rows.chunk_size
        end, new = offset + length, slice(offset, offset + length)
        new_places = places(inputs.x, input_blocks[row], offset, end)
        inputs.x[new_places] = x[row, :length]
        inputs.B[new_places] = B[row, :length]
        before = inputs.dt[input_row, 1, :, offset - 1 : offset].to(dtype)
        steps = dt[row, :length].to(dtype).T
        sums = torch.cat([before, steps * A.to(dtype)[:, None]], dim=1).cumsum(1)[:, before.shape[1] :]
        inputs.dt[input_row, :, :, new] = torch.stack([steps, sums])

        steps, sums = inputs.dt[input_row, :, :, :end].to(dtype)
        chunk_places = places(inputs.x, input_blocks[row], 0, end)
        scaled = inputs.x[chunk_places].to(dtype).movedim(1, 0) * steps[..., None]  # [H, tokens, P]
        keys = inputs.B[chunk_places].to(dtype).repeat_interleave(heads_a_group, dim=1).movedim(1, 0)
        queries = C[row, :length].to(dtype).repeat_interleave(heads_a_group, dim=1).movedim(1, 0)
        state = torch.zeros_like(ssm_states[0], dtype=dtype) if source < 0 else ssm_states[source].to(dtype)

        later = torch.arange(end) > torch.arange(offset, end)[:, None]
        decays = (sums[:, new, None] - sums[:, None]).masked_fill(later.to(x.device), float("-inf")).exp()
        output = (queries @ state.mT) * sums[:, new, None].exp() + (queries @ keys.mT * decays) @ scaled
        y[row, :length] = output.movedim(0, 1) + x[row, :length].to(dtype) * D.to(dtype)[:, None]
        if destination >= 0:
            to_end = (sums[:, -1:] - sums).exp()[..., None]
            leaving = sums[:, -1].exp()[:, None, None] * state + (scaled * to_end).mT @ keys
            ssm_states[destination] = leaving.to(ssm_states.dtype)
    return rounded(y, x.dtype, out)


def keep_ssd_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, inputs: SsdInputs, rows: TailRows, chunk_size: int
) -> None:
    """Store the inputs of each prefill row's tail, the tokens after its last grid point, for `ssd_replay`."""
    dtype = compute_dtype(x.dtype)
    indices = (index.tolist() for index in (rows.input_rows, rows.starts, rows.query_start_loc[1:]))
    for row, input_row, start, end in zip(input_table(rows), *indices, strict=True):
        if input_row < 0 or start >= end:
            continue
        count = end - start
        tail_places = places(inputs.x, row, 0, count)
        inputs.x[tail_places] = x[start:end]
        inputs.B[tail_places] = B[start:end]
        steps = dt[start:end].to(dtype).T
        inputs.dt[input_row, :, :, :count] = torch.stack([steps, (steps * A.to(dtype)[:, None]).cumsum(1)])
