"""Steps that decode one token of each request, by CUDA graph: time by the clock, idle time by a trace."""

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mambaslots as ms
from serving.limits import decode_bytes
from serving.models import BLOCK, ServingModel
from serving.prefill import free
from serving.trace import MarkedModel, trace_steps

TRACED_ROWS = (1, 32)
WARM_UP = 12


class DecodeBench:
    """An engine whose requests decode; requests come, and none ends."""

    def __init__(self, served: ServingModel, rows: int) -> None:
        lengths = served.lengths
        self._served = served
        self._contexts: dict[int, int] = {}
        self._length = -(-(lengths.context + 1000) // BLOCK) * BLOCK
        self._engine = served.engine(
            rows=rows,
            length=self._length,
            tokens_per_step=max(lengths.compared, rows),
            slots=min(rows + 32, 160),
            graphs=16,
            model=MarkedModel(served.model, served.device),
        )

    @property
    def contexts(self) -> list[int]:
        """Tokens of each request."""
        return list(self._contexts.values())

    def add(self, count: int) -> None:
        """Add requests with prompts of their own, and wait until all of them decode."""
        context = self._served.lengths.context
        sampling = ms.SamplingParams(max_tokens=self._length - context - 1)
        new = {self._engine.add_request(self._served.tokens(context), sampling) for _ in range(count)}
        self._contexts |= dict.fromkeys(new, context)
        started: set[int] = set()
        while not new <= started:
            started |= self.step()

    def step(self) -> set[int]:
        """The requests that got a token."""
        tokens = self._engine.step().tokens
        for request in tokens:
            self._contexts[request] += 1
        return set(tokens)

    def time_steps(self, steps: int) -> list[float]:
        """Milliseconds from the return of one step to the return of the next."""
        for _ in range(WARM_UP):
            self.step()
        self._served.synchronise()
        returns = []
        for _ in range(steps + 1):
            self.step()
            returns.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(returns)]


def measure_decodes(
    served: ServingModel, bandwidth: float, rows: tuple[int, ...], traced: int
) -> Iterator[dict[str, Any]]:
    """For each number of requests: milliseconds of a step, and of reading and writing its bytes.

    Args:
        bandwidth: bytes a second, of a copy.
        rows: numbers of requests, ascending.
        traced: this many steps also say how long the GPU idles between steps, and which kernels a step has.
    """
    bench = DecodeBench(served, rows[-1])
    for before, count in zip((0, *rows), rows, strict=False):
        bench.add(count - before)
        times = bench.time_steps(served.lengths.steps)
        moved = decode_bytes(served, bench.contexts)
        row: dict[str, Any] = {
            "requests": count,
            "context": round(statistics.fmean(bench.contexts)),
            "step_ms": statistics.median(times),
            "mean_ms": statistics.fmean(times),
            "bytes": moved,
            "limit_ms": 1e3 * moved / bandwidth,
        }
        if traced and served.device.type == "cuda" and count in TRACED_ROWS:
            row["trace"] = trace_steps(bench.step, traced)
        yield row
    del bench
    free(served.device)


def measure_rolling(served: ServingModel) -> dict[str, float]:
    """Milliseconds of a decode step that keeps a rolling state a request, and of one that keeps none.

    Means over as many steps as a block has tokens: each request crosses one boundary. Fewer steps on a CPU.
    """
    on_gpu = served.device.type == "cuda"
    rounds, steps = (3, BLOCK) if on_gpu else (1, BLOCK // 16)
    rows, context = served.lengths.rows[min(2, len(served.lengths.rows) - 1)], 2 * BLOCK
    engine = served.engine(
        rows=rows, length=8 * BLOCK, tokens_per_step=served.lengths.compared, slots=3 * rows, graphs=16
    )
    sampling = ms.SamplingParams(max_tokens=4 * BLOCK)
    times: dict[str, list[float]] = {"rolling": [], "off": []}
    for _ in range(rounds):
        for name, values in times.items():
            plan = ms.CheckpointPlan(decode="rolling" if name == "rolling" else "off")
            for index in range(rows):  # boundaries fall evenly over the steps
                prompt = served.tokens(context - index * BLOCK // rows)
                engine.add_request(prompt, sampling, checkpoint_plan=plan)
            while len(engine.step().tokens) < rows:
                pass
            for _ in range(WARM_UP):
                engine.step()
            served.synchronise()
            started = time.perf_counter()
            for _ in range(steps):
                engine.step()
            values.append(1e3 * (time.perf_counter() - started) / steps)
            engine.reset()
    return {"requests": rows} | {f"{name}_ms": statistics.median(values) for name, values in times.items()}
