"""Fuzz targets that are arguments: settings of every kind, and the calls of an engine."""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import torch
from fuzzing.target import REFUSED, Target, any_value, end_of
from mambaslots.model_parts import ModelShard, Part, StateSegment, StateSplit
from mambaslots.models import HybridConfig, HybridLM
from mambaslots.parallel_groups import ParallelGroups
from mambaslots.serve import ServerSettings
from mambaslots.state_spec import StateTensor

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from oracle.picture import picture


def targets() -> list[Target]:
    """The settings, one target a class, and the engine's calls."""
    return [*(Settings(*one) for one in _settings()), Calls()]


def _settings() -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The name of a target, what makes the settings, and good arguments of it."""
    pools = {"num_kv_blocks": 64, "num_mamba_slots": 8, "block_size_tokens": 16, "max_sequence_length": 256}
    spec = tiny_model().state_spec()
    state = {"name": "ssm", "num_layers": 2, "shape": (4, 8, 8), "dtype": torch.float32, "grid": 4}
    part = Part(0, 2, 4)
    return [
        ("InferenceConfig", ms.InferenceConfig, pools),
        ("HybridConfig", HybridConfig.tiny, {}),
        ("CheckpointPlan", ms.CheckpointPlan, {}),
        ("SamplingParams", ms.SamplingParams, {}),
        ("HybridStateSpec", ms.HybridStateSpec, {one.name: getattr(spec, one.name) for one in fields(spec)}),
        ("StateTensor", StateTensor, state),
        ("StateSplit", StateSplit, {"layers": part, "segments": (StateSegment(part, 3),)}),
        ("StateSegment", StateSegment, {"part": part, "width": 3}),
        ("Part", Part, {"start": 0, "stop": 2, "total": 4}),
        ("ModelShard", ModelShard, {"attention_layers": part, "kv_heads": part}),
        ("ParallelGroups", ParallelGroups, {}),
        ("ServerSettings", ServerSettings, {"model_name": "model", "api_keys": {"one": "key"}}),
    ]


@dataclass
class Settings:
    """A class of settings: one to three of its fields are any value at all."""

    name: str
    make: Callable[..., Any]
    good: Mapping[str, Any]
    documented: tuple[type[BaseException], ...] = (ValueError,)

    def draw(self, random: Random) -> dict[str, Any]:
        kind: Any = getattr(self.make, "__self__", self.make)  # the class of a classmethod
        names = [one.name for one in fields(kind) if one.init]
        changed = random.sample(names, k=min(len(names), random.choice((0, 1, 1, 1, 2, 3))))
        return {name: _near(random, self.good.get(name)) for name in changed}

    def size_of(self, drawn: Any) -> int:
        return 1000

    def feed(self, drawn: Any) -> str:
        made: list[Any] = []
        said: list[str] = []

        def call() -> None:
            try:
                made.append(self.make(**{**self.good, **drawn}))
            except self.documented as error:
                said.append(str(error))
                raise

        end = end_of(call, self.documented)
        named = not said or any(name.rpartition("_")[0] in said[0] or name in said[0] for name in drawn)
        assert named, f"the message names none of {', '.join(drawn)}: {said[0]:.200}"
        if made:
            assert len(repr(made[0])) > 0
            if is_dataclass(type(made[0])):
                again = replace(made[0])
                assert again == made[0], "settings made of the fields of settings are others"
                copy.copy(made[0])
        assert made or end == REFUSED
        return end


def _near(random: Random, good: Any) -> Any:
    """Any value, or one of the kind of `good` that another library would make."""
    kind = random.randrange(12)
    if kind == 0:
        return good
    if kind == 1 and isinstance(good, (tuple, list)):
        return random.choice(([*good, *good], [*good, any_value(random)], (), set(), list(good)))
    if kind == 2:
        tensors = (torch.tensor(1), torch.zeros(2, 2), torch.tensor([1, 2]), torch.empty(2, device="meta"))
        return random.choice((*tensors, torch.float16, torch.int8, torch.device("cpu"), "cpu", "cuda:99"))
    return any_value(random)


# ---- an engine


@cache
def tiny_model() -> HybridLM:
    """One Mamba layer and one attention layer."""
    config = HybridConfig.tiny(
        hidden_size=16, pattern="M*", mamba_num_heads=2, mamba_num_groups=1, mamba_state_dim=4,
        mamba_head_dim=8, num_attention_heads=2, num_kv_heads=1, head_dim=8, mlp_hidden_size=16,
        vocab_size=264, ssd_chunk_size=8,
    )  # fmt: skip
    return HybridLM(config, seed=1)


@cache
def small_engine() -> ms.DynamicInferenceEngine:
    """An engine that targets share whose inputs leave nothing in it."""
    return make_engine()


def make_engine() -> ms.DynamicInferenceEngine:
    """A small engine."""
    config = ms.InferenceConfig(
        block_size_tokens=8, max_requests=2, max_tokens_per_step=32, max_sequence_length=128,
        num_kv_blocks=24,
        num_mamba_slots=6,
    )  # fmt: skip
    return ms.DynamicInferenceEngine(tiny_model(), config)


_PREFIX = [5, 6, 7] * 8


@dataclass
class Calls:
    """The public calls of an engine that serves: any arguments; a refused call changes nothing."""

    name: str = "calls of an engine"
    documented: tuple[type[BaseException], ...] = (
        ValueError, ms.MambaSlotCapacityError, ms.KVBlockCapacityError,
    )  # fmt: skip
    _engine: ms.DynamicInferenceEngine | None = field(default=None, repr=False)

    def draw(self, random: Random) -> tuple[str, list[Any], dict[str, Any]]:
        name = random.choice(sorted(_GOOD_CALLS))
        arguments, options = _GOOD_CALLS[name]
        arguments, options = list(arguments), dict(options)
        for _ in range(random.choice((0, 1, 1, 2))):
            place = random.randrange(len(arguments) + len(options))
            if place < len(arguments):
                arguments[place] = _other(random, arguments[place])
            else:
                option = sorted(options)[place - len(arguments)]
                options[option] = _other(random, options[option])
        return name, arguments, options

    def size_of(self, drawn: Any) -> int:
        return 10_000

    def feed(self, drawn: Any) -> str:
        name, arguments, options = drawn
        if self._engine is None:
            self._engine = make_engine()
        engine = self._engine
        if not engine.pins():
            engine.warm(_PREFIX)
            engine.pin(_PREFIX)
        before, found = picture(engine), []
        end = end_of(lambda: found.append(getattr(engine, name)(*arguments, **options)), self.documented)
        if end == REFUSED:
            assert picture(engine) == before, f"{name} was refused and changed the engine"
        for one in found:
            self._undo(name, one)
        assert not engine.has_unfinished_requests(), f"{name} left requests"
        engine.context.check_integrity()
        return end

    def _undo(self, name: str, found: Any) -> None:
        """Drop what an accepted call has left, so that inputs do not depend on one another's requests."""
        assert self._engine is not None
        if name == "add_request":
            self._engine.cancel(found)
            self._engine.take_result(found)
        elif name == "stream":
            found.close()
        elif name == "pin":
            self._engine.unpin(found)


_ONE = ms.SamplingParams(max_tokens=2)
_GOOD_CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "add_request": ([[1, 2, 3], _ONE], {"cache_salt": b"salt", "checkpoint_plan": ms.CheckpointPlan()}),
    "generate": (
        [[[1, 2, 3], _PREFIX], _ONE],
        {"cache_salt": None, "checkpoint_plan": None, "progress": False},
    ),
    "score": ([[_PREFIX, [1, 2]], 1], {"cache_salt": None, "checkpoint_plan": None}),
    "stream": ([[1, 2, 3], _ONE], {"cache_salt": "salt", "checkpoint_plan": None}),
    "warm": ([_PREFIX], {"cache_salt": None}),
    "pin": ([_PREFIX], {"cache_salt": None}),
    "unpin": ([None], {}),
    "cancel": ([0], {"reason": "stop"}),
    "take_result": ([0], {}),
    "computed_prefix": ([0], {}),
    "observe": ([None], {}),
}


def _other(random: Random, good: Any) -> Any:
    """Any value, or one of the arguments that other calls take."""
    prompts: tuple[Any, ...] = (
        [], [-1], [264], [2**31], [True], [1.0], [None], ["a"], "text", b"bytes", [[1]], [1] * 128,
        [1] * 20_000, torch.tensor([1, 2]), torch.tensor([[1]]), torch.tensor([1.0]),
        torch.empty(3, dtype=torch.int64, device="meta"),
        range(5), (1, 2), {1: 2}, [[1, 2], None], [[1], [2], [3]], [[1] * 200], iter([1, 2]),
    )  # fmt: skip
    others: tuple[Any, ...] = (
        ms.SamplingParams(max_tokens=2**31 - 1), ms.SamplingParams(num_given_tokens=1),
        [_ONE], [_ONE, None],
        ms.CheckpointPlan(prefill_interval=3), ms.CheckpointPlan(marks=(2**31 - 1,)), [ms.CheckpointPlan()],
        b"", "", "\ud800", [b"a", "b"], ["a"], -1, 2**63, good, None,
    )  # fmt: skip
    return random.choice((random.choice(prompts), random.choice(others), any_value(random)))
