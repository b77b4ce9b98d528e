"""Replays whose inputs lie in pages, called as if they lay in whole chunks."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

PAGED = "x", "B", "k", "v", "new_v"


def paged[R](run: Callable[..., R], page_tokens: int) -> Callable[..., R]:
    """`run` with its inputs moved to pages in any order, and back; no page of others may change."""

    def moved(*arguments: Any, **named: Any) -> R:
        given = signature(run).bind(*arguments, **named).arguments
        inputs, slots = given["inputs"], given["rows"].input_rows
        pools = {name: pool for name in PAGED if (pool := getattr(inputs, name, None)) is not None}
        (num_slots, chunk), device = next(iter(pools.values())).shape[:2], slots.device
        per_chunk = -(-chunk // page_tokens)
        order = torch.randperm((num_slots + 1) * per_chunk, generator=torch.Generator().manual_seed(7))
        table = order[: num_slots * per_chunk].view(num_slots, per_chunk).to(device)
        token = torch.arange(chunk, device=device)
        places = table[:, token // page_tokens], token % page_tokens
        in_pages = {}
        for name, pool in pools.items():
            memory = pool.new_full((len(order), page_tokens + 3, *pool.shape[2:]), torch.nan)
            in_pages[name] = memory[:, :page_tokens]  # pages with gaps between them
            in_pages[name][places] = pool
        before = {name: pool.clone() for name, pool in in_pages.items()}
        own = slots[slots >= 0].unique()
        pages = table[slots.clamp(min=0)].masked_fill((slots < 0)[:, None], 0)
        given["inputs"] = inputs._replace(**in_pages)
        given["rows"] = given["rows"]._replace(pages=pages.to(torch.int32))
        result = run(**given)
        others = torch.ones(len(order), dtype=torch.bool, device=device)
        others[table[own].flatten()] = False
        for name, pool in pools.items():
            torch.testing.assert_close(
                in_pages[name][others], before[name][others], rtol=0, atol=0, equal_nan=True
            )
            pool.copy_(in_pages[name][places])
        return result

    return moved
