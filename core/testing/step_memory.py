"""Which memory one step names: what its model may read, and what it must write."""

from dataclasses import dataclass

from ..inference.contexts.step_inputs import StepInputs, StepShape


@dataclass(frozen=True)
class StepRow:
    """The real tokens of one row: `tokens`, drafts included, follow `start` tokens of the sequence.

    Attributes:
        first: index of the first token among the step's packed tokens.
        source: pool index of the state before the tokens; -1 for none.
        blocks: KV blocks in order, as many as the tokens fill.
    """

    first: int
    start: int
    tokens: tuple[int, ...]
    source: int
    blocks: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepMemory:
    """All of a step that is no padding.

    Attributes:
        rows: decode rows, then prefill rows.
        writes: pool index -> (row, tokens of its sequence after which the state is stored there).
        kv_writes: place in the KV cache (block * block size + offset) -> (row, position of its token).
        reads: the other places that hold tokens of the rows.
        logits: (row, position) of the tokens whose logits are returned.

    Example:
        A prefill of 5 tokens with blocks of 4, in blocks 2 and 7: kv_writes has the places 8 to 11 and 28.
    """

    rows: tuple[StepRow, ...]
    writes: dict[int, tuple[int, int]]
    kv_writes: dict[int, tuple[int, int]]
    reads: frozenset[int]
    logits: tuple[tuple[int, int], ...]

    @classmethod
    def from_inputs(cls, inputs: StepInputs) -> "StepMemory":
        """Read a step, padded or not; synchronises."""
        size = inputs.kv_cache.shape[3]
        rows = _rows(inputs, size)
        token_rows = {
            row.first + offset: (index, row.start + offset)
            for index, row in enumerate(rows)
            for offset in range(len(row.tokens))
        }
        positions = zip(inputs.kv_write_tokens.tolist(), inputs.kv_write_positions.tolist(), strict=True)
        kv_writes = {place: token_rows[token] for token, place in positions if place >= 0}
        held = {
            row.blocks[position // size] * size + position % size
            for row in rows
            for position in range(row.stop)
        }
        decoded, chunks, checkpoints = inputs.num_decode_tokens, inputs.chunks, inputs.checkpoints
        ends = [*range(decoded), *(decoded + stop - 1 for stop in chunks.query_start_loc.tolist()[1:])]
        ends += [decoded + stop - 1 for stop in chunks.cu_chunk_seqlens.tolist()[1:]]
        ends += [decoded + stop - 1 for stop in checkpoints.token_ends.tolist()]
        indices = (inputs.state_destinations, chunks.destinations, checkpoints.destinations)
        slots = [slot for part in indices for slot in part.tolist()]
        writes = {}
        for token, slot in zip(ends, slots, strict=True):
            if slot >= 0:
                row, position = token_rows[token]
                writes[slot] = row, position + 1
        logits = inputs.logit_tokens.tolist()[: inputs.num_logits]
        return cls(
            rows=rows,
            writes=writes,
            kv_writes=kv_writes,
            reads=frozenset(held - kv_writes.keys()),
            logits=tuple(token_rows[token] for token in logits),
        )

    @property
    def sources(self) -> set[int]:
        """The pool indices that the step starts from."""
        return {row.source for row in self.rows if row.source >= 0}

    def tails(self, size: int) -> set[int]:
        """Places after a row's last token in a block that the step begins, where zeros may be written."""
        return {
            row.blocks[-1] * size + offset
            for row in self.rows
            if row.blocks[-1] * size in self.kv_writes
            for offset in range((row.stop - 1) % size + 1, size)
        }


def _rows(inputs: StepInputs, size: int) -> tuple[StepRow, ...]:
    ids, positions, table = inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.block_table.tolist()
    starts, decodes = inputs.chunks.query_start_loc.tolist(), inputs.num_decodes
    rows = []
    sources = inputs.state_sources.tolist()
    for index, (length, source) in enumerate(zip(inputs.kv_lengths.tolist(), sources, strict=True)):
        if not length:  # padding
            continue
        if index < decodes:
            first = index * inputs.shape.decode_tokens
            start = positions[first]
        else:
            first = inputs.num_decode_tokens + starts[index - decodes]
            start = length - (starts[index - decodes + 1] - starts[index - decodes])
        tokens, blocks = ids[first : first + length - start], table[index][: -(-length // size)]
        rows.append(StepRow(first, start, tuple(tokens), source, tuple(blocks)))
    return tuple(rows)


def larger_shape(shape: StepShape) -> StepShape:
    """A shape with padding of every kind that a step of `shape` can have, as CUDA graphs need it."""
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
