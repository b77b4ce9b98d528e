"""Live slots of running requests, and the chunk metadata that SSD kernels read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import RequestOverflowError
from ...tensor_validation import device as checked_device
from ...validation import INT32_MAX, described, holds_data, integer, integers, shown
from .chunk_grid import MAX_POSITION, Int64Array, absolute_chunks, row_lengths


class MambaMetadata:
    """Which live slot each running request owns.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32 on the CPU, -1 = none. The context writes it as
            requests move between rows; `free_slots` reads it.
        intermediate_count, per_request_intermediate_counts: how many checkpoints this step's kernels
            extract, in all and for each prefill request. The context writes them; the slot allocator
            reads them when it commits.
    """

    def __init__(self, max_requests: int, num_live_slots: int | None = None) -> None:
        """`num_live_slots` defaults to one a request; speculative decoding needs more."""
        self.max_requests = integer("max_requests", max_requests, 1, INT32_MAX)
        self.num_live_slots = integer(
            "num_live_slots", max_requests if num_live_slots is None else num_live_slots, 1, INT32_MAX
        )
        self.request_to_mamba_state_idx = torch.empty(self.max_requests, dtype=torch.int32)
        self.reset()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate_slot(self) -> int:
        """A live slot that no one owns, as a plain int; its state is stale. Enters no row.

        Raises:
            RequestOverflowError: none is free.
        """
        if not self._free:
            raise RequestOverflowError(required=1, available=0)
        return self._free.popitem()[0]

    def free_slot(self, slot: int) -> None:
        """Give `slot` back. A row that names it is the caller's to clear.

        Raises:
            ValueError: `slot` is out of range or free already; nothing is changed.
        """
        self._release("slot", [integer("slot", slot, 0, self.num_live_slots - 1)])

    def free_slots(self, request_indices: Iterable[int] | Tensor) -> None:
        """Give back the slots of these rows and clear the rows; rows without a slot are passed over.

        Raises:
            ValueError: a row is out of range, or its slot is named twice or free already; nothing is
                changed.
        """
        rows = integers("request_indices", request_indices, 0, self.max_requests - 1)
        slots = self.request_to_mamba_state_idx[rows].tolist()
        self._release("request_indices", [slot for slot in slots if slot != -1])
        self.request_to_mamba_state_idx[rows] = -1

    def reset(self) -> None:
        """All slots free, all rows empty, no checkpoints. Rows keep their storage."""
        self._free = dict.fromkeys(reversed(range(self.num_live_slots)))  # a stack that knows its members
        self.request_to_mamba_state_idx.fill_(-1)
        self.intermediate_count = 0
        self.per_request_intermediate_counts: list[int] = []

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned, and that no two rows name one."""
        assert all(0 <= slot < self.num_live_slots for slot in self._free), "a free slot is out of range"
        named = [slot for slot in self.request_to_mamba_state_idx.tolist() if slot != -1]
        assert all(0 <= slot < self.num_live_slots for slot in named), "a row names a slot out of range"
        assert len(set(named)) == len(named), "two rows name one slot"
        assert self._free.keys().isdisjoint(named), "a row names a free slot"

    def _release(self, named_by: str, slots: list[int]) -> None:
        released = dict.fromkeys(slots)
        if len(released) < len(slots) or not released.keys().isdisjoint(self._free):
            raise ValueError(
                f"{named_by} names slots {slots}, some free or named twice; accepted: slots in use, once each"
            )
        self._free.update(released)


@dataclass(frozen=True)
class Mamba2AttentionMetadata:
    """What the Mamba2 layers of an attention-backend host read in one step: decodes first, then prefills.

    A suffix `_p` marks fields of the prefill rows; they are None in a step without prefills. The
    `block_idx_*` fields and the three of the convolution's launch grid belong to the host's own paging
    and convolution kernel: `build` leaves them None.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_reqs: int
    has_initial_states_p: Tensor | None = None  # [prefills] bool
    query_start_loc_p: Tensor | None = None  # [prefills + 1] as the host's, from 0 on
    num_computed_tokens_p: Tensor | None = None  # [prefills] as the host's
    state_indices_tensor: Tensor | None = None  # [requests]: the slot of each state
    block_idx_last_scheduled_token: Tensor | None = None
    block_idx_first_scheduled_token_p: Tensor | None = None
    block_idx_last_computed_token: Tensor | None = None
    nums_dict: dict[int, Any] | None = None
    batch_ptr: Tensor | None = None
    token_chunk_offset_ptr: Tensor | None = None
    prep_initial_states: bool = False  # any prefill has tokens before this step
    chunk_size: int = 0
    seq_idx_p: Tensor | None = None  # [chunks] int32: the prefill row of each chunk
    cu_chunk_seqlen_p: Tensor | None = None  # [chunks + 1] int32: chunk starts, trailing total
    last_chunk_indices_p: Tensor | None = None  # [prefills] int32; -1 for a row without tokens


class Mamba2AttentionBackend:
    """Where an attention-backend host looks up the builder."""

    @staticmethod
    def get_builder_cls() -> "type[Mamba2AttentionMetadataBuilder]":
        return Mamba2AttentionMetadataBuilder


class _ModelConfig(Protocol):
    def get_mamba_chunk_size(self) -> int | None: ...


class _VllmConfig(Protocol):
    @property
    def model_config(self) -> _ModelConfig: ...


class _CommonAttentionMetadata(Protocol):
    @property
    def query_start_loc_cpu(self) -> Tensor: ...

    def compute_num_computed_tokens(self) -> Tensor: ...


class Mamba2AttentionMetadataBuilder:
    """Builds a step's `Mamba2AttentionMetadata` on the CPU, with chunks on the absolute grid.

    Only that grid serves a prefix cache: whatever chunks the scheduler cut a prompt into, a state exists
    at every absolute multiple of the chunk size.
    """

    def __init__(
        self,
        kv_cache_spec: object,
        layer_names: list[str],
        vllm_config: _VllmConfig,
        device: torch.device | str,
    ) -> None:
        """The chunk size is `vllm_config.model_config.get_mamba_chunk_size()`.

        Raises:
            ValueError: the model states no chunk size, or one below 1.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = checked_device("device", device)
        get_chunk_size = getattr(getattr(vllm_config, "model_config", None), "get_mamba_chunk_size", None)
        if not callable(get_chunk_size):
            raise ValueError(
                f"vllm_config is {shown(vllm_config)}; accepted: what has model_config.get_mamba_chunk_size()"
            )
        self.chunk_size = integer("model_config.get_mamba_chunk_size()", get_chunk_size(), 1, MAX_POSITION)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: _CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Mamba2AttentionMetadata:
        """The metadata of one step, its tensors on the builder's device.

        Reads `query_start_loc_cpu` [requests + 1] and `compute_num_computed_tokens()` [requests] of
        `common_attn_metadata`, and column 0 of its `block_table_tensor` [requests, blocks] if it has
        one. The leading rows of one token with tokens before it are decodes, also those of no token
        (padding); from the first other row on, all are prefills. `common_prefix_len` and `fast_build`
        change nothing here. Mutates nothing. Synchronises only if the computed counts lie on a device.

        Raises:
            ValueError: `query_start_loc_cpu` is not 1-D, not on the CPU, does not start at 0 or
                decreases; the computed counts are not as many, or negative.
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
        before = _host_integers("compute_num_computed_tokens()", computed)
        lengths = row_lengths(before, starts)

        is_prefill = (lengths > 1) | ((lengths == 1) & (before == 0))
        num_decodes = int(is_prefill.argmax()) if is_prefill.any() else before.size
        num_prefills = before.size - num_decodes
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
            num_reqs=before.size,
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
            prep_initial_states=bool((before[num_decodes:] > 0).any()),
            seq_idx_p=seq_idx.to(self.device),
            cu_chunk_seqlen_p=cu_chunk_seqlen.to(self.device),
            last_chunk_indices_p=last_chunk_indices.to(self.device),
        )

    def _compute_chunk_metadata(
        self,
        num_prefills: int,
        num_computed_tokens_p_cpu: Tensor,
        query_start_loc_p_cpu: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(cu_chunk_seqlen [chunks + 1], seq_idx [chunks], last_chunk_indices [prefills]), int32, CPU.

        The absolute grid of `chunk_grid`: cuts at absolute multiples of `self.chunk_size`, no chunk and
        last = -1 for a prefill without tokens. States come back from the kernels one a *chunk*: index
        them by `last_chunk_indices`, not by request.

        Takes [prefills] and [prefills + 1] CPU integers, the latter from 0 on. Mutates and synchronises
        nothing; reads `chunk_size` and nothing else of the builder.

        Raises:
            ValueError: shapes that do not fit, or positions that fall.
        """
        computed = _host_integers("num_computed_tokens_p_cpu", num_computed_tokens_p_cpu)
        starts = _host_integers("query_start_loc_p_cpu", query_start_loc_p_cpu)
        if computed.size != integer("num_prefills", num_prefills, 0):
            raise ValueError(
                f"num_prefills is {shown(num_prefills)}; accepted: {computed.size}, the computed counts"
            )
        cu_chunk_seqlen, seq_idx, last_chunk_indices = absolute_chunks(computed, starts, self.chunk_size)
        return (
            torch.from_numpy(cu_chunk_seqlen),
            torch.from_numpy(seq_idx),
            torch.from_numpy(last_chunk_indices),
        )


def compute_varlen_chunk_metadata(query_start_loc: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(cu_chunk_seqlens [chunks + 1], last_chunk_indices [sequences], seq_idx_chunks [chunks]), int32.

    The packed grid: cuts at sequence ends and at multiples of `chunk_size` of the *packed* position. It
    is the absolute grid of sequences that begin at their packed position, and serves no prefix cache.
    Mind the order, which is not the builder's.

    `query_start_loc` [sequences + 1] integers, from 0 on. The results lie on its device; if that is not
    the CPU, reading it synchronises. A sequence without tokens has no chunk and last = -1.

    Raises:
        ValueError: `query_start_loc` is not 1-D, does not start at 0 or decreases; `chunk_size` < 1.
    """
    chunk_size = integer("chunk_size", chunk_size, 1, MAX_POSITION)
    starts = _host_integers("query_start_loc", _on_host(query_start_loc))
    cu_chunk_seqlens, seq_idx, last_chunk_indices = absolute_chunks(starts[:-1], starts, chunk_size)
    return (
        torch.from_numpy(cu_chunk_seqlens).to(query_start_loc.device),
        torch.from_numpy(last_chunk_indices).to(query_start_loc.device),
        torch.from_numpy(seq_idx).to(query_start_loc.device),
    )


_SIGNED_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _on_host(tensor: Tensor) -> Tensor:
    """On the CPU, if it is a tensor that holds data on a device; whatever else it is, unchanged."""
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
