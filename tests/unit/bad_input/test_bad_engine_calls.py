"""Bad calls of a serving engine: refused, with requests, pools and pins as before."""

from collections.abc import Callable, Iterator
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from mambaslots.inference.contexts.cache.pins import PinnedPrefix
from oracle import bad_values as bad
from oracle.bad_values import Bad, refuse, refuse_all
from oracle.budget import dear
from oracle.picture import picture
from oracle.serving import random_tokens, run_checked, small_engine

PREFIX = random_tokens(24, seed=1)
PROMPTS = ([*PREFIX, 1, 2, 3], random_tokens(40, seed=2), random_tokens(9, seed=3))
ONE = ms.SamplingParams(max_tokens=1)
_engine_target = "DynamicInferenceEngine"


class Served:
    """An engine with a pinned prefix, an unclaimed result, two requests that run and one that waits."""

    def __init__(self, **overrides: Any) -> None:
        self.engine = small_engine(
            max_requests=2,
            max_tokens_per_step=24,
            num_kv_blocks=24,
            num_mamba_slots=6,
            max_sequence_length=96,
            **overrides,
        )
        self.context = self.engine.context
        assert self.engine.warm(PREFIX) == 24
        self.prefix = self.engine.pin(PREFIX)
        sampling = ms.SamplingParams(max_tokens=20, return_log_probs=True)
        self.ids = [self.engine.add_request(prompt, sampling) for prompt in PROMPTS]
        for _ in range(3):
            self.engine.step()
        assert len(self.context.requests) == 2
        self.mark()

    def mark(self) -> None:
        self.before = picture(self.engine)

    def unchanged(self) -> None:
        assert picture(self.engine) == self.before
        self.context.check_integrity()

    def serves_on(self) -> None:
        """All three requests end, and answer as a new engine does."""
        results = run_checked(self.engine)
        sampling = ms.SamplingParams(max_tokens=20)
        expected = small_engine().generate(PROMPTS, sampling)
        assert [results[i].tokens for i in self.ids] == [result.tokens for result in expected]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests: every call is refused, so nothing ever happens to it."""
    made = Served()
    yield made
    made.serves_on()


# ---- requests

_ids = bad.ids(0, 255, good=(5,), empty=False)
_too_long = [1] * 96
_request: dict[str, Bad] = {
    "sampling_params": bad.sampling(),
    "cache_salt": bad.salt(),
    "checkpoint_plan": bad.plan(8),
}
# A plan for blocks of another size is refused by the name of its interval.
_named = {name: name for name in _request} | {"checkpoint_plan": "(checkpoint_plan|decode|prefill_interval)"}


def each_way_in(engine: ms.DynamicInferenceEngine) -> list[Callable[..., object]]:
    return [engine.add_request, engine.stream]


def test_prompts_that_are_none(served: Served) -> None:
    for add in each_way_in(served.engine):
        bad_prompts = _ids.also(_too_long, [1] * 10**5, torch.ones(96, dtype=torch.int64))
        refuse_all(_engine_target, bad_prompts, add, "prompt( and answer)?", served.unchanged)


@pytest.mark.parametrize("name", _request)
def test_bad_arguments_of_a_request(served: Served, name: str) -> None:
    for add in each_way_in(served.engine):
        refuse_all(
            _engine_target,
            _request[name],
            lambda v, add=add: add([1, 2], **{name: v}),
            _named[name],
            served.unchanged,
        )


@pytest.mark.parametrize("answer", [96, 95, 2**31 - 1])
def test_answers_that_can_never_end(served: Served, answer: int) -> None:
    sampling = ms.SamplingParams(max_tokens=answer)
    for add in each_way_in(served.engine):
        refuse(_engine_target, lambda a=add: a([1, 2], sampling), "prompt and answer")  # type: ignore[misc]
        served.unchanged()


def test_answers_beyond_the_kv_pool() -> None:
    small = small_engine(num_kv_blocks=4)
    refuse(
        _engine_target,
        lambda: small.add_request([1] * 30, ms.SamplingParams(max_tokens=3)),
        "prompt and answer",
    )
    assert not small.has_unfinished_requests()
    small.context.check_integrity()


def test_requests_there_are_not(served: Served) -> None:
    engine = served.engine
    unknown = bad.integer(0).also(99, 2**70)
    refuse_all(_engine_target, unknown, engine.cancel, "request_id", served.unchanged)
    refuse_all(_engine_target, unknown, engine.computed_prefix, "request_id", served.unchanged)
    refuse_all(_engine_target, bad.integer(0), engine.take_result, "request_id", served.unchanged)


# ---- generate


def test_generate_takes_prompts(served: Served) -> None:
    none = (None, 1, 1.5, float("nan"), len, torch.tensor(1), bad.Nothing(), np.array(3), int, ...)
    bad_lists = Bad(none, bad.anything().more.filter(lambda value: not np.iterable(value)))
    refuse_all(_engine_target, bad_lists, served.engine.generate, "prompts", served.unchanged)


def test_generate_adds_all_prompts_or_none(served: Served) -> None:
    """The second prompt is bad: the first is not served either."""
    refuse_all(
        _engine_target,
        _ids.inside(lambda value: [[1, 2], value]),
        served.engine.generate,
        r"prompts\[1\]",
        served.unchanged,
    )


@pytest.mark.parametrize(
    ("name", "good"),
    [("sampling_params", ONE), ("cache_salt", b"a"), ("checkpoint_plan", ms.CheckpointPlan())],
)
def test_generate_takes_one_for_all_or_one_each(served: Served, name: str, good: Any) -> None:
    engine = served.engine

    def call(value: Any) -> object:
        return engine.generate([[1, 2], [3, 4]], **{name: value})

    kind, named = _request[name], _named[name]
    refuse_all(
        _engine_target, kind.only(lambda v: isinstance(v, (list, tuple))), call, named, served.unchanged
    )
    refuse_all(_engine_target, kind.inside(lambda v: [good, v]), call, named, served.unchanged)
    for count in (0, 1, 3):
        refuse(_engine_target, lambda n=count: call([good] * n), name)  # type: ignore[misc]
        served.unchanged()


# ---- score


def test_score_takes_sequences(served: Served) -> None:
    none = (None, 1, 1.5, float("nan"), len, torch.tensor(1), bad.Nothing(), np.array(3), int, ...)
    bad_lists = Bad(none, bad.anything().more.filter(lambda value: not np.iterable(value)))
    refuse_all(_engine_target, bad_lists, served.engine.score, "sequences", served.unchanged)


def test_score_scores_all_sequences_or_none(served: Served) -> None:
    """The second sequence is bad: the first is not computed either."""
    too_short_or_long = _ids.also([1], [*_too_long, 1], [1] * 10**5, torch.ones(97, dtype=torch.int64))
    refuse_all(
        _engine_target,
        too_short_or_long.inside(lambda value: [[1, 2], value]),
        served.engine.score,
        r"sequences\[1\]",
        served.unchanged,
    )


@pytest.mark.parametrize(
    ("name", "good"), [("start", 1), ("cache_salt", b"a"), ("checkpoint_plan", ms.CheckpointPlan())]
)
def test_score_takes_one_for_all_or_one_each(served: Served, name: str, good: Any) -> None:
    engine = served.engine

    def call(value: Any) -> object:
        return engine.score([[1, 2], [3, 4]], **{name: value})

    kind = bad.integer(1, 1) if name == "start" else _request[name]
    named = r"start of sequences\[[01]\]" if name == "start" else _named[name]
    refuse_all(
        _engine_target, kind.only(lambda v: isinstance(v, (list, tuple))), call, named, served.unchanged
    )
    refuse_all(_engine_target, kind.inside(lambda v: [good, v]), call, named, served.unchanged)
    for count in (0, 1, 3):
        refuse(_engine_target, lambda n=count: call([good] * n), name)  # type: ignore[misc]
        served.unchanged()


def test_sequences_beyond_the_kv_pool() -> None:
    small = small_engine(num_kv_blocks=4)
    refuse(_engine_target, lambda: small.score([[1] * 33]), r"sequences\[0\]")
    assert not small.has_unfinished_requests()
    small.context.check_integrity()
    (result,) = small.score([[1] * 32])
    assert len(result.log_probs) == 31


# ---- the cache


@pytest.mark.parametrize("call", ["warm", "pin"])
def test_prefixes_that_are_none(served: Served, call: str) -> None:
    method = getattr(served.engine, call)
    refuse_all(_engine_target, bad.ids(0, 255, good=(5,)), method, "tokens", served.unchanged)
    refuse_all(
        _engine_target, bad.salt(), lambda v: method(PREFIX, cache_salt=v), "cache_salt", served.unchanged
    )


@pytest.mark.parametrize("tokens", [[], [1], PREFIX[:7], [9] * 40])
def test_prefixes_without_a_state_cannot_be_pinned(served: Served, tokens: list[int]) -> None:
    refuse(_engine_target, lambda: served.engine.pin(tokens), "tokens")
    served.unchanged()
    refuse(_engine_target, lambda: served.engine.pin(PREFIX, cache_salt="other"), "tokens")
    served.unchanged()


def test_a_prefix_too_long_for_the_cache_is_not_warmed(served: Served) -> None:
    refuse(_engine_target, lambda: served.engine.warm(_too_long), "prompt and answer")
    served.unchanged()


def test_only_what_was_pinned_here_is_unpinned(served: Served) -> None:
    elsewhere = Served().prefix
    forged = [PinnedPrefix(n, served.prefix.num_tokens) for n in (served.prefix.pin_id, -1, 99, [1], None)]
    prefixes = bad.anything().also(elsewhere, *forged, PinnedPrefix, served.prefix.pin_id)
    refuse_all(_engine_target, prefixes, served.engine.unpin, "prefix", served.unchanged)


def test_a_prefix_is_unpinned_once() -> None:
    served = Served()
    served.engine.unpin(served.prefix)
    served.mark()
    refuse(_engine_target, lambda: served.engine.unpin(served.prefix), "prefix")
    served.unchanged()


class Incomparable:
    """Is equal to nothing, and says so by raising."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("incomparable")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "Incomparable()"


@pytest.mark.parametrize(
    "version",
    [np.array([1, 2]), torch.tensor([1, 2]), torch.ones(2, 2), Incomparable(), bad.meta(2, 2), bad.meta()],
    ids=repr,
)
def test_a_version_that_compares_element_by_element(served: Served, version: Any) -> None:
    def set_version() -> None:
        served.engine.set_weights_version(version)

    refuse(_engine_target, set_version, "version")
    served.unchanged()


def test_without_prefix_caching_nothing_can_be_pinned() -> None:
    engine = small_engine(enable_prefix_caching=False)
    before = picture(engine)
    refuse(_engine_target, lambda: engine.pin(PREFIX), "tokens")
    refuse_all(_engine_target, bad.anything(), engine.unpin, "prefix")
    assert picture(engine) == before


# ---- the prefix cache


def test_the_cache_unpins_prefixes(served: Served) -> None:
    cache = served.context.prefix_cache
    refuse_all("PinnedPrefixes", bad.anything(), cache.pins.unpin, "prefix", served.unchanged)


def test_more_than_is_cached_is_not_evicted(served: Served) -> None:
    cache = served.context.prefix_cache
    num_cached = cache.stats().num_cached_kv_blocks
    refuse(
        "KVBlockAllocator",
        lambda: cache.kv_blocks.evict_lru_blocks(num_cached + 1),
        "",
        ms.KVBlockCapacityError,
    )
    served.unchanged()
    refuse("StateSlots", lambda: cache.slots.evict(10**30), "", ms.MambaSlotCapacityError)
    served.unchanged()


# ---- at the wrong time


def test_a_suspended_engine_computes_nothing() -> None:
    served = Served()
    engine = served.engine
    stream = engine.stream([1, 2, 3])
    engine.suspend()
    served.mark()
    for call in (
        engine.step,
        lambda: engine.generate([[1, 2]]),
        lambda: engine.score([[1, 2]]),
        lambda: engine.warm(PREFIX),
        lambda: engine.pin(PREFIX),
        lambda: next(stream),
    ):
        refuse(_engine_target, call, "", RuntimeError)
        served.unchanged()
    refuse(_engine_target, lambda: engine.unpin(served.prefix), "prefix")
    refuse_all(_engine_target, _ids, engine.add_request, "prompt", served.unchanged, examples=dear())
    stream.close()
    engine.resume()
    served.serves_on()


def test_nothing_is_called_from_inside_a_step_of_the_engine() -> None:
    served = Served()
    engine, model = served.engine, served.engine.model

    def model_that_calls(inputs: ms.StepInputs) -> torch.Tensor:
        served.mark()
        for call in (
            engine.step,
            lambda: engine.cancel(served.ids[0]),
            lambda: engine.pin(PREFIX),
            lambda: engine.unpin(served.prefix),
            engine.reset_prefix_cache,
            engine.suspend,
            engine.resume,
            engine.reset,
            lambda: engine.set_weights_version("new"),
        ):
            refuse(_engine_target, call, "", RuntimeError)
            served.unchanged()
        return model(inputs)

    engine.model = model_that_calls
    engine.step()
    engine.model = model
    served.serves_on()
