"""What no serving can beat, measured: a model's products, and the bandwidth of a large copy.

The products of a prefill: each linear layer of the model, one `torch.mm` of the layer's own weight with
random activations, one after the other; and the head for one token. The bytes of a decode step: each weight
that a step reads, once; the state of each request, read and written; the keys and values of its context.
"""

import statistics
import time
from collections.abc import Callable

import torch
from serving.models import ServingModel

COPY_BYTES = 4 << 30


def time_ms(call: Callable[[], object], device: torch.device) -> float:
    """On a GPU between two events, so the device's time."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy on the device; median of 10."""
    size = COPY_BYTES if device.type == "cuda" else 64 << 20
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = [time_ms(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * size / (statistics.median(times) / 1e3)


class Products:
    """The products of a model for `tokens` tokens, with random activations."""

    def __init__(self, served: ServingModel, tokens: int) -> None:
        dtype, device = served.head.dtype, served.device
        self._weights, self._head, self._device = served.products, served.head, device
        self._last = torch.randn(1, served.head.shape[1], dtype=dtype, device=device)
        self._inputs, self._outputs = {}, {}
        for rows, columns in {tuple(weight.shape) for weight in served.products}:
            self._inputs[columns] = torch.randn(tokens, columns, dtype=dtype, device=device)
            self._outputs[rows] = torch.empty(tokens, rows, dtype=dtype, device=device)

    @torch.no_grad()
    def run_ms(self) -> float:
        """Milliseconds of all products."""
        return time_ms(self._multiply, self._device)

    def _multiply(self) -> None:
        for weight in self._weights:
            torch.mm(self._inputs[weight.shape[1]], weight.t(), out=self._outputs[weight.shape[0]])
        torch.mm(self._last, self._head.t())


def decode_bytes(served: ServingModel, contexts: list[int]) -> int:
    """Bytes of a step that decodes one token of each request, whose contexts have these tokens."""
    spec = served.model.state_spec()
    states = 2 * len(contexts) * spec.state_bytes
    return served.weight_bytes + states + sum(contexts) * int(spec.kv_block_bytes(1))
