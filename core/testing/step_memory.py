"""Which memory one step names: what its model may read, and what it must write."""

from dataclasses import dataclass
from enum import StrEnum

from ..inference.contexts.step_inputs import StepInputs


class WriteKind(StrEnum):
    """The field of `StepInputs` that names a destination of a state."""

    DECODE = "decode_destinations"
    PREFILL = "prefill_destinations"
    INNER = "chunks.destinations and checkpoints.destinations"


@dataclass(frozen=True)
class StepRow:
    """The real tokens of one row.

    Attributes:
        decode: whether it is a decode row.
        first: the index of its first token in the step's packed tokens.
        start: tokens of the sequence before this step.
        tokens: the ids of its tokens, drafts included.
        source: the pool index of the state before them; -1 for none.
        blocks: its KV blocks in order, as many as its tokens fill.
    """

    decode: bool
    first: int
    start: int
    tokens: tuple[int, ...]
    source: int
    blocks: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StateWrite:
    """One destination: the state after `position` tokens of a row goes to pool index `slot`."""

    kind: WriteKind
    slot: int
    row: int
    position: int


@dataclass(frozen=True)
class KVWrite:
    """One token whose keys and values are stored: `place` is block * block size + offset."""

    place: int
    row: int
    position: int


@dataclass(frozen=True)
class StepMemory:
    """All of a step that is no padding.

    Attributes:
        rows: decode rows, then prefill rows.
        writes: the destinations, one entry a pool index.
        kv_writes: the tokens whose keys and values are stored.
        reads: the other places in the KV cache that hold tokens of the rows.
        cached_kv: those among `reads` that hold tokens of this very step, which are cached already.
        logits: (row, position) of the tokens whose logits are wanted.
    """

    rows: tuple[StepRow, ...]
    writes: tuple[StateWrite, ...]
    kv_writes: tuple[KVWrite, ...]
    reads: tuple[int, ...]
    cached_kv: tuple[int, ...]
    logits: tuple[tuple[int, int], ...]

    @classmethod
    def from_inputs(cls, inputs: StepInputs) -> "StepMemory":
        """Read an unpadded step; synchronises."""
        block_size = inputs.kv_cache.shape[3]
        rows = _rows(inputs, block_size)
        token_rows = {
            row.first + offset: (index, row.start + offset)
            for index, row in enumerate(rows)
            for offset in range(len(row.tokens))
        }
        kv_writes = tuple(
            KVWrite(place, *token_rows[token])
            for token, place in zip(
                inputs.kv_write_tokens.tolist(), inputs.kv_write_positions.tolist(), strict=True
            )
            if place >= 0
        )
        written = {write.place for write in kv_writes}
        named = {
            row.blocks[position // block_size] * block_size + position % block_size: position >= row.start
            for row in rows
            for position in range(row.stop)
        }
        for place in written:
            del named[place]
        return cls(
            rows=rows,
            writes=_writes(inputs, rows, token_rows),
            kv_writes=kv_writes,
            reads=tuple(named),
            cached_kv=tuple(place for place, new in named.items() if new),
            logits=tuple(token_rows[token] for token in inputs.logit_tokens.tolist()[: inputs.num_logits]),
        )

    @property
    def sources(self) -> list[int]:
        """The pool indices that the step starts from, each once."""
        return list(dict.fromkeys(row.source for row in self.rows if row.source >= 0))

    @property
    def slots(self) -> list[int]:
        """The pool indices that the step writes."""
        return [write.slot for write in self.writes]

    @property
    def decodes(self) -> int:
        return sum(row.decode for row in self.rows)

    @property
    def has_rows_without_source(self) -> bool:
        return any(row.source < 0 for row in self.rows)

    def __str__(self) -> str:
        decodes, prefills = (
            [len(row.tokens) for row in self.rows if row.decode is decode] for decode in (True, False)
        )
        parts = [
            f"{len(lengths)} {name} row{'s' * (len(lengths) > 1)} of {_listed(lengths)} "
            f"token{'s' * (lengths != [1] * len(lengths))}"
            for name, lengths in (("decode", decodes), ("prefill", prefills))
            if lengths
        ]
        return " and ".join(parts)


def _rows(inputs: StepInputs, block_size: int) -> tuple[StepRow, ...]:
    ids, positions = inputs.token_ids.tolist(), inputs.positions.tolist()
    lengths, sources = inputs.kv_lengths.tolist(), inputs.state_sources.tolist()
    table = inputs.block_table.tolist()
    starts = inputs.chunks.query_start_loc.tolist()
    decodes, width = inputs.num_decodes, inputs.shape.decode_tokens
    rows = []
    for index, (length, source) in enumerate(zip(lengths, sources, strict=True)):
        decode = index < decodes
        if decode:
            first = index * width
            start = positions[first]
        else:
            first = decodes * width + starts[index - decodes]
            start = length - (starts[index - decodes + 1] - starts[index - decodes])
        tokens = tuple(ids[first : first + length - start])
        blocks = tuple(table[index][: -(-length // block_size)])
        rows.append(StepRow(decode, first, start, tokens, source, blocks))
    return tuple(rows)


def _writes(
    inputs: StepInputs, rows: tuple[StepRow, ...], token_rows: dict[int, tuple[int, int]]
) -> tuple[StateWrite, ...]:
    decodes, decoded = inputs.num_decodes, inputs.num_decode_tokens
    destinations = inputs.state_destinations.tolist()
    found: dict[int, StateWrite] = {}
    for token, slot in enumerate(destinations[:decoded]):
        if slot >= 0:
            row, position = token_rows[token]
            found[slot] = StateWrite(WriteKind.DECODE, slot, row, position + 1)
    for index, slot in enumerate(destinations[decoded:], start=decodes):
        if slot >= 0:
            found[slot] = StateWrite(WriteKind.PREFILL, slot, index, rows[index].stop)
    ends = inputs.chunks.cu_chunk_seqlens.tolist()[1:]
    inner = list(zip(ends, inputs.chunks.destinations.tolist(), strict=True))
    inner += zip(
        inputs.checkpoints.token_ends.tolist(), inputs.checkpoints.destinations.tolist(), strict=True
    )
    for end, slot in inner:
        if slot >= 0:
            row, position = token_rows[decoded + end - 1]
            found[slot] = StateWrite(WriteKind.INNER, slot, row, position + 1)
    return tuple(found.values())


def _listed(lengths: list[int]) -> str:
    return f"{lengths[0]}" if len(set(lengths)) == 1 else ", ".join(map(str, lengths[:6]))
