"""The launches of Mamba-2's scan and of its decode by replay, as `compile_kernels.py` compiles them.

Nemotron-H-8B has 128 heads of 64 channels, 8 groups, a state of 128, and chunks of 128 tokens.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from launches.specialisation import Specialisation
from mambaslots.inference.kernels import ssd_replay, ssd_stages

HEADS, HEAD_DIM, GROUPS, STATE_DIM = 128, 64, 8, 128
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Access = Literal["load", "store"]
BOTH: tuple[Access, ...] = ("load", "store")


def ssd_outputs() -> list[Specialisation]:
    """x and C are views of one tensor: their tokens and heads are strides apart."""
    shapes = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
    strides = ("x_token_stride", "x_head_stride", "C_token_stride", "C_group_stride", "decay_head_stride")
    found = []
    for (inputs, operands), chunk_size in product(shapes, (128, 256)):
        dimensions = {"head_dim": HEAD_DIM, "state_dim": STATE_DIM, "chunk_size": chunk_size}
        blocks, num_warps, num_stages = ssd_stages.scan_blocks(**dimensions, operands=TORCH[operands])
        pointers = dict.fromkeys(("x", "C", "y"), inputs) | {"entering_states": operands}
        pointers |= dict.fromkeys(("dt", "log_decays", "CB", "D"), "fp32")
        found.append(
            Specialisation(
                name=f"chunk_scan {inputs} by {operands} chunk {chunk_size}",
                kernel=ssd_stages.chunk_scan_kernel,
                signature={name: f"*{dtype}" for name, dtype in pointers.items()}
                | {"cu_chunk_seqlens": "*i32"}
                | dict.fromkeys(strides, "i64"),
                constexprs={"heads": HEADS, "groups": GROUPS, "D_stride": 1} | dimensions | blocks,
                divisible_by_16=(*pointers, *strides),
                num_warps=num_warps,
                num_stages=num_stages,
            )
        )
    return found


def ssd_state_makers() -> list[Specialisation]:
    """x and B are views of one tensor, as for `ssd_outputs`."""
    strides = ("x_token_stride", "x_head_stride", "B_token_stride", "B_group_stride")
    strides += ("slot_stride", "decay_head_stride")
    found = []
    for inputs, operands, pool, chunk_size in (
        ("bf16", "bf16", "fp32", 128),
        ("bf16", "bf16", "bf16", 128),
        ("fp16", "fp16", "fp32", 256),
        ("fp16", "fp32", "fp32", 128),
        ("fp32", "fp32", "fp32", 128),
    ):
        dimensions = {"head_dim": HEAD_DIM, "state_dim": STATE_DIM, "chunk_size": chunk_size}
        blocks, num_stages = ssd_stages.state_blocks(**dimensions, operands=TORCH[operands])
        pointers = dict.fromkeys(("x", "B"), f"*{inputs}")
        pointers |= {"entering": f"*{operands}", "ssm_states": f"*{pool}"}
        pointers |= dict.fromkeys(("dt", "log_decays"), "*fp32")
        indices = dict.fromkeys(("sources", "destinations", "chunk_destinations"), "*i64")
        indices |= dict.fromkeys(("cu_chunk_seqlens", "row_chunk_starts"), "*i32")
        found.append(
            Specialisation(
                name=f"ssd_states {inputs} by {operands}, pool {pool} chunk {chunk_size}",
                kernel=ssd_stages.ssd_states_kernel,
                signature=pointers | indices | dict.fromkeys(strides, "i64"),
                constexprs={"heads": HEADS, "heads_of_group": HEADS // GROUPS} | dimensions | blocks,
                # Rows and chunks start anywhere: the index pointers may be slices of the step's buffer.
                divisible_by_16=(*pointers, *strides),
                num_warps=ssd_stages.STATE_WARPS,
                num_stages=num_stages,
                wide=BOTH,
            )
        )
    return found


def ssd_sums() -> list[Specialisation]:
    """The sums of dt * A, contiguous time steps."""
    pointers = dict.fromkeys(("dt", "A", "chunk_dt", "log_decays"), "*fp32")
    strides = ("dt_token_stride", "out_head_stride")
    return [
        Specialisation(
            name="chunk_cumsum",
            kernel=ssd_stages.chunk_cumsum_kernel,
            signature=pointers | {"cu_chunk_seqlens": "*i32"} | dict.fromkeys(strides, "i64"),
            constexprs={"dt_head_stride": 1, "a_stride": 1, "HEADS": HEADS, "CHUNK_SIZE": 128}
            | {"BLOCK_H": ssd_stages.heads_of_a_warp(HEADS)},
            divisible_by_16=(*pointers, *strides),
            num_warps=ssd_stages.SUM_WARPS,
        )
    ]


def ssd_score_makers() -> list[Specialisation]:
    """C and B are views of one tensor."""
    strides = ("C_token_stride", "C_group_stride", "B_token_stride", "B_group_stride")
    found = []
    for inputs, operands in (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")):
        blocks, num_stages = ssd_stages.score_blocks(128, STATE_DIM, TORCH[operands])
        pointers = dict.fromkeys(("C", "B"), f"*{inputs}") | {"CB": "*fp32"}
        found.append(
            Specialisation(
                name=f"chunk_scores {inputs} by {operands}",
                kernel=ssd_stages.chunk_scores_kernel,
                signature=pointers | {"cu_chunk_seqlens": "*i32"} | dict.fromkeys(strides, "i64"),
                constexprs={"groups": GROUPS, "state_dim": STATE_DIM, "chunk_size": 128}
                | {"WIDE": operands == "fp32"}
                | blocks,
                divisible_by_16=(*pointers, *strides),
                num_warps=ssd_stages.SCORE_WARPS,
                num_stages=num_stages,
                wide=BOTH,
            )
        )
    return found


BLOCK_TOKENS = 9  # tokens whose inputs lie in a KV block of Nemotron-H-8B


def tail_keepers() -> list[Specialisation]:
    """The inputs that a prefill leaves: x and B of Mamba-2, k and v of a gated delta net."""
    indices = {"input_rows": "*i64", "input_blocks": "*i32", "tail_starts": "*i64", "query_start_loc": "*i32"}
    pointers = dict.fromkeys(("first", "second", "first_kept", "second_kept"), "*bf16")
    strides = [f"{name}_{axis}_stride" for name in ("first", "second") for axis in ("token", "head", "input")]
    sizes = {"keep_ssd_inputs, x and B": (HEADS, HEAD_DIM, GROUPS, STATE_DIM)}
    sizes["keep_delta_inputs, k and v"] = (16, 128, 32, 128)
    names = ("first_heads", "first_size", "second_heads", "second_size")
    return [
        Specialisation(
            name=name,
            kernel=ssd_replay.keep_tails_kernel,
            signature=pointers | indices | dict.fromkeys(strides, "i64"),
            constexprs=dict(zip(names, dimensions, strict=True))
            | {
                "block_tokens": BLOCK_TOKENS,
                "num_input_blocks": -(-128 // BLOCK_TOKENS),
                "BLOCK": ssd_replay.TAIL_BLOCK,
            },
            divisible_by_16=(*pointers, *strides),
            num_warps=ssd_replay.TAIL_WARPS,
            wide=BOTH,
        )
        for name, dimensions in sizes.items()
    ]


def ssd_keepers() -> list[Specialisation]:
    """The dt and its sums that a prefill leaves, of 128 tokens at most."""
    indices = {"input_rows": "*i64", "tail_starts": "*i64", "query_start_loc": "*i32"}
    dt_pointers = dict.fromkeys(("dt", "A", "dt_inputs"), "*fp32")
    dt_strides = ("dt_token_stride", "dt_input_stride")
    return [
        Specialisation(
            name="keep_ssd_inputs, dt",
            kernel=ssd_replay.keep_dt_kernel,
            signature=dt_pointers | indices | dict.fromkeys(dt_strides, "i64"),
            constexprs={"dt_head_stride": 1, "a_stride": 1, "HEADS": HEADS, "CHUNK_SIZE": 128}
            | {"BLOCK_H": ssd_stages.heads_of_a_warp(HEADS)},
            divisible_by_16=(*dt_pointers, *dt_strides),
            num_warps=ssd_stages.SUM_WARPS,
        )
    ]


def ssd_replays() -> list[Specialisation]:
    """Decodes of one token, and of four, where x, B and C are views of one tensor."""
    strides = tuple(f"{name}_{axis}_stride" for name in "xBC" for axis in ("row", "token"))
    strides += ("x_head_stride", "B_group_stride", "C_group_stride", "dt_row_stride", "dt_token_stride")
    strides += ("state_slot_stride", "x_input_stride", "B_input_stride", "dt_input_stride")
    indices = dict.fromkeys(("input_rows", "sources", "destinations"), "*i64") | {"input_blocks": "*i32"}
    indices |= dict.fromkeys(("starts", "lengths"), "*i32")
    found = []
    for inputs, operands, chunk_size, tokens, rows in (
        ("bf16", "bf16", 128, 1, 1),
        ("bf16", "bf16", 128, 1, 32),
        ("bf16", "bf16", 128, 4, 32),
        ("bf16", "bf16", 256, 1, 32),
        ("fp16", "fp32", 128, 1, 32),
    ):
        dimensions = {"head_dim": HEAD_DIM, "state_dim": STATE_DIM, "chunk_size": chunk_size}
        blocks, options = ssd_replay.block_sizes(tokens, **dimensions, operands=TORCH[operands])
        pointers = dict.fromkeys(("x", "B", "C", "x_inputs", "B_inputs", "y"), f"*{inputs}")
        pointers |= dict.fromkeys(("dt", "A", "D", "ssm_states", "dt_inputs"), "*fp32")
        found.append(
            Specialisation(
                name=f"ssd_replay {inputs} by {operands} chunk {chunk_size} rows {rows} T={tokens}",
                kernel=ssd_replay.ssd_replay_kernel,
                signature=pointers | indices | dict.fromkeys(strides, "i64"),
                constexprs={"dt_head_stride": 1, "A_stride": 1, "D_stride": 1}
                | {"tokens": tokens, "heads": HEADS, "groups": GROUPS, "WIDE": operands == "fp32"}
                | {"block_tokens": BLOCK_TOKENS}
                | {"BLOCK_H": ssd_replay.group_heads_per_program(rows, HEADS, HEADS // GROUPS)}
                | dimensions
                | blocks,
                divisible_by_16=(*pointers, *strides),
                wide=BOTH,
                **options,
            )
        )
    return found


SSD_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "ssd_stages": (ssd_sums, ssd_score_makers, ssd_outputs, ssd_state_makers),
    "ssd_replay": (ssd_keepers, ssd_replays, tail_keepers),
}
"""Each file of `mambaslots.inference.kernels` that the scan has -> its launches."""
