"""Which memory a step names, read from its inputs alone."""

from dataclasses import dataclass

import torch
from mambaslots.inference.contexts.step_inputs import StepInputs


@dataclass(frozen=True)
class StepRow:
    """The real tokens of one row, drafts included, which follow `start` tokens of the sequence."""

    first: int  # of its tokens, among the step's packed tokens
    start: int
    tokens: tuple[int, ...]
    source: int  # pool index of the state before the tokens; -1 for none
    blocks: tuple[int, ...]  # KV blocks in order, as many as the tokens fill

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepMemory:
    """Which memory a step names: what its model may read, and what it must write; padding left out.

    A place is block * block size + offset. A prefill of 5 tokens with blocks of 4, in blocks 2 and 7:
    kv_writes has the places 8 to 11 and 28.
    """

    rows: tuple[StepRow, ...]  # decodes, then prefills
    writes: dict[int, tuple[int, int]]  # pool index -> (row, tokens after which the state is stored there)
    kv_writes: dict[int, tuple[int, int]]  # place -> (row, position of its token)
    reads: frozenset[int]  # the other places that hold tokens of the rows
    logits: tuple[tuple[int, int], ...]  # (row, position) of tokens whose logits are returned

    @classmethod
    def from_inputs(cls, inputs: StepInputs) -> "StepMemory":
        """Read a step, padded or not; synchronises."""
        size, ids, chunks, checkpoints = (
            inputs.kv_cache.shape[3],
            inputs.token_ids.tolist(),
            inputs.chunks,
            inputs.checkpoints,
        )
        columns = (
            inputs.query_start_loc[:-1], inputs.query_lengths, inputs.kv_lengths, inputs.state_sources,
            inputs.block_table,
        )  # fmt: skip
        rows = tuple(
            StepRow(
                first,
                length - count,
                tuple(ids[first : first + count]),
                source,
                tuple(blocks[: -(-length // size)]),
            )
            for first, count, length, source, blocks in zip(*(x.tolist() for x in columns), strict=True)
            if count  # else it is padding
        )
        token_rows = {
            row.first + offset: (index, row.start + offset)
            for index, row in enumerate(rows)
            for offset in range(len(row.tokens))
        }
        positions = zip(inputs.kv_write_tokens.tolist(), inputs.kv_write_positions.tolist(), strict=True)
        kv_writes = {place: token_rows[token] for token, place in positions if place >= 0}
        held = {row.blocks[at // size] * size + at % size for row in rows for at in range(row.stop)}
        decoded = inputs.num_decode_tokens
        stops = torch.cat([chunks.query_start_loc[1:], chunks.cu_chunk_seqlens[1:], checkpoints.token_ends])
        slots = torch.cat([inputs.state_destinations, chunks.destinations, checkpoints.destinations])
        ends = [*range(decoded), *(decoded + stop - 1 for stop in stops.tolist())]
        written = (
            (token_rows[token], slot) for token, slot in zip(ends, slots.tolist(), strict=True) if slot >= 0
        )
        return cls(
            rows=rows,
            writes={slot: (row, position + 1) for (row, position), slot in written},
            kv_writes=kv_writes,
            reads=frozenset(held - kv_writes.keys()),
            logits=tuple(token_rows[token] for token in inputs.logit_tokens.tolist()[: inputs.num_logits]),
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
