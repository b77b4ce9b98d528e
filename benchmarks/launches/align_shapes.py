"""The launches of the align kernels that `compile_kernels.py` compiles: Nemotron-H-8B with four drafts."""

from typing import Any

from launches.specialisation import Specialisation
from mambaslots.vllm.align_kernels import (
    COPY_BYTES,
    GROUP,
    LAYOUT_NUMBERS,
    NUM_WARPS,
    postprocess_mamba_fused_kernel,
    precopy_mamba_align_fused_kernel,
)

WINDOW = 16
"""Bytes of a window of 7 bfloat16 inputs, rounded up to a power of two."""
LAYOUT = {"block_table_ptrs_ptr": "*i64", "state_records_ptr": "*i64", "num_reqs": "i32"} | dict(
    zip(LAYOUT_NUMBERS, ("i64", "i64", "i32", "i32"), strict=True)
)


def hopper_specialisations() -> list[Specialisation]:
    """Both conv layouts."""
    return [launch(dim_first) for dim_first in (True, False) for launch in (precopy, postprocess)]


def precopy(dim_first: bool) -> Specialisation:
    columns = ("mamba_state_idx_ptr", "src_col_ptr", "token_bias_ptr")
    return Specialisation(
        f"precopy_mamba_align [{order(dim_first)}]",
        precopy_mamba_align_fused_kernel,
        LAYOUT | dict.fromkeys(columns, "*i32"),
        constants(dim_first),
        num_warps=NUM_WARPS,
        num_stages=1,
        wide=("load", "store"),
    )


def postprocess(dim_first: bool) -> Specialisation:
    counts = (
        "num_accepted_tokens_ptr", "mamba_state_idx_ptr", "num_scheduled_tokens_ptr",
        "num_computed_tokens_ptr", "num_draft_tokens_ptr", "num_accepted_tokens_out_ptr",
    )  # fmt: skip
    return Specialisation(
        f"postprocess_mamba [{order(dim_first)}]",
        postprocess_mamba_fused_kernel,
        LAYOUT | {"block_size": "i32"} | dict.fromkeys(counts, "*i32"),
        constants(dim_first),
        num_warps=NUM_WARPS,
        num_stages=1,
        wide=("load", "store"),
    )


def constants(dim_first: bool) -> dict[str, Any]:
    return {
        "COPY_BLOCK_SIZE": COPY_BYTES, "WINDOW": WINDOW, "GROUP": GROUP, "CONV_STATE_DIM_FIRST": dim_first,
    }  # fmt: skip


def order(dim_first: bool) -> str:
    return "dim, window" if dim_first else "window, dim"
