"""The SSD chunks of a step for vLLM's Mamba2 attention backend, under vLLM's names.

Results are cut on the absolute grid of `absolute_chunks`, those of `compute_varlen_chunk_metadata` are not.
Only the absolute grid serves a prefix cache: a state exists at every absolute multiple of the chunk size,
wherever the scheduler cut the prompt.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inference.contexts.step_inputs import Int64Array, absolute_chunks
from ..validation import INT32_MAX, described, holds_data, integer, shown
from ..validation import device as checked_device

MAX_POSITION = 2**48
"""Upper bound of a chunk's size and of the tokens before a row; sums with it do not overflow int64."""
_SIGNED_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Mamba2AttentionMetadata:
    """What the Mamba2 layers read in one step; its requests are decodes first, then prefills.

    A suffix `_p` marks fields of the prefills; they are None in a step without prefills. The `block_idx_*`
    fields, `nums_dict`, `batch_ptr` and `token_chunk_offset_ptr` belong to the host's own paging and
    convolution kernel: `build` leaves them None.

    Attributes:
        has_initial_states_p: [prefills] bool.
        query_start_loc_p: [prefills + 1] first token of each prefill, from 0 on, in the host's dtype.
        num_computed_tokens_p: [prefills] in the host's dtype.
        state_indices_tensor: [requests] the slot of each state.
        prep_initial_states: whether any prefill has tokens before this step.
        seq_idx_p: [chunks] int32, the prefill of each chunk.
        cu_chunk_seqlen_p: [chunks + 1] int32, the first token of each chunk, with a trailing total.
        last_chunk_indices_p: [prefills] int32, the last chunk of each prefill; -1 for one without tokens.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_reqs: int
    has_initial_states_p: Tensor | None = None
    query_start_loc_p: Tensor | None = None
    num_computed_tokens_p: Tensor | None = None
    state_indices_tensor: Tensor | None = None
    block_idx_last_scheduled_token: Tensor | None = None
    block_idx_first_scheduled_token_p: Tensor | None = None
    block_idx_last_computed_token: Tensor | None = None
    nums_dict: dict[int, Any] | None = None
    batch_ptr: Tensor | None = None
    token_chunk_offset_ptr: Tensor | None = None
    prep_initial_states: bool = False
    chunk_size: int = 0
    seq_idx_p: Tensor | None = None
    cu_chunk_seqlen_p: Tensor | None = None
    last_chunk_indices_p: Tensor | None = None


class Mamba2AttentionBackend:
    """Where a host looks up the builder."""

    @staticmethod
    def get_builder_cls() -> "type[Mamba2AttentionMetadataBuilder]":
        return Mamba2AttentionMetadataBuilder


class Mamba2AttentionMetadataBuilder:
    """Builds the `Mamba2AttentionMetadata` of each step on the CPU."""

    def __init__(
        self, kv_cache_spec: object, layer_names: list[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        """`vllm_config.model_config.get_mamba_chunk_size()` is the chunk size; ValueError without one."""
        self.device = checked_device("device", device)
        get_chunk_size = getattr(getattr(vllm_config, "model_config", None), "get_mamba_chunk_size", None)
        if not callable(get_chunk_size):
            raise ValueError(
                f"vllm_config is {shown(vllm_config)}; accepted: what has model_config.get_mamba_chunk_size()"
            )
        self.chunk_size = integer("model_config.get_mamba_chunk_size()", get_chunk_size(), 1, MAX_POSITION)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Mamba2AttentionMetadata:
        """The metadata of one step, its tensors on the builder's device.

        The leading requests with at most one token of this step and tokens before it are decodes; from the
        first other request on, all are prefills. Synchronises only if the computed counts lie on a device.

        Args:
            common_prefix_len, fast_build: change nothing.
            common_attn_metadata: has `query_start_loc_cpu` [requests + 1] and
                `compute_num_computed_tokens()` [requests]. If it has `block_table_tensor` [requests, blocks],
                column 0 becomes `state_indices_tensor`.

        Raises:
            ValueError: one of these is no such tensor, or its numbers describe no step.
        """
        compute = getattr(common_attn_metadata, "compute_num_computed_tokens", None)
        if not callable(compute) or not hasattr(common_attn_metadata, "query_start_loc_cpu"):
            raise ValueError(
                f"common_attn_metadata is {shown(common_attn_metadata)}; accepted: what has "
                "query_start_loc_cpu and compute_num_computed_tokens()"
            )
        query_start_loc = common_attn_metadata.query_start_loc_cpu
        computed = _on_host(compute())
        starts = _host_integers("query_start_loc_cpu", query_start_loc)
        num_computed = _host_integers("compute_num_computed_tokens()", computed)
        lengths = _row_lengths(num_computed, starts)

        is_prefill = (lengths > 1) | ((lengths == 1) & (num_computed == 0))
        num_decodes = int(is_prefill.argmax()) if is_prefill.any() else num_computed.size
        num_prefills = num_computed.size - num_decodes
        num_decode_tokens = int(starts[num_decodes])
        block_table: Tensor | None = getattr(common_attn_metadata, "block_table_tensor", None)
        if block_table is not None and not (
            isinstance(block_table, Tensor) and block_table.dim() == 2 and block_table.shape[1]
        ):
            raise ValueError(
                f"block_table_tensor {described(block_table)}; accepted: a tensor [requests, blocks], or None"
            )
        metadata = Mamba2AttentionMetadata(
            num_prefills=num_prefills,
            num_prefill_tokens=int(starts[-1]) - num_decode_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_reqs=num_computed.size,
            state_indices_tensor=None if block_table is None else block_table[:, 0],
            chunk_size=self.chunk_size,
        )
        if num_prefills == 0:
            return metadata

        computed_p = computed[num_decodes:]
        query_start_loc_p = query_start_loc[-num_prefills - 1 :] - num_decode_tokens
        cu_chunk_seqlen, seq_idx, last_chunk_indices = self._compute_chunk_metadata(
            num_prefills, computed_p, query_start_loc_p
        )
        return replace(
            metadata,
            has_initial_states_p=(computed_p > 0).to(self.device),
            query_start_loc_p=query_start_loc_p.to(self.device),
            num_computed_tokens_p=computed_p.to(self.device),
            prep_initial_states=bool((num_computed[num_decodes:] > 0).any()),
            seq_idx_p=seq_idx.to(self.device),
            cu_chunk_seqlen_p=cu_chunk_seqlen.to(self.device),
            last_chunk_indices_p=last_chunk_indices.to(self.device),
        )

    def _compute_chunk_metadata(
        self, num_prefills: int, num_computed_tokens_p_cpu: Tensor, query_start_loc_p_cpu: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`build_chunk_metadata` with the builder's chunk size, the only part of the builder that is read."""
        metadata = build_chunk_metadata(num_computed_tokens_p_cpu, query_start_loc_p_cpu, self.chunk_size)
        num_counts = num_computed_tokens_p_cpu.numel()
        if num_counts != integer("num_prefills", num_prefills, 0):
            raise ValueError(
                f"num_prefills is {shown(num_prefills)}; accepted: {num_counts}, the computed counts"
            )
        return metadata


def build_chunk_metadata(
    num_computed_tokens: Tensor, query_start_loc: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The SSD chunks of packed sequences, cut at absolute multiples of `chunk_size`.

    Kernels return one state for each *chunk*: read a sequence's state at `last_chunk_indices`, not at the
    sequence's number. Example: computed (0, 3), starts (0, 5, 15), chunks of 8 gives ([0, 5, 10, 15],
    [0, 1, 1], [0, 2]); the cut at 10 is position 8 of the second sequence.

    Args:
        num_computed_tokens: [sequences] integers on the CPU, tokens before this step.
        query_start_loc: [sequences + 1] integers on the CPU, the first token of each sequence in the packed
            step, from 0 on, with a trailing total.
        chunk_size: tokens of one chunk, at least 1.

    Returns:
        (cu_chunk_seqlen [chunks + 1], seq_idx [chunks], last_chunk_indices [sequences]), int32 CPU tensors. A
        sequence without tokens has no chunk, and -1 as its last chunk.

    Raises:
        ValueError: an argument is no such tensor, positions decrease or do not start at 0, a count is
            negative.
    """
    chunk_size = integer("chunk_size", chunk_size, 1, MAX_POSITION)
    num_computed = _host_integers("num_computed_tokens", num_computed_tokens)
    starts = _host_integers("query_start_loc", query_start_loc)
    lengths = _row_lengths(num_computed, starts)
    cu_chunk_seqlen, seq_idx, last_chunk_indices = map(
        torch.from_numpy, absolute_chunks(num_computed, starts, lengths, chunk_size)
    )
    return cu_chunk_seqlen, seq_idx, last_chunk_indices


def compute_varlen_chunk_metadata(query_start_loc: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The SSD chunks of packed sequences, cut at multiples of `chunk_size` of the *packed* position.

    The packed grid serves no prefix cache. Lengths (5, 10), chunks of 8: cuts at 0, 5, 8, not at 0, 5, 13.
    Synchronises if `query_start_loc` lies on a device.

    Returns:
        (cu_chunk_seqlens [chunks + 1], last_chunk_indices [sequences], seq_idx_chunks [chunks]), int32 on
        the device of `query_start_loc`. The order is not that of `build_chunk_metadata`.
    """
    chunk_size = integer("chunk_size", chunk_size, 1, MAX_POSITION)
    starts = _host_integers("query_start_loc", _on_host(query_start_loc))
    lengths = _row_lengths(starts[:-1], starts)
    cu_chunk_seqlens, seq_idx, last_chunk_indices = (
        torch.from_numpy(cuts).to(query_start_loc.device)
        for cuts in absolute_chunks(starts[:-1], starts, lengths, chunk_size)
    )
    return cu_chunk_seqlens, last_chunk_indices, seq_idx


def _on_host(tensor: Tensor) -> Tensor:
    """A tensor that holds data, on the CPU; any other value unchanged."""
    return tensor.cpu() if isinstance(tensor, Tensor) and holds_data(tensor) else tensor


def _host_integers(name: str, tensor: Tensor) -> Int64Array:
    if (
        not isinstance(tensor, Tensor)
        or not (tensor.is_cpu and holds_data(tensor))
        or tensor.dim() != 1
        or tensor.dtype not in _SIGNED_INTEGERS
    ):
        raise ValueError(f"{name} {described(tensor)}; accepted: a 1-D integer tensor on the CPU")
    return tensor.numpy().astype(np.int64)


def _row_lengths(computed: Int64Array, starts: Int64Array) -> Int64Array:
    """[rows] int64: the tokens of each row of a packed stream.

    Raises:
        ValueError: `starts` has not one entry more than `computed`, does not start at 0, decreases or
            ends beyond int32; a `computed` that is negative or beyond `MAX_POSITION`.
    """
    if starts.size != computed.size + 1 or starts[0] != 0:
        raise ValueError(
            f"query_start_loc has {starts.size} entries{f' from {starts[0]} on' if starts.size else ''} for "
            f"{computed.size} rows; accepted: one entry a row and the total, from 0 on"
        )
    lengths = starts[1:] - starts[:-1]
    if lengths.size:
        # Seen as unsigned, negative numbers are the largest: one look for both ends.
        row = lengths.view(np.uint64).argmax()
        if lengths[row] < 0:
            raise ValueError(f"query_start_loc falls by {-lengths[row]} after row {row}; accepted: no fall")
        if lengths[row] > INT32_MAX or starts[-1] > INT32_MAX:
            raise ValueError(f"query_start_loc has {starts[-1]} tokens; accepted: at most {INT32_MAX}")
        row = computed.view(np.uint64).argmax()
        if not 0 <= computed[row] <= MAX_POSITION:
            raise ValueError(
                f"computed is {computed[row]} in row {row}; accepted: integers from 0 to {MAX_POSITION}"
            )
    return lengths
