"""Checkpoints of hosts whose kernels cannot store a state into a slot.

Such kernels (megatron-core's own) write the states inside a prefill chunk to scratch rows of fixed address,
and leave the state at its end in the live slot. This module plans the rows before the step, and moves them
into durable slots after it.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...validation import INT32_MAX, instance, integer, shown
from ..policies.checkpoint_plan import CheckpointPlan

if TYPE_CHECKING:
    from .mamba_slot_allocator import MambaSlotAllocator

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Offset rows a request where the host does not say (`context.max_intermediate_offsets_per_request`)."""


class IntermediateStates:
    """What one step checkpoints: rows of offsets a request, and at most one chunk end.

    Rows are the host's request rows, `max_requests` of them. `offsets_cpu` [rows, width] counts tokens from
    the first token the chunk computes; `block_ids_cpu` [rows, width] names the blocks; `counts_cpu` [rows];
    `eos_block_id_cpu` [rows] is the block whose boundary the chunk ends on, or -1. Hosts move and clear rows
    of these four.
    """

    def __init__(
        self, allocator: "MambaSlotAllocator", conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> None:
        context = allocator.context
        self._allocator = allocator
        plan = getattr(context, "checkpoint_plan", None)
        self._plan = CheckpointPlan() if plan is None else plan
        instance("context.checkpoint_plan", self._plan, CheckpointPlan)

        def size(name: str, missing: int, minimum: int = 0) -> int:
            """A size that the host states, or may state."""
            value = getattr(context, name, None)
            return missing if value is None else integer(f"context.{name}", value, minimum, INT32_MAX)

        rows = size("max_requests", 0)
        width = size("max_intermediate_offsets_per_request", MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)
        self.max_count = size("max_mamba_intermediate_states_per_step", 0)
        self.pending = False
        self.dropped = 0
        block = size("block_size_tokens", 0, minimum=1)
        grid = size("ssm_chunk_alignment", 0) or size("mamba_chunk_size", 1) or 1
        if block and grid and block % grid:
            warnings.warn(
                f"block_size_tokens is {block}, no multiple of the SSD chunk ({grid}): most block boundaries "
                "have no state inside a prefill, and few prompts will resume",
                stacklevel=4,
            )
        self.offsets_cpu = torch.zeros(rows, width, dtype=torch.int32)
        self.counts_cpu = torch.zeros(rows, dtype=torch.int32)
        self.block_ids_cpu = torch.full((rows, width), -1, dtype=torch.int32)
        self.eos_block_id_cpu = torch.full((rows,), -1, dtype=torch.int32)
        conv, ssm = allocator.conv_states, allocator.ssm_states
        scratch = (allocator.num_mamba_layers, self.max_count)
        self.conv_out = torch.zeros(*scratch, *conv.shape[2:], dtype=conv_dtype, device=conv.device)
        self.ssm_out = torch.zeros(*scratch, *ssm.shape[2:], dtype=ssm_dtype, device=ssm.device)
        self._offsets_device = torch.zeros_like(self.offsets_cpu, device=ssm.device)
        self._counts_device = torch.zeros_like(self.counts_cpu, device=ssm.device)

    def plan(
        self, req: Any, row: int, skip_tokens: int, prefill_chunk_length: int, num_matched_blocks: int
    ) -> None:
        """Choose the boundaries to keep of the chunk that request row `row` computes.

        The chunk is tokens [finished + skip_tokens, finished + prefill_chunk_length) of `req.prompt_tokens`
        (finished = `req.finished_chunk_token_count`); `num_matched_blocks` of its blocks, after those
        allocated by earlier chunks, were found in the KV cache. Requests without block hashes
        (`req.precomputed_block_hashes` empty) take no state: nobody could find it.
        """
        context = self._allocator.context
        row = integer("current_id", row, 0, len(self.counts_cpu) - 1)
        block = int(context.block_size_tokens)
        try:
            finished, prompt = int(req.finished_chunk_token_count), len(req.prompt_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"req is {shown(req)}; accepted: what has prompt_tokens and finished_chunk_token_count"
            ) from error
        most = context.request_to_kv_block_ids.shape[1] * block - finished
        start = finished + integer("skip_tokens", skip_tokens, 0)
        stop = finished + integer("prefill_chunk_length", prefill_chunk_length, 0, most)
        num_matched_blocks = integer("num_matched_blocks", num_matched_blocks, 0)
        self._clear_rows(slice(row, row + 1))
        if not getattr(req, "precomputed_block_hashes", True) or stop <= start:
            return
        seen = (-(-finished // block) + num_matched_blocks) * block if num_matched_blocks else 0
        boundaries = self._plan.boundaries(
            start=start, stop=stop, prompt_tokens=prompt, block_size_tokens=block, seen_tokens=seen
        )
        blocks = context.request_to_kv_block_ids[row]
        inside = [b.position for b in boundaries if b.position < stop]
        room = max(0, min(self.offsets_cpu.shape[1], self.max_count - int(self.counts_cpu.sum())))
        kept = sorted([position for position in inside if (position - start) % self._grid == 0][:room])
        self.dropped += len(inside) - len(kept)
        for column, position in enumerate(kept):
            self.offsets_cpu[row, column] = position - start
            self.block_ids_cpu[row, column] = blocks[position // block - 1]
        self.counts_cpu[row] = len(kept)
        if any(b.position == stop for b in boundaries):
            self.eos_block_id_cpu[row] = blocks[stop // block - 1]
            self.pending = True
        self.pending |= bool(kept)

    @property
    def _grid(self) -> int:
        context = self._allocator.context
        return int(getattr(context, "ssm_chunk_alignment", 0) or getattr(context, "mamba_chunk_size", 0) or 1)

    # ---- the step's rows

    def _prefill_rows(self) -> slice:
        context = self._allocator.context
        start = context.paused_request_count + context.batch_dimensions.decode_req_count
        return slice(start, start + context.batch_dimensions.prefill_req_count)

    def step_rows(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        rows = self._prefill_rows()
        if not self.pending or rows.start == rows.stop:
            return None, None
        return self.offsets_cpu[rows], self.counts_cpu[rows]

    def transfer(self, start: int, count: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        integer("prefill_start", start, 0, len(self.counts_cpu))
        integer("prefill_count", count, 0, len(self.counts_cpu) - start)
        if count == 0:
            return None, None
        rows = slice(start, start + count)
        offsets, counts = self._offsets_device[rows], self._counts_device[rows]
        offsets.copy_(self.offsets_cpu[rows], non_blocking=True)
        counts.copy_(self.counts_cpu[rows], non_blocking=True)
        return offsets, counts

    # ---- after the step

    def collect(self) -> tuple[list[int], list[int], list[int], list[int], list[int]] | None:
        """(blocks, scratch rows, chunk-end blocks, their request rows, hashes of both), or None.

        Scratch rows are as the kernels filled them: request after request, in the order of
        `mamba_metadata.per_request_intermediate_counts`.
        """
        context = self._allocator.context
        rows = self._prefill_rows()
        if rows.start == rows.stop:
            return None
        taken: list[tuple[int, int]] = []
        metadata = context.mamba_metadata
        if metadata.intermediate_count > 0:
            planned = self.block_ids_cpu[rows].tolist()
            counts = metadata.per_request_intermediate_counts
            in_order = [block for row, count in zip(planned, counts, strict=False) for block in row[:count]]
            taken = [(block, row) for row, block in enumerate(in_order) if block >= 0]
        ended = zip(self.eos_block_id_cpu[rows].tolist(), range(rows.start, rows.stop), strict=True)
        ends = [(block, row) for block, row in ended if block >= 0]
        blocks, scratch_rows = [b for b, _ in taken], [r for _, r in taken]
        end_blocks, end_rows = [b for b, _ in ends], [r for _, r in ends]
        if not blocks and not end_blocks:
            return None
        hashes = context.kv_block_allocator.block_hashes[torch.tensor(blocks + end_blocks)].tolist()
        return blocks, scratch_rows, end_blocks, end_rows, hashes

    def commit(self) -> None:
        """Reserve, copy, commit. Blocks that nobody can find, or that have a state, are passed over."""
        try:
            collected = self.collect()
            if collected is not None:
                self._store(*collected)
        finally:
            self.clear()

    def _store(
        self,
        blocks: list[int],
        scratch: list[int],
        end_blocks: list[int],
        end_rows: list[int],
        hashes: list[int],
    ) -> None:
        allocator = self._allocator
        sources = [(True, row) for row in scratch] + [(False, row) for row in end_rows]
        reserved = allocator.reserved_blocks
        wanted: dict[int, tuple[bool, int]] = {}
        for block, key, source in zip(blocks + end_blocks, hashes, sources, strict=True):
            if (
                key <= 0
                or block in reserved
                or allocator.has_state(block)
                or allocator.hash_to_block_id.get(key, block) != block
            ):
                continue
            wanted.setdefault(block, source)
        # Shallow boundaries come before deep ones, and chunk ends last: where slots are short, those stay.
        chosen = list(wanted)[-allocator.available_count :] if allocator.available_count else []
        for block in wanted.keys() - set(chosen):
            allocator.ghosts.add(int(allocator.context.kv_block_allocator.block_hashes[block]), "capacity")
        slots = allocator.reserve(chosen)
        try:
            for from_scratch, store in (
                (True, allocator._copy_intermediate_to_cache),
                (False, lambda rows, slots: allocator.store_from_live_batch(slots, rows)),
            ):
                pairs = [
                    (wanted[b][1], s)
                    for b, s in zip(chosen, slots, strict=True)
                    if wanted[b][0] is from_scratch
                ]
                if pairs:
                    store([row for row, _ in pairs], [slot for _, slot in pairs])
        except BaseException:
            allocator.release_reservation(slots)
            raise
        allocator.commit(slots)

    def clear(self) -> None:
        """Forget this step's rows."""
        self._clear_rows(self._prefill_rows())
        self.pending = False

    def reset(self) -> None:
        self._clear_rows(slice(None))
        self.pending = False
        self.conv_out.zero_()
        self.ssm_out.zero_()

    def _clear_rows(self, rows: slice) -> None:
        self.offsets_cpu[rows] = 0
        self.counts_cpu[rows] = 0
        self.block_ids_cpu[rows] = -1
        self.eos_block_id_cpu[rows] = -1
