"""Replays whose inputs lie in pages, called as if they lay in whole chunks."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

PAGED = "x_inputs", "B_inputs", "k_inputs", "v_inputs", "new_v_inputs"


def paged[R](run: Callable[..., R], page_tokens: int) -> Callable[..., R]:
    """`run` with its inputs moved to pages in any order, and back; no page of others may change."""

    def moved(*arguments: Any, **named: Any) -> R:
        given = signature(run).bind(*arguments, **named).arguments
        pools = {name: given[name] for name in PAGED if given.get(name) is not None}
        (num_slots, chunk), device = next(iter(pools.values())).shape[:2], given["input_rows"].device
        per_chunk = -(-chunk // page_tokens)
        order = torch.randperm((num_slots + 1) * per_chunk, generator=torch.Generator().manual_seed(7))
        table = order[: num_slots * per_chunk].view(num_slots, per_chunk).to(device)
        token = torch.arange(chunk, device=device)
        places = table[:, token // page_tokens], token % page_tokens
        for name, pool in pools.items():
            memory = pool.new_full((len(order), page_tokens + 3, *pool.shape[2:]), torch.nan)
            given[name] = memory[:, :page_tokens]  # pages with gaps between them
            given[name][places] = pool
        before = {name: given[name].clone() for name in pools}
        slots = given["input_rows"]
        own = slots[slots >= 0].unique()
        pages = table[slots.clamp(min=0)].masked_fill((slots < 0)[:, None], 0)
        result = run(**given, pages=pages.to(torch.int32))
        others = torch.ones(len(order), dtype=torch.bool, device=device)
        others[table[own].flatten()] = False
        for name, pool in pools.items():
            torch.testing.assert_close(
                given[name][others], before[name][others], rtol=0, atol=0, equal_nan=True
            )
            pool.copy_(given[name][places])
        return result

    return moved
