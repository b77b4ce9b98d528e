"""`StepInputs` by the simplest loops there are: for tests of kernels, and of the context's own builder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.contexts.step_inputs import Checkpoints, PrefillChunks, StepInputs, StepShape
from mambaslots.state_spec import HybridStateSpec
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One request's part of a step.

    tokens: new tokens; start: tokens computed before. decode: a decode row (one token).
    source, destination: pool indices. blocks: KV blocks in order, from the sequence's first.
    checkpoints: absolute position (a multiple of the SSD chunk inside the new tokens) -> pool index.
    kv_from: keys and values of tokens before this absolute position are not written again.
    logits: "last", "all" or "none".
    """

    tokens: Sequence[int]
    start: int = 0
    source: int = -1
    destination: int = -1
    blocks: Sequence[int] = ()
    decode: bool = False
    checkpoints: Mapping[int, int] = field(default_factory=dict)
    kv_from: int = 0
    logits: str = "last"


def make_caches(
    spec: HybridStateSpec, slots: int, blocks: int, block_size: int, fill: float = 0.0
) -> tuple[StatePool, Tensor]:
    """A pool of `slots` live states and a KV cache, full of `fill`; NaN shows reads of what is no one's."""
    pool = StatePool(spec.states, slots, 0, spec.device)
    for states in pool.tensors:
        states.fill_(fill)
    shape = (spec.num_attention_layers, 2, blocks, block_size, spec.num_kv_heads, spec.head_dim)
    return pool, torch.full(shape, fill, dtype=spec.kv_dtype, device=spec.device)


def prefill_chunks(
    starts: Sequence[int], lengths: Sequence[int], chunk_size: int, device: torch.device | str = "cpu"
) -> PrefillChunks:
    """The absolute grid: rows of `lengths` new tokens after `starts` computed ones, cut at every multiple."""
    cu, seq_idx, row_starts, token_rows, query_starts = [], [], [0], [], [0]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for offset in range(length):
            if offset == 0 or (start + offset) % chunk_size == 0:
                cu.append(len(token_rows))
                seq_idx.append(row)
            token_rows.append(row)
        row_starts.append(len(cu))
        query_starts.append(len(token_rows))
    cu.append(len(token_rows))
    destinations = [-1] * len(seq_idx)
    return PrefillChunks(
        *(torch.tensor(v, dtype=torch.int64, device=device) for v in (query_starts, token_rows)),
        *(torch.tensor(v, dtype=torch.int32, device=device) for v in (cu, seq_idx, row_starts)),
        destinations=torch.tensor(destinations, dtype=torch.int64, device=device),
        chunk_size=chunk_size,
    )


def build_step(
    spec: HybridStateSpec, pool: StatePool, kv_cache: Tensor, block_size: int, rows: Sequence[Row]
) -> StepInputs:
    """The step of `rows`, which must hold decode rows first."""
    chunk_size = spec.chunk_size or block_size
    decodes = [row for row in rows if row.decode]
    prefills = [row for row in rows if not row.decode]
    assert list(rows) == decodes + prefills
    assert all(len(row.tokens) == 1 for row in decodes)

    token_ids, positions, kv_tokens, kv_positions, logit_tokens = [], [], [], [], []
    for row in rows:
        for offset, token in enumerate(row.tokens):
            position = row.start + offset
            if position >= row.kv_from:
                kv_tokens.append(len(token_ids))
                block = row.blocks[position // block_size]
                kv_positions.append(block * block_size + position % block_size)
            is_last = offset == len(row.tokens) - 1
            if row.logits == "all" or (row.logits == "last" and is_last):
                logit_tokens.append(len(token_ids))
            token_ids.append(int(token))
            positions.append(position)

    chunks = prefill_chunks(
        [row.start for row in prefills], [len(row.tokens) for row in prefills], chunk_size, spec.device
    )
    cp_rows, cp_ends, cp_destinations = [], [], []
    packed = 0
    for index, row in enumerate(prefills):
        for position, destination in sorted(row.checkpoints.items()):
            assert position % chunk_size == 0
            assert row.start < position < row.start + len(row.tokens)
            end = packed + position - row.start
            cp_rows.append(index)
            chunks.destinations[chunks.cu_chunk_seqlens.tolist().index(end) - 1] = destination
            cp_ends.append(end)
            cp_destinations.append(destination)
        packed += len(row.tokens)

    most_blocks = max(len(row.blocks) for row in rows)
    table = [[*row.blocks, *[0] * (most_blocks - len(row.blocks))] for row in rows]
    lengths = [row.start + len(row.tokens) for row in rows]

    query_lengths = [len(row.tokens) for row in rows]

    def int64(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=spec.device)

    shape = StepShape(
        decodes=len(decodes),
        prefills=len(prefills),
        prefill_tokens=len(token_ids) - len(decodes),
        max_query_tokens=max((len(row.tokens) for row in prefills), default=0),
        block_columns=most_blocks,
        kv_writes=len(kv_tokens),
        chunks=len(chunks.seq_idx),
        checkpoints=len(cp_rows),
        logits=len(logit_tokens),
    )
    return StepInputs(
        shape=shape,
        token_ids=int64(token_ids),
        positions=int64(positions),
        kv_lengths=int64(lengths).int(),
        block_table=int64(table).int().view(len(rows), most_blocks),
        query_start_loc=int64([0, *accumulate(query_lengths)]).int(),
        query_lengths=int64(query_lengths).int(),
        kv_write_tokens=int64(kv_tokens),
        kv_write_positions=int64(kv_positions),
        state_sources=int64([row.source for row in rows]),
        state_destinations=int64([row.destination for row in rows]),
        chunks=chunks,
        checkpoints=Checkpoints(int64(cp_rows), int64(cp_ends), int64(cp_destinations)),
        logit_tokens=int64(logit_tokens),
        num_logits=len(logit_tokens),
        kv_cache=kv_cache,
        state_pool=pool,
    )
