"""The `KernelSet` for GPUs, with the names and signatures of `reference`.

No function synchronises, and no launch depends on values: a CUDA graph can capture every function.
"""

from .attention_flash import paged_attention_decode, paged_attention_prefill, paged_attention_verify
from .causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from .gated_delta_rule import gated_delta_rule_scan
from .gated_delta_rule_update import gated_delta_rule_update
from .reference import apply_rotary, compute_dtype, gated_rms_norm, rms_norm
from .selective_state_update import selective_state_update
from .ssd_scan import ssd_chunk_scan
from .write_kv import write_kv

SEPARATE_STATES = True

__all__ = [
    "SEPARATE_STATES",
    "apply_rotary",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "compute_dtype",
    "gated_rms_norm",
    "gated_delta_rule_scan",
    "gated_delta_rule_update",
    "paged_attention_decode",
    "paged_attention_prefill",
    "paged_attention_verify",
    "rms_norm",
    "selective_state_update",
    "ssd_chunk_scan",
    "write_kv",
]
