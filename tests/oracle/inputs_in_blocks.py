"""Replays whose inputs lie in input blocks, called as if they lay in whole chunks."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

IN_BLOCKS = "x", "B", "k", "v", "new_v"


def in_blocks[R](run: Callable[..., R], block_tokens: int) -> Callable[..., R]:
    """`run` with its inputs moved to blocks in any order, and back; no block of others may change."""

    def moved(*arguments: Any, **named: Any) -> R:
        given = signature(run).bind(*arguments, **named).arguments
        inputs, slots = given["inputs"], given["rows"].input_rows
        pools = {name: pool for name in IN_BLOCKS if (pool := getattr(inputs, name, None)) is not None}
        (num_slots, chunk), device = next(iter(pools.values())).shape[:2], slots.device
        per_chunk = -(-chunk // block_tokens)
        order = torch.randperm((num_slots + 1) * per_chunk, generator=torch.Generator().manual_seed(7))
        table = order[: num_slots * per_chunk].view(num_slots, per_chunk).to(device)
        token = torch.arange(chunk, device=device)
        places = table[:, token // block_tokens], token % block_tokens
        moved_pools = {}
        for name, pool in pools.items():
            memory = pool.new_full((len(order), block_tokens + 3, *pool.shape[2:]), torch.nan)
            moved_pools[name] = memory[:, :block_tokens]  # input blocks with gaps between them
            moved_pools[name][places] = pool
        before = {name: pool.clone() for name, pool in moved_pools.items()}
        own = slots[slots >= 0].unique()
        input_blocks = table[slots.clamp(min=0)].masked_fill((slots < 0)[:, None], 0)
        given["inputs"] = inputs._replace(**moved_pools)
        given["rows"] = given["rows"]._replace(input_blocks=input_blocks.to(torch.int32))
        result = run(**given)
        others = torch.ones(len(order), dtype=torch.bool, device=device)
        others[table[own].flatten()] = False
        for name, pool in pools.items():
            torch.testing.assert_close(
                moved_pools[name][others], before[name][others], rtol=0, atol=0, equal_nan=True
            )
            pool.copy_(moved_pools[name][places])
        return result

    return moved
