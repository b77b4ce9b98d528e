"""The launches of norms, activations and gates at the shapes of Qwen3.5-4B, for `compile_kernels.py`.

The residual stream has 2,560 channels, and the MLPs have 9,216 columns. Attention has 16 query heads and 4
key heads of 256 channels, of which 64 are rotated. A query's projection also gives the gates, so that heads
lie 512 channels apart.
"""

from collections.abc import Callable

from launches.specialisation import Specialisation
from mambaslots.inference.kernels import few_rows as few_rows_kernels
from mambaslots.inference.kernels import gates as gate_kernels
from mambaslots.inference.kernels import norms as norm_kernels
from mambaslots.inference.kernels.step_rows import FEW_ROWS

QUERY_HEADS, KEY_HEADS, HEAD_DIM, ROTARY = 16, 4, 256, 64
HIDDEN, MLP_WIDTH = 2560, 9216


def gates() -> list[Specialisation]:
    """The squared ReLU and silu(gate) * up of wide rows, and x * sigmoid(gate) of heads."""
    found = []
    for dtype in ("fp32", "bf16"):
        for name, width, activation in (
            ("relu_squared", MLP_WIDTH, "relu squared"),
            ("silu_mul", MLP_WIDTH, "silu"),
            ("sigmoid_mul", HEAD_DIM, "sigmoid"),
        ):
            rows, columns = gate_kernels.tile(width)
            pointers = dict.fromkeys(("out", "x", "gate"), f"*{dtype}")
            strides = tuple(f"{side}_stride" for side in ("x_outer", "x_inner", "gate_outer", "gate_inner"))
            inner = QUERY_HEADS if activation == "sigmoid" else 1
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=gate_kernels.activation_kernel,
                    signature=pointers | dict.fromkeys(("num_rows", *strides), "i32"),
                    constexprs={"INNER": inner, "WIDTH": width, "ACTIVATION": activation}
                    | {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns},
                    divisible_by_16=(*pointers, *strides),
                    num_warps=gate_kernels.NUM_WARPS,
                    wide=("load", "store"),
                )
            )
    return found


def rms_norms() -> list[Specialisation]:
    """Of the residual stream, behind its sum and alone, and of heads."""
    found = []
    for dtype in ("fp32", "bf16"):
        for name, width, adds in (
            ("add_rms_norm", HIDDEN, True),
            ("rms_norm", HIDDEN, False),
            ("rms_norm of heads", HEAD_DIM, False),
        ):
            rows, columns, warps = norm_kernels.norm_tile(width)
            pointers = dict.fromkeys(("out", "x", "weight"), f"*{dtype}")
            sums = {"total": f"*{dtype}", "residual": f"*{dtype}"}
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=norm_kernels.rms_norm_kernel,
                    signature=pointers
                    | (sums if adds else {})
                    | {"eps": "fp32", "offset": "fp32", "num_rows": "i32"}
                    | {"x_row_stride": "i32", "residual_row_stride": "i32"},
                    constexprs={"WIDTH": width, "ADD": adds, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}
                    | ({} if adds else dict.fromkeys(sums)),
                    divisible_by_16=(
                        *pointers,
                        *(sums if adds else ()),
                        "x_row_stride",
                        "residual_row_stride",
                    ),
                    num_warps=warps,
                    wide=("load", "store"),
                )
            )
    return found


def norms_and_rotations() -> list[Specialisation]:
    """With norms, as in Qwen's models, and without, as in Bamba's."""
    found = []
    for dtype in ("fp32", "bf16"):
        for name, has_norm in (("qk_norm_rotary", True), ("rotary alone", False)):
            pointers = dict.fromkeys(("query_out", "key_out", "query", "key", "cos", "sin"), f"*{dtype}")
            weights = ("query_weight", "key_weight")
            sides = ("query_token", "query_head", "key_token", "key_head", "cos_token", "sin_token")
            strides = tuple(f"{side}_stride" for side in sides)
            if has_norm:
                pointers |= dict.fromkeys(weights, f"*{dtype}")
            heads = norm_kernels.QK_BLOCK // HEAD_DIM
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=norm_kernels.qk_norm_rotary_kernel,
                    signature=pointers
                    | dict.fromkeys(("eps", "offset"), "fp32")
                    | dict.fromkeys(strides, "i32"),
                    constexprs={"QUERY_HEADS": QUERY_HEADS, "KEY_HEADS": KEY_HEADS, "DIM": HEAD_DIM}
                    | {"ROTARY": ROTARY, "NORM": has_norm, "QUERY_BLOCKS": QUERY_HEADS // heads}
                    | {"BLOCK_HEADS": heads, "BLOCK_DIM": HEAD_DIM}
                    | ({} if has_norm else dict.fromkeys(weights)),
                    divisible_by_16=(*pointers, *strides),
                    num_warps=norm_kernels.QK_WARPS,
                    wide=("load", "store"),
                )
            )
    return found


def few_rows() -> list[Specialisation]:
    """Eight rows by the weights of an MLP, and of the head, whose logits are float32."""
    pointers, numbers = ("out", "rows", "weight"), ("num_outputs", "size", "row_stride", "weight_stride")
    return [
        Specialisation(
            name=f"few_rows to {dtype}",
            kernel=few_rows_kernels.few_rows_kernel,
            signature=dict.fromkeys(pointers, "*bf16")
            | {"out": f"*{dtype}"}
            | dict.fromkeys(("num_rows", *numbers), "i32"),
            constexprs={"OUTPUTS": few_rows_kernels.OUTPUTS, "ROWS": FEW_ROWS}
            | {"STEP": few_rows_kernels.STEPS[0], "STAGES": few_rows_kernels.STAGES},
            divisible_by_16=(*pointers, *numbers),
            num_warps=1,
            wide=("load",),
        )
        for dtype in ("bf16", "fp32")
    ]


POINTWISE_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "gates": (gates,),
    "norms": (rms_norms, norms_and_rotations),
    "few_rows": (few_rows,),
}
"""As `SHAPES` in `kernel_shapes.py`."""
