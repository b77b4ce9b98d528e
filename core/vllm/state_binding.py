"""Where a host's recurrent states lie, found by the names that vLLM gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from ..validation import INT32_MAX, integer, one_of
from .kernels import align_reference
from .kernels.align_layout import AlignLayout, AlignState

CACHE_MODES = ("none", "align", "all")


@dataclass(frozen=True)
class MambaCacheConfig:
    """How a host caches recurrent states: what vLLM spreads over its KV cache and cache configs.

    Attributes:
        block_size_tokens: tokens of one column of the slot table.
        mamba_groups: for each block table, the names of its Mamba layers in the forward context.
        num_speculative_tokens: most drafts of a step.
        cache_mode: "none", "align" or "all". States move in "align" only.
        conv_dim_first: conv states are [slots, dim, window], not [slots, window, dim].

    Raises:
        ValueError: a number is out of range, or the mode is not one of these.
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


class LayerStates(Protocol):
    """A Mamba layer in a host's forward context."""

    kv_cache: Sequence[Tensor]
    """One tensor [slots, ...] for each type of state."""


@dataclass
class StateBinding:
    """The align kernels of a device, and the states and block tables to which they are bound.

    Attributes:
        kernels: the module `kernels.align` or `kernels.align_reference`.
        num_state_types: state tensors of one layer.
    """

    kernels: ModuleType
    num_state_types: int
    _layout: AlignLayout | None = None

    @property
    def is_initialized(self) -> bool:
        return self._layout is not None

    @property
    def layout(self) -> AlignLayout:
        """The bound layout.

        Raises:
            RuntimeError: nothing is bound. A step that went on would leave states where they were.
        """
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
        """Bind the kernels to states and tables, unless they are bound to the same memory already.

        Synchronises when it binds. `MambaSpecDecodeGPUContext.initialize_from_forward_context` documents the
        arguments and errors.
        """
        types = [str(getattr(function, "__name__", function)) for function in mamba_state_copy_funcs]
        if len(types) != self.num_state_types or len(block_tables) != len(config.mamba_groups):
            raise ValueError(
                f"there are {len(types)} types of state and {len(block_tables)} block tables; accepted: "
                f"{self.num_state_types} and {len(config.mamba_groups)}"
            )
        window_dim = -1 if config.conv_dim_first else 1
        states = [
            AlignState(tensor, tensor.shape[window_dim] if "conv" in state_type else 0, group)
            for group, layers in enumerate(config.mamba_groups)
            for layer in layers
            for state_type, tensor in zip(types, forward_context[layer].kv_cache, strict=True)
        ]
        if self._layout is None or not self._layout.lies_in(states, block_tables):
            self._layout = AlignLayout.from_tensors(states, block_tables, config.conv_dim_first)

    def unbind(self) -> None:
        """Drop the tensors, so that their memory can be freed."""
        self._layout = None


def kernels_for(device: torch.device) -> ModuleType:
    """The align kernels for a device: Triton's on CUDA, imported at this call; plain torch's elsewhere."""
    if device.type != "cuda":
        return align_reference
    from .kernels import align

    return align
