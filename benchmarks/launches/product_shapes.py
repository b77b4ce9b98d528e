"""The launches of products that add over K in order: projections and the head of an 8B model, a router."""

from collections.abc import Callable

from launches.specialisation import Specialisation
from mambaslots.inference.kernels import products

STRIDES = ("a_row", "b_column")


def sequential_products() -> list[Specialisation]:
    """x @ weight.T with contiguous rows: the strides along K are 1."""
    found = []
    for operands, out, bias in (
        ("bf16", "bf16", False),
        ("bf16", "bf16", True),
        ("bf16", "fp32", False),
        ("fp16", "fp16", False),
        ("fp32", "fp32", False),
    ):
        pointers = {"a": f"*{operands}", "b": f"*{operands}", "out": f"*{out}"}
        constants = {"a_column": 1, "b_row": 1, "bias_stride": 1, "HAS_BIAS": bias, "WIDEN": False}
        if bias:
            pointers["bias"] = f"*{operands}"
        else:
            constants["bias"] = None
        sizes = {"rows": "i32", "columns": "i32", "length": "i32"}
        blocks = products.block_sizes(operands == "fp32")
        found.append(
            Specialisation(
                name=f"sequential_product {operands} to {out}{', bias' if bias else ''}",
                kernel=products.sequential_product_kernel,
                signature=pointers | sizes | dict.fromkeys(STRIDES, "i32"),
                constexprs=constants | blocks,
                divisible_by_16=(*pointers, *sizes, *STRIDES),
                num_warps=products.NUM_WARPS,
                num_stages=products.NUM_STAGES,
            )
        )
    return found


PRODUCT_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "products": (sequential_products,)
}
"""The file that has these kernels -> its launches."""
