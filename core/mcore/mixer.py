"""Corrections of what the Mamba mixer reads: checkpoint rows from CPU numbers, and carried windows."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .overrides import override
from .versions import DYNAMIC_CONTEXT, GPU_VIEW, MAMBA_METADATA, MAMBA_MIXER


@dataclass(frozen=True)
class CheckpointRows:
    """Which states the mixer extracts: views of one of the two buffers of the coalesced transfer.

    Attributes:
        chunks [n] int64: the SSD chunk whose last state is extracted.
        positions [n] int32: the packed token position where the convolution window ends.
        count [1] int32: how many of the n entries are real.
    """

    chunks: Tensor
    positions: Tensor
    count: Tensor

    @classmethod
    def appended_to(cls, buffer: Tensor, rows: int) -> "CheckpointRows":
        """Lengthen `buffer`, a whole [bytes] uint8 storage, in place; other views of it stay valid."""
        start = -(-buffer.numel() // 8) * 8
        stop = start + 12 * rows + 4
        storage = buffer.untyped_storage()
        storage.resize_(stop)
        buffer.set_(storage, 0, (stop,), (1,))
        buffer[start:].zero_()
        ends = (start, start + 8 * rows, start + 12 * rows, stop)
        chunks, positions, count = (buffer[a:b] for a, b in pairwise(ends))
        return cls(chunks.view(torch.int64), positions.view(torch.int32), count.view(torch.int32))

    def fill(self, chunks: list[int], positions: list[int], padding: int) -> None:
        """Write the real rows, and harmless numbers into the others, which only a warm-up may read."""
        real = len(chunks)
        self.chunks[:real] = torch.tensor(chunks, dtype=torch.int64, device="cpu")
        self.positions[:real] = torch.tensor(positions, dtype=torch.int32, device="cpu")
        self.chunks[real:] = 0
        self.positions[real:] = padding
        self.count.fill_(real)


@override(GPU_VIEW, "__init__", of_stock=True, faults=(22,))
def gpu_view_init(
    original: Callable[..., None], self: Any, max_requests: int, *args: Any, **kwargs: Any
) -> None:
    """Append the checkpoint rows to the device side of the coalesced transfer, for hybrid models."""
    original(self, max_requests, *args, **kwargs)
    if self.mamba_cu_seqlens is not None:
        self._mambaslots_rows = CheckpointRows.appended_to(self._buf, _rows(max_requests))


@override(DYNAMIC_CONTEXT, "_allocate_mamba_states", of_stock=True, faults=(22,))
def allocate_mamba_states(original: Callable[..., None], self: Any) -> None:
    """Append the checkpoint rows to the CPU side, and let the metadata use the device side as its buffers.

    The host has just made both buffers, and no graph has captured their addresses.
    """
    original(self)
    if not self.is_hybrid_model:
        return
    metadata, device = self.mamba_metadata, self.gpu_view._mambaslots_rows
    metadata._mambaslots_rows = CheckpointRows.appended_to(
        self._cpu_bookkeeping_buf, _rows(self.max_requests)
    )
    metadata._intermediate_chunk_indices_buffer = device.chunks
    metadata._intermediate_abs_positions_buffer = device.positions
    metadata._intermediate_real_count_buffer = device.count


def _offsets_per_request() -> int:
    host = importlib.import_module(MAMBA_METADATA.partition(":")[0])
    return int(host.MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)


def _rows(max_requests: int) -> int:
    return _offsets_per_request() * max_requests


@override(MAMBA_METADATA, "compute_cpu_metadata", of_stock=True, faults=(22,))
def compute_cpu_metadata(
    original: Callable[..., dict[str, Any]], self: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Also compute the checkpoint rows, from CPU numbers, before the step's transfer."""
    result = original(self, *args, **kwargs)
    rows = getattr(self, "_mambaslots_rows", None)
    if rows is None or "cu_seqlens_list" not in result:
        return result
    offsets, counts = result["intermediate_offsets_gpu"], result["intermediate_counts_gpu"]
    per_request = [] if counts is None else counts.tolist()
    table = [] if offsets is None else offsets.tolist()
    chunks, positions = checkpoint_rows(result["cu_seqlens_list"], table, per_request, self.mamba_chunk_size)
    rows.fill(chunks, positions, padding=self.d_conv)
    self._mambaslots_counts = per_request
    return result


def checkpoint_rows(
    cu_seqlens: list[int], offsets: list[list[int]], counts: list[int], chunk_size: int
) -> tuple[list[int], list[int]]:
    """The chunk index and the packed position of each offset, sequence after sequence.

    Every sequence is cut into SSD chunks from its own start, and has at least one chunk.
    """
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    first_chunks = accumulate((max(1, -(-length // chunk_size)) for length in lengths), initial=0)
    chunks, positions = [], []
    for start, first, row, count in zip(cu_seqlens, first_chunks, offsets, counts, strict=False):
        for offset in row[:count]:
            chunks.append(first + offset // chunk_size - 1)
            positions.append(start + offset)
    return chunks, positions


@override(MAMBA_METADATA, "_update_intermediate_metadata", of_stock=True, faults=(22,))
def update_intermediate_metadata(
    original: Callable[..., None],
    self: Any,
    intermediate_offsets_gpu: Tensor | None,
    intermediate_counts_gpu: Tensor | None,
    real_prefill_count: int,
    padded_prefill_count: int,
    cu_seqlens_gpu: Tensor | None = None,
) -> None:
    """Use the rows that the coalesced transfer has filled: no kernel and no synchronisation.

    The stock method rebuilds the rows on the GPU with about 12 small kernels and two synchronisations.
    """
    if cu_seqlens_gpu is None or getattr(self, "_mambaslots_rows", None) is None:
        return original(
            self, intermediate_offsets_gpu, intermediate_counts_gpu,
            real_prefill_count, padded_prefill_count, cu_seqlens_gpu,
        )  # fmt: skip
    rows = min(_rows(padded_prefill_count), self.max_intermediate_count)
    self.intermediate_chunk_indices = self._intermediate_chunk_indices_buffer[:rows]
    self.intermediate_abs_positions = self._intermediate_abs_positions_buffer[:rows]
    self.intermediate_real_count = self._intermediate_real_count_buffer
    self.per_request_intermediate_counts = self._mambaslots_counts
    self.intermediate_count = sum(self._mambaslots_counts)


@override(MAMBA_MIXER, "_ssm_prefill", faults=(3,))
def ssm_prefill(
    original: Callable[..., Tensor],
    self: Any,
    zxBCdt: Tensor,
    conv_state: Tensor | None,
    ssm_state: Tensor | None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    batch_indices: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Keep in the window what a chunk shorter than the convolution leaves of the one before.

    The stock method pads such a window with zeros on the left. Fixed shapes and no synchronisation, so it
    is captured with the rest of a CUDA graph; its cost is four gathers of [prefills, channels, width].
    """
    named = dict(seq_idx=seq_idx, cu_seqlens=cu_seqlens, batch_indices=batch_indices, **rest)
    if conv_state is None or seq_idx is None or cu_seqlens is None or batch_indices is None:
        return original(self, zxBCdt, conv_state, ssm_state, **named)
    before = conv_state[batch_indices]
    output = original(self, zxBCdt, conv_state, ssm_state, **named)
    windows = carried_windows(before, conv_state[batch_indices], cu_seqlens)
    module = importlib.import_module(MAMBA_MIXER.partition(":")[0])
    module.tensor_masked_update(conv_state, batch_indices, windows)  # leaves rows of index -1 alone
    return output


def carried_windows(before: Tensor, after: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[sequences, channels, width]: `after`, its zero padded head replaced by the end of `before`.

    Sequence i has `cu_seqlens[i + 1] - cu_seqlens[i]` new inputs, which end its window `after`.
    """
    width = before.shape[-1]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)[:, None]
    columns = torch.arange(width, device=before.device)[None, :]
    source = (columns + lengths).clamp(max=width - 1)[:, None, :].expand_as(before)
    return torch.where((columns < width - lengths)[:, None, :], before.gather(2, source), after)
