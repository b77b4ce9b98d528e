"""The SSD scan by pool slots: megatron-core's parallel stages, with our recurrence and scan between slots.

Three stages are megatron-core's, the same from 0.18.0 to 0.19.2: sums of dt * A, updates of chunks and C B.
Their products name no precision and so take Triton's default, TF32 (errors of 1e-3), unless
TRITON_F32_DEFAULT says otherwise. Triton reads it whenever it compiles a kernel, and keys its disk cache by
it; what a process has compiled stays. Importing this file sets it to "ieee", before the first launch here and
for all products of float32 that are compiled later in this process; a value that is set already stays.
"""

# mypy: disable-error-code="import-untyped"

import os
import warnings

import torch
from torch import Tensor

from .chunk_scan import InputPrecision, chunk_scan
from .state_passing import state_passing

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns of what is not installed for training
    from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd
    from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd, _chunk_state_fwd

_MOST_PROGRAMS = 65535  # on the second and third axis of a grid


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
    input_precision: InputPrecision = "ieee",
) -> Tensor:
    """`reference.ssd_chunk_scan` in five launches, without a copy of a state before, between or after.

    Everything is computed in float32; narrower x, B and C are widened first, because megatron-core's stages
    multiply in the dtype they are given. Reads each initial state once, and writes each destination once.
    Allocates [chunks, H, P, N] float32, and less for the other stages. Same inputs and cuts give the same
    bits in whatever company and, in a float32 pool, in however many calls.

    Synchronises nothing and depends on shapes alone, and so can be captured in a CUDA graph, with one
    condition: the first call for a chunk size, H, P, G, N and dtypes times megatron-core's configurations,
    which synchronises, and a call with other alignments, or one token, compiles. Before a capture call this
    once with the very shapes that are captured, as graph warm-ups do; the first such call best has many
    chunks, as it is the one that is timed. MAMBA_DETERMINISTIC=1, set before this file is imported, takes
    the smallest configurations and times nothing.

    Args: as `reference.ssd_chunk_scan`; float32 or narrower, and x, B and C with a last stride of 1.
        Padding chunks may follow the rows' own. A row's destination may be its own source, no other's.
        `seq_idx` is not read: `row_chunk_starts` says the same.
        input_precision: of the scan alone; the other products, and so the states, follow TRITON_F32_DEFAULT.
            Both may be "tf32x3", which stays within 1e-5 on tensor cores; "tf32" does not.

    Returns: y, [tokens, H, P] float32; unspecified for padding tokens.

    Raises:
        ValueError: x or ssm_states is float64, a tensor's last stride is not 1, or there are more chunks
            times groups, or rows, than a launch can have.
    """
    for name, tensor in (("x", x), ("ssm_states", ssm_states)):
        if tensor.dtype == torch.float64:
            raise ValueError(
                f"{name} is float64; accepted: float32 or narrower, as all is computed in float32"
            )
    chunks, groups, rows = cu_chunk_seqlens.shape[0] - 1, B.shape[1], sources.shape[0]
    if max(chunks * groups, rows) > _MOST_PROGRAMS:
        raise ValueError(
            f"the step has {chunks} chunks of {groups} groups and {rows} rows; accepted: at most "
            f"{_MOST_PROGRAMS} chunks times groups, and rows, in one step; lower max_tokens"
        )
    x, B, C = x.float(), B.float(), C.float()
    log_decays, chunk_dt = _chunk_cumsum_fwd(dt, A, chunk_size, cu_chunk_seqlens)
    states: Tensor = _chunk_state_fwd(B, x, chunk_dt, log_decays, cu_chunk_seqlens, states_in_fp32=True)
    CB = _bmm_chunk_fwd(C, B, chunk_size, cu_chunk_seqlens, output_dtype=torch.float32)
    state_passing(states, log_decays, ssm_states, sources, destinations, row_chunk_starts, chunk_destinations)
    return chunk_scan(x, chunk_dt, log_decays, C, CB, D, states, cu_chunk_seqlens, input_precision)
