"""What align mode keeps on the device for a host that names requests by id: numbers, and where states lie.

`MambaBuffers`, `MambaSpecDecodeGPUContext` and its methods have the names by which vLLM's model runner calls
them; `align_host` has the functions. The rule is `speculative_state`'s, the work that of `kernels.align`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...validation import INT32_MAX, integer, one_of
from ..kernels import align_reference
from ..kernels.align_layout import AlignLayout, AlignState

CACHE_MODES = ("none", "align", "all")


@dataclass(frozen=True)
class MambaCacheConfig:
    """How a host caches recurrent states.

    Attributes:
        block_size_tokens: tokens of a column.
        mamba_groups: for each block table, the names of its Mamba layers in the forward context.
        num_speculative_tokens: most drafts of a step.
        cache_mode: "none", "align" or "all"; states move in "align" only.
        conv_dim_first: conv states are [slots, dim, window], and not [slots, window, dim].
    """

    block_size_tokens: int
    mamba_groups: tuple[tuple[str, ...], ...]
    num_speculative_tokens: int = 0
    cache_mode: str = "align"
    conv_dim_first: bool = True

    def __post_init__(self) -> None:
        integer("block_size_tokens", self.block_size_tokens, 1, INT32_MAX)
        integer("num_speculative_tokens", self.num_speculative_tokens, 0, INT32_MAX)
        one_of("cache_mode", self.cache_mode, CACHE_MODES)


class Buffer(Protocol):
    """Numbers that the host writes and the device reads; a host's own such buffers are accepted."""

    gpu: Tensor

    @property
    def np(self) -> npt.NDArray[Any]:
        """Where the host writes the next numbers."""

    def copy_to_gpu(self, n: int) -> object:
        """Send the first n, without waiting; those behind stay on the device as they were."""


MakeBuffer = Callable[[int], Buffer]


class StagedBuffer:
    """int32 numbers in two pinned arrays, in turn: one can be written while the other still crosses."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self.gpu = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def np(self) -> npt.NDArray[Any]:
        return self._hosts[self._turn].numpy()

    def copy_to_gpu(self, n: int) -> Tensor:
        """Also takes turns: what `np` gives next has crossed, at most one copy later."""
        self.gpu[:n].copy_(self._hosts[self._turn][:n], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        return self.gpu[:n]


class LayerStates(Protocol):
    """A Mamba layer in a forward context."""

    kv_cache: Sequence[Tensor]
    """One tensor [slots, ...] for each type of state."""


@dataclass
class StateBinding:
    """The state tensors and block tables that the kernels are bound to, once there are any."""

    kernels: ModuleType
    num_state_types: int
    _layout: AlignLayout | None = None

    @property
    def is_initialized(self) -> bool:
        return self._layout is not None

    @property
    def layout(self) -> AlignLayout:
        """RuntimeError while nothing is bound: a step that went on would leave states where they were."""
        if self._layout is None:
            raise RuntimeError("no states are bound; call initialize_from_forward_context first")
        return self._layout

    def bind(
        self,
        config: MambaCacheConfig,
        forward_context: Mapping[str, LayerStates],
        mamba_state_copy_funcs: Sequence[object],
        block_tables: Sequence[Tensor],
    ) -> None:
        """As `MambaSpecDecodeGPUContext.initialize_from_forward_context`."""
        kinds = [str(getattr(kind, "__name__", kind)) for kind in mamba_state_copy_funcs]
        if len(kinds) != self.num_state_types or len(block_tables) != len(config.mamba_groups):
            raise ValueError(
                f"there are {len(kinds)} types of state and {len(block_tables)} block tables; accepted: "
                f"{self.num_state_types} and {len(config.mamba_groups)}"
            )
        states = []
        for group, layers in enumerate(config.mamba_groups):
            for layer in layers:
                for kind, tensor in zip(kinds, forward_context[layer].kv_cache, strict=True):
                    window = -1 if config.conv_dim_first else 1
                    width = tensor.shape[window] if "conv" in kind else 0
                    states.append(AlignState(tensor, width, group))
        if self._layout is None or not self._layout.lies_in(states, block_tables):
            self._layout = AlignLayout.of(states, block_tables, config.conv_dim_first)

    def unbind(self) -> None:
        """Let go of the tensors, so that their memory can be freed."""
        self._layout = None


@dataclass
class MambaPreprocessBuffers:
    """What `preprocess_mamba` sends and keeps, one entry a request of the batch."""

    binding: StateBinding
    state_idx: Buffer
    num_computed: Buffer
    query_start_loc: Buffer
    """One entry more."""
    rows: Tensor
    src_col: Tensor
    token_bias: Tensor


@dataclass
class MambaSpecDecodeGPUContext:
    """The copies that follow sampling, and those that the device decides before a forward.

    Nothing synchronises but the first binding. Every `run_` raises RuntimeError while no states are bound.
    Arrays are int32 or int64 on the device; with `idx_mapping` [num_reqs], -1 for padding, they are by
    request row, as the block tables; without, by batch row.
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
        """Allocate the buffers; states are bound later, when there are any.

        make_buffer: size -> `Buffer`; None: pinned ones of our own.
        """
        make = make_buffer or (lambda size: StagedBuffer(size, device))
        rows = integer("max_num_reqs", max_num_reqs, 1, INT32_MAX)
        return cls(
            kv_cache_config.block_size_tokens,
            StateBinding(kernels_for(device), num_state_types),
            *(make(rows), make(rows), make(rows), make(rows)),
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
        """Bind the kernels to the states' memory; again, where it is not the memory they are bound to.

        Args:
            mamba_state_copy_funcs: for each type of state something whose name has "conv" in it, if it is one
                of a convolution: a function, or the name.
            block_tables: one a group, [rows, columns] int32 of slots, -1 for none.

        Synchronises when it binds. ValueError for states that cannot be copied as bytes.
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
        """Before a forward: states from column src_col, biased, to column state_idx."""
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
        """After sampling, all by batch row: states on boundaries to their columns.

        Returns the counts to go on with, [num_reqs], until the next call; `num_accepted_tokens_gpu` stays.
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
        """After sampling, given the tokens computed with it; writes `num_accepted_tokens_gpu`."""
        layout = self.binding.layout
        snapshot = self._copied(num_accepted_tokens_gpu)
        self.binding.kernels.postprocess_align(
            layout, snapshot, state_idx_gpu, new_num_computed_tokens_gpu, num_accepted_tokens_gpu,
            idx_mapping, num_reqs, self.block_size_tokens,
        )  # fmt: skip

    def _copied(self, counts: Tensor) -> Tensor:
        """The counts in memory of this context's own, where it stays for a captured graph."""
        own = self._counts.get(counts.dtype)
        if own is None or len(own) < len(counts):
            own = self._counts[counts.dtype] = torch.empty_like(counts)
        own[: len(counts)].copy_(counts)
        return own[: len(counts)]


@dataclass
class MambaBuffers:
    """All that a model runner keeps for its Mamba layers.

    Attributes: `preprocess` in align mode, else None; `postprocess_align` in align mode with drafts, on a
    model that also has attention, else None.
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
        if kv_cache_config.cache_mode != "align":
            return cls(None, None)
        rows = integer("max_num_reqs", max_num_reqs, 1, INT32_MAX)
        make = make_buffer or (lambda size: StagedBuffer(size, device))
        preprocess = MambaPreprocessBuffers(
            StateBinding(kernels_for(device), num_state_types),
            make(rows),
            make(rows),
            make(rows + 1),
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )
        context = None
        if kv_cache_config.num_speculative_tokens and is_hybrid:
            context = MambaSpecDecodeGPUContext.create(
                rows, kv_cache_config, num_state_types, device, make_buffer
            )
        return cls(preprocess, context)


def kernels_for(device: torch.device) -> ModuleType:
    """The align kernels: Triton's on CUDA, imported only then; torch's elsewhere. States move as bits."""
    if device.type != "cuda":
        return align_reference
    from ..kernels import align

    return align


def send(buffer: Buffer, numbers: Sequence[int]) -> Tensor:
    """Write numbers to the front of a buffer and send them; its numbers on the device."""
    buffer.np[: len(numbers)] = np.asarray(numbers, dtype=np.int64)
    buffer.copy_to_gpu(len(numbers))
    return buffer.gpu
