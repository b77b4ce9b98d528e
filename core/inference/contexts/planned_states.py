"""The boundaries at which the rows of a host's step store states, and where kernels write those states."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from .cache.checkpoint_plan import KINDS_BY_WORTH, Boundary

_MAX_OFFSETS = 3  # of a row, as megatron-core sizes its scratch


class PlannedStates:
    """What each row of a step stores inside its prefill, and at the prefill's end, until it is cleared.

    Attributes:
        num_rows: rows of requests.
        any: whether a state is planned since the last step.
        offsets [rows, 3], counts [rows]: int32 on the CPU; after how many new tokens of a row states inside
            its prefill lie, ascending, and how many there are.
        inner_blocks [rows, 3], end_blocks [rows]: int32 on the CPU; the KV blocks that those states, and the
            state at the end, follow; -1: none.
        worth: block -> rank of the kind of its planned boundary, 0 the worthiest.
    """

    def __init__(self, num_rows: int, num_scratch_rows: int, grid: int, block_size_tokens: int) -> None:
        """Kernels write states inside a prefill at multiples of `grid` tokens, to scratch."""
        self.num_rows, self._num_scratch_rows = num_rows, num_scratch_rows
        self._grid, self._block_size = grid, block_size_tokens
        self._offsets = np.zeros((num_rows, _MAX_OFFSETS), np.int32)  # numpy writes faster than torch
        self._counts = np.zeros(num_rows, np.int32)
        self._inner_blocks, self._end_blocks = np.full_like(self._offsets, -1), np.full_like(self._counts, -1)
        arrays = self._offsets, self._counts, self._inner_blocks, self._end_blocks
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            self.offsets, self.counts, self.inner_blocks, self.end_blocks = map(torch.from_numpy, arrays)
        self.any = False
        self.worth: dict[int, int] = {}
        self._rows: set[int] = set()  # those that are not clear

    def add(
        self, row: int, start: int, stop: int, boundaries: Sequence[Boundary], blocks: Sequence[int]
    ) -> int:
        """Plan boundaries in (start, stop] of a clear row with these KV blocks; returns how many are dropped.

        Boundaries beside the kernels' grid, beyond three inside a row, or without scratch are dropped.
        """
        self._rows.add(row)
        size = self._block_size
        inside = [b.position for b in boundaries if b.position < stop]
        on_grid = [position for position in inside if (position - start) % self._grid == 0]
        num_free = self._num_scratch_rows - int(self._counts.sum())
        chosen = sorted(on_grid[: max(0, min(_MAX_OFFSETS, num_free))])
        for column, position in enumerate(chosen):
            self._offsets[row, column] = position - start
            self._inner_blocks[row, column] = blocks[position // size - 1]
        self._counts[row] = len(chosen)
        if any(b.position == stop for b in boundaries):
            self._end_blocks[row] = blocks[stop // size - 1]
            self.any = True
        self.any |= bool(chosen)
        for boundary in boundaries:
            self.worth[blocks[boundary.position // size - 1]] = KINDS_BY_WORTH.index(boundary.kind)
        return len(inside) - len(chosen)

    def places(self, rows: slice, counts: Iterable[int]) -> list[tuple[int, int, bool]]:
        """(block, row, whether it is a row of scratch) of each state of `rows`, those in scratch first.

        `counts`: how many states each row has in scratch, from its first row on.
        """
        planned = self._inner_blocks[rows].tolist()
        in_order = [block for row, count in zip(planned, counts, strict=False) for block in row[:count]]
        places = [(block, row, True) for row, block in enumerate(in_order)]
        ends = enumerate(self._end_blocks[rows].tolist(), rows.start)
        places += ((block, row, False) for row, block in ends)
        return [place for place in places if place[0] >= 0]  # a host may have cleared rows

    def clear_row(self, row: int) -> None:
        """Remove what is planned for a row, if anything is."""
        if row in self._rows:
            self._clear_rows(slice(row, row + 1))

    def clear_rows(self, rows: slice) -> None:
        """Remove what is planned for the rows of the last step."""
        self._clear_rows(rows)
        self.any = False

    def _clear_rows(self, rows: slice) -> None:
        self._offsets[rows], self._counts[rows] = 0, 0
        self._inner_blocks[rows], self._end_blocks[rows] = -1, -1
        self._rows.difference_update(range(*rows.indices(self.num_rows)))

    def clear(self) -> None:
        """Remove all that is planned."""
        self.clear_rows(slice(None))
        self.worth.clear()
