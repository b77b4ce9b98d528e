"""The gated delta rule of a step, all stages, by pool slots; see `reference.gated_delta_rule_scan`.

    stage                                  function                          file or package
    normalised keys and queries            delta_operands                    delta_operands.py
    sums of decays                         chunk_local_cumsum                fla-core's
    the WY form of a chunk                 chunk_gated_delta_rule_fwd_intra  fla-core's, in 16-bit floats
                                           chunk_scaled_dot_kkt_fwd, solve_tril, recompute_w_u_fwd
                                                                             fla-core's, in float32
    between chunks                         delta_state_passing               delta_state_passing.py
    outputs                                chunk_fwd_o                       fla-core's

fla-core's stages take packed sequences and cut each into chunks from its start. Here each of our chunks is
passed as a sequence of its own, and so it is its own only chunk.

fla-core's faster stage for the WY form multiplies in TF32, whose errors are 1e-3. Float32 therefore takes the
three other stages. Their products, and those of the outputs, name no precision, and take Triton's default.
The variable TRITON_F32_DEFAULT replaces the default, as `ssd_scan.py` says, and importing this file sets it
to "ieee", too, unless it is set.
"""

# mypy: disable-error-code="import-untyped"

import os
import warnings
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from .delta_operands import delta_operands
from .delta_state_passing import delta_state_passing

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

CHUNK_SIZES = (16, 32, 64)
"""Chunk sizes that fla-core's stages take."""
MAX_KEY_DIM = 256
_NUM_WARPS_THAT_ADD = 2
_LOG2_E = 1.4426950408889634


def gated_delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    chunk_size: int,
    cu_chunk_seqlens: Tensor,
    seq_idx: Tensor,
    row_chunk_starts: Tensor,
    chunk_destinations: Tensor,
) -> Tensor:
    """`reference.gated_delta_rule_scan` in at most eight launches, without a copy of a state.

    Keeps states and sums in float32. Products multiply numbers of the dtype of v: float32 exactly or in three
    TF32 products, 16-bit floats on tensor cores, as fla-core's own `chunk_gated_delta_rule` does. Reads each
    initial state once, and writes each destination once. Allocates [chunks, Hv, Dk, Dv] of the dtype of v.
    The same inputs and cuts give the same bits whichever rows share the batch and, in a float32 pool, however
    the cuts are spread over calls. A padding chunk costs programs of fla-core's that store nothing.

    Launches depend on shapes alone, and nothing synchronises, so that a CUDA graph can capture a call, on one
    condition: a call with the shapes of the capture came before, as graph warm-ups make it. The first call
    for a chunk size, Hk, Hv, Dk, Dv and dtype measures which configurations of fla-core's stages are the
    fastest for its number of chunks, and synchronises.

    Args:
        q, k, v, g, beta, states, sources, destinations, chunk_size, cu_chunk_seqlens, row_chunk_starts,
            chunk_destinations: as for `reference.gated_delta_rule_scan`, float32 or narrower. q, k and v are
            views with any strides. States have any slot stride. Padding chunks may follow the rows' chunks.
            Destinations of a row and of its chunks may be its own source, no other row's.
        seq_idx: is not read, because `row_chunk_starts` holds the same facts.

    Returns: o, [tokens, Hv, Dv] in the dtype of v; unspecified for padding tokens.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: v or states is float64, fla-core's stages do not take the chunk size, or Dk is above 256.
    """
    for name, tensor in (("v", v), ("states", states)):
        if tensor.dtype == torch.float64:
            raise ValueError(
                f"{name} is float64; accepted: float32 or narrower, because the scan computes in float32"
            )
    key_dim = k.shape[2]
    check_sizes(chunk_size, key_dim)
    fla = stages()
    chunks = cu_chunk_seqlens.shape[0] - 1
    # Chunk i is chunk 0 of sequence i. A little-endian int64 i is the pair (i, 0) of int32.
    pairs = torch.arange(chunks, device=v.device).view(torch.int32).view(chunks, 2)
    cuts = {"cu_seqlens": cu_chunk_seqlens, "chunk_indices": pairs}

    queries, keys, values = (x[None] for x in delta_operands(q, k, v))
    strength = beta.contiguous()[None]
    log_decays = fla.chunk_local_cumsum(g.contiguous()[None], chunk_size=chunk_size, scale=_LOG2_E, **cuts)
    if v.dtype == torch.float32:
        coupling = fla.chunk_scaled_dot_kkt_fwd(
            keys, log_decays, strength, chunk_size=chunk_size, output_dtype=torch.float32, **cuts
        )
        inverse = fla.solve_tril(coupling, output_dtype=torch.float32, **cuts)
        read_keys, written = fla.recompute_w_u_fwd(keys, values, strength, inverse, log_decays, **cuts)
    else:
        read_keys, written, _ = fla.chunk_gated_delta_rule_fwd_intra(
            keys, values, log_decays, strength, chunk_size=chunk_size, **cuts
        )
    entering, new_values = delta_state_passing(
        keys[0], read_keys[0], written[0], log_decays[0], states, sources, destinations,
        chunk_size, cu_chunk_seqlens, row_chunk_starts, chunk_destinations,
    )  # fmt: skip
    o: Tensor = fla.chunk_fwd_o(
        queries, keys, new_values[None], entering[None], log_decays,
        scale=key_dim**-0.5, chunk_size=chunk_size, **cuts,
    )  # fmt: skip
    return o[0]


def solved_chunks(
    keys: Tensor, g: Tensor, strength: Tensor, chunk_size: int, cuts: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """The inverse of the WY form's triangular system of each chunk, and the sums of decays.

    The stages and the bits of `gated_delta_rule_scan`, in two launches for chunks of 64 tokens.

    Args:
        keys: [tokens, Hk, Dk] normalised, of 16 bits. g, strength: [tokens, Hv]. All contiguous.
        chunk_size: the tokens of every chunk.
        cuts: [chunks + 1] int32 where each chunk's tokens start.
        pairs: [chunks] int64, 0, 1, 2 and so on.

    Returns: [tokens, Hv, chunk_size] in the dtype of keys, unspecified above the diagonal, and
        [tokens, Hv] float32, sums of g's binary logarithms from the start of each chunk.
    """
    fla, (tokens, heads), chunks = stages(), g.shape, pairs.shape[0]
    at = {"cu_seqlens": cuts, "chunk_indices": pairs.view(torch.int32).view(chunks, 2)}
    log_decays: Tensor = fla.chunk_local_cumsum(g[None], chunk_size=chunk_size, scale=_LOG2_E, **at)
    if chunk_size == 64:
        inverse = torch.empty(1, tokens, heads, chunk_size, dtype=keys.dtype, device=keys.device)
        fla.kkt_solve_kernel[chunks, heads](
            k=keys, g=log_decays, beta=strength, A=inverse, T=tokens, H=keys.shape[1], HV=heads,
            K=keys.shape[2], BT=chunk_size, BC=16, **at,
        )  # fmt: skip
    else:
        coupling = fla.chunk_scaled_dot_kkt_fwd(
            k=keys[None], g=log_decays, beta=strength[None], chunk_size=chunk_size,
            output_dtype=torch.float32, **at,
        )  # fmt: skip
        inverse = fla.solve_tril(A=coupling, output_dtype=keys.dtype, **at)
    return inverse[0], log_decays[0]


def check_sizes(chunk_size: int, key_dim: int) -> None:
    """Raise a ValueError where fla-core's stages do not take these sizes."""
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size}; accepted on a GPU: {CHUNK_SIZES}")
    if key_dim > MAX_KEY_DIM:
        raise ValueError(f"keys have {key_dim} numbers; accepted on a GPU: at most {MAX_KEY_DIM}")


def fix_orders_of_addition() -> None:
    """Leave fla-core's tuner one order of addition, so that two processes get the same bits.

    The tuner measures, and may choose otherwise in another process. Where a stage adds numbers of several
    threads, the number of warps is an order of addition. Tiles of products are none: their sums go over K in
    order. A tuner that has one configuration left has one order, and keeps it.

    Changes fla-core's kernels for the whole process, and nothing undoes it; calls that were tuned before are
    tuned again. Another call changes nothing, unless somebody has given the tuner configurations since.

    Raises:
        ImportError: fla-core is not installed.
        RuntimeError: fla-core has several configurations, none with that number of warps.
    """
    for kernel in stages().kernels_that_add:
        tuner = kernel.fn
        if len(tuner.configs) == 1:
            continue
        fixed = [
            config
            for config in tuner.configs
            if config.num_warps == _NUM_WARPS_THAT_ADD
            and config.kwargs.get("DOT_PRECISION", "ieee") == "ieee"
        ]
        if not fixed:
            raise RuntimeError(
                f"fla-core's {tuner.base_fn.__name__} has no configuration of {_NUM_WARPS_THAT_ADD} warps; "
                "install fla-core 0.6"
            )
        if len(fixed) < len(tuner.configs):
            tuner.configs = fixed
            tuner.cache.clear()


@cache
def stages() -> SimpleNamespace:
    """fla-core's stages by name; the first call imports fla-core, which takes seconds.

    Raises:
        ImportError: fla-core is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fla warns where there is no GPU
            from fla.ops.common.chunk_o import chunk_fwd_o
            from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
            from fla.ops.gated_delta_rule.chunk_fwd import (
                chunk_gated_delta_rule_fwd_intra,
                chunk_gated_delta_rule_fwd_kkt_solve_kernel,
            )
            from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
            from fla.ops.utils import chunk_local_cumsum, solve_tril
            from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel
            from fla.ops.utils.solve_tril import (
                merge_16x16_to_32x32_inverse_kernel,
                merge_16x16_to_64x64_inverse_kernel,
                solve_tril_16x16_kernel,
            )
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the gated delta rule on a GPU needs fla-core ({error.name} is missing); install it with: "
            "pip install 'mambaslots[fla]'"
        ) from error
    return SimpleNamespace(
        chunk_fwd_o=chunk_fwd_o,
        chunk_gated_delta_rule_fwd_intra=chunk_gated_delta_rule_fwd_intra,
        chunk_local_cumsum=chunk_local_cumsum,
        chunk_scaled_dot_kkt_fwd=chunk_scaled_dot_kkt_fwd,
        kkt_solve_kernel=chunk_gated_delta_rule_fwd_kkt_solve_kernel,
        recompute_w_u_fwd=recompute_w_u_fwd,
        solve_tril=solve_tril,
        kernels_that_add=(
            chunk_local_cumsum_scalar_kernel,
            chunk_gated_delta_rule_fwd_kkt_solve_kernel,
            solve_tril_16x16_kernel,
            merge_16x16_to_32x32_inverse_kernel,
            merge_16x16_to_64x64_inverse_kernel,
        ),
    )
