"""Prompts that are computed whole: time of the forward on the GPU, and of the engine's step by the clock."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import mambaslots as ms
import torch
from serving.limits import Products, time_ms
from serving.models import BLOCK, ServingModel
from support.no_states import NoStates

ONE = ms.SamplingParams(max_tokens=1)
NO_STATES = NoStates()
PAUSE_S = 0.1
EVERY_BLOCK = ms.CheckpointPlan(prefill_interval=BLOCK)


class TimedModel:
    """Calls a model, and notes the time of each forward on the device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.state_spec = model.state_spec
        self._model = model
        self._on_gpu = device.type == "cuda"
        self._times: list[tuple[Any, Any]] = []

    def __call__(self, inputs: ms.StepInputs) -> Any:
        begin = self._now()
        logits = self._model(inputs)
        self._times.append((begin, self._now()))
        return logits

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_ms(self) -> float:
        """Milliseconds of all forwards since the last call; synchronises."""
        times, self._times = self._times, []
        if not self._on_gpu:
            return 1e3 * sum(end - begin for begin, end in times)
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in times))


class PrefillBench:
    """An engine for one request, whose prompts have `length` tokens and are computed in one step."""

    def __init__(self, served: ServingModel, length: int) -> None:
        self._served = served
        self._length = length
        self._model = TimedModel(served.model, served.device)
        self.engine = served.engine(
            rows=1,
            length=length + BLOCK,
            tokens_per_step=length,
            slots=length // BLOCK + 4,
            model=self._model,
        )

    def run(self, plan: ms.CheckpointPlan | None = None) -> tuple[float, float]:
        """Milliseconds of the forward, and of the request from its arrival to its token."""
        self.engine.reset()
        prompt = self._served.tokens(self._length)
        self._served.synchronise()
        self._model.take_ms()
        started = time.perf_counter()
        self.engine.generate([prompt], ONE, checkpoint_plan=plan)
        wall = 1e3 * (time.perf_counter() - started)
        return self._model.take_ms(), wall


def measure_prefills(served: ServingModel, repeats: int) -> Iterator[dict[str, float]]:
    """For each length: milliseconds of the forward, of the step, and of the model's products."""
    for length in served.lengths.prefills:
        bench = PrefillBench(served, length)
        products = Products(served, length)
        warm_up = 2 if served.device.type == "cuda" else 1
        times = []
        for _ in range(warm_up + repeats):  # in turn, and after the same rest: a busy GPU lowers its clock
            time.sleep(PAUSE_S)
            forward, wall = bench.run()
            time.sleep(PAUSE_S)
            times.append((forward, wall, products.run_ms()))
        forward, wall, limit = (statistics.median(column) for column in zip(*times[warm_up:], strict=True))
        yield {"tokens": length, "forward_ms": forward, "step_ms": wall, "products_ms": limit}
        del bench, products
        free(served.device)


def measure_checkpoints(served: ServingModel, repeats: int) -> dict[str, float]:
    """Milliseconds of a forward that stores a state every block, beside one that stores none."""
    length = served.lengths.compared
    bench = PrefillBench(served, length)
    plans = {"without": NO_STATES, "with": EVERY_BLOCK, "without_again": NO_STATES}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    states = 0
    for repeat in range(repeats + 2):
        for name, plan in plans.items():
            measured = bench.run(plan)
            if name == "with":
                states = bench.engine.context.cache_stats().num_states_committed
            if repeat >= 2:
                times[name].append(measured)
    row: dict[str, float] = {"tokens": length, "states": states}
    for name, measured in times.items():
        row[f"{name}_forward_ms"] = statistics.median(forward for forward, _ in measured)
        row[f"{name}_step_ms"] = statistics.median(wall for _, wall in measured)
    return row


def measure_transformers(served: ServingModel, repeats: int) -> dict[str, float] | None:
    """Milliseconds of transformers' own forward, before the model is served; None without one."""
    forward = served.forward_of_transformers
    if forward is None:
        return None
    length = served.lengths.compared
    times, walls = [], []
    for _ in range(repeats + 2):
        time.sleep(PAUSE_S)
        ids = torch.tensor([served.tokens(length)], device=served.device)
        served.synchronise()
        started = time.perf_counter()
        times.append(time_ms(lambda ids=ids: forward(ids), served.device))  # type: ignore[misc]
        walls.append(1e3 * (time.perf_counter() - started))
    free(served.device)
    return {
        "tokens": length,
        "forward_ms": statistics.median(times[2:]),
        "wall_ms": statistics.median(walls[2:]),
    }


def measure_cold(served: ServingModel, repeats: int) -> dict[str, float]:
    """Seconds to serve prompts that share nothing, with the cache on and with caching switched off."""
    lengths = served.lengths
    prompt = lengths.shared + lengths.turns * lengths.turn
    sampling = ms.SamplingParams(max_tokens=lengths.answer)
    engines = {
        name: served.engine(
            rows=lengths.users,
            length=prompt + lengths.answer + BLOCK,
            tokens_per_step=lengths.compared,
            slots=3 * lengths.users,
            graphs=16,
            caching=name == "on",
        )
        for name in ("off", "on")
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items() if repeat % 2 else reversed(engines.items()):
            engine.reset()
            prompts = [served.tokens(prompt) for _ in range(lengths.users)]
            served.synchronise()
            started = time.perf_counter()
            engine.generate(prompts, sampling)
            if repeat:
                times[name].append(time.perf_counter() - started)
    return {"prompts": lengths.users, "tokens": prompt, "answer": lengths.answer} | {
        f"{name}_s": statistics.median(values) for name, values in times.items()
    }


def free(device: torch.device) -> None:
    """Give unused memory back, so that the next engine finds it."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
