"""The launches that encode and decode cached states, as `compile_kernels.py` compiles them.

Matrices of Nemotron-H-8B (128 heads of 64 x 128) and of Qwen3.5 (32 value heads of 128 x 128), float32 or
bfloat16; windows of 10,240 and 8,192 channels of 3, float32 or bfloat16.
"""

from collections.abc import Callable

from launches.specialisation import Specialisation
from mambaslots.inference.kernels import state_codec as codec

MATRICES = {"128 x 64 x 128": ((128, 64, 128), 1), "32 x 128 x 128": ((32, 128, 128), 2)}
"""Name -> the shape of a matrix, and the axis whose entries share a scale."""
INDICES = {"sources": "*i64", "destinations": "*i64"}


def scaled() -> list[Specialisation]:
    """int8 with scales, both ways."""
    found = []
    pointers = ("states", "numbers", "scales")
    strides = [f"{name}_{axis}" for name in ("state", "number", "scale") for axis in ("layer", "slot")]
    for kernel in (codec.quantise_kernel, codec.dequantise_kernel):
        for dtype in ("fp32", "bf16"):
            for name, (shape, axis) in MATRICES.items():
                tiles = codec.Tiles.of(shape, axis)
                found.append(
                    Specialisation(
                        f"{kernel.__name__.removesuffix('_kernel')} {dtype} {name}",
                        kernel,
                        {"states": f"*{dtype}", "numbers": "*i8", "scales": "*bf16"}
                        | INDICES
                        | dict.fromkeys(strides, "i32"),
                        {"TILES": tiles.num_tiles, "OUTER": tiles.outer, "GROUP": tiles.group}
                        | {"INNER": tiles.inner, "BLOCK_X": tiles.block_x, "BLOCK_Y": tiles.block_y},
                        divisible_by_16=(*pointers, *strides),
                        num_warps=codec.NUM_WARPS,
                        wide=("load",) if kernel is codec.quantise_kernel else ("store",),
                    )
                )
    return found


def casts() -> list[Specialisation]:
    """Windows and matrices in bfloat16, both ways."""
    strides = ("read_layer", "read_slot", "written_layer", "written_slot")
    return [
        Specialisation(
            f"cast {read} {written} {channels}",
            codec.cast_kernel,
            {"read": f"*{read}", "written": f"*{written}", "size": "i32"}
            | INDICES
            | dict.fromkeys(strides, "i32"),
            {"TILES": -(-channels * 3 // codec.CAST_ELEMENTS), "BLOCK": codec.CAST_ELEMENTS},
            divisible_by_16=("read", "written", "size", *strides),
            num_warps=codec.NUM_WARPS,
            wide=("load", "store") if read == written else (),
        )
        for channels in (10240, 8192)
        for read, written in (("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"))
    ]


CODEC_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {"state_codec": (scaled, casts)}
"""Each file that has kernels -> its launches."""
