"""Rows of a scan, in any number and at any places: what the tests of every scan draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """`length` tokens of sequence `seed` after `start` computed ones.

    checkpoints: absolute position, a multiple of the chunk size in (start, start + length] -> pool index.
    """

    seed: int
    start: int
    length: int
    source: int = -1
    destination: int = -1
    checkpoints: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cuts:
    """`rows` cut into chunks on the absolute grid.

    Attributes:
        ends: 0, and where each chunk of the packed tokens ends.
        row_of_chunk, destination_of_chunk: of each chunk, the row's number and its checkpoint's pool index.
        row_starts: the first chunk of each row, and the number of chunks.
    """

    ends: list[int]
    row_of_chunk: list[int]
    destination_of_chunk: list[int]
    row_starts: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row], chunk_size: int) -> "Cuts":
        ends, row_of_chunk, destinations, row_starts = [0], [], [], [0]
        for index, row in enumerate(rows):
            position, end = row.start, row.start + row.length
            while position < end:
                cut = min(end, (position // chunk_size + 1) * chunk_size)
                ends.append(ends[-1] + cut - position)
                row_of_chunk.append(index)
                destinations.append(row.checkpoints.get(cut, -1))
                position = cut
            row_starts.append(len(row_of_chunk))
        return cls(ends, row_of_chunk, destinations, row_starts)


def drawn_rows(max_size: int) -> st.SearchStrategy[list[tuple[int, int, bool, str, bool]]]:
    """What `rows_of` makes rows of: start, length, has a state, where the state goes, has checkpoints."""
    row = st.tuples(
        st.integers(0, 40),
        st.integers(0, 40),
        st.booleans(),
        st.sampled_from(["nowhere", "elsewhere", "in place"]),
        st.booleans(),
    )
    return st.lists(row, min_size=1, max_size=max_size)


def rows_of(drawn: Sequence[tuple[int, int, bool, str, bool]], chunk_size: int) -> list[Row]:
    """Rows with slots of their own: 4 a row, for its source, destination and two checkpoints."""
    rows = []
    for index, (start, length, carried, target, checkpointed) in enumerate(drawn):
        source = 4 * index if carried else -1
        ends = [p for p in range(start + 1, start + length + 1) if p % chunk_size == 0][-2:]
        places = {"nowhere": -1, "elsewhere": 4 * index + 1, "in place": source}
        checkpoints = {p: 4 * index + 2 + i for i, p in enumerate(ends)} if checkpointed else {}
        rows.append(Row(index, start, length, source, places[target], checkpoints))
    return rows


def poisoned_pool(layer: Any, rows: Sequence[Row], slots: int, dtype: torch.dtype | None = None) -> Tensor:
    """Random states where a row reads, NaN everywhere else; `dtype` None is the layer's own."""
    pool: Tensor = layer.pool(slots) if dtype is None else layer.pool(slots, dtype)
    sources = {row.source for row in rows}
    pool[[slot for slot in range(slots) if slot not in sources]] = torch.nan
    return pool
