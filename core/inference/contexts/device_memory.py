"""The tensors of a context's two pools."""

import torch

from ...state_spec import HybridStateSpec
from ...tensor_validation import addressable
from .input_pool import InputPool
from .state_pool import StatePool

MEBIBYTE = 1 << 20


class DeviceMemory:
    """KV of all blocks, and live and durable states, on the model's device.

    Attributes:
        kv_cache: [attention layers, 2 (K, V), blocks, block_size_tokens, KV heads, head dim].
        state_pool: live states, then durable states.
        input_pool: the inputs of running requests since their last grid points.
        allocated: whether all these tensors are there.
    """

    def __init__(
        self,
        spec: HybridStateSpec,
        num_kv_blocks: int,
        block_size_tokens: int,
        num_live_slots: int,
        num_durable_slots: int,
        input_pool: InputPool | None = None,
        is_shared: bool = False,
    ) -> None:
        """
        Args:
            input_pool: for decodes by replay; None for others.
            is_shared: whether live and durable states share their slots.
        """
        self._spec = spec
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size_tokens
        self.kv_cache = self._new_kv_cache()
        self.state_pool = StatePool(spec.states, num_live_slots, num_durable_slots, spec.device, is_shared)
        self.input_pool = input_pool or InputPool((), 0, 1, 0, spec.device)
        self.allocated = True

    def _new_kv_cache(self) -> torch.Tensor:
        spec, num_blocks = self._spec, self._num_kv_blocks
        shape = (
            spec.num_attention_layers, 2, num_blocks, self._block_size, spec.num_kv_heads, spec.head_dim,
        )  # fmt: skip
        addressable("num_kv_blocks", num_blocks, shape, spec.kv_dtype)
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device)

    def allocate(self) -> None:
        """Make the tensors again, as zeros, after `free`; their addresses are new.

        A call that raises, because memory is short, leaves no tensor; it can be repeated.
        """
        if not self.allocated:
            self.free()  # what an interrupted call has left
            # In one expression: no name in this frame, which a traceback keeps, holds a part of the memory.
            kv_cache, states, inputs = (
                self._new_kv_cache(), self.state_pool.new_memory(), self.input_pool.new_tensors()
            )  # fmt: skip
            self.kv_cache = kv_cache
            self.state_pool.put(states)
            self.input_pool.put(inputs)
            self.allocated = True

    def free(self) -> None:
        """Free the tensors' memory."""
        self.allocated = False
        self.state_pool.free()
        self.input_pool.free()
        self.kv_cache = self.kv_cache.new_empty(0)

    def summary(self) -> str:
        """One line that says how many bytes each pool takes, or would take if it were allocated."""
        pool, num_blocks = self.state_pool, self._num_kv_blocks
        state = self._spec.slot_bytes / MEBIBYTE
        kv = num_blocks * self._spec.kv_block_bytes(self._block_size) / MEBIBYTE
        inputs = self.input_pool
        total = pool.num_slots * state + kv + inputs.num_bytes / MEBIBYTE
        shared = ", and the live ones of idle rows" if pool.is_shared else ""
        replayed = ""
        if inputs.slots:
            each = inputs.num_bytes / inputs.slots / MEBIBYTE
            replayed = f"inputs of running requests {inputs.slots} x {each:.3g} MiB; "
        return (
            f"mambaslots: live states {pool.num_live} x {state:.3g} MiB; {replayed}"
            f"durable states {pool.num_durable} x {state:.3g} MiB{shared}; "
            f"KV {num_blocks} blocks of {self._block_size} tokens, {kv:.3g} MiB; "
            f"total {total:.4g} MiB on {self._spec.device}"
            f"{'' if self.allocated else ', freed now'}"
        )
