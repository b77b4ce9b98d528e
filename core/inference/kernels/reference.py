"""The `KernelSet` in plain torch: what a CPU runs, and the oracle of the GPU's kernels.

Every function runs on any device and in any float dtype, and computes in `compute_dtype`, float32 or wider.
Pools are those of one layer, `[slots, ...]`. A kernel reads the state before its tokens at a *source* pool
index (-1: zeros) and writes the state after its tokens at a *destination* (-1: nowhere). A kernel reads every
source before it writes any destination, so that a row may be updated in place.

Inputs may be padded to larger shapes. Padding writes nothing:

    row             has no token, or in decode kernels one; source and destination are -1
    token           lies behind the real tokens; row is -1; its output is unspecified
    chunk           lies behind the chunks that `row_chunk_starts` counts; is empty
    checkpoint      row is -1, end is 0, destination is -1
    position of KV  is -1
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...state_spec import HybridStateSpec
from .reference_attention import apply_rotary as apply_rotary
from .reference_attention import paged_attention as paged_attention
from .reference_attention import rotary_and_write_kv as rotary_and_write_kv
from .reference_attention import write_kv as write_kv
from .reference_chunks import PaddedChunks, pass_states, read_states, rounded, write_states
from .reference_chunks import compute_dtype as compute_dtype
from .reference_delta import gated_delta_rule_scan as gated_delta_rule_scan
from .reference_delta import gated_delta_rule_update as gated_delta_rule_update
from .reference_gates import delta_gates as delta_gates
from .reference_gates import gated_rms_norm as gated_rms_norm
from .reference_gates import rms_norm_gated as rms_norm_gated
from .reference_gates import time_steps as time_steps
from .reference_pointwise import add_rms_norm as add_rms_norm
from .reference_pointwise import head_product as head_product
from .reference_pointwise import qk_norm_rotary as qk_norm_rotary
from .reference_pointwise import relu_squared as relu_squared
from .reference_pointwise import rms_norm as rms_norm
from .reference_pointwise import sigmoid_mul as sigmoid_mul
from .reference_pointwise import silu_mul as silu_mul
from .reference_replay_conv import causal_conv1d_replay as causal_conv1d_replay
from .reference_replay_conv import keep_conv_inputs as keep_conv_inputs
from .reference_replay_delta import gated_delta_rule_replay as gated_delta_rule_replay
from .reference_replay_delta import keep_delta_inputs as keep_delta_inputs
from .reference_replay_ssd import keep_ssd_inputs as keep_ssd_inputs
from .reference_replay_ssd import ssd_replay as ssd_replay

SEPARATE_STATES = True
"""See `KernelSet.SEPARATE_STATES`."""


def check_states(spec: HybridStateSpec) -> None:
    """Does nothing: every state can be computed."""


def describe(spec: HybridStateSpec, block_size: int) -> tuple[str, ...]:
    """What computes; torch computes everything."""
    dtype = str(compute_dtype(spec.kv_dtype)).removeprefix("torch.")
    return (f"attention, scans and norms: torch operations in {dtype}",)


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    query_start_loc: Tensor,
    token_rows: Tensor,
    checkpoint_rows: Tensor,
    checkpoint_ends: Tensor,
    checkpoint_destinations: Tensor,
    *,
    activation: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution, then SiLU, over packed sequences of any lengths, 0 and 1 included.

    Args:
        x: [tokens, conv_dim] raw inputs, row after row.
        weight, bias: [conv_dim, kernel], [conv_dim] or None.
        conv_states: [slots, conv_dim, >= kernel - 1]. A slot's first kernel - 1 places hold the last raw
            inputs, oldest first. Written at `destinations` and `checkpoint_destinations`.
        sources, destinations: [rows] pool indices.
        query_start_loc: [rows + 1] where each row's tokens start in `x`.
        token_rows: [tokens] the row of each token.
        checkpoint_rows, checkpoint_ends, checkpoint_destinations: [n] a checkpoint stores the window before
            token `checkpoint_ends` of `x`, which is a token of that row or the row's end, at this pool index.
        activation: whether SiLU follows.
        out: where the result goes; None allocates it.

    Returns: [tokens, conv_dim] in the dtype of x.
    """
    tokens, conv_dim = x.shape
    width = weight.shape[1] - 1
    rows = torch.arange(sources.shape[0], device=x.device)
    taps = torch.arange(width, device=x.device)

    # Each row's carried window goes in front of the row's tokens, and one gather serves rows of any length.
    # Padding tokens belong to a row behind the last, whose window is zeros.
    packed = x.new_zeros(tokens + (rows.shape[0] + 1) * width, conv_dim)
    window_starts = query_start_loc[:-1] + rows * width
    carried = read_states(conv_states[..., :width], sources)
    packed[window_starts[:, None] + taps] = carried.transpose(1, 2).to(x.dtype)
    windows_before = torch.where(token_rows < 0, rows.shape[0], token_rows)
    token_windows = torch.arange(tokens, device=x.device) + windows_before * width
    packed[token_windows + width] = x

    dtype = compute_dtype(x.dtype)
    y = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for tap in range(width + 1):
        y = y + packed[token_windows + tap].to(dtype) * weight[:, tap].to(dtype)

    ends = torch.cat([query_start_loc[1:], checkpoint_ends])
    end_rows = torch.cat([rows, checkpoint_rows])
    windows = packed[(ends + end_rows * width)[:, None] + taps].transpose(1, 2)
    write_states(conv_states[..., :width], torch.cat([destinations, checkpoint_destinations]), windows)
    return rounded(F.silu(y) if activation else y, x.dtype, out)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    *,
    activation: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_prefill` for rows of T tokens each, with the window stored after each token.

    Args:
        x: [rows, T, conv_dim].
        weight, bias, conv_states, activation, out: as for `causal_conv1d_prefill`.
        sources: [rows] pool indices. destinations: [rows, T] where the window after that token goes.

    Returns: [rows, T, conv_dim] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    tokens, width = x.shape[1], weight.shape[1] - 1
    carried = read_states(conv_states[..., :width], sources).transpose(1, 2)
    packed = torch.cat([carried.to(x.dtype), x], dim=1)
    y = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for tap in range(width + 1):
        y = y + packed[:, tap : tap + tokens].to(dtype) * weight[:, tap].to(dtype)
    windows = packed.unfold(1, width, 1)[:, 1:]  # [rows, T, conv_dim, width]
    write_states(conv_states[..., :width], destinations.flatten(), windows.flatten(0, 1))
    return rounded(F.silu(y) if activation else y, x.dtype, out)


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    cu_chunk_seqlens: Tensor,
    seq_idx: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The state space dual form of h[t] = exp(dt A) h[t-1] + dt B x, y = C h + D x, over packed sequences.

    Dao & Gu 2024 (arXiv 2405.21060), section 6: within a chunk a masked matrix product, between chunks the
    recurrence, in order within a sequence. Every chunk is padded to `chunk_size`, so that its products have
    the same shape whichever rows share the batch. The same inputs and cuts therefore give the same states,
    bit for bit, in one call or in several.

    Args:
        x: [tokens, H, P]. dt: [tokens, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [tokens, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations` and `chunk_destinations`.
        sources, destinations: [rows] pool indices. A row without tokens passes its state on unchanged.
        cu_chunk_seqlens, seq_idx, row_chunk_starts: [chunks + 1], [chunks], [rows + 1], as in
            `PrefillChunks`. A chunk has at most `chunk_size` tokens, and a row without tokens has no chunk.
        chunk_destinations: [chunks] pool indices for the state after each chunk.
        out: where y goes; None allocates it.

    Returns: y, [tokens, H, P] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    heads, groups = x.shape[1], B.shape[1]
    chunks = PaddedChunks(x.shape[0], chunk_size, cu_chunk_seqlens, row_chunk_starts)

    # From here [chunks, G, heads of a group, chunk_size (, chunk_size, P or N)]. Padding has dt = 0.
    grouped = (groups, heads // groups)
    steps = chunks.padded(dt, dtype).movedim(1, 2)
    log_decay = torch.unflatten((steps * A.to(dtype)[:, None]).cumsum(-1), 1, grouped)
    scaled = torch.unflatten((chunks.padded(x, dtype) * steps.mT[..., None]).movedim(1, 2), 1, grouped)
    keys = chunks.padded(B, dtype).movedim(1, 2)
    queries = chunks.padded(C, dtype).movedim(1, 2)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    pairwise = log_decay[..., :, None] - log_decay[..., None, :]
    decay = pairwise.masked_fill(~causal, float("-inf")).exp()
    y = ((queries @ keys.mT)[:, :, None] * decay) @ scaled

    to_end = (log_decay[..., -1:] - log_decay).exp()
    updates = (scaled * to_end[..., None]).mT @ keys[:, :, None]
    entering, leaving, final = pass_states(
        _next_states,
        (updates.flatten(1, 2), log_decay[..., -1].exp().flatten(1, 2)),
        read_states(ssm_states, sources).to(dtype),
        seq_idx[: chunks.num_chunks].long(),
        row_chunk_starts.long(),
    )
    carried = queries[:, :, None] @ torch.unflatten(entering, 1, grouped).mT
    y = y + carried * log_decay.exp()[..., None]

    write_states(ssm_states, chunk_destinations[: chunks.num_chunks], leaving)
    write_states(ssm_states, destinations, final)
    outputs = x.to(dtype) * D.to(dtype)[:, None]
    packed = chunks.packed(y.flatten(1, 2).movedim(1, 2))
    outputs[: packed.shape[0]] += packed
    return rounded(outputs, x.dtype, out)


def _next_states(state: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """decay * state + update, of n chunks: [n, H, P, N], and [n, H] the decays."""
    return decay[:, :, None, None] * state + update


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ssd_chunk_scan` for rows of T tokens each: the recurrence (Gu & Dao 2023, arXiv 2312.00752).

    Args:
        x: [rows, T, H, P]. dt: [rows, T, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [rows, T, G, N]; head h belongs to group h // (H // G).
        ssm_states: [slots, H, P, N]. Written at `destinations`.
        sources: [rows] pool indices. destinations: [rows, T] where the state after that token goes.
        out: where y goes; None allocates it.

    Returns: y, [rows, T, H, P] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    narrow, x, dt = x.dtype, x.to(dtype), dt.to(dtype)
    heads_a_group = x.shape[2] // B.shape[2]
    key = B.to(dtype).repeat_interleave(heads_a_group, dim=2)
    query = C.to(dtype).repeat_interleave(heads_a_group, dim=2)
    decay = (dt * A.to(dtype)).exp()[..., None, None]
    scaled = (dt[..., None] * x)[..., None]
    state = read_states(ssm_states, sources).to(dtype)
    states = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + scaled[:, t] * key[:, t, :, None]
        states.append(state)
    after = torch.stack(states, dim=1)
    write_states(ssm_states, destinations.flatten(), after.flatten(0, 1))
    y = (after @ query[..., None])[..., 0] + x * D.to(dtype)[:, None]
    return rounded(y, narrow, out)
