"""The kernels of a GPU, in Triton.

No function synchronises, and no launch depends on values: a CUDA graph can capture every function. Slots are
int64, positions and lengths int32. Strides are any, but a slot of a pool is contiguous, and a last stride is
1 where `check_last_stride` asks for it: a ValueError says which tensor is not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...state_spec import HybridStateSpec
from . import attention, conv, conv_replay, delta, delta_replay, gates, norms, ssd, ssd_replay, write_kv
from .torch_kernels import KernelSet

_FUNCTIONS = {name for name, function in vars(KernelSet).items() if isinstance(function, staticmethod)}
_FUNCTIONS -= {"check_states", "compute_dtype", "describe", "head_product"}


class GpuKernelSet(KernelSet):
    """`KernelSet` on a GPU; each function is that of its name in one of the modules of Triton kernels."""

    @staticmethod
    def check_states(spec: HybridStateSpec) -> None:
        """Raise an ImportError or a ValueError where prefills cannot compute the states; loads fla-core."""
        shapes = {tensor.name: tensor.shape for tensor in spec.states if tensor.num_layers}
        if "delta" in shapes:
            delta.check_sizes(spec.chunk_size or 0, shapes["delta"][1])
            delta.stages()

    @staticmethod
    def describe(spec: HybridStateSpec) -> tuple[str, ...]:
        """What computes attention of a model, and why nothing better does."""
        if not spec.num_attention_layers:
            return ()
        return (attention.describe(spec.device, spec.kv_dtype, spec.head_dim),)

    @staticmethod
    def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits in float32; cuBLAS reads 16-bit operands of one dtype as they lie, and adds in float32."""
        if not hidden.numel():
            return torch.zeros(*hidden.shape[:-1], len(weight), dtype=torch.float32, device=hidden.device)
        if hidden.dtype == torch.float32 or not hidden.is_cuda or hidden.dtype != weight.dtype:
            return F.linear(hidden.float(), weight.float())
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return logits.view(*hidden.shape[:-1], len(weight))


for module in (norms, gates, conv, conv_replay, ssd, ssd_replay, delta, delta_replay, write_kv, attention):
    for name in _FUNCTIONS & vars(module).keys():
        setattr(GpuKernelSet, name, staticmethod(vars(module)[name]))
assert vars(GpuKernelSet).keys() >= _FUNCTIONS, "a GPU would run the torch function"
