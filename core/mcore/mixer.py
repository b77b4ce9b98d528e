"""Corrections of what the Mamba mixer reads: checkpoint rows from CPU numbers, and carried windows."""

import importlib
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..validation import ceil_div
from .overrides import override
from .versions import MAMBA_METADATA, MAMBA_MIXER


class SequenceStarts(list[int]):
    """Where the packed sequences of a step start; `least`: tokens of one."""

    def __init__(self, starts: Iterable[int]) -> None:
        super().__init__(starts)
        self.least = min((stop - start for start, stop in pairwise(self)), default=0)


@override(MAMBA_METADATA, "compute_cpu_metadata", faults=(22,))
def compute_cpu_metadata(
    original: Callable[..., dict[str, Any]], self: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Also keep where the step's sequences start, as CPU numbers."""
    result = original(self, *args, **kwargs)
    if "cu_seqlens_list" in result:
        result["cu_seqlens_list"] = SequenceStarts(result["cu_seqlens_list"])
    self._mambaslots_starts = result.get("cu_seqlens_list")
    return result


def checkpoint_rows(
    cu_seqlens: list[int], offsets: list[list[int]], counts: list[int], chunk_size: int
) -> tuple[list[int], list[int]]:
    """The chunk index and the packed position of each offset; every sequence has at least one chunk."""
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    first_chunks = accumulate((max(1, ceil_div(length, chunk_size)) for length in lengths), initial=0)
    chunks: list[int] = []
    positions: list[int] = []
    for start, first_chunk, row, count in zip(cu_seqlens, first_chunks, offsets, counts, strict=False):
        for offset in row[:count]:
            chunks.append(first_chunk + offset // chunk_size - 1)
            positions.append(start + offset)
    return chunks, positions


@override(MAMBA_METADATA, "_update_intermediate_metadata", faults=(22,))
def update_intermediate_metadata(
    original: Callable[..., None],
    self: Any,
    intermediate_offsets_gpu: Tensor | None,
    intermediate_counts_gpu: Tensor | None,
    real_prefill_count: int,
    padded_prefill_count: int,
    cu_seqlens_gpu: Tensor | None = None,
) -> None:
    """Compute the checkpoint rows from CPU numbers, and send them in one copy that does not wait."""
    if cu_seqlens_gpu is None:
        return original(
            self, intermediate_offsets_gpu, intermediate_counts_gpu, real_prefill_count, padded_prefill_count
        )
    module = importlib.import_module(MAMBA_METADATA.partition(":")[0])
    offsets = [] if intermediate_offsets_gpu is None else intermediate_offsets_gpu.tolist()
    counts = [] if intermediate_counts_gpu is None else intermediate_counts_gpu.tolist()
    chunks, positions = checkpoint_rows(self._mambaslots_starts, offsets, counts, self.mamba_chunk_size)
    count = len(chunks)
    has_graph = getattr(self, "_mambaslots_graph", True)  # without one, no row of padding is launched
    rows = module.MAX_INTERMEDIATE_OFFSETS_PER_REQUEST * padded_prefill_count if has_graph else count
    rows = min(rows, self.max_intermediate_count)
    parts = (
        self._intermediate_real_count_buffer,
        self._intermediate_chunk_indices_buffer[:rows],
        self._intermediate_abs_positions_buffer[:rows],
    )
    if rows:
        on_gpu = parts[0].device.type == "cuda"
        start = 4 + 2 * (rows + rows % 2)  # kernels are compiled for addresses that are multiples of 16
        packed = torch.full((start + rows,), self.d_conv, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        numbers: Any = packed.numpy()  # a warm-up may read rows of padding
        numbers[:start] = 0
        numbers[0] = count
        numbers[start : start + count] = positions
        numbers[4 : 4 + 2 * count].view(np.int64)[:] = chunks
        copy = packed.to(parts[0].device, non_blocking=True)
        views = (copy[:1], copy[4 : 4 + 2 * rows].view(torch.int64), copy[start:])
        if has_graph:
            parts = tuple(part.copy_(view) for part, view in zip(parts, views, strict=True))
        else:
            parts = views
    self.intermediate_real_count, self.intermediate_chunk_indices, self.intermediate_abs_positions = parts
    self.per_request_intermediate_counts = counts
    self._mambaslots_positions = positions
    self.intermediate_count = count


@override(MAMBA_MIXER, "_ssm_prefill", faults=(3,), series=("0.19",))
def ssm_prefill(
    original: Callable[..., Tensor],
    self: Any,
    zxBCdt: Tensor,
    conv_state: Tensor | None,
    ssm_state: Tensor | None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    batch_indices: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Keep in the window what a chunk shorter than the convolution leaves of the one before.

    Without synchronisation, because it is captured in a CUDA graph.
    """
    keywords = dict(seq_idx=seq_idx, cu_seqlens=cu_seqlens, batch_indices=batch_indices, **options)
    if conv_state is None or seq_idx is None or cu_seqlens is None or batch_indices is None:
        return original(self, zxBCdt, conv_state, ssm_state, **keywords)
    starts = options.get("cu_seqlens_list")
    is_long = isinstance(starts, SequenceStarts) and starts.least >= conv_state.shape[-1]
    if is_long and not (conv_state.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return original(self, zxBCdt, conv_state, ssm_state, **keywords)
    windows_before = conv_state[batch_indices]
    output = original(self, zxBCdt, conv_state, ssm_state, **keywords)
    windows = carried_windows(windows_before, conv_state[batch_indices], cu_seqlens)
    module = importlib.import_module(MAMBA_MIXER.partition(":")[0])
    module.tensor_masked_update(conv_state, batch_indices, windows)  # leaves rows of index -1 alone
    return output


def carried_windows(before: Tensor, after: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[sequences, channels, width]: `after`, its zero padded head replaced by the end of `before`."""
    width = before.shape[-1]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)[:, None]
    columns = torch.arange(width, device=before.device)[None, :]
    source = (columns + lengths).clamp(max=width - 1)[:, None, :].expand_as(before)
    return torch.where((columns < width - lengths)[:, None, :], before.gather(2, source), after)
