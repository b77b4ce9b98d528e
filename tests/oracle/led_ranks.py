"""Tests that call an engine on rank 0 alone: the other ranks build the same engines, and follow.

    @pytest.fixture(autouse=True, params=splits())
    def _led(world, request, monkeypatch): begin(world, request.param, monkeypatch)

    @on_leader
    def test_...(): small_engine(...)

On rank 0 the test's body runs, and each engine that it builds is a `LeadingEngine`.
"""

import threading
from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import pytest
import torch.distributed as dist
from mambaslots.inference.engines import step_runner
from oracle import serving
from oracle.agreement import Agreement
from oracle.distributed_world import World
from oracle.drafters import InPlaceModel
from oracle.faults import InjectedError

_agreements = count()
_ranks: "list[LedRanks]" = []


class LedRanks:
    """The ranks of a test, of which rank 0 leads all engines of a model that is split in one way."""

    def __init__(self, world: World, split: str, patch: pytest.MonkeyPatch, model: Any = None) -> None:
        self.world = world
        assert world.orders  # made by all ranks together
        self.model = world.model(split) if model is None else model
        self._engines: list[msd.LeadingEngine] = []
        self.plain_engine = ms.DynamicInferenceEngine
        patch.setitem(serving.DEFAULTS, "model", self.model)
        if world.rank == 0:
            patch.setattr(ms, "DynamicInferenceEngine", self._leading_class())

    def _leading_class(self) -> type[msd.LeadingEngine]:
        ranks = self

        class Leading(msd.LeadingEngine):
            """Lets the other ranks build the same engine first."""

            def __init__(self, model: Any, config: ms.InferenceConfig, **others: Any) -> None:
                if model.state_spec().groups.is_split:
                    ranks._broadcast((config, isinstance(model, InPlaceModel), others))
                super().__init__(model, config, **others)
                ranks._engines.append(self)

        return Leading

    def run(self, body: Callable[[], None]) -> None:
        """Run the body on rank 0, and serve it on the others."""
        if self.world.rank:
            self._follow()
            return
        try:
            body()
        finally:
            for engine in self._engines:
                engine.close()
            self._broadcast(None)

    def _broadcast(self, order: object) -> object:
        orders = [order]
        dist.broadcast_object_list(orders, src=0, group=self.world.orders)
        return orders[0]

    def _follow(self) -> None:
        threads, errors = [], []

        def follow(engine: ms.DynamicInferenceEngine) -> None:
            try:
                msd.follow(engine)
            except BaseException as error:
                errors.append(error)

        while (order := self._broadcast(None)) is not None:
            config, in_place, others = order  # type: ignore[misc]
            model = InPlaceModel(self.model) if in_place else self.model
            engine = ms.DynamicInferenceEngine(model, config, **others)
            threads.append(threading.Thread(target=follow, args=[engine]))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a follower did not return"
        if errors:
            raise errors[0]


def begin(world: World, split: str, patch: pytest.MonkeyPatch, model: Any = None) -> None:
    """From now on tests run on ranks of this world, with a model that is split in this way."""
    _ranks[:] = [LedRanks(world, split, patch, model)]


def present() -> LedRanks:
    """The ranks of the test that runs."""
    return _ranks[0]


def on_leader(test: Callable[..., None]) -> Callable[..., None]:
    """A test of which rank 0 runs the body."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        present().run(partial(test, *arguments, **named))

    return run


# ---- functions for `call_on_all`


def check_alike(engine: ms.DynamicInferenceEngine) -> None:
    """The caches are in order on every rank, and equal on all."""
    engine.check_integrity()
    found = engine.context.spec.groups.gather(state_of(engine))
    assert all(one == found[0] for one in found), found


def state_of(engine: ms.DynamicInferenceEngine) -> dict[str, object]:
    """What the engines of all ranks must have in common."""
    scheduler, cache = engine.core.scheduler, engine.context.prefix_cache
    return {
        "tokens": {request_id: one.tokens for request_id, one in engine.core.requests.items()},
        "waiting": list(scheduler.waiting),
        "running": [request.request_id for request in scheduler.running],
        "states": sorted(cache.slots.cached_states.state_block_of_hash.items()),
        "slots": [cache.slots.cached_states.block_of(slot) for slot in range(cache.slots.num_slots)],
        "order": list(cache.slots.cached_states.by_recency()),
        "pins": [(one.num_tokens, one.prefix_hash) for one in cache.pins.prefixes],
        "stats": engine.context.cache_stats(),
        "version": engine.weights_version,
        "allocated": engine.context.memory.is_allocated,
    }


_restores: list[Callable[[], None]] = []


def fail_in(engine: ms.DynamicInferenceEngine, ranks: list[int], place: int | str = 0) -> None:
    """Let these ranks, and no others, fail after so many collectives, or in a function of the step."""
    for restore in _restores:
        restore()
    rank = engine.context.spec.groups.rank
    owner, name = (step_runner, place) if isinstance(place, str) else (ms.ParallelGroups, "_run_collective")
    function, num_left = getattr(owner, name), 0 if isinstance(place, str) else place

    def failing(*arguments: object, **named: object) -> object:
        nonlocal num_left
        if num_left:
            num_left -= 1
            return function(*arguments, **named)
        restore()
        raise InjectedError(f"on rank {rank}")

    restore = partial(setattr, owner, name, function)
    _restores[:] = [restore]
    if rank in ranks:
        setattr(owner, name, failing)


def compare_steps(engine: msd.LeadingEngine) -> None:
    """From now on the ranks compare what they decide in each step."""
    engine.call_on_all(_agree, next(_agreements))


def _agree(engine: ms.DynamicInferenceEngine, number: int) -> None:
    groups = engine.context.spec.groups
    store = dist.PrefixStore(f"led {number}", dist.distributed_c10d._get_default_store().clone())
    Agreement(engine.context, store, groups.rank, groups.size, timeout_s=60.0)
