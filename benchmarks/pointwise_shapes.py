"""The launches of gates and of norms with rotations at the shapes of Qwen3.5-4B, for `compile_kernels.py`.

Attention has 16 query heads and 4 key heads of 256 channels, of which 64 are rotated. The MLPs have 9,216
columns. A query's projection also gives the gates, so that heads lie 512 channels apart.
"""

from collections.abc import Callable

from mambaslots.inference.kernels import activations, qk_norm_rotary
from specialisation import Specialisation

QUERY_HEADS, KEY_HEADS, HEAD_DIM, ROTARY = 16, 4, 256, 64
MLP_WIDTH = 9216


def gates() -> list[Specialisation]:
    """silu(gate) * up of wide rows, and x * sigmoid(gate) of heads."""
    found = []
    for dtype in ("fp32", "bf16"):
        for name, width, silu in (("silu_mul", MLP_WIDTH, True), ("sigmoid_mul", HEAD_DIM, False)):
            columns = min(activations.BLOCK, width)
            pointers = dict.fromkeys(("out", "x", "gate"), f"*{dtype}")
            strides = ("x_row_stride", "gate_row_stride")
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=activations.gated_kernel,
                    signature=pointers | dict.fromkeys(("num_rows", *strides), "i32"),
                    constexprs={"WIDTH": width, "SILU": silu, "BLOCK_COLUMNS": columns}
                    | {"BLOCK_ROWS": activations.BLOCK // columns},
                    divisible_by_16=(*pointers, *strides),
                    num_warps=activations.NUM_WARPS,
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
            heads = qk_norm_rotary.BLOCK // HEAD_DIM
            found.append(
                Specialisation(
                    name=f"{name} {dtype}",
                    kernel=qk_norm_rotary.qk_norm_rotary_kernel,
                    signature=pointers
                    | dict.fromkeys(("eps", "offset"), "fp32")
                    | dict.fromkeys(strides, "i32"),
                    constexprs={"QUERY_HEADS": QUERY_HEADS, "KEY_HEADS": KEY_HEADS, "DIM": HEAD_DIM}
                    | {"ROTARY": ROTARY, "NORM": has_norm, "QUERY_BLOCKS": QUERY_HEADS // heads}
                    | {"BLOCK_HEADS": heads, "BLOCK_DIM": HEAD_DIM}
                    | ({} if has_norm else dict.fromkeys(weights)),
                    divisible_by_16=(*pointers, *strides),
                    num_warps=qk_norm_rotary.NUM_WARPS,
                    wide=("load", "store"),
                )
            )
    return found


POINTWISE_SHAPES: dict[str, Callable[[], list[Specialisation]]] = {
    "activations": gates,
    "qk_norm_rotary": norms_and_rotations,
}
"""As `SHAPES` in `kernel_shapes.py`."""


if __name__ == "__main__":
    print(__doc__)
