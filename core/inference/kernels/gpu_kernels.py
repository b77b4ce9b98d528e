"""The `KernelSet` for GPUs, with the names and signatures of `reference`.

No function synchronises, and no launch depends on values: a CUDA graph can capture every function.
"""

import torch

from ...state_spec import HybridStateSpec
from . import attention, attention_flash, gated_delta_rule, ssd_scan
from .activations import relu_squared, sigmoid_mul, silu_mul
from .attention import paged_attention
from .causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from .conv_replay import causal_conv1d_replay, keep_conv_inputs
from .delta_gates import delta_gates
from .delta_replay import gated_delta_rule_replay, keep_delta_inputs
from .gated_delta_rule import gated_delta_rule_scan
from .gated_delta_rule_update import gated_delta_rule_update
from .gated_norms import gated_rms_norm, rms_norm_gated
from .norms import add_rms_norm, rms_norm
from .products import head_product
from .qk_norm_rotary import qk_norm_rotary
from .reference import compute_dtype
from .selective_state_update import selective_state_update
from .ssd_inputs import keep_ssd_inputs
from .ssd_replay import ssd_replay
from .ssd_scan import ssd_chunk_scan
from .time_steps import time_steps
from .write_kv import rotary_and_write_kv, write_kv

SEPARATE_STATES = True


def check_states(spec: HybridStateSpec) -> None:
    """Raise where the kernels of a prefill cannot compute these states. Imports what they need.

    Raises:
        ImportError: megatron-core (for Mamba-2 in float32) or fla-core (for gated delta nets) is not
            installed.
        ValueError: the chunk size, or the keys of a delta net, are none that the kernels take, or an
            environment variable of the kernels has a value that is not accepted.
    """
    shapes = {tensor.name: tensor.shape for tensor in spec.states if tensor.num_layers}
    attention_flash.num_splits()
    if "ssm" in shapes:
        ssd_scan.operand_dtype(spec.kv_dtype)
        if spec.kv_dtype == torch.float32:
            ssd_scan.stages()
    if "delta" in shapes:
        gated_delta_rule.check_sizes(spec.chunk_size or 0, shapes["delta"][1])
        gated_delta_rule.stages()


def describe(spec: HybridStateSpec, block_size: int) -> tuple[str, ...]:
    """What computes attention and scans of a model, and why nothing better does.

    Args:
        spec: what the model says of itself.
        block_size: tokens of a KV block.
    """
    lines = []
    if spec.num_attention_layers:
        lines.append(attention.describe(spec.device, spec.kv_dtype, spec.head_dim, block_size))
    names = {tensor.name for tensor in spec.states if tensor.num_layers}
    if "ssm" in names:
        lines.append(ssd_scan.describe(spec.kv_dtype))
    if "delta" in names:
        lines.append("gated delta rule: mambaslots, and stages of fla-core")
    return tuple(lines)


__all__ = [
    "SEPARATE_STATES",
    "add_rms_norm",
    "causal_conv1d_prefill",
    "causal_conv1d_replay",
    "causal_conv1d_update",
    "check_states",
    "compute_dtype",
    "delta_gates",
    "describe",
    "gated_rms_norm",
    "gated_delta_rule_replay",
    "gated_delta_rule_scan",
    "gated_delta_rule_update",
    "head_product",
    "keep_conv_inputs",
    "keep_delta_inputs",
    "keep_ssd_inputs",
    "paged_attention",
    "qk_norm_rotary",
    "relu_squared",
    "rms_norm",
    "rms_norm_gated",
    "rotary_and_write_kv",
    "selective_state_update",
    "sigmoid_mul",
    "silu_mul",
    "ssd_chunk_scan",
    "ssd_replay",
    "time_steps",
    "write_kv",
]
