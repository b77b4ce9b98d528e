"""A step padded to a larger shape, as CUDA graphs need it."""

from dataclasses import replace

import torch
from torch import Tensor

from ..inference.contexts.step_inputs import Checkpoints, PrefillChunks, StepInputs, StepShape


def larger_shape(shape: StepShape) -> StepShape:
    """A shape with padding of every kind that a step of `shape` can have.

    A step without decode rows, or without prefill rows, gets none.
    """
    decodes = shape.decodes + 2 if shape.decodes else 0
    prefills = shape.prefills + 2 if shape.prefills else 0
    tokens = shape.prefill_tokens + 5 if prefills else 0
    return StepShape(
        decodes=decodes,
        prefills=prefills,
        prefill_tokens=tokens,
        max_query_tokens=tokens,
        table_blocks=shape.table_blocks + 1,
        kv_writes=decodes * shape.decode_tokens + tokens,
        chunks=shape.chunks + 3 if prefills else 0,
        checkpoints=shape.checkpoints + 2 if prefills else 0,
        logits=shape.logits + 3,
        decode_tokens=shape.decode_tokens,
    )


def padded(inputs: StepInputs, shape: StepShape) -> StepInputs:
    """`inputs`, which are not padded, with padding up to `shape`; the pools are the same tensors.

    `shape`: at least that of the inputs in everything, with the same `decode_tokens`.
    """
    decodes, decoded = inputs.shape.decodes, inputs.num_decode_tokens
    rows, tokens = shape.decodes - decodes, (shape.decodes - decodes) * shape.decode_tokens
    chunks, checkpoints = inputs.chunks, inputs.checkpoints

    def moved(indices: Tensor) -> Tensor:
        """Indices of tokens, once there are more decode rows before the prefill rows."""
        return indices + tokens * (indices >= decoded)

    def around(values: Tensor, first: int, gap: int, total: int, padding: int) -> Tensor:
        """Padding behind the first entries, and at the end."""
        middle = values.new_full((gap, *values.shape[1:]), padding)
        joined = torch.cat([values[:first], middle, values[first:]])
        return behind(joined, total, padding)

    columns = shape.table_blocks - inputs.block_table.shape[1]
    table = torch.nn.functional.pad(inputs.block_table, (0, columns))
    starts = torch.cat([
        torch.arange(shape.decodes, dtype=torch.int32, device=table.device) * shape.decode_tokens,
        inputs.query_start_loc[decodes:] + tokens,
    ])  # fmt: skip
    last_token, last_chunk = int(chunks.query_start_loc[-1]), int(chunks.row_chunk_starts[-1])
    return replace(
        inputs,
        shape=shape,
        token_ids=around(inputs.token_ids, decoded, tokens, shape.tokens, 0),
        positions=around(inputs.positions, decoded, tokens, shape.tokens, 0),
        kv_lengths=around(inputs.kv_lengths, decodes, rows, shape.rows, 0),
        block_table=around(table, decodes, rows, shape.rows, 0),
        query_start_loc=behind(starts, shape.rows + 1, int(starts[-1])),
        query_lengths=around(inputs.query_lengths, decodes, rows, shape.rows, 0),
        kv_write_tokens=behind(moved(inputs.kv_write_tokens), shape.kv_writes, 0),
        kv_write_positions=behind(inputs.kv_write_positions, shape.kv_writes, -1),
        state_sources=around(inputs.state_sources, decodes, rows, shape.rows, -1),
        state_destinations=around(inputs.state_destinations, decoded, tokens, shape.state_writes, -1),
        chunks=PrefillChunks(
            query_start_loc=behind(chunks.query_start_loc, shape.prefills + 1, last_token),
            token_rows=behind(chunks.token_rows, shape.prefill_tokens, -1),
            cu_chunk_seqlens=behind(chunks.cu_chunk_seqlens, shape.chunks + 1, last_token),
            seq_idx=behind(chunks.seq_idx, shape.chunks, 0),
            row_chunk_starts=behind(chunks.row_chunk_starts, shape.prefills + 1, last_chunk),
            destinations=behind(chunks.destinations, shape.chunks, -1),
            chunk_size=chunks.chunk_size,
        ),
        checkpoints=Checkpoints(
            rows=behind(checkpoints.rows, shape.checkpoints, -1),
            token_ends=behind(checkpoints.token_ends, shape.checkpoints, 0),
            destinations=behind(checkpoints.destinations, shape.checkpoints, -1),
        ),
        logit_tokens=behind(moved(inputs.logit_tokens), shape.logits, 0),
    )


def behind(values: Tensor, total: int, padding: int) -> Tensor:
    """Padding at the end, up to `total` entries."""
    return torch.cat([values, values.new_full((total - len(values), *values.shape[1:]), padding)])
