"""Whether a product of few rows takes longer than it must."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .recorded_products import Product

_CALLS, _REPLAYS = 10, 5
_WORTH = 0.75
"""Another way must take at most this part of the time."""


def is_faster(product: Product, run: Callable[[Sequence[Any]], Tensor], num_rows: int) -> bool:
    """Whether `run` computes a product of a few rows clearly faster than the operator that the model runs.

    Captures CUDA graphs of both, so that launches take no time, and synchronises. The weights may lie in the
    L2 cache; what is found is a library's unlucky choice of a kernel, which takes several times as long. On a
    CPU nothing is measured, and nothing is faster.

    Args:
        product: the product, whose arguments have rows of a step in their first dimension.
        run: takes the product's arguments and computes it.
        num_rows: rows to measure with.
    """
    arguments = list(product.call.arguments)
    if not arguments[product.rows[0].argument].is_cuda:
        return False
    for row in product.rows:
        like: Tensor = arguments[row.argument]
        shape = num_rows * row.per_row, *like.shape[1:]
        arguments[row.argument] = torch.ones(shape, dtype=like.dtype, device=like.device)
    usual, other = (_seconds(way, arguments) for way in (product.call.run, run))
    return other <= _WORTH * usual


def _seconds(run: Callable[[Sequence[Any]], Tensor], arguments: Sequence[Any]) -> float:
    run(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run(arguments)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
