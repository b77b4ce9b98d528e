"""The `KernelSet` in plain torch: what a CPU runs, and the oracle of the GPU's kernels.

Every function runs on any device and in any float dtype, and computes in `compute_dtype`, float32 or wider.
Pools are those of one layer, `[slots, ...]`. A kernel reads the state before its tokens at a *source* pool
index (-1: zeros) and writes the state after its tokens at a *destination* (-1: nowhere). A kernel reads every
source before it writes any destination, so that a row may be updated in place.

Inputs may be padded to larger shapes. Padding writes nothing:

    row             has no token, or in decode kernels one; source and destination are -1
    token           lies after the real tokens; row is -1; its output is unspecified
    chunk           lies after the chunks that `row_chunk_starts` counts; is empty
    checkpoint      row is -1, end is 0, destination is -1
    position of KV  is -1
"""

from ....state_spec import HybridStateSpec
from . import attention, conv, delta, pointwise, ssd
from .chunks import compute_dtype


class KernelSet:
    """The functions that a model calls: here in plain torch, in `GpuKernelSet` in Triton.

    Each function says what it computes and the shapes of its arguments. `H`, `P`, `G` and `N` are heads,
    channels of a head, groups and state size of Mamba; `Hk`, `Hv`, `Dk` and `Dv` are key heads, value heads
    and the sizes of their keys and values. A function computes in `compute_dtype`, and returns the dtype of
    its first tensor, rounded once. Gates and logits stay in the compute dtype. `out`, where a function has
    it, is a contiguous tensor of the shape and dtype of the result, which is written there and returned.

    Example: `kernel_set(torch.device("cpu"), torch.bfloat16).rms_norm(x, weight, 1e-5)` with x [7, 512] and
    weight [512] computes in float32 and returns bfloat16 [7, 512].
    """

    @staticmethod
    def check_states(spec: HybridStateSpec) -> None:
        """Raise an ImportError or a ValueError where no kernel here can compute these states."""

    @staticmethod
    def describe(spec: HybridStateSpec) -> tuple[str, ...]:
        """What computes attention of a model, and why nothing better does; a line, or none."""
        dtype = str(compute_dtype(spec.kv_dtype)).removeprefix("torch.")
        return (f"attention, scans and norms: torch operations in {dtype}",)

    compute_dtype = staticmethod(compute_dtype)
    rms_norm = staticmethod(pointwise.rms_norm)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    gated_rms_norm = staticmethod(pointwise.gated_rms_norm)
    rms_norm_gated = staticmethod(pointwise.rms_norm_gated)
    qk_norm_rotary = staticmethod(pointwise.qk_norm_rotary)
    relu_squared = staticmethod(pointwise.relu_squared)
    silu_mul = staticmethod(pointwise.silu_mul)
    sigmoid_mul = staticmethod(pointwise.sigmoid_mul)
    time_steps = staticmethod(pointwise.time_steps)
    delta_gates = staticmethod(pointwise.delta_gates)
    head_product = staticmethod(pointwise.head_product)
    causal_conv1d_prefill = staticmethod(conv.causal_conv1d_prefill)
    causal_conv1d_update = staticmethod(conv.causal_conv1d_update)
    causal_conv1d_replay = staticmethod(conv.causal_conv1d_replay)
    keep_conv_inputs = staticmethod(conv.keep_conv_inputs)
    ssd_chunk_scan = staticmethod(ssd.ssd_chunk_scan)
    selective_state_update = staticmethod(ssd.selective_state_update)
    ssd_replay = staticmethod(ssd.ssd_replay)
    keep_ssd_inputs = staticmethod(ssd.keep_ssd_inputs)
    gated_delta_rule_scan = staticmethod(delta.gated_delta_rule_scan)
    gated_delta_rule_update = staticmethod(delta.gated_delta_rule_update)
    gated_delta_rule_replay = staticmethod(delta.gated_delta_rule_replay)
    keep_delta_inputs = staticmethod(delta.keep_delta_inputs)
    write_kv = staticmethod(attention.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
