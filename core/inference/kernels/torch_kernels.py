"""The functions that a model calls, in torch; `gpu_kernels` has them in Triton."""

from ...state_spec import HybridStateSpec
from .dtypes_and_strides import compute_dtype
from .reference import torch_attention, torch_conv, torch_delta, torch_pointwise, torch_ssd


class KernelSet:
    """The functions that a model calls: here in plain torch, in `GpuKernelSet` in Triton.

    `H`, `P`, `G` and `N` are heads, channels of a head, groups and state size of Mamba: head h belongs to
    group h // (H // G). `Hk`, `Hv`, `Dk` and `Dv` are key heads, value heads and the sizes of their keys and
    values: value head h reads key head h // (Hv // Hk). A function computes in `compute_dtype`, and returns
    the dtype of its first tensor, rounded once; gates and logits stay in the compute dtype. An argument of
    one name is the same in all functions. Prefills have packed rows of `[tokens, ...]`; decodes have `[rows,
    T, ...]`:

        x, weight, bias: of a convolution, [tokens, channels] raw, [channels, kernel], [channels] or None
        conv_states: [slots, channels, >= kernel - 1] the last raw inputs, oldest first
        x, dt: of Mamba, [tokens, H, P]; [tokens, H] after bias and softplus
        A, B, C, D: of Mamba, [H] negative; [tokens, G, N]; [tokens, G, N]; [H]
        ssm_states, states: [slots, H, P, N] and [slots, Hv, Dk, Dv]
        q, k: of a delta net, [tokens, Hk, Dk] raw: a function normalises both, x * rsqrt(sum x^2 + 1e-6), and
            multiplies q by Dk ** -0.5
        v, g, beta: of a delta net, [tokens, Hv, Dv]; [tokens, Hv] log decays, 0 or less, finite; [tokens, Hv]
            strengths as they are used
        raw: None, or what makes q, k, v, g and beta of the arguments that stand in their places
        sources, destinations: [rows] slot of the state before a row, -1: zeros; [rows, T] slot for the state
            after each token, -1: nowhere. It may be the row's own source, no other row's
        rows: the places of a step's rows, as `step_rows` describes each kind
        inputs: of decodes by replay, what a request keeps of its tokens since the last grid point, a multiple
            of `chunk_size`, at position % chunk_size; numbers of later tokens have no effect, NaN included.
            `complete_delta_chunks` takes pools [layers, ...]
        conv_inputs: of a convolution, [requests, R, channels] raw inputs at position % R, R at least kernel -
            1 + T; only the kernel - 1 positions before `starts` are read, and positions before 0 are zeros
        new_v: for 16-bit tokens on a GPU, else None: [tokens, Hv, Dv] what each adds to the value of its key
        out: where the result goes, contiguous; None allocates it
        query, key; keys, values: [T, heads, head dim], [T, KV heads, head dim]; query head h reads KV head
            h // (heads // KV heads)
        kv_cache: [2 (K, V), blocks, block size, KV heads, head dim]
        eps, offset: of norms over the last dimension, added to the mean square and to the weight [n]

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
    rms_norm = staticmethod(torch_pointwise.rms_norm)
    add_rms_norm = staticmethod(torch_pointwise.add_rms_norm)
    gate_then_rms_norm = staticmethod(torch_pointwise.gate_then_rms_norm)
    rms_norm_then_gate = staticmethod(torch_pointwise.rms_norm_then_gate)
    qk_norm_rotary = staticmethod(torch_pointwise.qk_norm_rotary)
    relu_squared = staticmethod(torch_pointwise.relu_squared)
    silu_mul = staticmethod(torch_pointwise.silu_mul)
    sigmoid_mul = staticmethod(torch_pointwise.sigmoid_mul)
    time_steps = staticmethod(torch_pointwise.time_steps)
    delta_gates = staticmethod(torch_pointwise.delta_gates)
    head_product = staticmethod(torch_pointwise.head_product)
    causal_conv1d_prefill = staticmethod(torch_conv.causal_conv1d_prefill)
    causal_conv1d_update = staticmethod(torch_conv.causal_conv1d_update)
    causal_conv1d_replay = staticmethod(torch_conv.causal_conv1d_replay)
    keep_conv_inputs = staticmethod(torch_conv.keep_conv_inputs)
    ssd_chunk_scan = staticmethod(torch_ssd.ssd_chunk_scan)
    selective_state_update = staticmethod(torch_ssd.selective_state_update)
    ssd_replay = staticmethod(torch_ssd.ssd_replay)
    keep_ssd_inputs = staticmethod(torch_ssd.keep_ssd_inputs)
    gated_delta_rule_scan = staticmethod(torch_delta.gated_delta_rule_scan)
    gated_delta_rule_update = staticmethod(torch_delta.gated_delta_rule_update)
    gated_delta_rule_replay = staticmethod(torch_delta.gated_delta_rule_replay)
    complete_delta_chunks = staticmethod(torch_delta.complete_delta_chunks)
    keep_delta_inputs = staticmethod(torch_delta.keep_delta_inputs)
    write_kv = staticmethod(torch_attention.write_kv)
    paged_attention = staticmethod(torch_attention.paged_attention)
