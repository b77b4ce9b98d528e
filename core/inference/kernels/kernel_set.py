"""Which kernels a model runs."""

from typing import Protocol

import torch
from torch import Tensor

from ...state_spec import HybridStateSpec
from ...tensor_validation import float_dtype
from ...validation import shown
from . import reference
from .attention_rows import AttentionRows


class KernelSet(Protocol):
    """The functions that a model calls, of one device and dtype; a module with these names is a kernel set.

    `reference.py` says for every function what it computes, the shapes of its arguments and how they may be
    padded. `H`, `P`, `G` and `N` are heads, channels of a head, groups and state size of Mamba. `Hk`, `Hv`,
    `Dk` and `Dv` are key heads, value heads and the sizes of their keys and values. A function computes in
    `compute_dtype`, and returns the dtype of its first tensor, rounded once. Gates are the exception: they
    stay in the compute dtype, and so do logits. `out`, where a function has it, is a contiguous tensor of the
    shape and dtype of the result, which is written there and returned: the parts of a step lie side by side
    without a copy.
    """

    SEPARATE_STATES: bool
    """Whether a row's destinations may differ from the row's source. Without this, every row is updated in
    place: the source is -1 or the row's first destination, and only checkpoints inside a prefill are written
    to other slots."""

    def check_states(self, spec: HybridStateSpec) -> None:
        """Raise an ImportError or a ValueError where no kernel here can compute these states."""

    def describe(self, spec: HybridStateSpec, block_size: int) -> tuple[str, ...]:
        """What computes attention and scans of a model, and why nothing better does; a line each."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which norms, decays, scores and states of a `dtype` model are computed."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """Normalise x [..., n] by its root mean square, times weight [n] + offset."""

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """residual + x, both [..., n], and the `rms_norm` of this sum."""

    def relu_squared(self, x: Tensor) -> Tensor:
        """max(x, 0) squared."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [..., n]."""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), both [..., n]."""

    def qk_norm_rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
        query_weight: Tensor | None = None, key_weight: Tensor | None = None, eps: float = 0.0,
        *, offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`rms_norm` of each head of query and key [T, heads, D], then a rotation by cos and sin [T, R]."""

    def head_product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [..., n] @ weight.T, weight [vocabulary, n], in float32 or wider."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        """The RMS norm of x * silu(gate), both [T, n], over each of `groups` parts; weight [n]."""

    def rms_norm_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of each head of x [T, H, D], times silu(gate); weight [D] or [H, D]."""

    def time_steps(
        self, dt: Tensor, dt_bias: Tensor, A_log: Tensor, shortest: float = 0.0, longest: float = float("inf")
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """clamp(softplus(dt + dt_bias)) of dt [T, H], and A = -exp(A_log) [H], in the compute dtype."""

    def delta_gates(
        self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, doubled: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """-exp(A_log) softplus(a + dt_bias) and sigmoid(b), a and b [T, Hv], in the compute dtype."""

    def causal_conv1d_prefill(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor,
        sources: Tensor, destinations: Tensor, query_start_loc: Tensor, token_rows: Tensor,
        checkpoint_rows: Tensor, checkpoint_ends: Tensor, checkpoint_destinations: Tensor,
        *, activation: bool = True, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve packed rows x [tokens, conv_dim], then SiLU if `activation`. Writes `conv_states`."""

    def causal_conv1d_update(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor,
        sources: Tensor, destinations: Tensor,
        *, activation: bool = True, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve rows of T tokens, x [rows, T, conv_dim], like a prefill. Writes `conv_states`."""

    def causal_conv1d_replay(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, conv_inputs: Tensor,
        slots: Tensor, starts: Tensor, lengths: Tensor, destinations: Tensor,
        *, activation: bool = True, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`causal_conv1d_prefill`, to the bit, of rows x [rows, T, conv_dim] behind the inputs in rings.

        Writes `conv_inputs` and `conv_states`.
        """

    def keep_conv_inputs(
        self, x: Tensor, conv_states: Tensor, conv_inputs: Tensor,
        slots: Tensor, starts: Tensor, sources: Tensor, query_start_loc: Tensor,
    ) -> None:  # fmt: skip
        """Store the last inputs of packed rows x [tokens, conv_dim] for replays. Writes `conv_inputs`.

        Reads `conv_states`, and so comes before the prefill that writes them.
        """

    def ssd_chunk_scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor,
        sources: Tensor, destinations: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor, seq_idx: Tensor,
        row_chunk_starts: Tensor, chunk_destinations: Tensor, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The recurrence over packed rows, x [tokens, H, P] and B, C [tokens, G, N]. Writes `ssm_states`."""

    def selective_state_update(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor,
        sources: Tensor, destinations: Tensor, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The recurrence over T tokens of each row, x [rows, T, H, P]. Writes `ssm_states`."""

    def ssd_replay(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor,
        x_inputs: Tensor, B_inputs: Tensor, gates: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor,
        sources: Tensor, destinations: Tensor, chunk_size: int, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The scan of T tokens of each row, x [rows, T, H, P], from the inputs since the last grid point.

        Writes the inputs, and `ssm_states` at grid points.
        """

    def keep_ssd_inputs(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, x_inputs: Tensor, B_inputs: Tensor, gates: Tensor,
        slots: Tensor, tail_starts: Tensor, query_start_loc: Tensor, chunk_size: int,
    ) -> None:  # fmt: skip
        """Store what packed rows x [tokens, H, P] have behind their last grid points. Writes the inputs."""

    def gated_delta_rule_scan(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
        sources: Tensor, destinations: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor, seq_idx: Tensor,
        row_chunk_starts: Tensor, chunk_destinations: Tensor,
    ) -> Tensor:  # fmt: skip
        """The rule over packed rows, q and k [tokens, Hk, Dk], v [tokens, Hv, Dv]. Writes `states`."""

    def gated_delta_rule_update(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
        sources: Tensor, destinations: Tensor,
    ) -> Tensor:  # fmt: skip
        """The rule over T tokens of each row, q and k [rows, T, Hk, Dk]. Writes `states`."""

    def gated_delta_rule_replay(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
        k_inputs: Tensor, v_inputs: Tensor, g_inputs: Tensor, beta_inputs: Tensor,
        slots: Tensor, starts: Tensor, lengths: Tensor, sources: Tensor, destinations: Tensor,
        chunk_size: int,
    ) -> Tensor:  # fmt: skip
        """`gated_delta_rule_scan` from the last grid point; the outputs of T tokens of each row.

        Writes the four kinds of inputs, and `states` behind chunks that the tokens complete.
        """

    def keep_delta_inputs(
        self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        k_inputs: Tensor, v_inputs: Tensor, g_inputs: Tensor, beta_inputs: Tensor,
        slots: Tensor, tail_starts: Tensor, query_start_loc: Tensor,
    ) -> None:  # fmt: skip
        """Store the inputs of packed rows behind their last grid points for replays. Writes them."""

    def write_kv(
        self, kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor
    ) -> None:
        """Store keys and values [T, kv heads, head dim] of `tokens` at `positions`. Writes `kv_cache`.

        The rows behind the last token of a new block become zeros.
        """

    def rotary_and_write_kv(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, base: float,
        kv_cache: Tensor, tokens: Tensor, write_positions: Tensor,
    ) -> Tensor:  # fmt: skip
        """Rotate query and key, `write_kv` key and value, and return the query. Writes `kv_cache`."""

    def paged_attention(
        self, query: Tensor, kv_cache: Tensor, rows: AttentionRows, *, scale: float | None = None
    ) -> Tensor:
        """Causal attention of all rows of a step, query [T, heads, head dim]."""


def kernel_set(device: torch.device, dtype: torch.dtype) -> KernelSet:
    """The kernels for weights of `dtype` on `device`.

    `reference` serves a CPU, and float64 on any device, which the Triton kernels would narrow to float32. On
    a GPU `reference` synchronises, and a CUDA graph cannot capture it. `gpu_kernels` serves a GPU in all
    other dtypes, and needs triton; `check_states` says what else a model's states need.

    Raises:
        ImportError: triton is not installed.
        ValueError: `device` is no torch.device, or `dtype` none in which weights can be computed.
    """
    if not isinstance(device, torch.device):
        raise ValueError(f"device is {shown(device)}; accepted: a torch.device")
    if float_dtype("dtype", dtype) == torch.float64 or device.type != "cuda":
        return reference
    try:
        from . import gpu_kernels
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the kernels for {device} need {error.name}; install it with: pip install {error.name}"
        ) from error
    return gpu_kernels
