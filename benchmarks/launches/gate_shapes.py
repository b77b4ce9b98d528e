"""The launches of gates and gated norms of mixers, kernel by kernel, as `compile_kernels.py` compiles them.

Time steps and the norm of groups are those of Nemotron-H-8B, gates and the norm of heads those of Qwen3.5-4B.
"""

from collections.abc import Callable

from launches.specialisation import Specialisation
from mambaslots.inference.kernels import gates as gate_kernels
from mambaslots.inference.kernels import norms as norm_kernels

HEADS, GROUPS, GROUP_CHANNELS = 128, 8, 1024
DELTA_HEADS, DELTA_DIM = 32, 128


def steps() -> list[Specialisation]:
    """dt is a slice of a projection."""
    pointers = {"dt": "*bf16", "dt_bias": "*fp32", "A_log": "*fp32", "steps": "*fp32", "A": "*fp32"}
    numbers = {"tokens": "i32", "shortest": "fp32", "longest": "fp32", "dt_token_stride": "i32"}
    return [
        Specialisation(
            name="time_steps bf16",
            kernel=gate_kernels.time_steps_kernel,
            signature=pointers | numbers,
            constexprs=dict.fromkeys(("dt_head_stride", "bias_stride", "a_stride"), 1)
            | {"HEADS": HEADS, "BLOCK_T": 8, "BLOCK_H": HEADS},
            divisible_by_16=(*pointers, "dt_token_stride"),
            num_warps=gate_kernels.NUM_WARPS,
        )
    ]


def delta() -> list[Specialisation]:
    pointers = {"a": "*bf16", "b": "*bf16", "A_log": "*fp32", "dt_bias": "*bf16", "g": "*fp32"}
    pointers |= {"beta": "*fp32"}
    strides = [f"{x}_{axis}_stride" for x in "ab" for axis in ("token", "outer")]
    return [
        Specialisation(
            name="delta_gates bf16",
            kernel=gate_kernels.delta_gates_kernel,
            signature=pointers | dict.fromkeys(["tokens", *strides], "i32"),
            constexprs=dict.fromkeys(("a_inner_stride", "b_inner_stride", "rate_stride", "bias_stride"), 1)
            | {"HEADS": DELTA_HEADS, "INNER": DELTA_HEADS, "DOUBLED": False}
            | {"BLOCK_T": 1024 // DELTA_HEADS, "BLOCK_H": DELTA_HEADS},
            divisible_by_16=(*pointers, *strides),
            num_warps=gate_kernels.NUM_WARPS,
        )
    ]


def norms() -> list[Specialisation]:
    found = []
    for name, heads, dim, inner, weights, gate_first in (
        ("gate_then_rms_norm", GROUPS, GROUP_CHANNELS, 1, GROUPS * GROUP_CHANNELS, True),
        ("rms_norm_then_gate", DELTA_HEADS, DELTA_DIM, DELTA_HEADS, DELTA_DIM, False),
    ):
        for dtype in ("bf16", "fp32"):
            block_h, block_d, num_warps = norm_kernels.gated_blocks(heads, dim)
            pointers = dict.fromkeys(("x", "gate", "weight", "out"), f"*{dtype}")
            strides = [f"{x}_{axis}_stride" for x in ("x", "gate") for axis in ("token", "outer", "inner")]
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=norm_kernels.gated_norm_kernel,
                    signature=pointers | {"eps": "fp32"} | dict.fromkeys(strides, "i32"),
                    constexprs={"HEADS": heads, "INNER": inner, "DIM": dim, "WEIGHTS": weights}
                    | {"GATE_FIRST": gate_first, "BLOCK_H": block_h, "BLOCK_D": block_d},
                    divisible_by_16=(*pointers, *strides),
                    num_warps=num_warps,
                    wide=("load", "store"),
                )
            )
    return found


GATE_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "gates": (steps, delta),
    "norms": (norms,),
}
"""Each file of `mambaslots.inference.kernels` that has kernels of gates -> its launches."""
