"""The buffers of align mode: the numbers that cross to the device, and what runs on them there.

`MambaBuffers`, `MambaSpecDecodeGPUContext` and its methods have the names by which vLLM's model runner
calls them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..validation import INT32_MAX, integer
from .state_binding import LayerStates, MambaCacheConfig, StateBinding, kernels_for


class Buffer(Protocol):
    """Numbers that the host writes and the device reads. A host may bring its own class."""

    gpu: Tensor
    """[size] on the device."""

    @property
    def np(self) -> npt.NDArray[Any]:
        """[size] on the host: where to write the next numbers."""

    def copy_to_gpu(self, n: int) -> object:
        """Send the first n numbers without waiting; the other entries of `gpu` stay."""


MakeBuffer = Callable[[int], Buffer]
"""size -> a buffer of that size."""


class StagedBuffer:
    """int32 numbers in two pinned host arrays, used in turn: one is written while the other still crosses."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self.gpu = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def np(self) -> npt.NDArray[Any]:
        return self._hosts[self._turn].numpy()

    def copy_to_gpu(self, n: int) -> Tensor:
        """Send the first n numbers and switch arrays; waits for the copy before, not for this one."""
        self.gpu[:n].copy_(self._hosts[self._turn][:n], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        return self.gpu[:n]


def send(buffer: Buffer, numbers: Sequence[int]) -> Tensor:
    """Write numbers to the front of a buffer and send them without waiting; returns the device's tensor."""
    buffer.np[: len(numbers)] = np.asarray(numbers, dtype=np.int64)
    buffer.copy_to_gpu(len(numbers))
    return buffer.gpu


@dataclass
class MambaPreprocessBuffers:
    """What `preprocess_mamba` sends to the device and keeps there; one entry per request of the batch.

    Attributes:
        binding: the kernels and the states to which they are bound.
        state_idx, num_computed: the running columns and the computed tokens.
        query_start_loc: the first token of each request in the step; one entry more, for the total.
        rows: the numbers 0, 1, 2, ... as the mapping from batch rows to buffer entries.
        src_col, token_bias: where each state was before the step.
    """

    binding: StateBinding
    state_idx: Buffer
    num_computed: Buffer
    query_start_loc: Buffer
    rows: Tensor
    src_col: Tensor
    token_bias: Tensor


@dataclass
class MambaSpecDecodeGPUContext:
    """The copies after sampling, and the copies before a forward whose columns the device already has.

    Only the first binding synchronises. Every `run_` method raises RuntimeError while no states are bound.
    Device arrays are int32 or int64. A method with `idx_mapping` [num_reqs] reads its arrays and the block
    tables by request row, -1 for padding; a method without it, or with None, reads them by batch row.
    """

    block_size_tokens: int
    binding: StateBinding
    state_idx: Buffer
    num_scheduled_tokens: Buffer
    num_computed_tokens: Buffer
    num_draft_tokens: Buffer
    _counts: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: MambaCacheConfig,
        num_state_types: int,
        device: torch.device,
        make_buffer: MakeBuffer | None = None,
    ) -> "MambaSpecDecodeGPUContext":
        """Allocate the buffers. States are bound later, when the host has allocated them.

        Args:
            max_num_reqs: most requests of a batch.
            num_state_types: state tensors of one layer.
            make_buffer: makes the host's own buffers; None: a `StagedBuffer` each.

        Raises:
            ValueError: `max_num_reqs` is out of range.
        """
        make = make_buffer or (lambda size: StagedBuffer(size, device))
        num_rows = integer("max_num_reqs", max_num_reqs, 1, INT32_MAX)
        return cls(
            block_size_tokens=kv_cache_config.block_size_tokens,
            binding=StateBinding(kernels_for(device), num_state_types),
            state_idx=make(num_rows),
            num_scheduled_tokens=make(num_rows),
            num_computed_tokens=make(num_rows),
            num_draft_tokens=make(num_rows),
        )

    @property
    def is_initialized(self) -> bool:
        return self.binding.is_initialized

    def initialize_from_forward_context(
        self,
        kv_cache_config: MambaCacheConfig,
        forward_context: Mapping[str, LayerStates],
        mamba_state_copy_funcs: Sequence[object],
        block_tables: Sequence[Tensor],
    ) -> None:
        """Bind the kernels to the states' memory, unless they are bound to the same memory already.

        Synchronises when it binds.

        Args:
            forward_context: layer name -> layer, whose `kv_cache` has one state tensor of each type.
            mamba_state_copy_funcs: one entry for each type of state, a function or a name. A name with "conv"
                in it marks the state of a convolution.
            block_tables: one table per group, [rows, columns] int32 slots, -1 for none.

        Raises:
            ValueError: types or tables are not as many as configured, or states cannot be copied as bytes.
        """
        self.binding.bind(kv_cache_config, forward_context, mamba_state_copy_funcs, block_tables)

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """Before a forward: copy states from column `src_col_gpu`, biased, to column `state_idx_gpu`."""
        layout = self.binding.layout
        self.binding.kernels.precopy_align(
            layout, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping, num_reqs
        )

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> Tensor:
        """After sampling, by batch row: copy states on boundaries to their columns.

        Returns:
            [num_reqs] the accepted counts for the next step, valid until the next call.
            `num_accepted_tokens_gpu` itself is not changed.
        """
        layout = self.binding.layout
        counts = self._copied(num_accepted_tokens_gpu)
        self.binding.kernels.postprocess_align(
            layout, num_accepted_tokens_gpu, mamba_state_idx_gpu, num_computed_tokens_gpu, counts, None,
            num_reqs, self.block_size_tokens, num_scheduled_tokens_gpu, num_draft_tokens_gpu,
        )  # fmt: skip
        return counts[:num_reqs]

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """After sampling, given the tokens computed with this step; writes `num_accepted_tokens_gpu`."""
        layout = self.binding.layout
        snapshot = self._copied(num_accepted_tokens_gpu)
        self.binding.kernels.postprocess_align(
            layout, snapshot, state_idx_gpu, new_num_computed_tokens_gpu, num_accepted_tokens_gpu,
            idx_mapping, num_reqs, self.block_size_tokens,
        )  # fmt: skip

    def _copied(self, counts: Tensor) -> Tensor:
        """The counts in memory of this context, whose address a captured graph may keep."""
        own = self._counts.get(counts.dtype)
        if own is None or len(own) < len(counts):
            own = self._counts[counts.dtype] = torch.empty_like(counts)
        own[: len(counts)].copy_(counts)
        return own[: len(counts)]


@dataclass
class MambaBuffers:
    """Everything that a model runner keeps for its Mamba layers.

    Attributes:
        preprocess: None unless the cache mode is "align".
        postprocess_align: None unless the cache mode is "align", steps have drafts, and the model has
            attention beside its Mamba layers.
    """

    preprocess: MambaPreprocessBuffers | None
    postprocess_align: MambaSpecDecodeGPUContext | None

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: MambaCacheConfig,
        num_state_types: int,
        device: torch.device,
        is_hybrid: bool = True,
        make_buffer: MakeBuffer | None = None,
    ) -> "MambaBuffers":
        """Allocate what the configured mode needs; arguments as in `MambaSpecDecodeGPUContext.create`.

        Args:
            is_hybrid: whether the model has attention beside its Mamba layers.

        Raises:
            ValueError: `max_num_reqs` is out of range.
        """
        if kv_cache_config.cache_mode != "align":
            return cls(None, None)
        num_rows = integer("max_num_reqs", max_num_reqs, 1, INT32_MAX)
        make = make_buffer or (lambda size: StagedBuffer(size, device))
        preprocess = MambaPreprocessBuffers(
            binding=StateBinding(kernels_for(device), num_state_types),
            state_idx=make(num_rows),
            num_computed=make(num_rows),
            query_start_loc=make(num_rows + 1),
            rows=torch.arange(num_rows, dtype=torch.int32, device=device),
            src_col=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            token_bias=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
        context = None
        if kv_cache_config.num_speculative_tokens and is_hybrid:
            context = MambaSpecDecodeGPUContext.create(
                num_rows, kv_cache_config, num_state_types, device, make_buffer
            )
        return cls(preprocess, context)
