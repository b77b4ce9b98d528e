"""The SSD scan of a step, all stages, by pool slots; the reference is `reference.ssd_chunk_scan`.

    stage             for inputs of 16 bits             for inputs of float32
    sums of dt * A    chunk_cumsum    ssd_decays.py     _chunk_cumsum_fwd    megatron-core's
    C B               chunk_scores    ssd_scores.py     _bmm_chunk_fwd       megatron-core's
    states            ssd_states      ssd_states.py     _chunk_state_fwd     megatron-core's
                                                        state_passing        state_passing.py
    outputs           chunk_scan      ssd_output.py     chunk_scan           ssd_output.py

No stage for 16 bits chooses its tiles by timing them, and all add in one order. A row's outputs, and the
states at its chunks' ends, depend on the row alone. `ssd_replay` repeats these sums for single tokens.

Products multiply numbers of the model's dtype and add in float32, as mamba_ssm and megatron-core do. The
environment variable MAMBASLOTS_SSD_OPERANDS=float32 widens the numbers first; "model" is the default. Sums of
dt * A, decays, states and the recurrence between chunks are float32 either way.

megatron-core's stages are the same from 0.18.0 to 0.19.2. Their products of float32 name no precision, and so
take Triton's default, TF32, whose errors are 1e-3. The variable TRITON_F32_DEFAULT replaces the default.
Triton reads the variable whenever it compiles a kernel, and its disk cache has a key for it; kernels that a
process has compiled stay. Importing this file sets the variable to "ieee" unless it is set. The setting holds
for every launch here, and for all products of float32 that this process compiles later.
"""

# mypy: disable-error-code="import-untyped"

import os
import warnings
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from .ssd_decays import chunk_cumsum
from .ssd_output import InputPrecision, chunk_scan
from .ssd_scores import chunk_scores
from .ssd_states import ssd_states
from .state_passing import state_passing

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

OPERANDS_VARIABLE = "MAMBASLOTS_SSD_OPERANDS"
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
    *,
    out: Tensor | None = None,
    input_precision: InputPrecision = "ieee",
) -> Tensor:
    """`reference.ssd_chunk_scan` in four or five launches, without a copy of a state.

    Multiplies numbers of the dtype of x, or of float32 where MAMBASLOTS_SSD_OPERANDS says so; everything else
    is float32. Reads each initial state once, and writes each destination once. Allocates [chunks, H, P, N]
    of the operands' dtype, and less for the other stages. The same inputs and cuts give the same bits
    whichever rows share the batch and, in a float32 pool, however the cuts are spread over calls.

    Launches depend on shapes alone, and nothing synchronises, so that a CUDA graph can capture a call, on one
    condition: a call with exactly the shapes of the capture came before, as graph warm-ups make it. A call
    with other alignments, or with one token, compiles. The first call with float32 for a chunk size, H, P, G
    and N measures which configurations of megatron-core's stages are the fastest for its number of chunks,
    which should be large, and synchronises. MAMBA_DETERMINISTIC=1, set before this file is imported, takes
    the smallest configurations and measures nothing.

    Args:
        x, dt, A, B, C, D, ssm_states, sources, destinations, chunk_size, cu_chunk_seqlens, row_chunk_starts,
            chunk_destinations: as for `reference.ssd_chunk_scan`, float32 or narrower. The last stride of x,
            B and C is 1. Padding chunks may follow the rows' chunks. Destinations of a row and of its chunks
            may be its own source, no other row's.
        seq_idx: is not read, because `row_chunk_starts` holds the same facts.
        out: where y goes, contiguous, of the dtype of x; None allocates it.
        input_precision: the precision of the last stage where it multiplies float32. For inputs of float32
            the other products, and so the states, follow TRITON_F32_DEFAULT; for inputs of 16 bits they are
            "ieee". With "tf32x3" for both, errors stay within
            1e-5 on tensor cores; with "tf32" they do not.

    Returns: y, [tokens, H, P] in the dtype of x; unspecified for padding tokens.

    Raises:
        ImportError: x is float32, and megatron-core is not installed.
        ValueError: x or ssm_states is float64, a tensor's last stride is not 1, there are more chunks times
            groups, or rows, than a launch can have, or MAMBASLOTS_SSD_OPERANDS has another value.
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
    operands = operand_dtype(x.dtype)
    slots = ssm_states, sources, destinations
    if x.dtype == torch.float32:
        megatron = stages()
        log_decays, chunk_dt = megatron.chunk_cumsum_fwd(dt, A, chunk_size, cu_chunk_seqlens)
        entering: Tensor = megatron.chunk_state_fwd(
            B, x, chunk_dt, log_decays, cu_chunk_seqlens, states_in_fp32=True
        )
        state_passing(entering, log_decays, *slots, row_chunk_starts, chunk_destinations)
        CB = megatron.bmm_chunk_fwd(C, B, chunk_size, cu_chunk_seqlens, output_dtype=torch.float32)
    else:
        chunk_dt, log_decays = chunk_cumsum(dt, A, chunk_size, cu_chunk_seqlens)
        entering = ssd_states(
            x, B, chunk_dt, log_decays, *slots, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
            operands,
        )  # fmt: skip
        CB = chunk_scores(C, B, chunk_size, cu_chunk_seqlens, operands)
    return chunk_scan(x, chunk_dt, log_decays, C, CB, D, entering, cu_chunk_seqlens, input_precision, out)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what the scan multiplies for inputs of `dtype`.

    Raises:
        ValueError: MAMBASLOTS_SSD_OPERANDS has a value that is not accepted.
    """
    operands = os.environ.get(OPERANDS_VARIABLE, "float32" if dtype == torch.float16 else "model")
    if operands not in ("model", "float32"):
        raise ValueError(f"{OPERANDS_VARIABLE} is {operands!r}; accepted: 'model', 'float32'")
    return dtype if operands == "model" else torch.float32


def describe(dtype: torch.dtype) -> str:
    """Which scan a GPU runs for inputs of `dtype`, and in which dtype it multiplies."""
    operands = str(operand_dtype(dtype)).removeprefix("torch.")
    whose = "mambaslots, and stages of megatron-core," if dtype == torch.float32 else "mambaslots"
    return f"SSD scan: {whose} with products of {operands}, sums in float32"


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
            f"the SSD scan of float32 on a GPU needs megatron-core ({error.name} is missing); install it "
            "with: pip install 'mambaslots[megatron]'"
        ) from error
    return SimpleNamespace(
        bmm_chunk_fwd=_bmm_chunk_fwd, chunk_cumsum_fwd=_chunk_cumsum_fwd, chunk_state_fwd=_chunk_state_fwd
    )
