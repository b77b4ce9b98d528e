"""The kernels of a GPU, in Triton.

No function synchronises, and no launch depends on values: a CUDA graph can capture every function.
"""

import torch

from ...state_spec import HybridStateSpec
from . import attention, conv, delta, delta_replay, gates, norms, products, ssd
from . import ssd_replay as replay
from . import write_kv as kv
from .reference import KernelSet


class GpuKernelSet(KernelSet):
    """`KernelSet` on a GPU."""

    @staticmethod
    def check_states(spec: HybridStateSpec) -> None:
        """Raise where the kernels of a prefill cannot compute these states. Imports what they need.

        Raises:
            ImportError: megatron-core (for Mamba-2 in float32) or fla-core (for gated delta nets) is not
                installed.
            ValueError: the chunk size, or the keys of a delta net, are none that the kernels take, or an
                environment variable of the kernels has a value that is not accepted.
        """
        shapes = {tensor.name: tensor.shape for tensor in spec.states if tensor.num_layers}
        attention.num_splits()
        if "ssm" in shapes:
            ssd.operand_dtype(spec.kv_dtype)
            if spec.kv_dtype == torch.float32:
                ssd.stages()
        if "delta" in shapes:
            delta.check_sizes(spec.chunk_size or 0, shapes["delta"][1])
            delta.stages()

    @staticmethod
    def describe(spec: HybridStateSpec, block_size: int) -> tuple[str, ...]:
        """What computes attention and scans of a model, and why nothing better does."""
        lines = []
        if spec.num_attention_layers:
            lines.append(attention.describe(spec.device, spec.kv_dtype, spec.head_dim, block_size))
        names = {tensor.name for tensor in spec.states if tensor.num_layers}
        if "ssm" in names:
            lines.append(ssd.describe(spec.kv_dtype))
        if "delta" in names:
            lines.append("gated delta rule: mambaslots, and stages of fla-core")
        return tuple(lines)

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    gated_rms_norm = staticmethod(norms.gated_rms_norm)
    rms_norm_gated = staticmethod(norms.rms_norm_gated)
    qk_norm_rotary = staticmethod(norms.qk_norm_rotary)
    relu_squared = staticmethod(gates.relu_squared)
    silu_mul = staticmethod(gates.silu_mul)
    sigmoid_mul = staticmethod(gates.sigmoid_mul)
    time_steps = staticmethod(gates.time_steps)
    delta_gates = staticmethod(gates.delta_gates)
    head_product = staticmethod(products.head_product)
    causal_conv1d_prefill = staticmethod(conv.causal_conv1d_prefill)
    causal_conv1d_update = staticmethod(conv.causal_conv1d_update)
    causal_conv1d_replay = staticmethod(conv.causal_conv1d_replay)
    keep_conv_inputs = staticmethod(conv.keep_conv_inputs)
    ssd_chunk_scan = staticmethod(ssd.ssd_chunk_scan)
    selective_state_update = staticmethod(ssd.selective_state_update)
    ssd_replay = staticmethod(replay.ssd_replay)
    keep_ssd_inputs = staticmethod(replay.keep_ssd_inputs)
    gated_delta_rule_scan = staticmethod(delta.gated_delta_rule_scan)
    gated_delta_rule_update = staticmethod(delta.gated_delta_rule_update)
    gated_delta_rule_replay = staticmethod(delta_replay.gated_delta_rule_replay)
    keep_delta_inputs = staticmethod(delta_replay.keep_delta_inputs)
    write_kv = staticmethod(kv.write_kv)
    rotary_and_write_kv = staticmethod(kv.rotary_and_write_kv)
    paged_attention = staticmethod(attention.paged_attention)
