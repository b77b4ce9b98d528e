"""Storing a step's keys and values into the paged cache, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from .specialisation import Specialisation

_BLOCK = 1024
_WARPS = 4


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Store `keys` and `values` [T, kv heads, head dim] of `tokens` [W] at `positions` [W].

    Writes `kv_cache` [2, blocks, block size, kv heads, head dim], contiguous, in its dtype; a position is
    block * block size + offset, or -1 to write nothing, which costs one load. One launch; does not
    synchronise.
    """
    width = kv_cache.shape[3] * kv_cache.shape[4]
    if not tokens.shape[0] or not width:
        return
    keys, values = keys.flatten(1), values.flatten(1)
    _write_kv_kernel[(tokens.shape[0], triton.cdiv(width, _BLOCK))](
        kv_cache, keys, values, tokens, positions,
        kv_cache.stride(0), keys.stride(0), values.stride(0),
        WIDTH=width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=_WARPS, num_stages=1,
    )  # fmt: skip


@triton.jit
def _write_kv_kernel(
    # Pointers
    cache, keys, values, tokens, positions,
    # Strides
    value_cache_offset, key_token_stride, value_token_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a written token and part of its width."""
    entry = tl.program_id(0)
    position = tl.load(positions + entry)
    if position >= 0:
        token = tl.load(tokens + entry)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < WIDTH
        key = tl.load(keys + token * key_token_stride + place, mask=inside)
        value = tl.load(values + token * value_token_stride + place, mask=inside)
        stored = cache + position * WIDTH + place
        tl.store(stored, key.to(cache.dtype.element_ty), mask=inside)
        tl.store(stored + value_cache_offset, value.to(cache.dtype.element_ty), mask=inside)


def hopper_specialisations() -> list[Specialisation]:
    """What `write_kv` launches for Nemotron-H-8B: 8 kv heads of 128, keys rotated and so in float32."""
    pointers = {"keys": "*fp32", "tokens": "*i64", "positions": "*i64"}
    return [
        Specialisation(
            name=f"write_kv {dtype}",
            kernel=_write_kv_kernel,
            signature=pointers
            | {"cache": f"*{dtype}", "values": f"*{dtype}", "value_cache_offset": "i64"}
            | dict.fromkeys(("key_token_stride", "value_token_stride"), "i32"),
            constexprs={"WIDTH": 1024, "BLOCK": 1024},
            divisible_by_16=(
                *pointers, "cache", "values", "value_cache_offset", "key_token_stride", "value_token_stride",
            ),
            num_warps=_WARPS,
            num_stages=1,
        )
        for dtype in ("fp32", "bf16")
    ]  # fmt: skip
