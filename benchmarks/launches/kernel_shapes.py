"""The launches of a step of real models, kernel by kernel, as `compile_kernels.py` compiles them.

`delta_shapes.py` lists those of the gated delta rule, `ssd_shapes.py` those of the SSD scan, `gate_shapes.py`
those of gates and gated norms. Here is the rest of Nemotron-H-8B: 24 Mamba layers of 128 heads of 64
channels, 8 groups, a state of 128, a convolution of 10,240 channels and 4 taps, and 8 KV heads of 128.
Pools are float32 or bfloat16; a decode has one token or four.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from launches.specialisation import Specialisation
from mambaslots.inference.kernels import (
    conv,
    conv_replay,
    ssd,
    state_move,
    write_kv,
)
from mambaslots.inference.kernels import penalties as penalty_kernels
from mambaslots.inference.kernels import token_draws as draw_kernels
from mambaslots.inference.kernels.state_move import PartMove
from mambaslots.inference.kernels.state_pools import ConvAndSsm

HEADS, HEAD_DIM, GROUPS, STATE_DIM = 128, 64, 8, 128
TAPS = 4

Access = Literal["load", "store"]
BOTH: tuple[Access, ...] = ("load", "store")


def state_pool(ssm_dtype: torch.dtype = torch.float32) -> ConvAndSsm:
    """A pool of 64 states, without memory."""
    return ConvAndSsm(
        torch.empty(24, 64, 10240, 3, dtype=torch.bfloat16, device="meta"),
        torch.empty(24, 64, HEADS, HEAD_DIM, STATE_DIM, dtype=ssm_dtype, device="meta"),
    )


def state_copies() -> list[Specialisation]:
    """Copies, and the narrow accesses of slots of odd sizes."""
    types = {"read": "*i64", "write": "*i64", "pairs": "i32", "layers": "i32"}
    types |= dict.fromkeys(state_move.PART_ARGUMENTS, "i64")
    found = []

    def launch(name: str, pool: ConvAndSsm, changed: dict[str, Any], wide: tuple[Access, ...]) -> None:
        constants = state_move.constants_of(*(PartMove.between(part, part) for part in pool)) | changed
        options = {"num_warps": state_move.NUM_WARPS, "num_stages": 1}
        found.append(Specialisation(name, state_move.move_states, types, constants, **options, wide=wide))

    for dtype in (torch.float32, torch.bfloat16):
        launch(f"copy_states {str(dtype).removeprefix('torch.')}", state_pool(dtype), {}, BOTH)
    for align in (16, 8, 4, 2, 1):
        tail = align > 1
        odd = {"CONV_ALIGN": align, "CONV_TAIL": tail, "SSM_ALIGN": align, "SSM_TAIL": tail}
        name = f"copy_states, aligned to {align}" + ", odd size" * tail
        launch(name, state_pool(torch.bfloat16), odd, ())
    return found


def convolutions() -> list[Specialisation]:
    """Prefill, and decode of one token and of four, for inputs of each dtype."""
    strides = ("x_token_stride", "weight_channel_stride", "slot_stride", "state_channel_stride")
    ones = {"x_channel_stride": 1, "weight_tap_stride": 1, "state_tap_stride": 1}
    indices = (
        "sources", "destinations", "query_start_loc", "token_rows",
        "checkpoint_rows", "checkpoint_ends", "checkpoint_destinations",
    )  # fmt: skip
    found = []
    for dtype in ("fp32", "bf16"):
        tensors = dict.fromkeys(("x", "weight", "bias", "states", "out"), f"*{dtype}")
        pointers = tensors | dict.fromkeys(indices, "*i64")
        found.append(
            Specialisation(
                name=f"causal_conv1d_prefill {dtype}",
                kernel=conv.conv_prefill_kernel,
                signature=pointers | dict.fromkeys(("rows", "checkpoints", "conv_dim", *strides), "i32"),
                constexprs=ones
                | {"KERNEL": TAPS, "HAS_BIAS": True, "ACTIVATION": True}
                | {"BLOCK_T": conv.PREFILL_TOKENS, "BLOCK_C": conv.PREFILL_CHANNELS},
                divisible_by_16=(*pointers, "conv_dim", "x_token_stride", "slot_stride"),
                num_warps=conv.PREFILL_WARPS,
            )
        )
        for tokens in (1, 4):
            pointers = tensors | dict.fromkeys(("sources", "destinations"), "*i64")
            integers = ["conv_dim", "x_row_stride", "x_token_stride", *strides[1:], "destination_row_stride"]
            one_token = {"destination_row_stride": 1} if tokens == 1 else {}
            found.append(
                Specialisation(
                    name=f"causal_conv1d_update {dtype} T={tokens}",
                    kernel=conv.conv_update_kernel,
                    signature=pointers | {name: "i32" for name in integers if name not in one_token},
                    constexprs=ones
                    | one_token
                    | {"destination_token_stride": 1}
                    | {"KERNEL": TAPS, "HAS_BIAS": True, "ACTIVATION": True}
                    | {"TOKENS": tokens, "BLOCK_C": conv.UPDATE_CHANNELS},
                    divisible_by_16=(*pointers, "conv_dim", "x_row_stride", "x_token_stride", "slot_stride"),
                    num_warps=conv.UPDATE_WARPS,
                )
            )
    return found


def convolution_replays() -> list[Specialisation]:
    """Decode by replay of one token and of four, and what prefills keep for it, for inputs of each dtype."""
    found = []
    for dtype in ("fp32", "bf16"):
        blocks = {"BLOCK_C": conv_replay.CHANNELS}
        indices = {"input_rows": "*i64", "starts": "*i32"}
        even = ("conv_dim", "x_token_stride", "slot_stride", "ring_stride")
        for tokens in (1, 4):
            tensors = dict.fromkeys(("x", "weight", "bias", "states", "rings", "out"), f"*{dtype}")
            pointers = tensors | indices | {"lengths": "*i32", "destinations": "*i64"}
            integers = dict.fromkeys((*even[:3], "x_row_stride", "weight_channel_stride"), "i32")
            found.append(
                Specialisation(
                    name=f"causal_conv1d_replay {dtype} T={tokens}",
                    kernel=conv_replay.conv_replay_kernel,
                    signature=pointers | integers | {"state_channel_stride": "i32", "ring_stride": "i64"},
                    constexprs={"x_channel_stride": 1, "weight_tap_stride": 1, "state_tap_stride": 1}
                    | {"KERNEL": TAPS, "HAS_BIAS": True, "ACTIVATION": True}
                    | {"TOKENS": tokens, "RING": TAPS + tokens - 1}
                    | blocks,
                    divisible_by_16=(*pointers, *even, "x_row_stride"),
                    num_warps=conv_replay.NUM_WARPS,
                )
            )
        pointers = dict.fromkeys(("x", "states", "rings"), f"*{dtype}") | indices
        pointers |= {"sources": "*i64", "query_start_loc": "*i32"}
        integers = dict.fromkeys((*even[:3], "state_channel_stride"), "i32")
        found.append(
            Specialisation(
                name=f"keep_conv_inputs {dtype}",
                kernel=conv_replay.keep_conv_kernel,
                signature=pointers | integers | {"ring_stride": "i64"},
                constexprs={"x_channel_stride": 1, "state_tap_stride": 1}
                | {"WIDTH": TAPS - 1, "RING": TAPS}
                | blocks,
                divisible_by_16=(*pointers, *even),
                num_warps=conv_replay.NUM_WARPS,
            )
        )
    return found


def state_updates() -> list[Specialisation]:
    """Decode of one token and of four, for pools of each dtype."""
    block_p, block_n = ssd.update_blocks(HEAD_DIM, STATE_DIM)
    even = [f"{tensor}_{axis}_stride" for tensor in "xbc" for axis in ("row", "token")]
    even += ["dt_row_stride", "dt_token_stride", "x_head_stride", "b_group_stride", "c_group_stride"]
    even += ["slot_stride", "head_stride", "p_stride"]
    found = []
    for dtype in ("fp32", "bf16"):
        for tokens in (1, 4):
            pointers = dict.fromkeys(("x", "B", "C", "out"), "*bf16") | dict.fromkeys(
                ("dt", "A", "D"), "*fp32"
            )
            pointers |= {"states": f"*{dtype}", "sources": "*i64", "destinations": "*i64"}
            ones = ["x_p_stride", "dt_head_stride", "a_stride", "b_n_stride", "c_n_stride", "d_stride"]
            ones += ["n_stride", "destination_token_stride"]
            odd = ["destination_row_stride"]
            if tokens == 1:
                ones, odd = ones + odd, []
            found.append(
                Specialisation(
                    name=f"selective_state_update {dtype} T={tokens}",
                    kernel=ssd.ssd_update_kernel,
                    signature=pointers | dict.fromkeys([*even, *odd], "i32"),
                    constexprs=dict.fromkeys(ones, 1)
                    | {"TOKENS": tokens, "HEADS": HEADS, "HEADS_PER_GROUP": HEADS // GROUPS}
                    | {"HEAD_DIM": HEAD_DIM, "STATE_DIM": STATE_DIM, "BLOCK_P": block_p, "BLOCK_N": block_n},
                    divisible_by_16=(*pointers, *even),
                    num_warps=ssd.UPDATE_WARPS,
                    num_stages=1,
                    wide=BOTH,
                )
            )
    return found


def kv_writes() -> list[Specialisation]:
    """8 KV heads of 128 numbers, and 2 of 256, in KV blocks of 256 tokens."""
    found = []
    for dtype in ("fp32", "bf16"):
        for kv_heads, head_dim in ((8, 128), (2, 256)):
            strides = tuple(
                f"{name}_{axis}_stride" for name in ("key", "value") for axis in ("token", "head")
            )
            pointers = dict.fromkeys(("keys", "values", "cache"), f"*{dtype}")
            pointers |= dict.fromkeys(("tokens", "positions"), "*i64")
            found.append(
                Specialisation(
                    name=f"write_kv {dtype} {kv_heads} x {head_dim}",
                    kernel=write_kv.write_kv_kernel,
                    signature=pointers
                    | dict.fromkeys((*strides, "num_entries", "block_stride"), "i32")
                    | {"value_cache_offset": "i64"},
                    constexprs={"BLOCK_SIZE": 256, "ZEROS": write_kv.ZEROS, "KV_HEADS": kv_heads}
                    | {"DIM": head_dim, "BLOCK_DIM": head_dim}
                    | {"BLOCK_HEADS": write_kv.kv_heads_per_program(kv_heads, head_dim)},
                    divisible_by_16=(*pointers, *strides, "value_cache_offset", "block_stride"),
                    num_warps=write_kv.NUM_WARPS,
                    num_stages=1,
                    wide=BOTH if kv_heads * head_dim >= write_kv.BLOCK else (),
                )
            )
    return found


def token_draws() -> list[Specialisation]:
    """Logits are float32 or bfloat16, and scores and probabilities float32."""
    sizes = ("vocabulary", "width")
    found = []
    for kernel, name, tensors in (
        (draw_kernels.score_kernel, "score fp32", {"scores": "fp32", "logits": "fp32", "largest": "fp32"}),
        (draw_kernels.score_kernel, "score bf16", {"scores": "fp32", "logits": "bf16", "largest": "bf16"}),
        (draw_kernels.top_k_kernel, "cut to top_k", {"scores": "fp32"}),
        (draw_kernels.draw_kernel, "draw", {"tokens": "i64", "probabilities": "fp32"}),
    ):
        pointers = {tensor: f"*{dtype}" for tensor, dtype in (tensors | {"settings": "fp64"}).items()}
        strides = ("logits_row_stride",) if "logits" in tensors else ()
        found.append(
            Specialisation(
                name=name,
                kernel=kernel,
                signature=pointers | dict.fromkeys(("num_draws", *sizes, *strides), "i32"),
                constexprs={"BLOCK": draw_kernels.BLOCK},
                divisible_by_16=(*pointers, *sizes, *strides),
                num_warps=draw_kernels.NUM_WARPS,
            )
        )
    return found


def penalties() -> list[Specialisation]:
    sizes, strides = ("num_rows", "vocabulary"), ("logits_row_stride", "counts_row_stride")
    pointers = {"out": "*fp32", "logits": "", "counts": "*i32", "count_rows": "*i64", "settings": "*fp32"}
    return [
        Specialisation(
            name=f"penalize {dtype}",
            kernel=penalty_kernels.penalize_kernel,
            signature=pointers | {"logits": f"*{dtype}"} | dict.fromkeys((*sizes, *strides), "i32"),
            constexprs={"BLOCK": penalty_kernels.BLOCK},
            divisible_by_16=(*pointers, "vocabulary", *strides),
            wide=("load", "store"),
        )
        for dtype in ("fp32", "bf16")
    ]


SHAPES: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {
    "state_move": (state_copies,),
    "conv": (convolutions,),
    "conv_replay": (convolution_replays,),
    "ssd": (state_updates,),
    "write_kv": (kv_writes,),
    "token_draws": (token_draws,),
    "penalties": (penalties,),
}
"""Each file of `mambaslots.inference.kernels` that has kernels -> its launches."""
