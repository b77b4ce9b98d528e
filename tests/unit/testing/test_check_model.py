"""Right models pass `check_model`, it reaches all of the protocol, and what cannot be checked is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from bring_a_model import MovingAverageLM
from hypothesis import settings
from mambaslots.inference.contexts.step import Step
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.models import hybrid_lm
from mambaslots.testing import ModelError, ModelReport, Rule, check_model, model_check
from mambaslots.testing.memory_stage import _index_tensors
from mambaslots.testing.scenarios import SCENARIOS
from mambaslots.testing.step_memory import StepMemory
from mambaslots.testing.step_padding import larger_shape, padded
from oracle import bad_values as bad
from oracle.bad_values import refuse_all
from oracle.drafters import InPlaceModel, RightDrafter
from oracle.ema_lm import VOCABULARY, EmaLM
from oracle.fresh_process import run_code
from oracle.model_kinds import KINDS, MIX, kind_of_model
from oracle.serving import random_tokens, small_engine, small_model, tiny_model
from torch import Tensor


def hybrid(dtype: torch.dtype) -> ms.models.HybridLM:
    return ms.models.HybridLM(ms.models.HybridConfig.tiny(dtype=dtype), seed=0)


def of_kind(name: str) -> ms.models.HybridLM:
    with kind_of_model(name):
        return small_model()


class Float32EmaLM(EmaLM):
    dtype = torch.float32


RIGHT: dict[str, Callable[[], Any]] = {
    "hybrid float64": lambda: hybrid(torch.float64),
    "hybrid float32": lambda: hybrid(torch.float32),
    "hybrid bfloat16": lambda: hybrid(torch.bfloat16),
    "in place": lambda: InPlaceModel(of_kind(MIX)),
    "long chunks": lambda: small_model(64),
    "chunks of one token": lambda: small_model(1),
    "averages": EmaLM,
    "averages float32": Float32EmaLM,
    "example": lambda: MovingAverageLM(torch.float64),
    **{name: partial(of_kind, name) for name in KINDS},
}


COPIED_IN_PLACE = {
    "rows resumed from a cached state", "rows behind accepted drafts", "decode states into cache",
    "in-place probes",
}  # fmt: skip
"""Where states are updated in place, the context copies them to and from live slots."""
REACHED = COPIED_IN_PLACE | {
    "steps", "decode rows", "decode rows of several tokens", "prefill rows", "prefill rows with a source",
    "states inside prefills", "tokens whose KV was there", "resumed tokens", "source probes",
    "cached-KV probes", "padded steps",
}  # fmt: skip


FEW = settings(max_examples=5, deadline=None)
LONG = {
    "chunks of one token", "long chunks", "averages float32", "averages", "hybrid float64", "hybrid float32",
    "hybrid bfloat16", "windows alone",
    *(name for name in KINDS if name != MIX),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in RIGHT]
)
def test_a_right_model_passes(name: str) -> None:
    model = RIGHT[name]()
    report = check_model(model)
    assert isinstance(report, ModelReport)
    assert report.passed
    assert f"{type(model).__name__} keeps all rules" in str(report)
    assert all(scenario.num_compared and not scenario.skipped for scenario in report.scenarios)
    assert max(scenario.largest_difference for scenario in report.scenarios) <= report.tolerance
    assert {what for what, count in report.reached.items() if count} == (
        REACHED - COPIED_IN_PLACE if name == "in place" else REACHED
    )


def test_what_is_not_asked_for_is_not_checked() -> None:
    class OneTokenARow(EmaLM):
        """Neither drafts nor padding."""

        def __call__(self, inputs: StepInputs) -> Tensor:
            assert inputs.shape.decode_tokens == 1
            assert (inputs.kv_lengths > 0).all()
            return super().__call__(inputs)

    report = check_model(OneTokenARow(), num_speculative_tokens=0, padded_shapes=False)
    assert report.scenarios[-1].skipped == "not asked for"
    assert "padded steps" not in report.reached
    with pytest.raises(ModelError, match="RAISES: AssertionError"):
        check_model(OneTokenARow(), padded_shapes=False)
    with pytest.raises(ModelError, match="PADDING DIFFERS: AssertionError"):
        check_model(OneTokenARow(), num_speculative_tokens=0)


def test_a_tolerance_may_be_given_and_is_kept_to() -> None:
    class Noisy(EmaLM):
        """Decoding is off by a millionth."""

        def logits(self, x: Tensor, inputs: StepInputs) -> Tensor:
            return super().logits(x, inputs) * (1 + 1e-6 * bool(inputs.num_decodes))

    assert check_model(Noisy(), tolerance=1e-5).passed
    with pytest.raises(ModelError, match=r"DECODE DIFFERS: the logits after 2 tokens differ by 1\.0e-06"):
        check_model(Noisy())


def test_texts_are_of_the_vocabulary_and_length_that_are_asked_for() -> None:
    seen: set[int] = set()
    longest = 0

    class Watched(EmaLM):
        def __call__(self, inputs: StepInputs) -> Tensor:
            nonlocal longest
            step = StepMemory.from_inputs(inputs) if not (inputs.kv_lengths == 0).any() else None
            seen.update(token for row in (step.rows if step else ()) for token in row.tokens)
            longest = max(longest, int(inputs.kv_lengths.max()))
            return super().__call__(inputs)

    check_model(Watched(), vocabulary=[3, 4, 11], num_tokens=40)
    assert seen == {3, 4, 11}
    assert longest == 41  # the last token that is generated is not computed


def test_importing_mambaslots_imports_neither_its_testing_nor_pytest() -> None:
    code = "import sys, mambaslots; sys.exit(bool({'pytest', 'mambaslots.testing'} & sys.modules.keys()))"
    assert run_code(code).returncode == 0


def test_the_package_gives_it_out_when_it_is_asked_for() -> None:
    code = "import mambaslots as ms; ms.testing.check_model; ms.nothing"
    run = run_code(code)
    assert run.stderr.endswith("AttributeError: module 'mambaslots' has no attribute 'nothing'\n")


# ---- what cannot be checked


class NoSpec(EmaLM):
    def state_spec(self) -> Any:
        return {"num_layers": 1}


class RaisingSpec(EmaLM):
    def state_spec(self) -> Any:
        raise KeyError("hidden_size")


class ChangingSpec(EmaLM):
    calls = 0

    def state_spec(self) -> Any:
        self.calls += 1
        return replace(super().state_spec(), vocab_size=VOCABULARY + self.calls)


class NoRecurrentLayer(EmaLM):
    def state_spec(self) -> Any:
        return replace(super().state_spec(), states=())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "the model is None; accepted: an object with state_spec"),
        (EmaLM, "accepted: an object with state_spec"),
        (lambda inputs: inputs, "accepted: an object with state_spec"),
        (NoSpec(), r"state_spec\(\) returns {'num_layers': 1}; accepted: a HybridStateSpec"),
        (RaisingSpec(), r"state_spec\(\) raises KeyError: 'hidden_size'"),
        (ChangingSpec(), r"accepted: the same at every call"),
        (NoRecurrentLayer(), r"states has no layer; accepted: at least one"),
    ],
)
def test_what_is_no_model_is_told_so_in_a_sentence(model: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        check_model(model)  # type: ignore[arg-type]
    (finding,) = caught.value.report.findings
    assert finding.rule is Rule.SPEC
    assert isinstance(caught.value, AssertionError)


def test_bad_arguments_are_refused() -> None:
    def call(name: str) -> Callable[[Any], object]:
        return lambda value: check_model(EmaLM(), **{name: value})

    refuse_all("check_model", bad.real(0, optional=True), call("tolerance"), "tolerance", examples=FEW)
    short = bad.ids(0, 16, good=(3,)).only(lambda value: value is None).also([], [3, 3, 3], [1, 2])
    refuse_all("check_model", short, call("vocabulary"), "vocabulary", examples=FEW)
    tokens = bad.integer(32, 2**31 - 1, optional=True)
    refuse_all("check_model", tokens, call("num_tokens"), "num_tokens", examples=FEW)
    refuse_all("check_model", bad.boolean(), call("padded_shapes"), "padded_shapes", examples=FEW)
    refuse_all("check_model", bad.integer(0, 2**31 - 1), call("seed"), "seed", examples=FEW)
    drafts = bad.integer(0, 63)
    refuse_all("check_model", drafts, call("num_speculative_tokens"), "num_speculative_tokens", examples=FEW)


def test_a_model_that_is_split_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms.ParallelGroups, "is_split", True)
    with pytest.raises(ValueError, match=r"model is .*; accepted: a whole model on one rank"):
        check_model(EmaLM())


# ---- padded steps


def test_padding_is_that_of_the_contexts_own_builder() -> None:
    """Every step of a busy engine, padded by the builder as CUDA graphs have it, and by `padded`."""
    engine = small_engine(num_speculative_tokens=3, make_drafter=RightDrafter, max_tokens=40)
    context, begin = engine.context, engine.context.begin_step
    kinds = set()

    def begin_twice(steps: Any, *_: Any) -> Step:
        plain = begin(steps).inputs
        own = padded(plain, larger_shape(plain.shape))
        tensors = {name: tensor.clone() for name, tensor in _index_tensors(own).items()}
        context.prefix_cache.abort()
        context._steps = ()
        theirs = begin(steps, larger_shape).inputs
        assert theirs.shape == own.shape
        assert theirs.num_logits == own.num_logits
        for name, tensor in _index_tensors(theirs).items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, msg=name)
        kinds.add((plain.num_decodes > 0, plain.shape.decode_tokens > 1, plain.num_prefills > 0))
        context._steps = ()
        context.prefix_cache.abort()
        return begin(steps)

    context.begin_step = begin_twice  # type: ignore[method-assign]
    params = ms.SamplingParams(num_tokens_to_generate=9)
    prompts = [random_tokens(length, seed=length) for length in (20, 33, 7)]
    engine.generate([*prompts, prompts[0]], params)
    assert {(True, True, False), (False, False, True), (True, True, True)} <= kinds


@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_models_kernels_keep_all_rules_on_a_gpu(dtype: torch.dtype) -> None:
    assert check_model(tiny_model(dtype, "cuda")).passed


@pytest.mark.long
def test_the_gpus_kernels_keep_all_rules_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    monkeypatch.setattr(torch.cuda, "device", lambda *args: nullcontext())
    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda *args: GpuKernelSet)
    small = {"hidden_size": 32, "mamba_num_heads": 2, "mamba_num_groups": 1, "mlp_hidden_size": 32}
    config = ms.models.HybridConfig.tiny(dtype=torch.float32, pattern="M*", **small)
    assert check_model(ms.models.HybridLM(config)).passed


@pytest.mark.parametrize(
    "pattern", [*(pytest.param(name, marks=pytest.mark.long) for name in ("G*", "C*", "GM*", "G")), "C"]
)
def test_every_kind_of_state_keeps_all_rules(pattern: str) -> None:
    config = ms.models.HybridConfig.tiny(dtype=torch.float64, hidden_size=32, pattern=pattern)
    assert check_model(ms.models.HybridLM(config)).passed


def test_numpy_integers_are_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "SCENARIOS", SCENARIOS[:1])
    assert check_model(EmaLM(), seed=np.int64(3), num_tokens=np.int64(32), padded_shapes=False).passed
