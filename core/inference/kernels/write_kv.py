"""Store a step's keys and values into the paged cache, in Triton; the reference is `reference.write_kv`."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
NUM_WARPS = 4


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Store `keys[tokens[i]]` and `values[tokens[i]]` at `positions[i]` of the cache.

    One launch. Does not synchronise.

    Args:
        kv_cache: [2, blocks, block size, kv heads, head dim], contiguous. Written, in its own dtype.
        keys, values: [T, kv heads, head dim].
        tokens: [W] indices into `keys` and `values`.
        positions: [W] block * block size + offset. -1 writes nothing, which costs one load.
    """
    width = kv_cache.shape[3] * kv_cache.shape[4]
    if not tokens.shape[0] or not width:
        return
    keys, values = keys.flatten(1), values.flatten(1)
    write_kv_kernel[(tokens.shape[0], triton.cdiv(width, BLOCK))](
        kv_cache, keys, values, tokens, positions,
        kv_cache.stride(0), keys.stride(0), values.stride(0),
        WIDTH=width, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip


@triton.jit
def write_kv_kernel(
    # Pointers
    cache, keys, values, tokens, positions,
    # Strides
    value_cache_offset, key_token_stride, value_token_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has an entry of `tokens` and a block of the entry's width."""
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
