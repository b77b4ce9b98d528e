"""The launches of attention in segments at 32 heads of 128 numbers, for `compile_kernels.py`.

KV blocks have 256 tokens. Results of segments are contiguous.
"""

from collections.abc import Callable

from launches.specialisation import Specialisation
from mambaslots.inference.kernels import attention_segments
from mambaslots.inference.kernels.attention_segments import Readers

HEADS, HEAD_DIM, BLOCK_SIZE = 32, 128, 256
SEGMENTS = {name.upper(): tokens for name, tokens in attention_segments.SEGMENTS._asdict().items()}


def pairs_of_rows() -> list[Specialisation]:
    """Decode rows of one token, own segments of rows, and segments before these in copies and apart."""
    columns = attention_segments.SEGMENTS.long // BLOCK_SIZE
    of_rows = ("block_table", "kv_lengths", "query_start_loc", "query_lengths")
    of_pairs = ("pair_table", "pair_kv_lengths", "pair_starts", "pair_lengths")
    pointers = dict.fromkeys((*of_rows, *of_pairs), "*i32")
    return [
        Specialisation(
            name=f"segment_rows {readers.name.lower()}{', copied' * copies}",
            kernel=attention_segments.segment_rows_kernel,
            signature=pointers
            | dict.fromkeys(("table_stride", "num_columns", "tokens", "query_stride", "head_stride"), "i32")
            | ({"query": "*bf16", "copies": "*bf16"} if copies else {"query": "*bf16"}),
            constexprs={
                "READERS": int(readers),
                "SEPARATE": readers == Readers.AFTER and not copies,
                "BLOCK_SIZE": BLOCK_SIZE,
                "COLUMNS": columns,
                "BLOCK": columns,
                "HEADS": HEADS,
                "DIM": HEAD_DIM,
                "BLOCK_HEADS": HEADS,
                "BLOCK_DIM": HEAD_DIM,
            }
            | SEGMENTS
            | ({} if copies else {"copies": None}),
            divisible_by_16=("query", "copies", "query_stride", "head_stride") if copies else (),
            num_warps=attention_segments.COPY_WARPS if copies else 1,
            wide=("load", "store") if copies else (),
        )
        for readers, copies in (
            (Readers.ALL, True),
            (Readers.WITHIN, False),
            (Readers.AFTER, True),
            (Readers.AFTER, False),
        )
    ]


def combinations() -> list[Specialisation]:
    """Results of decodes in one tensor, and those of prefills in two."""
    results = ("earlier", "final", "out")
    sums = ("earlier_log_sums", "final_log_sums")
    strides = ("earlier_segment_stride", "earlier_token_stride", "earlier_head_stride")
    strides += ("final_token_stride", "final_head_stride", "out_token_stride", "out_head_stride")
    sum_strides = tuple(
        f"{name}_sums_{of}_stride" for name in ("earlier", "final") for of in ("segment", "head")
    )
    found = []
    for dtype in ("bf16", "fp16"):
        for name in ("decodes", "prefills"):
            together = name == "decodes"
            own_strides = ("final_segment_stride", "final_sums_segment_stride")
            sizes = (*strides, *sum_strides, "heads", "num_earlier", "final_segment_stride")
            found.append(
                Specialisation(
                    name=f"combine_segments {name} {dtype}",
                    kernel=attention_segments.combine_segments_kernel,
                    signature=dict.fromkeys(results, f"*{dtype}")
                    | dict.fromkeys(sums, "*fp32")
                    | {"positions": "*i64"}
                    | dict.fromkeys((size for size in sizes if together or size not in own_strides), "i32"),
                    constexprs={
                        "TOGETHER": attention_segments.TOGETHER,
                        "DIM": HEAD_DIM,
                        "BLOCK_HEADS": attention_segments.BLOCK // HEAD_DIM,
                        "BLOCK_DIM": HEAD_DIM,
                        "earlier_sums_token_stride": 1,
                        "final_sums_token_stride": 1,
                    }
                    | SEGMENTS
                    | ({} if together else dict.fromkeys(own_strides, 0)),
                    divisible_by_16=(
                        *results, *strides, *(("final_segment_stride",) if together else ()), "heads",
                    ),
                    num_warps=attention_segments.NUM_WARPS,
                    wide=("load", "store"),
                )
            )  # fmt: skip
    return found


SEGMENT_SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "attention_segments": (pairs_of_rows, combinations),
}
"""Each file of `mambaslots.inference.kernels` that has these kernels -> its launches."""
