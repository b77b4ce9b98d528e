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
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.models import hybrid_lm
from mambaslots.testing import ModelError, check_model
from mambaslots.testing.rules import Rule
from oracle import bad_values as bad
from oracle.bad_values import refuse_all
from oracle.drafters import InPlaceModel
from oracle.ema_lm import VOCABULARY, EmaLM
from oracle.fresh_process import run_code
from oracle.model_kinds import KINDS, MIX, kind_of_model
from oracle.serving import small_model, tiny_model
from oracle.step_memory import StepMemory
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


# States in place are of the mix, in float64; a dtype below it is bfloat16. The kinds' other tests are many.
QUICK = ("hybrid bfloat16", "in place")
FEW = settings(max_examples=5, deadline=None)


@pytest.mark.sampled(name=QUICK)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_passes(name: str) -> None:
    model = RIGHT[name]()
    report = check_model(model)
    assert f"{type(model).__name__} keeps all rules" in str(report)
    assert report.num_compared > 400


def test_what_is_not_asked_for_is_not_checked() -> None:
    class OneTokenARow(EmaLM):
        """Neither drafts nor padding."""

        def __call__(self, inputs: StepInputs) -> Tensor:
            assert inputs.shape.decode_tokens == 1
            assert (inputs.kv_lengths > 0).all()
            return super().__call__(inputs)

    check_model(OneTokenARow(), num_speculative_tokens=0, padded_shapes=False)
    with pytest.raises(ModelError, match="RAISES: AssertionError"):
        check_model(OneTokenARow(), padded_shapes=False)
    with pytest.raises(ModelError, match="PADDING DIFFERS: AssertionError"):
        check_model(OneTokenARow(), num_speculative_tokens=0)


def test_a_tolerance_may_be_given_and_is_kept_to() -> None:
    class Noisy(EmaLM):
        """Decoding is off by a millionth."""

        def logits(self, x: Tensor, inputs: StepInputs) -> Tensor:
            return super().logits(x, inputs) * (1 + 1e-6 * bool(inputs.num_decodes))

    check_model(Noisy(), tolerance=1e-5)
    with pytest.raises(ModelError, match=r"DECODE DIFFERS: logits after 2 tokens differs by 1\.0e-06"):
        check_model(Noisy())


def test_texts_are_of_the_vocabulary_that_is_asked_for() -> None:
    seen: set[int] = set()

    class Watched(EmaLM):
        def __call__(self, inputs: StepInputs) -> Tensor:
            rows = StepMemory.from_inputs(inputs).rows
            seen.update(token for row in rows for token in row.tokens)
            return super().__call__(inputs)

    check_model(Watched(), vocabulary=[3, 4, 11], seed=np.int64(3))  # numpy's integers are integers
    assert seen == {3, 4, 11}


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
        (ChangingSpec(), r"accepted: the same twice"),
        (NoRecurrentLayer(), r"states has no layer; accepted: at least one"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(model: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        check_model(model)  # type: ignore[arg-type]
    assert caught.value.rule is Rule.SPEC
    assert isinstance(caught.value, AssertionError)


def test_bad_arguments_are_refused() -> None:
    def call(name: str) -> Callable[[Any], object]:
        return lambda value: check_model(EmaLM(), **{name: value})

    refuse_all("check_model", bad.real(0, optional=True), call("tolerance"), "tolerance", examples=FEW)
    short = bad.ids(0, 16, good=(3,)).only(lambda value: value is None).also([], [3, 3, 3], [1, 2])
    refuse_all("check_model", short, call("vocabulary"), "vocabulary", examples=FEW)
    refuse_all("check_model", bad.integer(0, 2**31 - 1), call("seed"), "seed", examples=FEW)
    drafts = bad.integer(0, 63)
    refuse_all("check_model", drafts, call("num_speculative_tokens"), "num_speculative_tokens", examples=FEW)


def test_a_model_that_is_split_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms.ParallelGroups, "is_split", True)
    with pytest.raises(ValueError, match=r"model is .*; accepted: a whole model on one rank"):
        check_model(EmaLM())


@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_models_kernels_keep_all_rules_on_a_gpu(dtype: torch.dtype) -> None:
    check_model(tiny_model(dtype, "cuda"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
def test_the_gpus_kernels_keep_all_rules_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    monkeypatch.setattr(torch.cuda, "device", lambda *args: nullcontext())
    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda *args: GpuKernelSet)
    small = {"hidden_size": 32, "mamba_num_heads": 2, "mamba_num_groups": 1, "mlp_hidden_size": 32}
    config = ms.models.HybridConfig.tiny(dtype=torch.float32, pattern="M*", **small)
    check_model(ms.models.HybridLM(config))


@pytest.mark.parametrize(
    "pattern", [*(pytest.param(name, marks=pytest.mark.long) for name in ("G*", "C*", "GM*", "G")), "C"]
)
def test_every_kind_of_state_keeps_all_rules(pattern: str) -> None:
    config = ms.models.HybridConfig.tiny(dtype=torch.float64, hidden_size=32, pattern=pattern)
    check_model(ms.models.HybridLM(config))
