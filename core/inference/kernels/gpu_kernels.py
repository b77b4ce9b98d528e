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


class GpuKernelSet(KernelSet):
    """`KernelSet` on a GPU; keeps `compute_dtype`."""

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

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    gate_then_rms_norm = staticmethod(norms.gate_then_rms_norm)
    rms_norm_then_gate = staticmethod(norms.rms_norm_then_gate)
    qk_norm_rotary = staticmethod(norms.qk_norm_rotary)
    relu_squared = staticmethod(gates.relu_squared)
    silu_mul = staticmethod(gates.silu_mul)
    sigmoid_mul = staticmethod(gates.sigmoid_mul)
    time_steps = staticmethod(gates.time_steps)
    delta_gates = staticmethod(gates.delta_gates)
    causal_conv1d_prefill = staticmethod(conv.causal_conv1d_prefill)
    causal_conv1d_update = staticmethod(conv.causal_conv1d_update)
    causal_conv1d_replay = staticmethod(conv_replay.causal_conv1d_replay)
    keep_conv_inputs = staticmethod(conv_replay.keep_conv_inputs)
    ssd_chunk_scan = staticmethod(ssd.ssd_chunk_scan)
    selective_state_update = staticmethod(ssd.selective_state_update)
    keep_ssd_inputs = staticmethod(ssd_replay.keep_ssd_inputs)
    ssd_replay = staticmethod(ssd_replay.ssd_replay)
    gated_delta_rule_scan = staticmethod(delta.gated_delta_rule_scan)
    gated_delta_rule_update = staticmethod(delta.gated_delta_rule_update)
    gated_delta_rule_replay = staticmethod(delta_replay.gated_delta_rule_replay)
    complete_delta_chunks = staticmethod(delta_replay.complete_delta_chunks)
    keep_delta_inputs = staticmethod(delta_replay.keep_delta_inputs)
    write_kv = staticmethod(write_kv.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
