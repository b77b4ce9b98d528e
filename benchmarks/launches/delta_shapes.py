"""The launches of the gated delta rule, kernel by kernel, as `compile_kernels.py` compiles them.

Qwen3.5-4B and Qwen3-Next-80B have 16 key heads and 32 value heads of 128 numbers, larger models of their kind
16 and 48; heads of 256 numbers are the largest. Chunks have 64 tokens. Inputs are bfloat16, or float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from launches.specialisation import Specialisation
from mambaslots.inference.kernels import delta, delta_replay, delta_solve

KEY_HEADS, CHUNK = 16, 64
GATES = ("g", "beta")
HEADS = ((32, 128), (48, 128), (32, 256))
"""Value heads, and numbers of a head's keys and values."""
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


def operands() -> list[Specialisation]:
    """q, k and v are views of one tensor."""
    found = []
    for dtype in TORCH:
        for heads, dim in HEADS:
            pointers = ("q", "k", "v", "queries", "keys", "values")
            strides = [f"{x}_{axis}_stride" for x in "qkv" for axis in ("token", "head")]
            found.append(
                Specialisation(
                    name=f"delta_operands {dtype} {heads} x {dim}",
                    kernel=delta.delta_operands_kernel,
                    signature=dict.fromkeys(pointers, f"*{dtype}")
                    | dict.fromkeys(["tokens", *strides], "i32"),
                    constexprs={f"{x}_dim_stride": 1 for x in "qkv"}
                    | {"KEY_HEADS": KEY_HEADS, "VALUE_HEADS": heads, "KEY_DIM": dim, "VALUE_DIM": dim}
                    | {"BLOCK_K": dim, "BLOCK_V": dim, "BLOCK_T": delta.OPERAND_TOKENS},
                    divisible_by_16=(*pointers, *strides),
                    num_warps=delta.OPERAND_WARPS,
                )
            )
    return found


def state_passings() -> list[Specialisation]:
    found = []
    for dtype, pool in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")):
        for heads, dim in HEADS:
            blocks, num_stages = delta.passing_blocks(dim, dim, TORCH[dtype])
            tensors = ("keys", "read_keys", "written", "entering", "new_values")
            pointers = dict.fromkeys(tensors, f"*{dtype}") | {"log_decays": "*fp32", "states": f"*{pool}"}
            indices = dict.fromkeys(("sources", "destinations", "chunk_destinations"), "*i64")
            indices |= dict.fromkeys(("cu_chunk_seqlens", "row_chunk_starts"), "*i32")
            found.append(
                Specialisation(
                    name=f"delta_state_passing {dtype}, pool {pool} {heads} x {dim}",
                    kernel=delta.delta_state_passing_kernel,
                    signature=pointers | indices | {"slot_stride": "i64"},
                    constexprs={"heads": heads, "heads_of_key": heads // KEY_HEADS, "chunk_size": CHUNK}
                    | {"key_dim": dim, "value_dim": dim}
                    | blocks,
                    # Rows and chunks start anywhere: the index pointers may be slices of the step's buffer.
                    divisible_by_16=(*pointers, "slot_stride"),
                    num_warps=delta.PASSING_WARPS,
                    num_stages=num_stages,
                    wide=("load", "store"),
                )
            )
    return found


def updates() -> list[Specialisation]:
    """Decode of one token and of four, for pools of each dtype."""
    found = []
    for pool in TORCH:
        for tokens in (1, 4):
            for heads, dim in HEADS:
                found.append(update(pool, tokens, heads, dim))
    return found


def update(pool: str, tokens: int, heads: int, dim: int) -> Specialisation:
    block_k, block_v = delta.update_blocks(dim, dim)
    even = [f"{x}_{axis}_stride" for x in "qkv" for axis in ("row", "token", "head")]
    even += [f"{x}_{axis}_stride" for x in ("g", "beta") for axis in ("row", "token")]
    even += ["slot_stride", "head_stride", "key_stride"]
    ones = [*(f"{x}_dim_stride" for x in "qkv"), "g_head_stride", "beta_head_stride", "value_stride"]
    ones += ["destination_token_stride"]
    odd = ["destination_row_stride"]
    if tokens == 1:
        ones, odd = ones + odd, []
    pointers: dict[str, Any] = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    pointers |= {"g": "*fp32", "beta": "*fp32", "states": f"*{pool}"}
    pointers |= dict.fromkeys(("sources", "destinations"), "*i64")
    return Specialisation(
        name=f"gated_delta_rule_update {pool} T={tokens} {heads} x {dim}",
        kernel=delta.delta_update_kernel,
        signature=pointers | dict.fromkeys([*even, *odd], "i32"),
        constexprs=dict.fromkeys(ones, 1)
        | {"TOKENS": tokens, "HEADS": heads, "HEADS_OF_KEY": heads // KEY_HEADS}
        | {"KEY_DIM": dim, "VALUE_DIM": dim, "BLOCK_K": block_k, "BLOCK_V": block_v},
        divisible_by_16=(*pointers, *even),
        num_warps=delta.UPDATE_WARPS,
        num_stages=1,
        wide=("load", "store"),
    )


BLOCK_TOKENS = 16  # tokens whose inputs lie in a KV block of Qwen3.5-4B
INPUT_STRIDES = "k_input_stride", "v_input_stride"
INDICES = {"input_rows": "*i64", "input_blocks": "*i32"}
TAPS = 4
RAW = "weight", "A_log", "dt_bias", "conv_states", "conv_inputs", "conv_destinations"
RAW_STRIDES = "conv_slot_stride", "ring_stride"


def kept_rows() -> list[Specialisation]:
    """What decodes of one token and of four make of raw tokens and keep, and prefills' tails."""
    found = []
    for dtype in TORCH:
        for heads, dim in HEADS:
            sizes = {"KEY_HEADS": KEY_HEADS, "VALUE_HEADS": heads, "KEY_DIM": dim, "VALUE_DIM": dim}
            for tokens, tails in ((1, False), (4, False), (CHUNK, True)):
                of_dtype = [*"qkv", "queries", "k_inputs", "v_inputs"]
                of_float32 = [f"{x}_inputs" for x in GATES]
                wide, strides = [*INPUT_STRIDES, *(f"{x}_row_stride" for x in GATES)], list[str]()
                constants = dict.fromkeys((f"{x}_dim_stride" for x in "kv"), 1)
                constants |= dict.fromkeys((f"{x}_inner_stride" for x in GATES), 1)
                indices = INDICES | {"starts": "*i64" if tails else "*i32", "ends": "*i32"}
                if tails:
                    of_float32 += GATES
                    constants |= dict.fromkeys((*RAW, *RAW_STRIDES), None)
                    constants |= {"KERNEL": 0, "WINDOW": 0, "RING": 0}
                else:
                    of_dtype += [*GATES, "weight", "dt_bias", "conv_states", "conv_inputs"]
                    of_float32 += ["A_log"]
                    indices |= {"conv_destinations": "*i64"}
                    wide += RAW_STRIDES
                    constants |= {"KERNEL": TAPS, "WINDOW": TAPS - 1, "RING": TAPS - 1 + tokens}
                if tails and dtype != "fp32":
                    of_dtype += ["new_v", "new_v_inputs"]
                    wide += ["new_v_input_stride"]
                else:
                    constants |= {"new_v": None, "new_v_inputs": None, "new_v_input_stride": 0}
                pointers = dict.fromkeys(of_dtype, f"*{dtype}") | dict.fromkeys(of_float32, "*fp32") | indices
                strides += [f"{x}_{axis}_stride" for x in "kv" for axis in ("token", "head")]
                strides += [f"{x}_{axis}_stride" for x in GATES for axis in ("token", "outer")]
                found.append(
                    Specialisation(
                        name=f"keep_rows {dtype} T={tokens} {heads} x {dim}",
                        kernel=delta_replay.keep_rows_kernel,
                        signature=pointers | dict.fromkeys(strides, "i32") | dict.fromkeys(wide, "i64"),
                        constexprs=constants
                        | sizes
                        | {"CHUNK": CHUNK, "BLOCK_TOKENS": BLOCK_TOKENS, "TOKENS": tokens, "TAILS": tails}
                        | {"INNER": heads, "DOUBLED": False, "bias": None}
                        | delta_replay.keep_blocks(tokens, heads, dim, dim),
                        divisible_by_16=(*pointers, *strides, *wide),
                        num_warps=delta.OPERAND_WARPS,
                        wide=("load", "store"),
                    )
                )
    return found


def solved_rows() -> list[Specialisation]:
    """The new rows of the inverse: in decodes of few rows and of many, and in prefills' tails."""
    found = []
    for tails, rows in ((False, 1), (False, 128), (True, 8)):
        for heads, dim in HEADS:
            floats = "g_inputs", "beta_inputs", "inverses", "solved_decays"
            pointers = dict.fromkeys(("k_inputs", "solved"), "*bf16") | dict.fromkeys(floats, "*fp32")
            pointers |= {} if tails else {"queries": "*bf16"}
            pointers |= INDICES | {"starts": "*i64" if tails else "*i32", "ends": "*i32"}
            shape = delta_solve.solve_shape(rows * heads, dim, CHUNK)
            warps = shape.pop("num_warps")
            strides = ["k_input_stride", *(f"{x}_row_stride" for x in (*GATES, "inverse"))]
            found.append(
                Specialisation(
                    name=f"solve_rows {'tails' if tails else f'{rows} decodes'} {heads} x {dim}",
                    kernel=delta_solve.solve_rows_kernel,
                    signature=pointers | dict.fromkeys(strides, "i64"),
                    constexprs={"heads": heads, "heads_of_key": heads // KEY_HEADS, "key_dim": dim}
                    | {"tokens": CHUNK if tails else 1, "chunk_size": CHUNK, "TAILS": tails, "BLOCK_K": dim}
                    | {"block_tokens": BLOCK_TOKENS}
                    | ({"queries": None} if tails else {})
                    | shape,
                    divisible_by_16=(*pointers, *strides),
                    num_warps=warps,
                    num_stages=1,
                )
            )
    return found


def replay_outputs() -> list[Specialisation]:
    """The last stage of replays of one token and of four, for pools of each dtype."""
    found = []
    for pool in TORCH:
        for tokens in (1, 4):
            for heads, dim in HEADS:
                narrow = "queries", "solved", "v_inputs", "new_v_inputs", "out"
                pointers = dict.fromkeys(narrow, "*bf16")
                pointers |= dict.fromkeys(("solved_decays", "beta_inputs"), "*fp32")
                pointers |= {"states": f"*{pool}", "sources": "*i64"} | INDICES
                pointers |= dict.fromkeys(("starts", "lengths"), "*i32")
                strides = ["v_input_stride", "beta_row_stride", "new_v_input_stride", "slot_stride"]
                found.append(
                    Specialisation(
                        name=f"delta_outputs, pool {pool} T={tokens} {heads} x {dim}",
                        kernel=delta_replay.outputs_kernel,
                        signature=pointers | dict.fromkeys(strides, "i64") | {"scale": "fp32"},
                        constexprs={"tokens": tokens, "heads": heads, "heads_of_key": heads // KEY_HEADS}
                        | {
                            "key_dim": dim,
                            "value_dim": dim,
                            "chunk_size": CHUNK,
                            "block_tokens": BLOCK_TOKENS,
                        }
                        | delta_replay.output_blocks(tokens, dim, dim, TORCH[pool]),
                        divisible_by_16=(*pointers, *strides),
                        num_warps=delta_replay.OUTPUT_WARPS,
                        num_stages=1,
                        maxnreg=delta_replay.OUTPUT_REGISTERS,
                        wide=("load",),
                    )
                )
    return found


def completions() -> list[Specialisation]:
    """The states after chunks that decodes complete, for pools of each dtype."""
    found = []
    for pool in TORCH:
        for heads, dim in HEADS:
            pointers = dict.fromkeys(("k_inputs", "v_inputs"), "*bf16")
            pointers |= dict.fromkeys(("g_inputs", "beta_inputs", "inverses"), "*fp32")
            pointers |= {"states": f"*{pool}"}
            pointers |= INDICES | dict.fromkeys(("sources", "destinations"), "*i64")
            strides = [*INPUT_STRIDES, *(f"{x}_row_stride" for x in (*GATES, "inverse")), "slot_stride"]
            strides += [*(f"{x}_layer_stride" for x in ("k", "v", *GATES, "inverse")), "layer_stride"]
            found.append(
                Specialisation(
                    name=f"complete_chunks, pool {pool} {heads} x {dim}",
                    kernel=delta_replay.complete_chunks_kernel,
                    signature=pointers | dict.fromkeys(strides, "i64") | {"rows": "i32", "groups": "i32"},
                    constexprs={"heads": heads, "heads_of_key": heads // KEY_HEADS}
                    | {"key_dim": dim, "value_dim": dim, "chunk_size": CHUNK, "block_tokens": BLOCK_TOKENS}
                    | delta_replay.completion_blocks(dim, dim)
                    | {"ROWS": delta_replay.COMPLETION_ROWS},
                    divisible_by_16=(*pointers, *strides),
                    num_warps=delta_replay.COMPLETION_WARPS,
                    num_stages=delta_replay.COMPLETION_STAGES,
                    wide=("load", "store"),
                )
            )
    return found


DELTA_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "delta": (operands, state_passings, updates),
    "delta_replay": (kept_rows, replay_outputs, completions),
    "delta_solve": (solved_rows,),
}
"""Each file of `mambaslots.inference.kernels` that has kernels of the rule -> its launches."""
