"""Which states each row of a host's step stores, and where kernels write them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..cache.checkpoint_plan import KINDS_BY_WORTH, Boundary
from ..cache.state_slots import StateSlots

_MAX_OFFSETS = 3  # of a row, as megatron-core sizes its scratch


class WrittenStates(NamedTuple):
    """The states that a step has written, in megatron-core's lists: those inside prefills, then at ends."""

    inner_blocks: list[int]
    scratch_indices: list[int]  # of the inner states
    end_blocks: list[int]
    rows: list[int]  # the requests whose live states they are
    hashes: list[int]  # of the inner blocks, then of the end blocks


class StepPlan:
    """What each row of a step stores inside its prefill, and at the prefill's end, until it is cleared.

    A row is a request's place in the host's tensors. Scratch has the states inside prefills, row after row.

    Attributes:
        has_planned: whether a state is planned since the last step.
        offsets [rows, 3], counts [rows]: int32 on the CPU; after how many new tokens of a row states inside
            its prefill lie, ascending, and how many there are.
        inner_blocks [rows, 3], end_blocks [rows]: int32 on the CPU; the KV blocks that those states, and the
            state at the end, follow; -1: none.
    """

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def __init__(self, num_rows: int, num_scratch: int, grid: int, block_size_tokens: int) -> None:
        """Kernels write states inside a prefill at multiples of `grid` tokens, to scratch."""
        self._num_scratch = num_scratch
        self._grid = grid
        self._block_size = block_size_tokens
        self.counts = torch.zeros(num_rows, dtype=torch.int32, device="cpu")
        self.offsets = self.counts.new_zeros(num_rows, _MAX_OFFSETS)
        self.inner_blocks = torch.full_like(self.offsets, -1)
        self.end_blocks = torch.full_like(self.counts, -1)
        self.has_planned = False
        self._ranks: dict[int, dict[int, int]] = {}  # of rows that are not clear: block -> rank of its kind

    def add(
        self, row: int, start: int, stop: int, boundaries: Sequence[Boundary], blocks: Sequence[int]
    ) -> int:
        """Plan boundaries in (start, stop] of a clear row with these KV blocks; returns how many are dropped.

        Boundaries off the kernels' grid, beyond three inside a row, or without scratch are dropped.
        """
        block_at = {b.position: blocks[b.position // self._block_size - 1] for b in boundaries}
        self._ranks[row] = {block_at[b.position]: KINDS_BY_WORTH.index(b.kind) for b in boundaries}
        inside = [b.position for b in boundaries if b.position < stop]
        on_grid = [position for position in inside if (position - start) % self._grid == 0]
        num_free = self._num_scratch - int(self.counts.sum())
        chosen = sorted(on_grid[: max(0, min(_MAX_OFFSETS, num_free))])
        offsets, inner_blocks = self.offsets.numpy(), self.inner_blocks.numpy()  # which are faster to write
        offsets[row, : len(chosen)] = [position - start for position in chosen]
        inner_blocks[row, : len(chosen)] = [block_at[position] for position in chosen]
        self.counts[row] = len(chosen)
        self.end_blocks[row] = block_at.get(stop, -1)
        self.has_planned |= bool(chosen) or stop in block_at
        return len(inside) - len(chosen)

    def written(self, rows: slice, counts: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Block -> index in scratch of each state inside the prefills; block -> row of those at the ends.

        `counts`: how many states each row has in scratch, from its first row on.
        """
        planned = zip(self.inner_blocks[rows].tolist(), counts, strict=False)
        inner: dict[int, int] = {}
        ends: dict[int, int] = {}
        for index, block in enumerate(block for blocks, count in planned for block in blocks[:count]):
            inner.setdefault(block, index)
        for row, block in enumerate(self.end_blocks[rows].tolist(), rows.start):
            if block not in inner:
                ends.setdefault(block, row)
        inner.pop(-1, None)  # a host may have cleared rows
        ends.pop(-1, None)
        return inner, ends

    def unstored(self, rows: slice, counts: Iterable[int], slots: StateSlots) -> WrittenStates:
        """Of the `written` states those of registered blocks without a state or a reserved slot."""
        inner, ends = self.written(rows, counts)
        cached_states, reserved = slots.cached_states, set(slots.reserved.values())
        hash_of_block: dict[int, int] = {}
        for block in (*inner, *ends):
            prefix_hash = slots.tree.hash_of(block)
            findable = prefix_hash > 0 and cached_states.state_block_of_hash.get(prefix_hash, block) == block
            if findable and block not in reserved and block not in cached_states.slot_of_block:
                hash_of_block[block] = prefix_hash
        inner = {block: index for block, index in inner.items() if block in hash_of_block}
        ends = {block: row for block, row in ends.items() if block in hash_of_block}
        return WrittenStates(
            [*inner], [*inner.values()], [*ends], [*ends.values()], [*hash_of_block.values()]
        )

    def ranks(self) -> dict[int, int]:
        """Block -> the rank of its boundary's kind, 0 the worthiest; the worthiest of rows that share it."""
        best_ranks: dict[int, int] = {}
        for ranks in self._ranks.values():
            best_ranks |= {block: min(rank, best_ranks.get(block, rank)) for block, rank in ranks.items()}
        return best_ranks

    def clear_row(self, row: int) -> None:
        """Remove what is planned for a row, if anything is."""
        if row in self._ranks:
            self._clear_rows(slice(row, row + 1))

    def clear_step(self, rows: slice) -> None:
        """Remove what is planned for the rows of the last step."""
        self._clear_rows(rows)
        self.has_planned = False

    def _clear_rows(self, rows: slice) -> None:
        self.offsets[rows] = 0
        self.counts[rows] = 0
        self.inner_blocks[rows] = -1
        self.end_blocks[rows] = -1
        for row in range(*rows.indices(len(self.counts))):
            self._ranks.pop(row, None)
