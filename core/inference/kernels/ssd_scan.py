"""The SSD scan of a step, all stages, by pool slots; the reference is `reference.ssd_chunk_scan`.

    stage                 function            file
    sums of dt * A        _chunk_cumsum_fwd   megatron-core's
    updates of chunks     _chunk_state_fwd    megatron-core's
    C B                   _bmm_chunk_fwd      megatron-core's
    between chunks        state_passing       state_passing.py
    outputs               chunk_scan          ssd_output.py

megatron-core's stages are the same from 0.18.0 to 0.19.2. Their products name no precision, and so take
Triton's default, TF32, whose errors are 1e-3. The variable TRITON_F32_DEFAULT replaces the default. Triton
reads the variable whenever it compiles a kernel, and its disk cache has a key for it; kernels that a process
has compiled stay. Importing this file sets the variable to "ieee" unless it is set. The setting holds for
every launch here, and for all products of float32 that this process compiles later.
"""

# mypy: disable-error-code="import-untyped"

import os
import warnings
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from .ssd_output import InputPrecision, chunk_scan
from .state_passing import state_passing

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

_MAX_PROGRAMS = 65535  # on the second and third axis of a grid


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

    Computes in float32. Widens x, B and C first, because megatron-core's stages multiply in the dtype of
    their inputs. Reads each initial state once, and writes each destination once. Allocates [chunks, H, P, N]
    float32, and less for the other stages. The same inputs and cuts give the same bits whichever rows share
    the batch and, in a float32 pool, however the cuts are spread over calls.

    Launches depend on shapes alone, and nothing synchronises, so that a CUDA graph can capture a call, on one
    condition: a call with exactly the shapes of the capture came before, as graph warm-ups make it. The first
    call for a chunk size, H, P, G, N and dtypes measures which configurations of megatron-core's stages are
    the fastest for its number of chunks, which should be large, and synchronises. A call with other
    alignments, or with one token, compiles. MAMBA_DETERMINISTIC=1, set before this file is imported, takes
    the smallest configurations and measures nothing.

    Args:
        x, dt, A, B, C, D, ssm_states, sources, destinations, chunk_size, cu_chunk_seqlens, row_chunk_starts,
            chunk_destinations: as for `reference.ssd_chunk_scan`, float32 or narrower. The last stride of x,
            B and C is 1. Padding chunks may follow the rows' chunks. A row's destination may be its own
            source, no other row's.
        seq_idx: is not read, because `row_chunk_starts` holds the same facts.
        input_precision: the precision of the last stage. The other products, and so the states, follow
            TRITON_F32_DEFAULT. With "tf32x3" for both, errors stay within 1e-5 on tensor cores; with "tf32"
            they do not.

    Returns: y, [tokens, H, P] float32; unspecified for padding tokens.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: x or ssm_states is float64, a tensor's last stride is not 1, or there are more chunks
            times groups, or rows, than a launch can have.
    """
    for name, tensor in (("x", x), ("ssm_states", ssm_states)):
        if tensor.dtype == torch.float64:
            raise ValueError(
                f"{name} is float64; accepted: float32 or narrower, because the scan computes in float32"
            )
    chunks, groups, rows = cu_chunk_seqlens.shape[0] - 1, B.shape[1], sources.shape[0]
    if max(chunks * groups, rows) > _MAX_PROGRAMS:
        raise ValueError(
            f"the step has {chunks} chunks of {groups} groups and {rows} rows; accepted: at most "
            f"{_MAX_PROGRAMS} chunks times groups, and rows, in one step; lower max_tokens"
        )
    x, B, C = x.float(), B.float(), C.float()
    megatron = stages()
    log_decays, chunk_dt = megatron.chunk_cumsum_fwd(dt, A, chunk_size, cu_chunk_seqlens)
    states: Tensor = megatron.chunk_state_fwd(
        B, x, chunk_dt, log_decays, cu_chunk_seqlens, states_in_fp32=True
    )
    CB = megatron.bmm_chunk_fwd(C, B, chunk_size, cu_chunk_seqlens, output_dtype=torch.float32)
    state_passing(states, log_decays, ssm_states, sources, destinations, row_chunk_starts, chunk_destinations)
    return chunk_scan(x, chunk_dt, log_decays, C, CB, D, states, cu_chunk_seqlens, input_precision)


@cache
def stages() -> SimpleNamespace:
    """megatron-core's stages by name; the first call imports megatron-core.

    Raises:
        ImportError: megatron-core is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core warns of what is not installed for training
            from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd
            from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd, _chunk_state_fwd
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the SSD scan on a GPU needs megatron-core ({error.name} is missing); install it with: "
            "pip install 'mambaslots[megatron]'"
        ) from error
    return SimpleNamespace(
        bmm_chunk_fwd=_bmm_chunk_fwd, chunk_cumsum_fwd=_chunk_cumsum_fwd, chunk_state_fwd=_chunk_state_fwd
    )
