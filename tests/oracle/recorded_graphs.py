"""An engine on the CPU that runs by graphs as one on a GPU does; something stands in the place of graphs."""

from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.step_builder import StepBuffer
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.inference.engines import cuda_graphs
from mambaslots.inference.engines.cuda_graphs import GraphBuckets, GraphRunner
from oracle.serving import small_engine
from torch import Tensor


class Recorded:
    """In the place of a captured graph: runs the model on the tensors that it was captured with."""

    captures = 0

    def __init__(self, model: Any, inputs: StepInputs, pool: object) -> None:
        type(self).captures += 1
        self._model, self._inputs = model, inputs
        self.pool = "memory"

    def launch(self) -> Tensor:
        return self._model(self._inputs)


def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """Let `Recorded` stand in the place of graphs; it counts from 0."""
    fresh = type("Fresh", (Recorded,), {"captures": 0})
    monkeypatch.setattr(cuda_graphs, "CapturedForward", fresh)
    return fresh


def fix_addresses(buffer: StepBuffer) -> None:
    """Let every step of a CPU use one host buffer, as those of a GPU use one device buffer."""
    lists: tuple[list[Any], ...] = (buffer._hosts, buffer._arrays, buffer._tensors)
    for of_both in lists:
        of_both[1] = of_both[0]


def graphed_engine(
    max_graphs: int = 100, min_decode_tokens: int = 0, **settings: object
) -> ms.DynamicInferenceEngine:
    """An engine on the CPU that runs as one on a GPU does: fixed addresses, padded steps, graphs."""
    engine = small_engine(**settings)
    fix_addresses(engine.context._buffer)
    buckets = GraphBuckets.of(engine.context, min_decode_tokens)
    engine.core.step_runner.graphs = GraphRunner(engine.context.spec, buckets, max_graphs)
    return engine
