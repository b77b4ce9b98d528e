"""Exceptions at chosen calls inside an engine: before a call has done its work, or after."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import mambaslots as ms
from mambaslots.inference.contexts.cache.paths import CachedPath
from mambaslots.inference.engines import step_runner
from mambaslots.inference.kernels import sampling

Owner = Callable[[ms.DynamicInferenceEngine], object]


class InjectedError(Exception):
    """What a failing allocator, kernel or sampler raises."""


class Interrupted(KeyboardInterrupt):
    """Control-C, in the middle of whatever runs."""


POINTS: dict[str, tuple[Owner, str]] = {
    "scheduling": (lambda e: e.core.scheduler, "schedule"),
    "matching": (lambda e: e.context.prefix_cache, "match"),
    "admission": (lambda e: e.context.admission, "schedule_request"),
    "row": (lambda e: e.context.admission, "admit"),
    "block table": (lambda e: CachedPath, "append"),
    "KV allocation": (lambda e: e.context.prefix_cache.kv_blocks, "allocate_memory_blocks"),
    "KV references": (lambda e: e.context.prefix_cache.kv_blocks, "add_references"),
    "KV release": (lambda e: e.context.prefix_cache.kv_blocks, "release_memory_blocks"),
    "resume": (lambda e: e.context._request_states, "start_from"),
    "slot pin": (lambda e: e.context.prefix_cache.slots, "pin"),
    "slot unpin": (lambda e: e.context.prefix_cache.slots, "unpin"),
    "slot reservation": (lambda e: e.context.prefix_cache.slots, "reserve_slots"),
    "planned slots": (lambda e: e.context.prefix_cache, "reserve"),
    "inputs": (lambda e: e.context._builder, "build"),
    "begin": (lambda e: e.context, "begin_step"),
    "forward": (lambda e: e, "model"),
    "register": (lambda e: e.context.prefix_cache.tree, "register"),
    "commit": (lambda e: e.context.prefix_cache.slots, "commit_slots"),
    "advance": (lambda e: e.context._request_states, "advance"),
    "end": (lambda e: e.context, "end_step"),
    "sample": (lambda e: step_runner, "sample"),
    "log_softmax": (lambda e: sampling, "log_softmax"),
    "sampled": (lambda e: step_runner, "SampledStep"),
    "waited": (lambda e: step_runner.SampledStep, "append_tokens"),
    "leaving": (lambda e: e.context, "release"),
}


@contextmanager
def acting(
    engine: ms.DynamicInferenceEngine, point: str, action: Callable[[], None], number: int = 0
) -> Iterator[None]:
    """The call of a point with this number does `action` first, which may raise."""
    owner_of, name = POINTS[point]
    owner = owner_of(engine)
    real, numbers = getattr(owner, name), count()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            action()
        return real(*args, **kwargs)

    with patch.object(owner, name, wrapped):
        yield


@contextmanager
def failing(
    engine: ms.DynamicInferenceEngine,
    point: str,
    *,
    after: bool = False,
    calls: Collection[int] = (0,),
    error: type[BaseException] = InjectedError,
) -> Iterator[Counter[str]]:
    """The calls numbered `calls` of a point raise; the counter says how often calls came and failed."""
    owner_of, name = POINTS[point]
    owner = owner_of(engine)
    real, seen = getattr(owner, name), Counter[str]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        number = seen["calls"]
        seen["calls"] += 1
        if number in calls and not after:
            seen["failed"] += 1
            raise error(point)
        result = real(*args, **kwargs)
        if number in calls:
            seen["failed"] += 1
            raise error(point)
        return result

    with patch.object(owner, name, wrapped):
        yield seen
