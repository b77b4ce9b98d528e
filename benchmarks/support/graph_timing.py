"""How long calls take on a GPU without the time of their launches."""

import statistics
from collections.abc import Callable
from typing import Any


def graph_us(call: Callable[[], Any], calls: int = 10) -> float:
    """The median of 20 launches of a CUDA graph of `calls` calls, in microseconds a call.

    Two calls before the capture compile and tune.
    """
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 / calls * start.elapsed_time(end))
    return statistics.median(times)
